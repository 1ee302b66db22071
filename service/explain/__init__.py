"""Why a prompt's blocks are held or not, in figures and in words; and the last requests."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
