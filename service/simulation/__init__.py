"""What tiers of other sizes and policies would have found, from a trace."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
