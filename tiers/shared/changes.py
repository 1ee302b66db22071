"""What this process knows of a shared tier: names with an expiry, and what came and went. No I/O."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from kvtier.tiers import BlockRecord, ChainHash, Changes

MAX_NAMES: Final = 262_144  # blocks that a process remembers of a shared tier


Where = TypeVar("Where", bound=Hashable)


class KnownNames(Generic[Where]):
    """Names, where each is and until when that is believed, the least recently confirmed dropped first. Thread-safe."""

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        """`lifetime`: seconds that a name is believed."""
        self._lifetime = lifetime
        self._limit = limit
        self._clock = clock
        self._lock = Lock()
        self._known: OrderedDict[ChainHash, tuple[float, Where]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, hashes: Iterable[ChainHash], where: Where) -> None:
        """They are there, as of now."""
        with self._lock:
            found = self._clock() + self._lifetime, where
            for chain_hash in hashes:
                self._known[chain_hash] = found
                self._known.move_to_end(chain_hash)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def forget(self, hashes: Iterable[ChainHash]) -> list[bool]:
        """They are not there; returns which of them were known."""
        with self._lock:
            return [self._known.pop(chain_hash, None) is not None for chain_hash in hashes]

    def forget_all(self, where: Where) -> None:
        """Nothing is there, as far as is to be believed."""
        with self._lock:
            for chain_hash in [chain_hash for chain_hash, (_, there) in self._known.items() if there == where]:
                del self._known[chain_hash]

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def leading(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading names are known."""
        with self._lock:
            now, known = self._clock(), self._known
            return next(
                (i for i, name in enumerate(hashes) if (each := known.get(name)) is None or each[0] <= now), len(hashes)
            )

    def of(self, hashes: Sequence[ChainHash]) -> list[Where | None]:
        """Where each is."""
        with self._lock:
            now, known = self._clock(), self._known
            return [each[1] if (each := known.get(name)) is not None and each[0] > now else None for name in hashes]

    def check(self) -> None:
        with self._lock:
            assert len(self._known) <= self._limit, f"{len(self._known)} names"
            times = [until for until, _ in self._known.values()]
            assert times == sorted(times), "names out of order"


class SharedChanges:
    """An `Announcer` of blocks that this process wrote or read. Thread-safe.

    They are gone once missed, or after a server's expiry; beyond `limit` the one confirmed longest ago is told as gone.
    """

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime = lifetime  # seconds
        self._limit = limit
        self._clock = clock
        self._lock = Lock()  # guards what follows
        self._listens = False
        self._told: OrderedDict[ChainHash, float] = OrderedDict()  # blocks the reader knows → when they expire
        self._fresh: OrderedDict[ChainHash, BlockRecord] = OrderedDict()  # blocks it is to learn of
        self._gone: dict[ChainHash, None] = {}
        self._cleared = False

    # what the store saw

    def seen(self, records: Iterable[BlockRecord]) -> None:
        if not self._listens:
            return
        with self._lock:
            until = self._clock() + self._lifetime
            for record in records:
                if record.chain_hash in self._told:
                    self._told[record.chain_hash] = until
                    self._told.move_to_end(record.chain_hash)
                else:
                    self._fresh[record.chain_hash] = record
            while len(self._told) + len(self._fresh) > self._limit:
                if self._told:
                    self._gone[self._told.popitem(last=False)[0]] = None
                else:
                    self._fresh.popitem(last=False)

    def missed(self, hashes: Iterable[ChainHash]) -> None:
        """These are not there, or not as they should be."""
        if not self._listens:
            return
        with self._lock:
            for chain_hash in hashes:
                self._fresh.pop(chain_hash, None)
                if self._told.pop(chain_hash, None) is not None:
                    self._gone[chain_hash] = None

    def clear(self) -> None:
        with self._lock:
            self._cleared |= bool(self._told or self._gone)
            self._gone.update(dict.fromkeys(self._told))
            self._told.clear()
            self._fresh.clear()

    # what the reader asks

    def listen(self) -> None:
        """Keep a log from now on: of what was there before, nobody here knows more than the name."""
        with self._lock:
            self._forget()
            self._listens = True

    @property
    def waiting(self) -> bool:
        with self._lock:  # lanes change what is looked at
            now = self._clock()
            return bool(self._gone or self._fresh) or next(iter(self._told.values()), now + 1) <= now

    def take(self, limit: int) -> Changes:
        with self._lock:
            now = self._clock()
            while self._told and next(iter(self._told.values())) <= now:
                self._gone[self._told.popitem(last=False)[0]] = None
            gone, self._gone = list(self._gone), {}
            cleared, self._cleared = self._cleared, False
            stored = [self._fresh.popitem(last=False)[1] for _ in range(min(limit, len(self._fresh)))]
            self._told.update((record.chain_hash, now + self._lifetime) for record in stored)
            return Changes(gone, stored, cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns what the reader knows."""
        with self._lock:
            known = [*self._gone, *self._told]
            self._forget()
            self._listens = False
            return known

    def _forget(self) -> None:
        self._told.clear()
        self._fresh.clear()
        self._gone.clear()
        self._cleared = False
