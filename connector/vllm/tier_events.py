"""Which chunks a secondary tier has, told to vLLM's stream of KV events: routers see them there."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, Final

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvtier.tiers import ChainHash

_LOOKED_AT: Final = 64  # chunks a step, of those that were told of: whether the tier still has them
_MOST: Final = 1 << 20  # chunks that are told of; more push the oldest out, as if the tier had lost them


class ChunkEvents:
    """A chunk is told of when the tier has stored it, and again when the tier is found to have it no more.

    What left is found by looking at some of the chunks that were told of each time. Not thread-safe: vLLM's scheduler
    calls it. What the tier held before the process began is not told of, as vLLM's own tiers do.
    """

    def __init__(
        self, hold: Callable[[Sequence[ChainHash]], list[bool] | None], medium: Medium, locality: Locality | None
    ) -> None:
        """`hold` says which chunks the tier has; None while it cannot say."""
        self._hold = hold
        self._about: dict[str, Any] = {"medium": medium, "locality": locality}
        if "removal_expected" in {each.name for each in fields(OffloadingEvent)}:
            self._about["removal_expected"] = True  # vLLM then keeps what it needs to tell of it
        self._told: OrderedDict[ChainHash, OffloadKey] = OrderedDict()  # those looked at longest ago first
        self._new: list[tuple[ChainHash, OffloadKey]] = []

    def stored(self, chunks: Iterable[tuple[ChainHash, OffloadKey]]) -> None:
        """The tier has these now."""
        self._new += [(name, key) for name, key in chunks if name not in self._told]

    def take(self) -> list[OffloadingEvent]:
        """What is to be told since the last call."""
        events = []
        if self._new:
            self._told.update(self._new)
            events.append(OffloadingEvent(keys=[key for _, key in self._new], removed=False, **self._about))
            self._new = []
        looked_at = list(islice(self._told, _LOOKED_AT))
        held = self._hold(looked_at) if looked_at else None
        gone = [name for name, is_held in zip(looked_at, held or (), strict=held is not None) if not is_held]
        for name in looked_at:
            self._told.move_to_end(name)
        gone += list(islice(self._told, max(0, len(self._told) - _MOST)))
        if keys := [self._told.pop(name) for name in dict.fromkeys(gone)]:
            events.append(OffloadingEvent(keys=keys, removed=True, **self._about))
        return events
