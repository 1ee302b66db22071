"""Records that lie one behind the other, put where they belong as their bytes come."""

from collections.abc import Callable, Sequence


class ArrivingRecords:
    """Heads are kept apart, and what is behind each goes into its slot at once: no record waits for the next one."""

    def __init__(
        self,
        lengths: Sequence[int],
        head_bytes: int,
        into: Sequence[memoryview],
        tell: Callable[[int, bytes], None],
    ) -> None:
        """`lengths` of whole records, in bytes: at least `head_bytes`, at most those and a slot of `into`.

        `tell` is called for each record when it is whole, with its number and head.
        """
        self.num_whole = 0
        self._tell = tell
        self._lengths = lengths
        self._head_bytes = head_bytes
        self._into = into
        self._head = bytearray()
        self._rest = memoryview(b"")  # of the slot that is being filled

    def take(self, came: memoryview) -> None:
        """The next bytes. What is behind the last record is left alone."""
        while came and self.num_whole < len(self._lengths):
            if missing := self._head_bytes - len(self._head):
                self._head += came[:missing]
                came = came[missing:]
                if len(self._head) < self._head_bytes:
                    return
                self._rest = self._into[self.num_whole][: self._lengths[self.num_whole] - self._head_bytes]
            fits = min(len(came), len(self._rest))
            self._rest[:fits] = came[:fits]
            self._rest, came = self._rest[fits:], came[fits:]
            if not self._rest:
                head, number = bytes(self._head), self.num_whole
                self._head.clear()
                self.num_whole += 1
                self._tell(number, head)
