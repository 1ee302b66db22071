"""The models that were reset in this process: their blocks are neither lent nor borrowed any more."""

from threading import Lock
from typing import Final

_MOST: Final = 4096


class Resets:
    """Fingerprints of models that somebody told to forget everything. Thread-safe.

    A reset says that blocks of one name have other bytes from now on, as when an engine's weights were changed where
    they lie. Which of the peers' blocks are from before, no name tells. So it lasts as long as the process.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._fingerprints: set[bytes] = set()
        self._all = False  # too many to remember each

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._all or fingerprint in self._fingerprints

    def note(self, fingerprint: bytes) -> bool:
        """Returns whether that is news."""
        with self._lock:
            is_news = fingerprint not in self
            self._fingerprints.add(fingerprint)
            self._all |= len(self._fingerprints) > _MOST
            return is_news


RESETS: Final = Resets()
