"""`kvtier size`: what a model's blocks take, and how many tokens and conversations memory and disk hold."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
