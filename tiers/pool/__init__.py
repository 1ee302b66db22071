"""Slots and the index of the blocks they hold, leases, and the order of eviction."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
