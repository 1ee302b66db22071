"""Which RoPE SGLang computes with, for a model whose RoPE depends on the text's length."""

from collections.abc import Mapping
from typing import Any, Final

from kvtier.connector.models import SHORT_ROPE
from kvtier.tiers import ConfigError

_LENGTH_ROPE: Final = "length-rope:"  # before a configuration's digest
_ORIGINAL: Final = "original_max_position_embeddings"


def rope_factor(configuration: Mapping[str, Any], digest: str, context_length: int | None) -> float | None:
    """`rope_factor` of an identity. With longrope, one long text gives all of its batch the long RoPE.

    So equal tokens have one KV only where no text can be. ConfigError if the server's `context_length` allows one. None
    for other kinds of RoPE, which a `ModelIdentity` refuses if they depend on the length.
    """
    if not digest.startswith(_LENGTH_ROPE):
        return None
    text = configuration.get("text_config") or configuration
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    lengths = [int(length) for length in (rope.get(_ORIGINAL), text.get(_ORIGINAL)) if length]
    if rope.get("rope_type", rope.get("type")) != "longrope" or not lengths:
        return None
    limit = min(lengths)
    if context_length is None or context_length > limit:
        said = f"SGLang computes texts beside one of more than {limit} tokens with another RoPE"
        raise ConfigError(f"longrope: {said}; start with --context-length {limit}")
    return SHORT_ROPE
