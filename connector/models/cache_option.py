"""Under which name a model of transformers takes its cache: 5.24 gave all kinds one name, `cache`."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = ("cache", "cache_params", "past_key_values")  # since 5.24; before it of state models, and of all others


def cache_option(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that gives this cache to the model's `forward` or `generate`, or to one of its layers."""
    takes = inspect.signature(model.forward).parameters
    return {next((name for name in _NAMES if name in takes), _NAMES[-1]): cache}


def given_cache(options: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache among keyword arguments, under whatever name, and that name; if there is none, None."""
    return next(((name, options[name]) for name in _NAMES if options.get(name) is not None), (_NAMES[-1], None))


def returned_cache(output: Any) -> Any:
    """The cache of a `forward`'s output."""
    return given_cache(vars(output))[1]
