"""Which RoPE vLLM chose at its start, for a model whose RoPE depends on the text's length."""

from typing import Any, Final

from kvtier.tiers import ConfigError

_LENGTH_ROPE: Final = "length-rope:"  # before a configuration's digest


def rope_factor(model: Any, digest: str) -> float | None:
    """`rope_factor` of an identity: vLLM builds one RoPE for all texts, by the configuration and max_model_len.

    Raises ConfigError where transformers' own code computes RoPE: it follows the longest text of each batch.
    """
    if not digest.startswith(_LENGTH_ROPE):
        return None
    if model.using_transformers_backend():
        said = "RoPE that depends on the text's length, in transformers' own code, follows each batch"
        raise ConfigError(f"model {model.model!r}: {said}; start with --model-impl vllm")
    return float(model.max_model_len)
