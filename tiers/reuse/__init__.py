"""How requests return: the report of a request's end, and the order of eviction that is learned from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
