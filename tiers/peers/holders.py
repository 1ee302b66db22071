"""Which peer is known to hold which block: bounded, and forgotten in time, for a peer evicts without telling."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final, NamedTuple

from kvtier.tiers import ChainHash

MAX_NAMES: Final = 262_144
PeerAddress = tuple[str, int]


class _KnownHolder(NamedTuple):
    peer: PeerAddress
    until: float  # seconds of the clock


class PeerHolders:
    """Names with a peer and an expiry, the least recently confirmed dropped first. Thread-safe, without I/O."""

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        """`lifetime`: seconds that a name is believed."""
        self._lifetime = lifetime
        self._limit = limit
        self._clock = clock
        self._lock = Lock()
        self._held: OrderedDict[ChainHash, _KnownHolder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, peer: PeerAddress, names: Iterable[ChainHash]) -> None:
        """The peer holds them, as of now."""
        with self._lock:
            held = _KnownHolder(peer, self._clock() + self._lifetime)
            for name in names:
                self._held[name] = held
                self._held.move_to_end(name)
            while len(self._held) > self._limit:
                self._held.popitem(last=False)

    def forget(self, names: Iterable[ChainHash]) -> None:
        with self._lock:
            for name in names:
                self._held.pop(name, None)

    def forget_peer(self, peer: PeerAddress) -> None:
        """It does not answer, or is not to be believed."""
        with self._lock:
            for name in [name for name, held in self._held.items() if held.peer == peer]:
                del self._held[name]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def leading(self, names: Sequence[ChainHash]) -> int:
        """How many leading names somebody holds."""
        with self._lock:
            now, held = self._clock(), self._held
            return next(
                (i for i, name in enumerate(names) if (each := held.get(name)) is None or each.until <= now), len(names)
            )

    def of(self, names: Sequence[ChainHash]) -> list[PeerAddress | None]:
        """Who holds each."""
        with self._lock:
            now, held = self._clock(), self._held
            return [each.peer if (each := held.get(name)) and each.until > now else None for name in names]

    def check(self) -> None:
        with self._lock:
            assert len(self._held) <= self._limit, f"{len(self._held)} names"
            times = [held.until for held in self._held.values()]
            assert times == sorted(times), "names out of order"
