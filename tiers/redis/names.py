"""Which blocks this process knows to be in Redis: bounded, and forgotten in time, for others evict there too."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from kvtier.tiers import ChainHash
from kvtier.tiers.shared import MAX_NAMES


class Names:
    """Names with an expiry, the least recently confirmed dropped first. Thread-safe; asking takes no I/O."""

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime = lifetime  # seconds
        self._limit = limit
        self._clock = clock
        self._lock = Lock()
        self._until: OrderedDict[ChainHash, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, hashes: Iterable[ChainHash]) -> None:
        """They are there, as of now."""
        with self._lock:
            until = self._clock() + self._lifetime
            for chain_hash in hashes:
                self._until[chain_hash] = until
                self._until.move_to_end(chain_hash)
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def forget(self, hashes: Iterable[ChainHash]) -> list[bool]:
        """They are not there; returns which of them were known."""
        with self._lock:
            return [self._until.pop(chain_hash, None) is not None for chain_hash in hashes]

    def clear(self) -> None:
        with self._lock:
            self._until.clear()

    def leading(self, hashes: Sequence[ChainHash]) -> int:
        with self._lock:
            now = self._clock()
            return next((i for i, h in enumerate(hashes) if self._until.get(h, 0.0) <= now), len(hashes))

    def known(self, hashes: Sequence[ChainHash]) -> list[bool]:
        with self._lock:
            now = self._clock()
            return [self._until.get(chain_hash, 0.0) > now for chain_hash in hashes]

    def check(self) -> None:
        with self._lock:
            assert len(self._until) <= self._limit, f"{len(self._until)} names"
            times = list(self._until.values())
            assert times == sorted(times), "names out of order"
