"""Requests read from traces: Mooncake's form, `kvtier trace`, LMCache's lookup logs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
