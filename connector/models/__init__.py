"""What a checkpoint says of itself: its KV's shape, its identity, its tokenizer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
