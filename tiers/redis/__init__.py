"""The tier that nodes share: blocks as records in Redis or Valkey, one server or a cluster."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
