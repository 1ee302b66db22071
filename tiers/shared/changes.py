"""What this process knows of a shared tier: names with an expiry, and the log of changes. No I/O."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Final, Generic, TypeVar

from kvtier.tiers import BlockRecord, ChainHash, Changes

MAX_NAMES: Final = 262_144  # blocks that a process remembers of a shared tier


Where = TypeVar("Where", bound=Hashable)


class KnownNames(Generic[Where]):
    """Names, each with its place and expiry; the least recently confirmed is dropped first. Thread-safe."""

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        """`lifetime`: seconds until a known name expires."""
        self._lifetime = lifetime
        self._limit = limit
        self._clock = clock
        self._lock = Lock()
        self._known: OrderedDict[ChainHash, tuple[float, Where]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, hashes: Iterable[ChainHash], where: Where) -> None:
        """These were found there just now."""
        with self._lock:
            found = self._clock() + self._lifetime, where
            for chain_hash in hashes:
                self._known[chain_hash] = found
                self._known.move_to_end(chain_hash)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def forget(self, hashes: Iterable[ChainHash]) -> list[bool]:
        """These are not there; returns which of them were known."""
        with self._lock:
            return [self._known.pop(chain_hash, None) is not None for chain_hash in hashes]

    def forget_all(self, where: Where) -> None:
        """Forget all names of this place."""
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
        """The place of each; None: not known."""
        with self._lock:
            now, known = self._clock(), self._known
            return [each[1] if (each := known.get(name)) is not None and each[0] > now else None for name in hashes]

    def check(self) -> None:
        with self._lock:
            assert len(self._known) <= self._limit, f"{len(self._known)} names"
            times = [until for until, _ in self._known.values()]
            assert times == sorted(times), "names out of order"


class SharedChanges:
    """A `ChangeFeed` of blocks that this process wrote or read. Thread-safe.

    A block is removed after a miss or its expiry on the server. Beyond `limit` the oldest confirmed one is removed.
    """

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime = lifetime  # seconds
        self._limit = limit
        self._clock = clock
        self._lock = Lock()  # guards what follows
        self._listens = False
        self._known: OrderedDict[ChainHash, float] = OrderedDict()  # blocks the reader knows → when they expire
        self._added: OrderedDict[ChainHash, BlockRecord] = OrderedDict()  # blocks the reader will learn
        self._removed: dict[ChainHash, None] = {}
        self._cleared = False

    # Called by the store.

    def seen(self, records: Iterable[BlockRecord]) -> None:
        if not self._listens:
            return
        with self._lock:
            until = self._clock() + self._lifetime
            for record in records:
                if record.chain_hash in self._known:
                    self._known[record.chain_hash] = until
                    self._known.move_to_end(record.chain_hash)
                else:
                    self._added[record.chain_hash] = record
            while len(self._known) + len(self._added) > self._limit:
                if self._known:
                    self._removed[self._known.popitem(last=False)[0]] = None
                else:
                    self._added.popitem(last=False)

    def missed(self, hashes: Iterable[ChainHash]) -> None:
        """These are missing, or damaged."""
        if not self._listens:
            return
        with self._lock:
            for chain_hash in hashes:
                self._added.pop(chain_hash, None)
                if self._known.pop(chain_hash, None) is not None:
                    self._removed[chain_hash] = None

    def clear(self) -> None:
        with self._lock:
            self._cleared |= bool(self._known or self._removed)
            self._removed.update(dict.fromkeys(self._known))
            self._known.clear()
            self._added.clear()

    # Called by the reader.

    def listen(self) -> None:
        """Keep a log from now on. Of blocks from before, only the name would be known."""
        with self._lock:
            self._forget()
            self._listens = True

    @property
    def waiting(self) -> bool:
        with self._lock:  # lanes change both on their threads
            now = self._clock()
            return bool(self._removed or self._added) or next(iter(self._known.values()), now + 1) <= now

    def take(self, limit: int) -> Changes:
        with self._lock:
            now = self._clock()
            while self._known and next(iter(self._known.values())) <= now:
                self._removed[self._known.popitem(last=False)[0]] = None
            removed, self._removed = list(self._removed), {}
            cleared, self._cleared = self._cleared, False
            stored = [self._added.popitem(last=False)[1] for _ in range(min(limit, len(self._added)))]
            self._known.update((record.chain_hash, now + self._lifetime) for record in stored)
            return Changes(removed, stored, cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns the names of blocks that the reader knows."""
        with self._lock:
            known = [*self._removed, *self._known]
            self._forget()
            self._listens = False
            return known

    def _forget(self) -> None:
        self._known.clear()
        self._added.clear()
        self._removed.clear()
        self._cleared = False
