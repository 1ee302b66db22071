"""Differences between transformers' versions: a cache's keyword, and the length up to which a text has one RoPE."""

import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from kvtier.tiers import ConfigError

_NAMES: Final = ("cache", "cache_params", "past_key_values")  # from 5.24 on; before: state models, all others


def cache_option(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that passes this cache to the model's `forward` or `generate`, or to one of its layers."""
    takes = inspect.signature(model.forward).parameters
    return {next((name for name in _NAMES if name in takes), _NAMES[-1]): cache}


def given_cache(options: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache among keyword arguments, and its keyword; None if there is none."""
    return next(((name, options[name]) for name in _NAMES if options.get(name) is not None), (_NAMES[-1], None))


def returned_cache(output: Any) -> Any:
    """The cache in a `forward`'s output."""
    return given_cache(vars(output))[1]


_RESETS: Final = (5, 19)  # from this version of transformers on a short text after a long one has its own dynamic RoPE

_ORIGINAL: Final = "original_max_position_embeddings"

SHORT_ROPE: Final = 1.0
"""`rope_factor` of an identity: the RoPE of texts no longer than `rope_limit`."""


def rope_limit(config: Any) -> int | None:
    """The most tokens of a text for which a model has one RoPE. None: one for all texts.

    None also for unknown kinds of RoPE, which a `ModelIdentity` refuses. ConfigError for dynamic RoPE in a transformers
    whose short texts may get the RoPE of a long one before them.
    """
    config = config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)]
    limits: list[int] = []
    for each in by_layer or [rope]:
        kind = each.get("rope_type", each.get("type"))
        if kind == "longrope":  # other factors beyond the original training length
            named = (each.get(_ORIGINAL), getattr(config, _ORIGINAL, None))
            limits += [int(length) for length in named if length]
        elif kind == "dynamic":  # grows beyond this length, and returns to the first frequencies below it
            _require_reset()
            limits.append(int(config.max_position_embeddings) - 1)
    return min(limits, default=None)


def _require_reset() -> None:
    version = metadata.version("transformers")
    if tuple(int(number) for number in version.split(".")[:2]) < _RESETS:
        problem = f"transformers {version} does not return from the RoPE of a long text"
        raise ConfigError(f"rope_type 'dynamic': {problem}; install {'.'.join(map(str, _RESETS))} or newer")
