"""KV events: publishing them, following them, and the index of who holds what."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
