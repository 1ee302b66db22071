"""SlabIndex: which slot of a slab holds which block: the core's index, and which slots have a name."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.pool import Slots, Words, make_index

_PIECE: Final = 1 << 14  # names that are loaded, or looked for by a check, at once


class SlabIndex:
    """Names of slots: at most one per slot, and one slot per name. It takes no lock.

    Compiled it takes 49 to 65 bytes a slot, interpreted some 200.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._index = make_index(num_slots)
        self._words: Words = self._index.names.view(np.uint64).reshape(-1, 4)
        self.is_named = bytearray(num_slots)  # of every slot, and of those behind the last one
        self._named = np.frombuffer(self.is_named, np.bool_)

    @property
    def num_names(self) -> int:
        """Slots that have a name."""
        return self._index.num_names

    def find(self, hashes: Sequence[ChainHash]) -> Slots:
        """The slot of each name, -1 where there is none. ValueError if a name is not 32 bytes."""
        return np.array(self.find_each(hashes), np.int64)

    def find_each(self, hashes: Sequence[ChainHash]) -> list[int]:
        """As `find`, as a list."""
        return self._index.find_all(hashes if isinstance(hashes, list) else list(hashes))

    def find_one(self, name: ChainHash) -> int:
        """The slot of one name, -1 if it has none. ValueError as `find`."""
        return self._index.find_all([name])[0]

    def write(self, slots: Slots | slice, words: Words) -> None:
        """Note the names of slots that have none; `load` makes them findable."""
        self._words[slots] = words

    def load(self, slots: Slots) -> list[int]:
        """Make the names noted of these slots findable; returns the slots whose name another has, and has already."""
        others: list[int] = []
        for first in range(0, len(slots), _PIECE):
            others += self._index.load(slots[first : first + _PIECE].tolist())
        self._named[slots] = True
        self._named[others] = False
        return others

    def add(self, hashes: Sequence[ChainHash], places: Sequence[int]) -> None:
        """Name slots that have no name. No name comes twice, and none is in the index."""
        slots = list(places)
        self._index.put_all(list(hashes), slots)
        for slot in slots:
            self.is_named[slot] = 1

    def remove(self, places: Sequence[int]) -> None:
        """Take the slots' names away; each has one. `names` still tells it until the slot is named again."""
        slots = list(places)
        self._index.remove_all(slots)
        for slot in slots:
            self.is_named[slot] = 0

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each of the slots (-1: none; it may lie behind the last one) has a name."""
        held: NDArray[np.bool_] = self._named.take(slots, mode="wrap") & (slots >= 0) & (slots < self.num_slots)
        return held

    def named(self, first: int = 0, end: int | None = None) -> Slots:
        """All slots from `first` to before `end` that have names, ascending."""
        return first + np.flatnonzero(self._named[first:end])

    def names(self, slots: Slots) -> list[ChainHash]:
        """The names of slots that have one, or had one last."""
        joined = self._words.take(slots, 0).tobytes()
        return [joined[i : i + 32] for i in range(0, len(joined), 32)]

    def words(self, slots: Slots) -> Words:
        """The names of slots as `[n, 4]` uint64."""
        return self._words.take(slots, 0)

    def shorten(self, num_slots: int) -> None:
        """Have no more than so many slots; those behind have no names."""
        self.num_slots = num_slots

    def reset(self) -> None:
        """Take all names away."""
        self._index.reset()
        self._named[:] = False

    def check(self) -> Slots:
        """All named slots. Raises AssertionError unless each is found by its name, and nothing else is."""
        named = self.named()
        assert self.num_names == len(named), f"{self.num_names} names for {len(named)} slots"
        assert not len(named) or named[-1] < self.num_slots, "a slot out of range has a name"
        for first in range(0, len(named), _PIECE):
            piece = named[first : first + _PIECE]
            assert self.find_each(self.names(piece)) == piece.tolist(), "a name leads to another slot"
        return named
