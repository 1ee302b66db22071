"""The tiers: bookkeeping and bytes of each place a KV block can live. Imports nothing of ours above it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
