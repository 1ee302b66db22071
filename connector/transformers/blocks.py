"""Blocks between a cache and the tiers' slots: their planes, caches made of them, and views of a cache's blocks."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.transformers.cache_form import CacheForm, WatchedCache, layers_of, per_token
from kvtier.connector.transformers.padding import with_room


class Blocks:
    """Consecutive blocks of one row, plane by plane, in host or device memory; then whole slots of states.

    A plane is `[num_blocks, block_size, num_heads, dim]`, as one tensor or as several side by side in `dim`.
    """

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]], states: torch.Tensor) -> None:
        """`states` are `[num_slots, num_elements]`."""
        self.states = states
        self._planes = list(planes)
        self._num_blocks = len(planes[0][0]) if planes else 0

    @classmethod
    def of(cls, slots: torch.Tensor, form: CacheForm, num_blocks: int) -> Self:
        """Views of slots, `[num_slots, num_elements]`: the first `num_blocks` are blocks, the others states."""
        return cls([[view] for _, _, view in form.planes(slots[:num_blocks])], slots[num_blocks:])

    @classmethod
    def empty(cls, form: CacheForm, num_blocks: int, num_states: int, device: torch.device) -> Self:
        dtype: torch.dtype = getattr(torch, form.dtype)
        planes = [
            [torch.empty(num_blocks, form.block_size, plane.num_heads, plane.dim, dtype=dtype, device=device)]
            for layer in form.layers
            for plane in layer
        ]
        return cls(planes, torch.empty(num_states, form.num_elements, dtype=dtype, device=device))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Consecutive parts of one row, each plane joined to one tensor."""
        if len(parts) == 1:
            return parts[0]
        planes = zip(*(part._planes for part in parts), strict=True)
        joined = [[torch.cat([tensor for (tensor,) in plane])] for plane in planes]
        return cls(joined, torch.cat([part.states for part in parts]))

    def __len__(self) -> int:
        return self._num_blocks + len(self.states)

    def take(self) -> Iterator[torch.Tensor]:
        """Each plane once. It is released here, since a device has no room for all of it twice."""
        while self._planes:
            parts = self._planes.pop(0)
            yield parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)

    def read(self, slots: torch.Tensor, form: CacheForm, numbers: Sequence[int]) -> None:
        """Gather these blocks, ascending, into `slots`, `[len(numbers), num_elements]`."""
        for at, first, count in _runs(numbers, self._num_blocks):
            self._move(slots[at : at + count], form, first, into_slots=True)

    def write(self, slots: torch.Tensor, form: CacheForm, first: int) -> None:
        """Scatter `slots`, `[n, num_elements]`, to the blocks from `first` on."""
        for at, start, count in _runs(range(first, first + len(slots)), self._num_blocks):
            self._move(slots[at : at + count], form, start, into_slots=False)

    @torch.no_grad()
    def _move(self, slots: torch.Tensor, form: CacheForm, first: int, *, into_slots: bool) -> None:
        """Move one run, which is either in the planes or in the states."""
        if first >= self._num_blocks:
            first -= self._num_blocks
            _copy(slots, self.states[first : first + len(slots)], into_slots)
            return
        for parts, (_, _, view) in zip(self._planes, form.planes(slots), strict=True):
            start = 0
            for part in parts:
                end = start + part.shape[-1]
                _copy(view[..., start:end], part[first : first + len(slots)], into_slots)
                start = end


def _copy(slots: torch.Tensor, own: torch.Tensor, into_slots: bool) -> None:
    target, source = (slots, own) if into_slots else (own, slots)
    target.copy_(source)


def _runs(numbers: Sequence[int], border: int) -> Iterator[tuple[int, int, int]]:
    """Ascending numbers as runs that do not cross the border: index of the first, the first, length."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1 or numbers[at] == border:
            yield start, numbers[start], at - start
            start = at


class BlendedCache(WatchedCache):
    """A cache with reused segments: nothing after the first `num_exact` tokens of any row may be stored."""

    num_exact: int = 0


def fill(cache: DynamicCache, form: CacheForm, rows: Sequence[Blocks], num_tokens: int, device: torch.device) -> None:
    """Put the first tokens of each row's blocks into an empty cache; zeros if a row has fewer. Takes the planes."""
    if not num_tokens:
        return
    num_blocks = -(-num_tokens // form.block_size)
    taken = [blocks.take() for blocks in rows]
    for number, layer in enumerate(form.layers):
        tensors: dict[str, torch.Tensor] = {}
        for plane in layer:
            views = [with_room(next(planes), num_blocks) for planes in taken]
            start = 0
            for part in plane.parts:
                both = torch.stack([view[..., start : start + part.dim] for view in views]).to(device)
                tokens = both.flatten(1, 2)[:, :num_tokens].transpose(1, 2)  # [rows, heads, tokens, dim]
                tensors[part.name] = tokens.contiguous()
                start += part.dim
        if tensors:
            cache.update(tensors["keys"], tensors["values"], number)
        if "indexer_keys" in tensors:
            cache.update_indexer(tensors["indexer_keys"].squeeze(1), number)


def blocks_of(cache: DynamicCache, row: int, run: range, form: CacheForm, num_pads: int = 0) -> Blocks:
    """Blocks `run` of one row of a cache, as views of it. The row's first token is in column `num_pads`."""
    layers: Any = cache.layers
    columns = slice(num_pads + run.start * form.block_size, num_pads + run.stop * form.block_size)
    planes = []
    for number, layer in enumerate(form.layers):
        for plane in layer:
            parts = []
            for part in plane.parts:
                tensor = per_token(layers[number], part.name)
                assert tensor is not None  # `is_whole`
                own = tensor[row, :, columns].detach().transpose(0, 1)  # [tokens, heads, dim]
                parts.append(own.view(len(run), form.block_size, *own.shape[1:]))
            planes.append(parts)
    return Blocks(planes, torch.empty(0, form.num_elements))


def is_whole(cache: DynamicCache, num_rows: int, form: CacheForm, model: PreTrainedModel) -> bool:
    """Whether a cache has every token of every row, in the form of blocks."""
    try:
        return layers_of(cache, num_rows, cache.get_seq_length(), model) == form.layers
    except ValueError:
        return False
