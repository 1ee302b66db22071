"""The gate of what a cache keeps: a model goes on behind states and rows that were stored, as if computed just now."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.transformers.cache_form import CacheForm, empty_cache, plain_tokens
from kvtier.connector.transformers.device_copies import DEADLINE
from kvtier.connector.transformers.kv_cache import blocks_of, fill
from kvtier.connector.transformers.positions import counts_from_zero
from kvtier.connector.transformers.state_form import StateForm
from kvtier.connector.transformers.state_passes import feed
from kvtier.tiers import ConfigError

_BORDER: Final = 24  # tokens before the states
_BEHIND: Final = (2, 14)  # tokens behind them: first a few, since a state may be forgotten soon
# Relative, of states and of logits, to which the errors of all layers add up. What a state lacks is off by far more.
_TOLERANCES: Final = {torch.float32: (1e-3, 5e-3)}
_COARSE: Final = (0.01, 0.3)  # of 16-bit types
_DRAWS: Final = 3  # of tokens
_FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
_OTHERS: Final = "docs/models.md lists the models that are kept; leave kvtier out for this one"


@dataclass(frozen=True, slots=True)
class GoingOn:
    """How a model goes on behind a state, as transformers computes it here."""

    in_pieces: bool  # several tokens at once; if not, one at a time
    by_steps: bool  # one token at a time gives the same as a whole prompt
    from_zero: bool = False  # … of which it counts positions from 0 in each pass, unless it is told them


@torch.no_grad()
def how_it_goes_on(model: PreTrainedModel, form: CacheForm) -> GoingOn:
    """Measures it with a few tokens. Raises ConfigError if the model cannot go on behind a state at all.

    Without recurrent states it must go on in both ways.
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
        said = f"transformers computes whole prompts of it only: behind {behind} the next tokens come out differently"
        raise ConfigError(f"model kind {kind!r}: {said}; {_OTHERS}")
    return GoingOn(in_pieces, by_steps, from_zero)


def _is_alike(model: Any, form: CacheForm, at_once: int | None) -> bool:
    """Whether tokens behind states that were taken of another cache come out as in a whole prompt.

    In 16 bits a token may go to another expert by rounding. So logits may differ with some tokens, states with none.
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
    """Whether states and logits are alike; None if only the logits are not."""
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
    """A cache of the tokens before the border, made of what blocks and states hold of it."""
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
    feed(model, other, tokens.flip(1), 0)  # what a model keeps outside of the cache is of these tokens now
    return restored


def _are_states_alike(states: StateForm, cache: DynamicCache, whole: DynamicCache, tolerance: float) -> bool:
    """Of states of one kind the first layer's count: in the others the errors of all layers before add up."""
    seen = set[tuple[str, tuple[int, ...]]]()
    for part, found, expected in zip(states.parts, states.take(cache), states.take(whole), strict=True):
        if (part.kind, part.shape) not in seen and not _distance(found, expected) <= tolerance:
            return False
        seen.add((part.kind, part.shape))
    return True


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative; not a number if either is not."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))
