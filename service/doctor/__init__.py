"""What is wrong with this machine, this configuration or a slab, and the fix."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
