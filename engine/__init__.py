"""The in-process engine: continuous batching over a paged L1 pool, models by transformers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
