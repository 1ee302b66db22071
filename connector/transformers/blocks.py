"""Blocks between a cache and the tiers' slots: their planes, wherever these lie, and records of states behind them."""

from collections.abc import Iterator, Sequence
from typing import Self

import torch

from kvtier.connector.transformers.cache_form import CacheForm


class Blocks:
    """Consecutive blocks of one row, plane by plane, in a host's or a device's memory; then whole slots of states.

    A plane is `[num_blocks, block_size, num_heads, dim]`, as one tensor or as several side by side in `dim`.
    """

    def __init__(self, planes: Sequence[Sequence[torch.Tensor]], states: torch.Tensor) -> None:
        """`states` are `[num_slots, num_elements]`."""
        self.states = states
        self._planes = list(planes)
        self._num_blocks = len(planes[0][0]) if planes else 0

    @classmethod
    def of(cls, slots: torch.Tensor, form: CacheForm, num_blocks: int) -> Self:
        """Views of slots, `[num_slots, num_elements]`, of which the first `num_blocks` hold blocks."""
        return cls([[view] for _, _, view in form.planes(slots[:num_blocks])], slots[num_blocks:])

    @classmethod
    def empty(cls, form: CacheForm, num_blocks: int, num_states: int, device: torch.device) -> Self:
        """Memory for so many slots, each plane by itself."""
        dtype: torch.dtype = getattr(torch, form.dtype)
        planes = [
            [torch.empty(num_blocks, form.block_size, plane.num_heads, plane.dim, dtype=dtype, device=device)]
            for layer in form.layers
            for plane in layer
        ]
        return cls(planes, torch.empty(num_states, form.num_elements, dtype=dtype, device=device))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Parts of one row, one behind the other, each plane of them as one tensor."""
        if len(parts) == 1:
            return parts[0]
        planes = zip(*(part._planes for part in parts), strict=True)
        joined = [[torch.cat([tensor for (tensor,) in plane])] for plane in planes]
        return cls(joined, torch.cat([part.states for part in parts]))

    def __len__(self) -> int:
        """How many slots they fill."""
        return self._num_blocks + len(self.states)

    def take(self) -> Iterator[torch.Tensor]:
        """Each plane once. What was taken is not held here any more: a device has no room for all of it twice."""
        while self._planes:
            parts = self._planes.pop(0)
            yield parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)

    def read(self, slots: torch.Tensor, form: CacheForm, numbers: Sequence[int]) -> None:
        """Gather these of them, ascending, into `slots`, `[len(numbers), num_elements]`."""
        for at, first, count in _runs(numbers, self._num_blocks):
            self._move(slots[at : at + count], form, first, into_slots=True)

    def write(self, slots: torch.Tensor, form: CacheForm, first: int) -> None:
        """Scatter `slots`, `[n, num_elements]`, to those from `first` on."""
        for at, start, count in _runs(range(first, first + len(slots)), self._num_blocks):
            self._move(slots[at : at + count], form, start, into_slots=False)

    @torch.no_grad()
    def _move(self, slots: torch.Tensor, form: CacheForm, first: int, *, into_slots: bool) -> None:
        """One run, which lies either in the planes or in the states."""
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
    """Ascending numbers as runs, none over the border: place of the first among them, the first, how many."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1 or numbers[at] == border:
            yield start, numbers[start], at - start
            start = at
