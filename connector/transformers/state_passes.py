"""Forward passes behind what a cache already has: by hand, and those of a `generate()` that is under way."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.connector.models import cache_option
from kvtier.connector.transformers.cache_form import per_token
from kvtier.connector.transformers.pass_watch import is_torn
from kvtier.connector.transformers.state_form import StateForm


@torch.no_grad()
def feed(model: Any, cache: DynamicCache, tokens: torch.Tensor, start: int, at_once: int | None = None) -> Any:
    """Put `tokens`, `[rows, tokens]`, behind the `start` that the cache has, `at_once` at a time. The last output."""
    takes = inspect.signature(model.forward).parameters
    output = None
    for first in range(0, tokens.shape[1], at_once or tokens.shape[1]):
        part = tokens[:, first : first + at_once] if at_once else tokens
        options: dict[str, Any] = {**cache_option(model, cache), "use_cache": True}
        if "position_ids" in takes:
            begin = start + first
            options["position_ids"] = torch.arange(begin, begin + part.shape[1], device=part.device).expand(
                len(part), -1
            )
        if "logits_to_keep" in takes:
            options["logits_to_keep"] = 1
        output = model(input_ids=part, **options)
    return output


class PassHook:
    """A model's hook for the `generate()` that is followed. It stays: in a call the model is not to change."""

    def __init__(self, model: Any) -> None:
        self.current: FollowedPasses | None = None
        model.register_forward_pre_hook(self._before, with_kwargs=True)

    @classmethod
    def of(cls, model: Any) -> "PassHook":
        """The model's, which it gets if it has none."""
        owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None) or cls(model)

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return None if self.current is None else self.current.before(args, kwargs)


class FollowedPasses:
    """Watches the forward passes of one `generate()`: what goes into the cache, and its states at the last border.

    The first pass gets only what the cache has not: for a cache without K and V `generate` cannot tell.
    """

    def __init__(self, cache: DynamicCache, states: StateForm, num_cached: int, num_tokens: int, size: int) -> None:
        """The cache has the first `num_cached` tokens of a prompt of `num_tokens`. Borders lie `size` tokens apart."""
        self.num_fed = num_cached
        self.latest: tuple[int, list[torch.Tensor]] | None = None  # tokens, and the states behind them
        self._cache = cache
        self._states = states
        self._num_cached = num_cached
        self._num_tokens = num_tokens
        self._size = size
        self._fed: list[torch.Tensor] = []

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Watch until the block ends; then `latest` is the last border's."""
        hook = PassHook.of(model)
        hook.current = self
        try:
            yield
        finally:
            hook.current = None
        self._look()

    def was_fed(self, sequences: torch.Tensor) -> bool:
        """Whether exactly these tokens, `[rows, tokens]`, are what went into the cache, as far as it goes."""
        fed = torch.cat(self._fed, dim=1) if self._fed else sequences[:, :0]
        expected = sequences[:, self._num_cached : self.num_fed]
        return fed.shape == expected.shape and torch.equal(fed.to(expected.device), expected)

    def _has_keys(self) -> bool:
        layers: Any = self._cache.layers
        return any(per_token(layer, "keys") is not None for layer in layers)

    def _look(self) -> None:
        if self.num_fed > self._num_tokens and not self.num_fed % self._size:
            self.latest = self.num_fed, self._states.take(self._cache)

    def before(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What a pass that begins is given."""
        is_torn(self._cache)  # a cache without K and V sees no pass by itself
        self._look()
        tokens = kwargs["input_ids"]
        rest = self._num_tokens - self._num_cached
        if not self._fed and tokens.shape[1] > rest:
            tokens = tokens[:, -rest:]
            kwargs = {**kwargs, "input_ids": tokens}
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., -rest:]
            if not self._has_keys():  # then layers take a mask for these very tokens, and this one hides none
                kwargs["attention_mask"] = None
        self._fed.append(tokens)
        self.num_fed += tokens.shape[1]
        return args, kwargs
