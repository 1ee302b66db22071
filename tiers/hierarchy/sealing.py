"""What a step filled, on its way to be hashed and published: in parts, each of which somebody may wait for."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.hierarchy.cache_tiers import Filled

AT_ONCE: Final = 256  # blocks, about: those in front wait for the hashes of all


@dataclass(eq=False, slots=True)
class Sealing:
    """What a step filled, or a part of that, to be hashed and published together."""

    stores: Sequence[Filled]
    names: list[ChainHash]  # of all their blocks
    awaited: bool = False  # somebody wants to know when it is done
    done: bool = False  # its blocks are there, or will not come


def parts_of(stores: Sequence[Filled]) -> list[Sealing]:
    """A step's stores in parts of no more blocks than are sealed at once, but for a store that is larger by itself."""
    names = [name for reservation, _, _ in stores for name in reservation.hashes]
    if len(names) <= AT_ONCE or len(stores) < 2:
        return [Sealing(stores, names)] if stores else []
    half = len(stores) // 2
    return [*parts_of(stores[:half]), *parts_of(stores[half:])]


def next_part(waiting: deque[Sealing]) -> list[Sealing]:
    """The oldest that wait, taken out: about as many as are sealed at once."""
    taken: list[Sealing] = []
    num_blocks = 0
    while waiting and num_blocks < AT_ONCE:
        taken.append(waiting.popleft())
        num_blocks += len(taken[-1].names)
    return taken


class Sealer(Protocol):
    """Who hashes and publishes: the `StoreQueue`."""

    def next_sealings(self) -> list[Sealing]:
        """The oldest of what waits, taken."""

    def publish(self, sealings: Sequence[Sealing]) -> list[Outcome]:
        """Hash and publish; the outcome of each store in turn."""

    def sealed(self, sealings: Sequence[Sealing], outcomes: list[Outcome]) -> None:
        """They have ended."""

    def drop_waiting(self, reason: Outcome) -> None:
        """What waits will not be sealed."""


@dataclass(eq=False, slots=True)
class SealJob:
    """Hashing and publishing all that waits when its turn comes: a step's stores are one job. Implements `Job`."""

    stores: Sealer
    sealings: list[Sealing] | None = None  # once its turn has come
    deadline: float = math.inf  # memory only: it cannot hang

    def run(self) -> list[Outcome]:
        """On the sealing thread."""
        self.sealings = self.stores.next_sealings()
        return self.stores.publish(self.sealings)

    def end(self, result: list[Outcome] | Outcome, *, late: bool) -> None:
        """Not OK: its slots are given back."""
        if self.sealings is None:
            self.stores.drop_waiting(result if isinstance(result, Outcome) else Outcome.IO_ERROR)
        elif isinstance(result, Outcome):
            self.stores.sealed(self.sealings, [result] * sum(len(each.stores) for each in self.sealings))
        else:
            self.stores.sealed(self.sealings, result)

    def overdue(self) -> None:
        """Never told: there is no deadline."""
