"""Rows of different length in one batch: columns of padding before a prompt, and after an answer that has ended.

A row's blocks are named by its own tokens, and have the KV of these. In a cache the row begins after its padding.
All rows of a call continue from one column. Padding before it is zeros, which the mask hides.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from transformers import DynamicCache

from kvtier.connector.models import cache_option
from kvtier.connector.transformers.cache_form import CacheForm, empty_cache, per_token, tolerance_of

_NUM_TOKENS: Final = 12
_NUM_PADS: Final = 5
# raised by a model with another signature
_FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
_PLAIN: Final[dict[str, Any]] = {  # one forward pass by `generate`, whatever the model's own settings
    "max_new_tokens": 1,
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "return_dict_in_generate": False,
}


def inferred_mask(input_ids: torch.Tensor, pad_token: int | None, ends: Sequence[int]) -> torch.Tensor | None:
    """The mask that `generate` makes by default, if it hides anything: it hides the padding token."""
    if pad_token is None or pad_token in ends or not bool((input_ids == pad_token).any()):
        return None
    return input_ids.ne(pad_token).long()


def pads_of(mask: torch.Tensor | None, input_ids: torch.Tensor) -> tuple[int, ...] | None:
    """How many columns the mask hides before each row's tokens; None if it hides others, or a whole row."""
    num_rows, num_columns = input_ids.shape
    if mask is None:
        return (0,) * num_rows
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return None
    shown = mask.bool()
    if bool((shown[:, :-1] & ~shown[:, 1:]).any()) or not bool(shown[:, -1].all()):
        return None
    return tuple(num_columns - number for number in shown.sum(1).tolist())


def ends_of_answers(sequences: torch.Tensor, num_columns: int, pad_token: int | None, pad_ends: bool) -> list[int]:
    """Each row's length without the padding after its answer. The answers begin at column `num_columns`.

    If the padding token also ends an answer, the first one belongs to it.
    """
    answers = sequences[:, num_columns:]
    if pad_token is None or not answers.shape[1]:
        return [sequences.shape[1]] * len(sequences)
    is_padding = (answers == pad_token).flip(1).long().cumprod(1).sum(1).tolist()  # the run at the end
    return [sequences.shape[1] - max(0, number - pad_ends) for number in is_padding]


def with_room(blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """`[n, num_elements]`, cut or padded with zeros to `num_blocks`."""
    missing = num_blocks - len(blocks)
    return blocks[:num_blocks] if missing <= 0 else torch.cat([blocks, blocks.new_zeros(missing, *blocks.shape[1:])])


def move_behind_padding(cache: DynamicCache, form: CacheForm, pads: Sequence[int]) -> None:
    """Shift each row of a cache to the right by its padding. What does not fit is dropped, the padding is zeros."""
    if not any(pads):
        return
    for states in _states_of(cache, form):
        for row, pad in zip(states, pads, strict=True):  # [heads, columns, dim]
            pad = min(pad, row.shape[1])
            if pad:
                row[:, pad:] = row[:, :-pad].clone()
                row[:, :pad] = 0


@torch.inference_mode()
def why_padding_shows(model: Any, form: CacheForm) -> str | None:
    """How a padded row's KV differs from the row alone in this model; None if it is the same.

    Tests it: tokens after other tokens that a mask hides, with `generate` itself.
    """
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    columns = torch.arange(_NUM_PADS + _NUM_TOKENS, device=model.device)
    padded = ((columns * 7919 + 3) % vocab_size)[None]
    mask = (columns >= _NUM_PADS).long()[None]
    try:
        alone = _kv_of(model, form, padded[:, _NUM_PADS:], mask[:, _NUM_PADS:])
        behind = _kv_of(model, form, padded, mask)
    except _FAILURES as error:
        reason = str(error).partition("\n")[0]
        return f"padding that it does not take ({type(error).__name__}: {reason})"
    tolerance = tolerance_of(model)
    for expected, found in zip(alone, behind, strict=True):
        if found.shape[2] != _NUM_PADS + _NUM_TOKENS or expected.shape[2] != _NUM_TOKENS:
            return "layers that drop tokens"
        wanted = expected[0].float()  # [heads, tokens, dim]
        off = (found[0, :, _NUM_PADS:].float() - wanted).norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        if not float(off.median()) <= tolerance:
            return "KV that depends on the padding"
    return None


def _kv_of(model: Any, form: CacheForm, input_ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    cache = empty_cache(model)
    model.generate(input_ids, attention_mask=mask, **cache_option(model, cache), **_PLAIN)
    return list(_states_of(cache, form))


def _states_of(cache: DynamicCache, form: CacheForm) -> Iterator[torch.Tensor]:
    """Every tensor with a row per token, `[rows, heads, columns, dim]`, layer by layer."""
    layers: Any = cache.layers
    for layer, planes in zip(layers, form.layers, strict=False):
        for plane in planes:
            for part in plane.parts:
                if (states := per_token(layer, part.name)) is not None:
                    yield states
