"""The same tiers behind a socket: a daemon that owns a node's host memory and slab, and its HTTP pages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
