"""kvtier: a hierarchical KV-cache offload service for LLM inference.

`__init__.pyi` lists the public API. A name is imported when it is first used: `import kvtier` needs neither torch
nor time. Each folder below has such a list, its face; only what stands there may be imported from outside the folder.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
