"""Room: how full the storage is that a tier lies on, a file system or a server's memory, and its own file."""

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Lock, Thread
from typing import Final, NamedTuple

_EVERY: Final = 10.0  # seconds between two looks, at least


class StoragePlace(NamedTuple):
    place: str  # a directory, or the server's address
    used: int  # bytes, by everybody
    limit: int | None  # bytes that there may be; None: no bound is set
    is_own: bool = False  # a file of the tier alone, which grows as it is filled: a slab


class LastRoom:
    """Room as it was found last: storage is looked at now and then in the background. Thread-safe."""

    def __init__(self, look: Callable[[], Iterable[StoragePlace]], known: Sequence[StoragePlace] = ()) -> None:
        """`look` may wait for ever: then there is no other look, and what is `known` stays."""
        self._look = look
        self._lock = Lock()  # guards what follows
        self._told = tuple(known)
        self._is_looking = False
        self._due = time.monotonic() + _EVERY if known else 0.0

    def told(self) -> Sequence[StoragePlace]:
        """At once; if that is old, it is looked again meanwhile. Empty until the first look has ended."""
        with self._lock:
            if not self._is_looking and time.monotonic() >= self._due:
                self._is_looking = True
                Thread(target=self._look_again, name="kvtier-room", daemon=True).start()
            return self._told

    def _look_again(self) -> None:
        found: tuple[StoragePlace, ...] = ()
        try:
            found = tuple(self._look())
        finally:
            with self._lock:
                self._told, self._is_looking, self._due = found, False, time.monotonic() + _EVERY
