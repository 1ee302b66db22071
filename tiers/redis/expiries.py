"""LearnedExpiries: when blocks in Redis expire, by how requests of their class return.

A server whose policy is volatile-ttl evicts what expires first. So blocks that are needed less expire earlier: by as
many seconds as an average request would have to be older to be needed as little. It is never below half of `ttl`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from threading import Lock
from typing import Final

from kvtier.tiers import ChainHash
from kvtier.tiers.reuse import MOST_AHEAD, ClassifiedEnd

_MOST_WAITING: Final = 65_536  # blocks; of more the oldest keep the expiry they have


class LearnedExpiries:
    """What ends of requests say of blocks' expiries and the servers have not been told yet. Thread-safe, no I/O."""

    def __init__(self, ttl: float) -> None:
        """`ttl`: seconds that a block is kept that is needed most."""
        self._ttl = ttl
        self._scale = min(1.0, ttl / (4 * MOST_AHEAD))
        self._lock = Lock()
        self._due: OrderedDict[ChainHash, int] = OrderedDict()  # of blocks that are stored: milliseconds
        self._early: OrderedDict[ChainHash, int] = OrderedDict()  # of those whose end was told first

    def ended(self, end: ClassifiedEnd, are_stored: Sequence[bool]) -> None:
        """A request has ended, and these of its blocks are stored, as far as is known."""
        seconds = self._ttl - self._scale * (MOST_AHEAD - end.order.ahead(end.kind))
        milliseconds = int(1000 * seconds)
        with self._lock:
            for depth, (name, is_stored) in enumerate(zip(end.names, are_stored, strict=True)):
                waiting = self._due if is_stored else self._early
                # A chain's end goes first: without its beginning nobody could reach it.
                waiting[name] = max(1, milliseconds - depth)
                waiting.move_to_end(name)
            for waiting in (self._due, self._early):
                while len(waiting) > _MOST_WAITING:
                    waiting.popitem(last=False)

    def stored(self, hashes: Iterable[ChainHash]) -> None:
        """These were written just now, with the longest expiry."""
        with self._lock:
            for name in hashes:
                if (milliseconds := self._early.pop(name, None)) is not None:
                    self._due[name] = milliseconds

    def take(self, count: int) -> dict[ChainHash, int]:
        """Up to `count` blocks and the milliseconds after which each is to expire. They wait no more."""
        with self._lock:
            names = list(islice(self._due, count))
            return {name: self._due.pop(name) for name in names}

    def clear(self) -> None:
        """Nothing that was told of is stored any more."""
        with self._lock:
            self._due.clear()
            self._early.clear()
