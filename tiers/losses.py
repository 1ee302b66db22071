"""Blocks lost of late for want of room or time: a reason to call a process degraded, while it goes on."""

import time
from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from kvtier.tiers.kinds import L2
from kvtier.tiers.tier import Outcome

_MINUTES: Final = 5  # whole ones, besides the one under way
_SHARE: Final = 0.1  # of the blocks offered or looked up that may be lost: as in deploy/prometheus/rules.yml
_LOOKED_UP: Final = "looked up"
_STORED: Final = "stored"
_MORE_ROOM: Final = "raise [host] size"
_FASTER: Final = f'{_MORE_ROOM}, or set [cache] admit_after = "auto"'


def _fix_of(tier: str, reason: str) -> str | None:
    """The option that helps a tier which drops stores for this reason; None if nothing is too small or too slow."""
    match reason:
        case Outcome.NO_SLOT:
            return _MORE_ROOM
        case Outcome.EVICTED | Outcome.QUEUE_FULL:
            return _FASTER
        case Outcome.FULL:
            return "raise [file] size, or free some of its disk" if tier == "file" else f"give {tier} more room"
        case Outcome.TIMEOUT:
            return f"raise [{'service' if tier == L2 else tier}] deadline"
    return None  # a quota and an admission are somebody's will; a breaker that opens is told as such


class Losses:
    """Counts by minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._minutes: deque[tuple[int, Counter[tuple[str, str]]]] = deque(maxlen=_MINUTES + 1)

    def looked_up(self, num_blocks: int) -> None:
        self._count("", _LOOKED_UP, num_blocks)

    def missed(self, reason: str, num_blocks: int) -> None:
        if reason == Outcome.NO_SLOT:
            self._count("", reason, num_blocks)

    def stored(self, tier: str, num_blocks: int) -> None:
        self._count(tier, _STORED, num_blocks)

    def dropped(self, tier: str, reason: str, num_blocks: int) -> None:
        if _fix_of(tier, reason) is not None:
            self._count(tier, reason, num_blocks)

    @property
    def wanting(self) -> dict[str, str]:
        """What there is too little of, and why one thinks so: "file stores", "l2 slots"."""
        oldest, seen = int(self._clock() // 60) - _MINUTES, Counter[tuple[str, str]]()
        with self._lock:
            for minute, counts in self._minutes:
                if minute >= oldest:
                    seen += counts
        found = {}
        for tier in sorted({tier for tier, _ in seen} - {""}):
            lost = Counter({why: n for (of, why), n in seen.items() if of == tier and why != _STORED})
            all_lost, offered = lost.total(), lost.total() + seen[tier, _STORED]
            if all_lost > _SHARE * offered:
                reasons = ", ".join(f"{reason} {num_blocks}" for reason, num_blocks in lost.most_common())
                fix = _fix_of(tier, lost.most_common(1)[0][0])
                found[f"{tier} stores"] = f"{_of(all_lost, offered)} were not stored ({reasons}); {fix}"
        crowded, asked = seen["", Outcome.NO_SLOT], seen["", _LOOKED_UP]
        if crowded > _SHARE * asked:
            found["l2 slots"] = (
                f"{_of(crowded, max(crowded, asked))} had no slot to be loaded to (no_slot); {_MORE_ROOM}"
            )
        return found

    def _count(self, tier: str, what: str, num_blocks: int) -> None:
        minute, minutes = int(self._clock() // 60), self._minutes
        with self._lock:
            if not minutes or minutes[-1][0] < minute:
                minutes.append((minute, Counter()))
            minutes[-1][1][tier, what] += num_blocks


def _of(num_blocks: int, of: int) -> str:
    return f"{num_blocks / of:.0%} of {of} blocks in the last {_MINUTES} minutes"
