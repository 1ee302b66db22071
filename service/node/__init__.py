"""The daemon of a node: one process that owns the tiers of every engine on it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
