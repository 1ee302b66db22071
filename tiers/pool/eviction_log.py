"""EvictionLog: which blocks left a tier lately, when and why; and how long blocks lived there. It takes no lock.

A miss looks up here what became of its block. It is bounded: one word an entry, and a name that left later may take the
place of one that left before. Of as many names as there are entries some two thirds are remembered, of a tenth as many
nearly all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, Outcome
from kvtier.tiers.pool.changes import NAME_MIX, Slots, Words, to_words

EVICTED: Final = str(Outcome.EVICTED)  # made room for other blocks
REMOVED: Final = "removed"  # an operator had it dropped by name or tenant
RESET: Final = "reset"  # everything was forgotten
LOST: Final = "lost"  # it was stored in a tier that does not report what it drops, and is not there now
NEVER_SEEN: Final = "never_seen"  # nothing is remembered: it was never stored here, or left too long ago

AGE_BOUNDS: Final = tuple(1 << power for power in range(21))  # seconds, of the histogram's buckets
NUM_AGES: Final = len(AGE_BOUNDS) + 1
SECONDS: Final = NUM_AGES  # the place behind the buckets: the sum of all ages
_CAUSES: Final = (EVICTED, REMOVED, RESET, *(str(each) for each in Outcome if each is not Outcome.EVICTED), LOST)
_CODE: Final = {cause: code for code, cause in enumerate(_CAUSES, 1)}
EVICTED_CODE: Final = _CODE[EVICTED]
_LOST_CODE: Final = _CODE[LOST]
_MOST_SECONDS: Final = (1 << 24) - 1
_LEAST_ENTRIES: Final = 1024
_FOUR: Final = Struct("4Q").unpack_from
_MIX_FIRST, _, _, _MIX_LAST = NAME_MIX.tolist()
_U64: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1


class EvictionReason(NamedTuple):
    """What became of a block that no tier holds."""

    cause: str  # one of this file's, or the `Outcome` for which a store was dropped
    tier: str = ""  # it left, or was not stored in; "" where nothing is remembered
    seconds: int = 0  # ago


class EvictionLog:
    """What left one tier. Called under the lock of that tier; a reader without it may miss what leaves just now.

    An entry is the name's tag above the second it left (24 bits) above the cause's code (8 bits); 0 is empty.
    """

    def __init__(
        self, tier: str, num_entries: int, num_places: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_places`: slots, or whatever comes and goes as one, whose ages are to be known."""
        self.tier = tier
        self.entries = np.zeros(max(_LEAST_ENTRIES, num_entries), np.uint64)
        self.came_at = np.zeros(num_places, np.uint32)  # second of each place's block, 0: not known
        self.ages = np.zeros(NUM_AGES + 1, np.int64)
        self.clock = clock
        self.start = int(clock())  # whole seconds, so that tiers with one clock agree which of them came last
        self.entry, self._came = memoryview(self.entries), memoryview(self.came_at)  # for one at a time

    def now(self) -> int:
        """The second, from 1 on."""
        return min(int(self.clock()) - self.start + 1, _MOST_SECONDS)

    def evicted(self, places: Slots, words: Words) -> None:
        """Blocks of these names make room; `places` are theirs."""
        self.left(words, EVICTED)
        came_at = self.came_at.take(places)
        self.aged(self.now() - came_at[came_at > 0].astype(np.int64))

    def aged(self, seconds: NDArray[np.int64]) -> None:
        """Blocks were evicted after so long."""
        bins = np.minimum(np.frexp(seconds.astype(np.float64))[1], NUM_AGES - 1)
        self.ages[:NUM_AGES] += np.bincount(bins, minlength=NUM_AGES)
        self.ages[SECONDS] += seconds.sum()

    def came(self, place: int) -> None:
        """Blocks come to this place."""
        self._came[place] = self.now()

    def left(self, names: Words | Sequence[ChainHash], cause: str) -> None:
        """These are not held any more, or were not stored, for this cause: one of this file's or an `Outcome`."""
        words = names if isinstance(names, np.ndarray) else to_words(names)
        if not len(words):
            return
        mixed = words @ NAME_MIX
        low = np.uint64(self.now() << 8 | _CODE[cause])
        self.entries[self._places(mixed)] = mixed << np.uint64(32) | low

    def find_each(self, words: Words) -> NDArray[np.uint64]:
        """The low half of each name's entry, 0 where it is not known: comparable, the later is the larger."""
        mixed = words @ NAME_MIX
        found = self.entries.take(self._places(mixed))
        return np.where(found >> np.uint64(32) == mixed & np.uint64(_U32), found & np.uint64(_U32), np.uint64(0))

    def _places(self, mixed: NDArray[np.uint64]) -> Slots:
        return ((mixed >> np.uint64(32)) * np.uint64(len(self.entries)) >> np.uint64(32)).astype(np.int64)


Causes = Mapping[tuple[str, str], int]
"""(cause, tier) → blocks."""


def eviction_reason(tiers: Sequence[EvictionLog], name: ChainHash) -> EvictionReason:
    """What became of a block that no tier holds: where it left last. One that was lost was evicted above knowingly."""
    latest = EvictionReason(NEVER_SEEN)
    first, _, _, last = _FOUR(name, 0)
    mixed = first * _MIX_FIRST + last * _MIX_LAST & _U64
    for eviction_log in tiers:
        entry = eviction_log.entry[(mixed >> 32) * len(eviction_log.entry) >> 32]
        if entry and entry >> 32 == mixed & _U32:
            cause, ago = _CAUSES[(entry & 0xFF) - 1], eviction_log.now() - (entry >> 8 & _MOST_SECONDS)
            is_below = cause == LOST and latest.cause == EVICTED
            if not latest.tier or ago <= latest.seconds or is_below:
                latest = EvictionReason(cause, eviction_log.tier, ago)
    return latest


def causes_of(tiers: Sequence[EvictionLog], names: Sequence[ChainHash]) -> Causes:
    """What became of consecutive blocks that no tier holds. If nothing is known of the first, the others' names are not
    looked at: a chain loses its end first.
    """
    if not names:
        return {}
    if len(names) == 1 or not eviction_reason(tiers, names[0]).tier:
        first = eviction_reason(tiers, names[0])
        return {(first.cause, first.tier): len(names)}
    words = to_words(names)
    low = np.array([eviction_log.find_each(words) for eviction_log in tiers])
    seconds = (low >> np.uint64(8)).astype(np.int64)
    ago = np.array([eviction_log.now() for eviction_log in tiers])[:, None] - seconds
    ago[low == 0] = _MOST_SECONDS + 1
    kind = low & np.uint64(0xFF)
    ago[(kind == EVICTED_CODE) & (kind == _LOST_CODE).any(axis=0)] = _MOST_SECONDS + 1
    owner = len(tiers) - 1 - ago[::-1].argmin(axis=0)  # of two that say the same second the lower tier
    codes = low[owner, np.arange(len(names))].astype(np.int64) & 0xFF
    counted: dict[tuple[str, str], int] = {}
    kinds, counts = np.unique(owner << 8 | codes, return_counts=True)
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        code = kind & 0xFF
        key = (_CAUSES[code - 1], tiers[kind >> 8].tier) if code else (NEVER_SEEN, "")
        counted[key] = counted.get(key, 0) + count
    return counted
