"""Segments: KV of a text alone, moved to another place of a prompt and repaired there, in transformers' models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
