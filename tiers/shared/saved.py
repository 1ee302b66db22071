"""SavedBytes: what compression kept off the way to a store and back."""

from collections.abc import Mapping
from threading import Lock


class SavedBytes:
    """Counts, in bytes of blocks, by way. Thread-safe."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._lock = Lock()  # guards what follows
        self._sent = self._received = 0

    def sent(self, num_stored: int) -> None:
        """A block is going to be stored in so many bytes, whatever becomes of that."""
        with self._lock:
            self._sent += self._slot_bytes - num_stored

    def received(self, num_stored: int) -> None:
        """A block came whole in so many bytes."""
        with self._lock:
            self._received += self._slot_bytes - num_stored

    def counts(self) -> Mapping[str, int]:
        """Since the start: `saved_{sent, received}`."""
        with self._lock:
            return {"saved_sent": self._sent, "saved_received": self._received}
