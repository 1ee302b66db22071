"""The bytes kept for all clients together, half sent or unread: one bound, and whoever has most of them goes first."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

Who = TypeVar("Who")

MAX_BUFFERED: Final = 64 << 20  # bytes of frames not whole yet and of answers not read yet, over all clients


class Buffers(Generic[Who]):
    """Who keeps the daemon from letting go of how many bytes. Lives on the loop's thread.

    Past `limit` the one with most is told to go by `cut`, until the rest fits; of equals the one noted least recently.
    So a client with no more than its equal share of the limit never goes, whatever the others do, and nobody waits.
    """

    def __init__(self, cut: Callable[[Who], None], limit: int = MAX_BUFFERED) -> None:
        """`cut` lets go of what is kept for one, and notes that."""
        self._cut = cut
        self.limit = limit
        self.used = 0  # bytes
        self._kept: dict[Who, int] = {}

    def note(self, who: Who, num_bytes: int) -> None:
        """So many bytes are kept for it now; with 0 it is forgotten. May cut off anybody, itself too."""
        self.used += num_bytes - self._kept.pop(who, 0)
        if num_bytes:
            self._kept[who] = num_bytes
        while self.used > self.limit:
            self._cut(max(self._kept, key=self._kept.__getitem__))

    def check(self) -> None:
        """Raise AssertionError if the sum is not that of the parts, or the bound does not hold."""
        assert self.used == sum(self._kept.values()) <= self.limit, f"{self.used} bytes kept, {self.limit} at most"
