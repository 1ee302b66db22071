"""SharedChanges: what this process knows to have come to a shared tier and gone from it. An `Announcer`."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Final

from kvtier.tiers import BlockRecord, ChainHash, Changes

MAX_NAMES: Final = 262_144  # blocks that a process remembers of a shared tier


class SharedChanges:
    """Blocks this process wrote or read are there, for as long as a server keeps what nobody reads; then, or once one
    was missed, they are gone. Others' blocks are theirs to tell. Thread-safe.

    Bounded: beyond `limit` blocks the one that was confirmed longest ago is told as gone.
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
