"""kvtier on Ray Serve: engines as replicas, and requests routed to the replica with their prompt's KV."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
