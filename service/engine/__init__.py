"""The in-process engine behind the OpenAI API: `kvtier engine`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
