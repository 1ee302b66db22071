"""Positions for models that count them from 0 in each pass: a pass behind a cache is told where its tokens stand."""

import inspect
from dataclasses import replace
from typing import Any, Final, Self
from weakref import WeakSet

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.models import cache_option, given_cache
from kvtier.connector.transformers.cache_form import CacheForm, empty_cache, per_token, plain_tokens
from kvtier.connector.transformers.kv_cache import blocks_of

_BEFORE: Final = 24  # tokens that the cache has
_TOLERANCE: Final = 0.02  # relative; another position turns keys by far more, and rounding by less


@torch.no_grad()
def counts_from_zero(model: PreTrainedModel, form: CacheForm) -> bool:
    """Whether the model takes a token behind a cache for the first one, unless it is told `position_ids`."""
    module: Any = model
    if not form.layers or "position_ids" not in inspect.signature(module.forward).parameters:
        return False
    if PassPositions.found(model):
        return True
    tokens = torch.tensor([plain_tokens(model, _BEFORE + 1)], device=model.device)
    last = tokens[:, _BEFORE:]
    kept = []
    for told in ({"position_ids": torch.full_like(last, _BEFORE)}, {}):
        cache = empty_cache(model)
        options: dict[str, Any] = {**cache_option(model, cache), "use_cache": True}
        module(input_ids=tokens[:, :_BEFORE], **options)
        module(input_ids=last, **options, **told)
        behind = blocks_of(cache, 0, range(_BEFORE, _BEFORE + 1), replace(form, block_size=1))
        kept.append(torch.cat([plane.flatten() for plane in behind.take()]).float())
    return bool((kept[1] - kept[0]).norm() > _TOLERANCE * kept[0].norm())


class PassPositions:
    """Gives a model's passes the positions that they lack, for as long as the model lives. A caller's own are kept."""

    def __init__(self, model: PreTrainedModel, form: CacheForm) -> None:
        """A hook of the inner model's, which every way into the model passes. `of` adds it once."""
        inner = model.base_model
        self._first = form.kept[0]
        self._signature = inspect.signature(inner.forward)
        self._followed = WeakSet[DynamicCache]()
        inner.register_forward_pre_hook(self._before, with_kwargs=True)

    @classmethod
    def of(cls, model: PreTrainedModel, form: CacheForm) -> Self:
        """The model's, which it gets if it has none."""
        return cls.found(model) or cls(model, form)

    @classmethod
    def found(cls, model: PreTrainedModel) -> Self | None:
        """The model's, of an earlier `KVTier`."""
        owners = (getattr(hook, "__self__", None) for hook in model.base_model._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def follow(self, cache: DynamicCache) -> None:
        """What this cache has is right so far."""
        self._followed.add(cache)

    def followed(self, cache: DynamicCache) -> bool:
        """Whether every pass into this cache went by here."""
        return cache in self._followed

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        given = {**self._signature.bind_partial(*args).arguments, **kwargs}
        cache, tokens = given_cache(given)[1], given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(cache, DynamicCache) or tokens is None:
            return None
        layers: Any = cache.layers
        keys = per_token(layers[self._first], "keys") if len(layers) > self._first else None
        if keys is None:
            self.follow(cache)
            return None
        if given.get("position_ids") is not None:
            return None
        start = keys.shape[2]
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        return (), {**given, "position_ids": positions}
