"""TierAdmission: whether a tier below L2 takes every block, or only what was seen before (`admit_after = "auto"`)."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, Metrics
from kvtier.tiers.pool import NUM_AGES, Departures
from kvtier.tiers.reuse import EDGES

_BEHIND: Final = 0.75  # of the store queue's room is taken: the tier falls behind
_CALM: Final = 0.25  # from here on it has caught up
_SHORTEST: Final = 10.0  # seconds without a sign of it before every block is taken again
_LONGEST: Final = 160.0  # each stay that follows at once on one before is twice as long, up to this
_LOOK: Final = 30.0  # seconds between two looks at how long blocks live
_FEWEST: Final = 16  # evictions and returns that tell anything


class Why(StrEnum):
    """Why a tier takes only what was seen before."""

    QUEUE = "queue"  # it takes stores more slowly than they come
    RESIDENCE = "residence"  # blocks are evicted there before half of all requests would have returned


class TierAdmission:
    """One tier's. Thread-safe; no I/O, and nothing kept for each block: what left a tier is remembered there."""

    def __init__(
        self,
        tier: str,
        departures: Callable[[], Sequence[Departures]],
        gaps: Callable[[], NDArray[np.float64] | None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """`departures`: of L2 and the tier, the tier's last. `gaps`: returns by age, as `SlotPool.return_gaps`."""
        self._tier = tier
        self._departures = departures
        self._gaps = gaps
        self._metrics = metrics
        self._clock = clock
        self._lock = Lock()
        self._reasons: set[Why] = set()
        self._behind_at = self._left_at = self._looked_at = -np.inf
        self._stay = _SHORTEST
        self._ages = np.zeros(NUM_AGES, np.int64)  # of evictions before the last look that told anything,
        self._told_at = 0.0  # and when that was
        self._show()

    def is_selective(self, filling: float, *, refused: bool = False) -> bool:
        """Whether only what was seen before is to be stored now.

        `filling`: the part of the store queue's room that is taken. `refused`: it had no room for a block.
        """
        now = self._clock()
        with self._lock:
            reasons = {Why.QUEUE} if self._is_behind(filling, now, refused) else set()
            if self._is_short_lived(now):
                reasons.add(Why.RESIDENCE)
            if reasons != self._reasons:
                self._reasons = reasons
                self._show()
            return bool(reasons)

    def num_seen(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks were here before: they left a tier, or were not stored in one."""
        departures = self._departures()
        for count, name in enumerate(hashes):
            if all(each.find(name) is None for each in departures):
                return count
        return len(hashes)

    def _is_behind(self, filling: float, now: float, refused: bool) -> bool:
        was_behind = Why.QUEUE in self._reasons
        if refused or filling >= (_CALM if was_behind else _BEHIND):
            if not was_behind:
                follows = now - self._left_at < self._stay
                self._stay = min(2 * self._stay, _LONGEST) if follows else _SHORTEST
            self._behind_at = now
            return True
        if was_behind and now - self._behind_at >= self._stay:
            self._left_at = now
            return False
        return was_behind

    def _is_short_lived(self, now: float) -> bool:
        """Blocks live less there than the median request takes to return; once so, until they live twice as long."""
        was_short = Why.RESIDENCE in self._reasons
        departures = self._departures()
        if now - self._looked_at < _LOOK or not departures or departures[-1].tier != self._tier:
            return was_short
        self._looked_at = now
        ages, gaps = departures[-1].ages[:NUM_AGES].copy(), self._gaps()
        evicted = ages - self._ages
        if gaps is None or gaps.sum() < _FEWEST:
            return was_short
        gap = float(EDGES[_median(gaps)]) + 1.0
        if evicted.sum() < _FEWEST:  # the tier has room again: what is there has lived so long since
            return was_short and now - self._told_at < 2.0 * gap
        self._ages, self._told_at = ages, now
        residence = 2.0 ** (_median(evicted) - 0.5)  # a bucket's middle: each is up to twice the one before
        return bool(residence < (2.0 if was_short else 1.0) * gap)

    def _show(self) -> None:
        for why in Why:
            self._metrics.selective(self._tier, why, why in self._reasons)


def _median(counts: NDArray[np.int64] | NDArray[np.float64]) -> int:
    """The bin that the middle one of all that were counted lies in."""
    return int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
