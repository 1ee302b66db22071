"""Backlog: blocks of a pool that are still to be given to somebody, oldest first. It holds none of them back."""

from collections.abc import Sequence
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.pool.index import Slots
from kvtier.tiers.pool.slot_queue import SlotQueue
from kvtier.tiers.pool.slots import SlotTable
from kvtier.tiers.pool.states import READY

_PIECE: Final = 4096  # slots looked at while the pool's lock is held


class Backlog:
    """Ready blocks of a pool in line, each once, in the order they were added. Thread-safe: under the pool's lock.

    Evicting a block costs nothing here: a slot is remembered with its generation, and compared when its turn comes.
    What has left by then is counted. The bound is the pool's own: a slot is in line once. Its arrays, 16 to 24 bytes a
    slot and 8 for the generation, are made for the first block.
    """

    def __init__(self, table: SlotTable, lock: Lock) -> None:
        self._table = table
        self._lock = lock
        self._queue: SlotQueue | None = None
        self._times = np.zeros(0, np.int64)  # by slot: the generation that is in line
        self._size = 0
        self._num_lost = 0

    def __len__(self) -> int:
        """Blocks in line, with those that left unnoticed. No lock is taken."""
        return self._size

    def add(self, names: Sequence[ChainHash]) -> None:
        """Put blocks in line, at its end; those that are in line stay where they are. What the pool lacks has left."""
        with self._lock:
            found = self._table.find(names)
            slots = found[found >= 0]
            self._num_lost += len(found) - len(slots)
            if not len(slots):
                return
            if self._queue is None:
                self._queue = SlotQueue(self._table.num_slots)
                self._times = np.zeros(self._table.num_slots, np.int64)
            in_line = self._queue.tickets(slots) >= 0
            fresh = slots[~(in_line & (self._times[slots] == self._table.generation[slots]))]
            self._drop(self._queue, fresh)
            self._times[fresh] = self._table.generation[fresh]
            self._queue.append(fresh)
            self._size += len(fresh)

    def take(self, count: int) -> tuple[list[ChainHash], list[int]]:
        """Take the first `count` blocks that are still held out of line, or all there are: their names and slots."""
        names: list[ChainHash] = []
        slots: list[int] = []
        while len(names) < count and self._size and self._queue is not None:
            with self._lock:
                taken = self._queue.take(min(count - len(names), _PIECE))
                held = taken[self._are_held(taken)]
                self._size -= len(taken)
                self._num_lost += len(taken) - len(held)
                names += self._table.index.names(held)
                slots += held.tolist()
        return names, slots

    def remove(self, names: Sequence[ChainHash]) -> None:
        """They need not be given any more. Fine if they are not in line."""
        if not self._size or self._queue is None:
            return
        with self._lock:
            slots = self._table.find(names)
            slots = slots[slots >= 0]
            slots = slots[(self._queue.tickets(slots) >= 0) & self._are_held(slots)]
            self._queue.remove(slots)
            self._size -= len(slots)

    def take_lost(self, *, look: bool = False) -> int:
        """How many blocks left the pool while in line, since this was last asked: as far as it was noticed.

        `look`: at all that is in line. O(slots), but the lock is held for a piece at a time.
        """
        if look and self._size and self._queue is not None:
            for first in range(0, self._table.num_slots, _PIECE):
                piece = np.arange(first, min(first + _PIECE, self._table.num_slots))
                with self._lock:
                    in_line = piece[self._queue.tickets(piece) >= 0]
                    self._drop(self._queue, in_line[~self._are_held(in_line)])
        with self._lock:
            lost, self._num_lost = self._num_lost, 0
        return lost

    def clear(self) -> None:
        """Forget all, lost ones too. Called under the pool's lock."""
        if self._queue is not None:
            self._queue.reset()
        self._size = self._num_lost = 0

    def _are_held(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each slot's block is the one that is in line."""
        is_same = self._times[slots] == self._table.generation[slots]
        held: NDArray[np.bool_] = is_same & (self._table.state[slots] == READY)
        return held

    def _drop(self, queue: SlotQueue, slots: Slots) -> None:
        """Take out those that are in line: their blocks have left."""
        gone = slots[queue.tickets(slots) >= 0]
        queue.remove(gone)
        self._size -= len(gone)
        self._num_lost += len(gone)
