"""`kvtier bench`: load on any OpenAI server, and what came of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
