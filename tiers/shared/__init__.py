"""What tiers have in common that nodes share: how a record is written and verified, and what is told of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
