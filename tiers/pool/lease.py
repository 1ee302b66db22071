"""What a pool hands out: `Places` of blocks, a `Reservation` to fill, a `Lease` that protects, and counts of slots."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from kvtier.tiers import ChainHash


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many slots are in each state: free + filling + ready + quarantined is the pool's size."""

    free: int
    filling: int
    ready: int
    leased: int  # of the ready ones: those somebody holds a lease on
    quarantined: int
    dirty: int  # of the ready ones: those no lower tier holds
    tails: int  # of the ready ones: a chain's unfinished last block


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks were when they were looked for: their slots, and how often each had been taken by then.

    A slot that was not taken since and is ready still has that block, so its name need not be looked up again.
    """

    slots: list[int]
    generations: list[int]

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots taken for blocks that are not held yet, invisible until `SlotPool.seal`.

    All lists run parallel, in chain order. As a context manager, and when it is dropped, it abandons what was neither
    sealed nor quarantined. It is empty if every block asked for was held already.
    """

    hashes: list[ChainHash]
    indices: list[int]  # positions in the hashes `reserve` was asked for
    slots: list[int]
    generations: list[int]  # how often each slot had been taken by then
    parents: list[ChainHash | None]
    epoch: int = field(repr=False)  # the pool's count of resets when the slots were taken
    num_open: int = field(repr=False)  # slots still filling
    on_end: "Callable[[Reservation, bool], None]" = field(repr=False)  # (itself, whether it was dropped)
    is_tail: bool = field(default=False, init=False)  # of one block that is a chain's unfinished last one
    is_given: bool = field(default=False, init=False, repr=False)  # to be sealed: whoever filled it has no say any more

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


@dataclass(eq=False, slots=True)
class Lease:
    """Protection of blocks from eviction: while it lives, its slots keep their bytes. Made by `SlotPool`.

    `release` may be called any number of times, by any thread; a lease that is dropped instead counts as leaked.
    """

    hashes: list[ChainHash]
    slots: list[int]
    generations: list[int]  # how often each slot had been taken by then
    # (itself, whether it was dropped). Whoever made the lease sets this to None, under a lock: then it is released.
    on_release: "Callable[[Lease, bool], None] | None"

    def __len__(self) -> int:
        return len(self.hashes)

    def __repr__(self) -> str:
        return f"Lease({len(self)} blocks, {'released' if self.released else 'held'})"

    @property
    def released(self) -> bool:
        return self.on_release is None

    def release(self) -> None:
        """End the protection: the chain's tail becomes evictable before its head. Idempotent."""
        if (on_release := self.on_release) is not None:
            on_release(self, False)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # An empty lease protects nothing; and nothing may wait for a lock here: the pool may be what was interrupted.
        if (on_release := self.on_release) is not None and self.hashes and not sys.is_finalizing():
            on_release(self, True)
