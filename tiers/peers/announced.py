"""Which blocks one peer says that it holds, by its KV events: short names, bounded, each only a hint."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from threading import Lock
from typing import Final

from kvtier.tiers import ChainHash

KEY_BYTES: Final = 8
"""Events name a block by the last bytes of its chain hash. Two blocks of one key are told apart when one is read."""

MAX_DOUBTS: Final = 16
"""Flights that a peer's events sent in vain, after which they are not believed until some doubts have passed."""

_KEY: Final = itemgetter(slice(-KEY_BYTES, None))
_DOUBT: Final = 30.0  # seconds for which a name that was not there is not believed


class NamesRoom:
    """How many names may be known by events, of all peers together. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.left = self._most = most
        self._lock = Lock()

    def take(self, count: int) -> int:
        """Up to `count` places; how many there were."""
        with self._lock:
            count = min(count, self.left)
            self.left -= count
            return count

    def give_back(self, count: int) -> None:
        with self._lock:
            self.left += count

    def check(self) -> None:
        assert 0 <= self.left <= self._most, f"{self.left} places of {self._most}"


class AnnouncedNames:
    """One peer's names. Written by whoever reads its events, asked by anybody; asking takes no lock.

    A name costs some 100 bytes. Names beyond the room are left out, and `is_whole` is false until all is told anew.
    """

    def __init__(self, room: NamesRoom, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_whole = True  # no name was left out
        self._room = room
        self._clock = clock
        self._lock = Lock()  # held by whoever changes what follows
        self._keys: set[bytes] = set()
        self._doubts: dict[bytes, float] = {}  # a key that was asked for in vain → until when it is not believed
        self._closed = False

    def __len__(self) -> int:
        return len(self._keys)

    def store(self, keys: Iterable[bytes]) -> None:
        """The peer's memory holds these blocks now."""
        with self._lock:
            if self._closed:
                return
            fresh = set(keys).difference(self._keys)
            taken = self._room.take(len(fresh))
            if taken < len(fresh):
                self.is_whole = False
                fresh = set(list(fresh)[:taken])
            self._keys |= fresh
            for key in fresh.intersection(self._doubts):
                del self._doubts[key]

    def remove(self, keys: Iterable[bytes]) -> None:
        """They have left it."""
        with self._lock:
            gone = self._keys.intersection(keys)
            self._keys -= gone
            self._room.give_back(len(gone))

    def clear(self) -> None:
        """Nothing is known of the peer: what comes now is all it holds."""
        with self._lock:
            self._room.give_back(len(self._keys))
            gone, self._keys, self._doubts, self.is_whole = self._keys, set(), {}, True
        _let_go(gone)

    def close(self) -> None:
        """Forget all; nothing is stored any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._room.give_back(len(self._keys))
            gone, self._keys = self._keys, set()
        _let_go(gone)

    def doubt(self, name: ChainHash) -> None:
        """The peer was asked for this block, and did not send it."""
        with self._lock:
            self._forget_doubts()
            if len(self._doubts) < MAX_DOUBTS:
                self._doubts[name[-KEY_BYTES:]] = self._clock() + _DOUBT

    @property
    def num_doubts(self) -> int:
        """Names that it did not have lately, though its events said so."""
        if self._doubts:
            with self._lock:
                self._forget_doubts()
        return len(self._doubts)

    def holds(self, name: ChainHash) -> bool:
        key = name[-KEY_BYTES:]
        return key in self._keys and key not in self._doubts

    def leading(self, names: Sequence[ChainHash], first: int = 0) -> int:
        """Where the run of held blocks that begins at `first` ends."""
        keys, doubts = self._keys, self._doubts
        following = takewhile(keys.__contains__, map(_KEY, islice(names, first, None)))
        if doubts:
            following = takewhile(lambda key: key not in doubts, following)
        return first + sum(1 for _ in following)

    def check(self) -> None:
        """Raise AssertionError if more is doubted than may be."""
        with self._lock:
            assert len(self._doubts) <= MAX_DOUBTS, f"{len(self._doubts)} doubts"
            assert not (self._closed and self._keys), "names of a peer that nobody follows"

    def _forget_doubts(self) -> None:
        now = self._clock()
        self._doubts = {key: until for key, until in self._doubts.items() if until > now}


def _let_go(keys: set[bytes]) -> None:
    """One by one: a million at once would keep all other threads waiting."""
    while keys:
        keys.pop()
