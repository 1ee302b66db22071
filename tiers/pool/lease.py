"""What a pool hands out besides leases (core.py): `Places`, a `Reservation` to fill, states and counts of slots."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, TypeVar

from kvtier.tiers import ChainHash

FREE: Final = 0  # states of a slot, as `core.py` has them
FILLING: Final = 1  # taken, and invisible to every lookup
READY: Final = 2
QUARANTINED: Final = 3  # an operation that hangs may still write here

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many slots are in each state: free + filling + ready + quarantined is the pool's size."""

    free: int
    filling: int
    ready: int
    leased: int  # of the ready ones: those with a lease
    quarantined: int
    dirty: int  # of the ready ones: those no lower tier holds
    tails: int  # of the ready ones: partial blocks


@dataclass(frozen=True, slots=True)
class Places:
    """Slots of blocks and their generations when found: one not taken since, and ready, still has its block."""

    slots: list[int]
    generations: list[int]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots taken for blocks that are not held yet, invisible until `SlotPool.seal`.

    All lists run parallel, in chain order. As a context manager, and when it is dropped, it abandons what was neither
    sealed nor quarantined. It is empty if every block was there already.
    """

    hashes: list[ChainHash]
    indices: list[int]  # positions in the hashes given to `reserve`
    slots: list[int]
    generations: list[int]  # how often each slot had been taken by then
    parents: list[ChainHash | None]
    epoch: int = field(repr=False)  # the pool's count of resets when the slots were taken
    num_open: int = field(repr=False)  # slots still filling
    on_end: "Callable[[Reservation, bool], None]" = field(repr=False)  # (itself, whether it was dropped)
    num_refused: int = field(default=0, init=False)  # last blocks of those hashes that are not worth a slot
    is_partial: bool = field(default=False, init=False)  # of one block that is a chain's unfinished last one
    is_given: bool = field(default=False, init=False, repr=False)  # to be sealed: it cannot be abandoned any more

    @property
    def is_whole(self) -> bool:
        """Whether every one of its slots is still filling: none was sealed or given up."""
        return self.num_open == len(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self, False)

    def __del__(self) -> None:
        if self.num_open and not sys.is_finalizing():
            self.on_end(self, True)


def picked(items: Sequence[T], at: Sequence[int]) -> list[T]:
    """The items at these positions, which are distinct and in order."""
    return list(items) if len(at) == len(items) else [items[i] for i in at]
