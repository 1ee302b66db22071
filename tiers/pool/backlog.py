"""Backlog: blocks of a pool that are still to be handed on, oldest first. It holds none of them back."""

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

from kvtier.tiers import ChainHash

if TYPE_CHECKING:
    from kvtier.tiers.pool.core import Line, SlotCore

_PIECE: Final = 4096  # slots looked at while the pool's lock is held


class Backlog:
    """Ready blocks of a pool in line, each once, in the order they were added. Thread-safe: under the pool's lock.

    Evicting a block costs nothing here: a slot is remembered with its generation, and compared when its turn comes.
    What has left by then is counted. The bound is the pool's own: a slot is in line once. Its arrays, 25 bytes a slot,
    are made for the first block.
    """

    def __init__(self, core: "SlotCore", lock: Lock) -> None:
        self._core = core
        self._lock = lock
        self._line: Line | None = None
        self.is_used = False  # whether any block was ever in line: before that no look is needed
        self._num_lost = 0

    def __len__(self) -> int:
        """Blocks in line, with those that left unnoticed. No lock is taken."""
        return 0 if self._line is None else len(self._line)

    def add(self, names: Sequence[ChainHash]) -> None:
        """Put blocks in line, at its end; those that are in line stay where they are. What the pool lacks has left."""
        with self._lock:
            slots = [slot for slot in self._core.find(list(names)) if slot >= 0]
            self._num_lost += len(names) - len(slots)
            if slots:
                if self._line is None:
                    self._line, self.is_used = self._core.line(), True
                self._num_lost += self._line.add(slots)

    def take(self, count: int) -> tuple[list[ChainHash], list[int]]:
        """Take the first `count` blocks that are still held out of line, or all there are: their names and slots."""
        names: list[ChainHash] = []
        slots: list[int] = []
        while len(names) < count and len(self) and self._line is not None:
            with self._lock:
                held, num_lost = self._line.take(min(count - len(names), _PIECE))
                self._num_lost += num_lost
                names += self._core.names_of(held)
                slots += held
        return names, slots

    def remove(self, names: Sequence[ChainHash]) -> None:
        """They need not be given any more. Fine if they are not in line."""
        if len(self) and self._line is not None:
            with self._lock:
                self._line.remove([slot for slot in self._core.find(list(names)) if slot >= 0])

    def take_lost(self, *, look: bool = False) -> int:
        """Blocks that left the pool while in line, since the last call; with `look` all, in O(slots), by pieces."""
        if look and len(self) and self._line is not None:
            for first in range(0, self._core.num_slots, _PIECE):
                with self._lock:
                    self._num_lost += self._line.drop_lost(first, first + _PIECE)
        with self._lock:
            lost, self._num_lost = self._num_lost, 0
        return lost

    def clear(self) -> None:
        """Forget all, lost ones too. Called under the pool's lock."""
        if self._line is not None:
            self._line.reset()
        self._num_lost = 0
