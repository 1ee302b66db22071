"""The former path of `kvtier.connector.vllm`'s tier, which configurations of vLLM may name."""

from importlib import import_module


def __getattr__(name: str) -> object:
    return getattr(import_module("kvtier.connector.vllm"), name)
