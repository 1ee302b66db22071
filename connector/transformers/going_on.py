"""How a model continues after a cache's tokens: passes by hand and in `generate`, positions, and the check at start."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Self
from weakref import WeakSet

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.models import cache_option, given_cache
from kvtier.connector.transformers.blocks import blocks_of, fill
from kvtier.connector.transformers.cache_form import CacheForm, StateForm, empty_cache, is_torn, per_token, plain_tokens
from kvtier.connector.transformers.device_copies import DEADLINE
from kvtier.tiers import ConfigError


@torch.no_grad()
def feed(model: Any, cache: DynamicCache, tokens: torch.Tensor, start: int, at_once: int | None = None) -> Any:
    """Append `tokens`, `[rows, tokens]`, to the cache's `start` tokens, `at_once` at a time. The last output."""
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
    """A model's hook for the current `FollowedPasses`. It stays, since the model must not change during a call."""

    def __init__(self, model: Any) -> None:
        self.current: FollowedPasses | None = None
        model.register_forward_pre_hook(self._before, with_kwargs=True)

    @classmethod
    def of(cls, model: Any) -> "PassHook":
        """The model's hook, added if it has none."""
        owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None) or cls(model)

    def _before(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return None if self.current is None else self.current.before(args, kwargs)


class FollowedPasses:
    """Watches the forward passes of one `generate()`: the cache's tokens, and its states at the last border.

    Passes only the tokens that the cache lacks to the first pass: without K and V `generate` cannot tell which.
    """

    def __init__(self, cache: DynamicCache, states: StateForm, num_cached: int, num_tokens: int, size: int) -> None:
        """The cache has the first `num_cached` tokens of a prompt of `num_tokens`. Borders are `size` tokens apart."""
        self.num_fed = num_cached
        self.latest: tuple[int, list[torch.Tensor]] | None = None  # tokens, and the states after them
        self._cache = cache
        self._states = states
        self._num_cached = num_cached
        self._num_tokens = num_tokens
        self._size = size
        self._fed: list[torch.Tensor] = []

    @contextmanager
    def following(self, model: Any) -> Iterator[None]:
        """Watch inside the context; then `latest` is the last border's."""
        hook = PassHook.of(model)
        hook.current = self
        try:
            yield
        finally:
            hook.current = None
        self._look()

    def was_fed(self, sequences: torch.Tensor) -> bool:
        """Whether exactly these tokens, `[rows, tokens]`, were added to the cache, as far as it goes."""
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
        """The arguments for a pass that begins. Another cache's passes, as of `guidance_scale`, stay as they are."""
        if given_cache(kwargs)[1] is not self._cache:
            return args, kwargs
        is_torn(self._cache)  # a cache without K and V is not notified of passes
        self._look()
        tokens = kwargs["input_ids"]
        rest = self._num_tokens - self._num_cached
        if not self._fed and tokens.shape[1] > rest:
            tokens = tokens[:, -rest:]
            kwargs = {**kwargs, "input_ids": tokens}
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., -rest:]
            if not self._has_keys():  # then layers expect a mask of these tokens only, and this one hides none
                kwargs["attention_mask"] = None
        self._fed.append(tokens)
        self.num_fed += tokens.shape[1]
        return args, kwargs


_BEFORE: Final = 24  # tokens in the cache
_TOLERANCE: Final = 0.02  # relative; wrong positions rotate keys far more, rounding less


@torch.no_grad()
def counts_from_zero(model: PreTrainedModel, form: CacheForm) -> bool:
    """Whether the model counts positions from 0 in each pass, unless it gets `position_ids`."""
    module: Any = model
    if not form.layers or "position_ids" not in inspect.signature(module.forward).parameters:
        return False
    if PassPositions.found(model):
        return True
    tokens = torch.tensor([plain_tokens(model, _BEFORE + 1)], device=model.device)
    last = tokens[:, _BEFORE:]
    kept = []
    for given in ({"position_ids": torch.full_like(last, _BEFORE)}, {}):
        cache = empty_cache(model)
        options: dict[str, Any] = {**cache_option(model, cache), "use_cache": True}
        module(input_ids=tokens[:, :_BEFORE], **options)
        module(input_ids=last, **options, **given)
        behind = blocks_of(cache, 0, range(_BEFORE, _BEFORE + 1), replace(form, block_size=1))
        kept.append(torch.cat([plane.flatten() for plane in behind.take()]).float())
    return bool((kept[1] - kept[0]).norm() > _TOLERANCE * kept[0].norm())


class PassPositions:
    """Adds missing positions to a model's passes, for the model's lifetime. A caller's own positions are kept."""

    def __init__(self, model: PreTrainedModel, form: CacheForm) -> None:
        """Adds a hook to the inner model, which every way into the model calls. `of` adds it once."""
        inner = model.base_model
        self._first = form.kept[0]
        self._signature = inspect.signature(inner.forward)
        self._followed = WeakSet[DynamicCache]()
        inner.register_forward_pre_hook(self._before, with_kwargs=True)

    @classmethod
    def of(cls, model: PreTrainedModel, form: CacheForm) -> Self:
        """The model's, added if it has none."""
        return cls.found(model) or cls(model, form)

    @classmethod
    def found(cls, model: PreTrainedModel) -> Self | None:
        """The model's, if an earlier `KVTier` added one."""
        owners = (getattr(hook, "__self__", None) for hook in model.base_model._forward_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def follow(self, cache: DynamicCache) -> None:
        """The cache's positions are right so far."""
        self._followed.add(cache)

    def followed(self, cache: DynamicCache) -> bool:
        """Whether this hook has seen every pass into the cache."""
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


_BORDER: Final = 24  # tokens before the states
_BEHIND: Final = (2, 14)  # tokens after them: first a few, since a state may be lost soon
# Relative, for states and for logits, in which all layers' errors add up. A missing state is off by far more.
_TOLERANCES: Final = {torch.float32: (1e-3, 5e-3)}
_COARSE: Final = (0.01, 0.3)  # for 16-bit types
_DRAWS: Final = 3  # of tokens
_FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
_OTHERS: Final = "docs/models.md lists the models that are kept; leave kvtier out for this one"


@dataclass(frozen=True, slots=True)
class GoingOn:
    in_pieces: bool  # several tokens at once; else only one at a time
    by_steps: bool  # one token at a time gives the same result as a whole prompt
    from_zero: bool = False  # … but it counts positions from 0 in each pass, unless it gets them


@torch.no_grad()
def how_it_goes_on(model: PreTrainedModel, form: CacheForm) -> GoingOn:
    """Test it with a few tokens. Raises ConfigError if the model cannot continue after a state at all.

    A model without recurrent states must continue both ways.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    if model.training:
        raise ConfigError("the model is in training mode; call model.eval() before KVTier(model)")
    behind = "a state" if form.states is not None else "a prefix"
    try:
        in_pieces = _is_alike(model, form, None)
        by_steps = _is_alike(model, form, 1)
        from_zero = counts_from_zero(model, form)
    except _FAILURES as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"model kind {kind!r}: it cannot go on behind {behind} ({reason}); {_OTHERS}") from error
    if not (in_pieces or by_steps) or (form.states is None and not (in_pieces and by_steps)):
        why = f"transformers computes whole prompts of it only: behind {behind} the next tokens come out differently"
        raise ConfigError(f"model kind {kind!r}: {why}; {_OTHERS}")
    return GoingOn(in_pieces, by_steps, from_zero)


def _is_alike(model: Any, form: CacheForm, at_once: int | None) -> bool:
    """Whether tokens after states taken from another cache give the same result as in a whole prompt.

    In 16 bits rounding may route a token to another expert. So logits may differ for some tokens, states for none.
    """
    num_tokens = _BORDER + sum(_BEHIND)
    ids = plain_tokens(model, num_tokens)
    for draw in range(_DRAWS):
        drawn = [ids[(number * 7 + draw * 11) % len(ids)] for number in range(num_tokens)]
        verdict = _compared(model, form, torch.tensor([drawn], device=model.device), at_once)
        if verdict is not None:
            return verdict
    return False


def _compared(model: Any, form: CacheForm, tokens: torch.Tensor, at_once: int | None) -> bool | None:
    of_states, of_logits = _TOLERANCES.get(model.dtype, _COARSE)
    cache, at, is_same_text = _restored(model, form, tokens), _BORDER, True
    for index, number in enumerate(_BEHIND):
        whole = empty_cache(model)
        expected = feed(model, whole, tokens[:, : at + number], 0).logits[:, -1]
        try:
            found = feed(model, cache, tokens[:, at : at + number], at, at_once).logits[:, -1]
        except _FAILURES:
            return False
        at += number
        tolerance = of_states * (1 + 3 * index)  # rounding adds up
        if form.states is not None and not _are_states_alike(form.states, cache, whole, tolerance):
            return False
        is_same_text &= _distance(found, expected) <= of_logits
    return True if is_same_text else None


def _restored(model: Any, form: CacheForm, tokens: torch.Tensor) -> DynamicCache:
    """A cache of the tokens before the border, made from blocks and states."""
    first, other, restored = empty_cache(model), empty_cache(model), empty_cache(model)
    feed(model, first, tokens[:, :_BORDER], 0)
    if form.layers:
        one_block = replace(form, block_size=_BORDER)
        fill(restored, one_block, [blocks_of(first, 0, range(1), one_block)], _BORDER, model.device)
    if form.states is not None:
        states = form.states.rows(form.states.take(first)).wait(DEADLINE)
        if states is None:
            raise RuntimeError(f"its states did not come from {model.device} in {DEADLINE:.0f} s")
        form.states.put(restored, states, model.device)
    feed(model, other, tokens.flip(1), 0)  # state outside of the cache is of these tokens now
    return restored


def _are_states_alike(states: StateForm, cache: DynamicCache, whole: DynamicCache, tolerance: float) -> bool:
    """Only the first layer's states of each kind count: in later layers the errors of all layers before add up."""
    seen = set[tuple[str, tuple[int, ...]]]()
    for part, found, expected in zip(states.parts, states.take(cache), states.take(whole), strict=True):
        if (part.kind, part.shape) not in seen and not _distance(found, expected) <= tolerance:
            return False
        seen.add((part.kind, part.shape))
    return True


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative; NaN if either is."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))
