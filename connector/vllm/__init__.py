"""kvtier inside vLLM: the KV connector, and the tier below vLLM's own offloading."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
