"""Why a request's blocks were held or not: one line for each request, and the last of them to ask about."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
