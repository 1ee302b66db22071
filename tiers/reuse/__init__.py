"""How requests return: what their ends tell, and the order of eviction that is learned from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
