"""kvtier: a hierarchical KV-cache offload service for LLM inference.

`__init__.pyi` lists the public API. A name is imported when it is first used: `import kvtier` needs neither torch
nor time. Each folder below has such a list, its face; only what stands there may be imported from outside the folder.
"""

import lazy_loader

__version__ = "0.2.0"

_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> object:
    """A name of the public API. MissingPackages: what the engine needs is not installed."""
    try:
        return _import(name)
    except ModuleNotFoundError:
        from kvtier.tiers import require_extra

        require_extra(f"kvtier.{name}", "engine")
        raise
