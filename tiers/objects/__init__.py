"""The lowest tier that nodes share: runs of blocks as objects in an S3-compatible bucket."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
