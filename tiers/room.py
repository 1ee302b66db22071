"""Room: how full the storage is that a tier lies on, a file system or a server's memory, and its own file."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class StoragePlace(NamedTuple):
    place: str  # a directory, or the server's address
    used: int  # bytes, by everybody
    limit: int | None  # bytes that there may be; None: no bound is set
    is_own: bool = False  # a file of the tier alone, which grows as it is filled: a slab


@runtime_checkable
class TellsRoom(Protocol):
    """A tier that knows how full its storage is."""

    def room(self) -> Sequence[StoragePlace]:
        """Each place, as it was heard of last. Never waits for a server."""
