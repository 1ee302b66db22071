"""The client of a node's daemon: tiers in another process, over one socket and one shared region."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
