"""The common parts of tiers that nodes share: how records are written and verified, and which changes are reported."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
