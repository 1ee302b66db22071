"""TierLife: from a tier's opening to its closing, with the thread that tells servers of a reset."""

import threading
from collections.abc import Callable


class TierLife:
    """Whether a tier is closed. Thread-safe. No reset is lost by closing: that waits until it is told."""

    def __init__(self, name: str) -> None:
        """`name` is that of the thread."""
        self._name = name
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._telling: threading.Thread | None = None
        self.is_closed = False

    def tell(self, reset: Callable[[], object]) -> None:
        """Call `reset`, which has a deadline of its own, in a thread. Nothing if the tier is closed."""
        with self._lock:
            if not self.is_closed:
                self._telling = threading.Thread(target=reset, name=self._name, daemon=True)
                self._telling.start()

    def close(self, timeout: float) -> bool:
        """Wait for the last reset, `timeout` seconds at most. False if the tier was closed before."""
        with self._lock:
            if self.is_closed:
                return False
            self.is_closed = True
        if self._telling is not None:
            self._telling.join(timeout)
        return True
