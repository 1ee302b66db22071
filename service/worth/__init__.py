"""`kvtier worth`: from how many tokens on loading wins, in seconds and in money."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
