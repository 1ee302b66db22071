"""Compiled twins of innermost loops: found where `kvtier compile` built them, never needed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
