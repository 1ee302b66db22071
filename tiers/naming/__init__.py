"""Names of blocks: chain hashes of their tokens, rooted in the model's fingerprint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
