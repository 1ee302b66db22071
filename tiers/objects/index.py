"""Which blocks are known to be in the bucket, and where in which object. Bounded; no I/O."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final

from kvtier.tiers import ChainHash
from kvtier.tiers.objects.layout import Edges
from kvtier.tiers.shared import MAX_NAMES

NAME_LIFETIME: Final = 3600.0  # seconds until a known name expires: others delete without notice


class StoredObject:
    """An object as far as it is known. Its fields belong to the index."""

    __slots__ = ("blocks", "edges", "first", "until")

    def __init__(self, first: bytes, edges: Edges) -> None:
        self.first = first  # its first block's name in its key
        self.edges = edges  # of all its records
        self.blocks: list[ChainHash] = []  # the leading ones, as far as they are known
        self.until = 0.0

    @property
    def num_blocks(self) -> int:
        return len(self.edges) - 1


BlockPlace = tuple[StoredObject, int]
"""An object, and the position of a block in it."""


class ObjectIndex:
    """Blocks by name; whole objects are forgotten, the one that was confirmed longest ago first. Thread-safe."""

    def __init__(self, lifetime: float, limit: int = MAX_NAMES, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime = lifetime  # seconds
        self._limit = limit
        self._clock = clock
        self._lock = Lock()  # guards what follows
        self._objects: OrderedDict[bytes, StoredObject] = OrderedDict()  # by `first`
        self._places: dict[ChainHash, BlockPlace] = {}

    def __len__(self) -> int:
        return len(self._places)

    def learn(self, first: bytes, hashes: Sequence[ChainHash], edges: Edges) -> None:
        """The object of that name begins with these blocks, as of now, and its records have these edges."""
        with self._lock:
            known = self._objects.get(first)
            is_same = known is not None and known.edges == edges
            if known is not None and not (is_same and _agree(known.blocks, hashes)):  # another one by now
                self._forget(known)
                known = None
            if known is None:
                known = self._objects[first] = StoredObject(first, edges)
            for position in range(len(known.blocks), len(hashes)):
                known.blocks.append(hashes[position])
                self._places[hashes[position]] = (known, position)
            self._confirm(known)
            while len(self._places) > self._limit and len(self._objects) > 1:
                self._forget(next(iter(self._objects.values())))

    def confirm(self, objects: Iterable[StoredObject]) -> None:
        """These objects were just read."""
        with self._lock:
            for each in objects:
                if self._objects.get(each.first) is each:
                    self._confirm(each)

    def leading(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks are known."""
        with self._lock:
            now = self._clock()
            return next((i for i, h in enumerate(hashes) if self._place(h, now) is None), len(hashes))

    def in_part(self, hashes: Sequence[ChainHash]) -> int:
        """How many of a chain's last blocks lie in an object that has more behind them; 0 if it ends with them."""
        if not hashes:
            return 0
        with self._lock:
            place = self._places.get(hashes[-1])
            if place is None or place[1] + 1 >= place[0].num_blocks or place[1] >= len(hashes):
                return 0
            return place[1] + 1

    def places(self, hashes: Sequence[ChainHash]) -> list[BlockPlace | None]:
        """Where each block is, as far as that is known."""
        with self._lock:
            now = self._clock()
            return [self._place(chain_hash, now) for chain_hash in hashes]

    def forget(self, objects: Iterable[StoredObject]) -> list[ChainHash]:
        """These objects are missing or damaged; returns the blocks that are not known any more."""
        with self._lock:
            return [h for each in objects for h in self._forget(each)]

    def clear(self) -> None:
        with self._lock:
            self._objects.clear()
            self._places.clear()

    def check(self) -> None:
        with self._lock:
            for chain_hash, (stored, position) in self._places.items():
                assert self._objects.get(stored.first) is stored, "a place in a forgotten object"
                assert stored.blocks[position] == chain_hash, "a place of another block"
            times = [each.until for each in self._objects.values()]
            assert times == sorted(times), "objects out of order"

    def _place(self, chain_hash: ChainHash, now: float) -> BlockPlace | None:
        place = self._places.get(chain_hash)
        return place if place is not None and place[0].until > now else None

    def _confirm(self, stored: StoredObject) -> None:
        stored.until = self._clock() + self._lifetime
        self._objects.move_to_end(stored.first)

    def _forget(self, stored: StoredObject) -> list[ChainHash]:
        if self._objects.get(stored.first) is stored:
            del self._objects[stored.first]
        forgotten = [h for h in stored.blocks if (place := self._places.get(h)) is not None and place[0] is stored]
        for chain_hash in forgotten:
            del self._places[chain_hash]
        return forgotten


def _agree(one: Sequence[ChainHash], other: Sequence[ChainHash]) -> bool:
    """Whether one of two chains begins the other."""
    common = min(len(one), len(other))
    return list(one[:common]) == list(other[:common])
