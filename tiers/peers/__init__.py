"""The tier in other nodes' memory: blocks that their daemons send over TCP, under a key that all nodes share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
