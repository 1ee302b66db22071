"""kvtier inside vLLM: the KV connector, and the tier below vLLM's own offloading."""

import lazy_loader

_of_module, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _of_module(name)
    except ImportError as error:  # it names what this vLLM lacks
        raise ImportError(
            f"kvtier.connector.vllm needs vLLM from 0.32 on ({error}); pip install 'vllm<0.34'"
        ) from error
