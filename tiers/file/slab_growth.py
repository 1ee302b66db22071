"""SlabGrowth: takes disk space for a slab's extents before they are first filled, a step at a time."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from kvtier.tiers.config import show_size
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab_space import FULL_ERRNOS, STEP_BYTES, SlabFile

_log = logging.getLogger(__name__)

_RETRY: Final = 10.0  # seconds until a disk that was full is asked again


class SlabGrowth:
    """Which extents have their space: none but those that hold blocks is known to, until it was asked for.

    Thread-safe. The lock is held across the system call: nobody writes to a step that is being taken. Some file systems
    take space by writing zeros.
    """

    def __init__(self, io: FileIO, file: SlabFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._io = io
        self._file = file
        self._clock = clock
        self._has_space = bytearray(file.superblock.num_extents)
        self._lock = threading.Lock()
        self.retry_at: float | None = None  # on the clock, while the disk is full: it is asked again then
        self._warned = False

    def found(self, extents: Iterable[int]) -> None:
        """These hold blocks."""
        for extent in extents:
            self._has_space[extent] = 1

    def lacks(self, extent: int) -> bool:
        """Whether its space was not asked for yet, or could not be had."""
        return not self._has_space[extent]

    def ask_again(self) -> bool:
        """Whether a disk that was full is to be asked again now: True once, until it is full again."""
        if self.retry_at is None or self._clock() < self.retry_at:
            return False
        self.retry_at = None
        return True

    def make_room(self, extent: int) -> bool:
        """Take the extent's space, and that of some behind it. False if the disk is full; OSError if it refuses."""
        if self._has_space[extent]:
            return True
        with self._lock:
            if self._has_space[extent]:
                return True
            size, offset = self._file.superblock.extent_bytes, self._file.superblock.payload_offsets[extent]
            for end in dict.fromkeys((self._step(extent), extent + 1)):
                try:
                    self._io.allocate(self._file.fd, offset, (end - extent) * size)
                except OSError as error:
                    if error.errno not in FULL_ERRNOS:
                        raise
                else:
                    self._has_space[extent:end] = b"\1" * (end - extent)
                    self._warned = False
                    return True
            if not self._warned:
                self._warned = True
                _log.warning(
                    "[file] %s: the disk is full, the slab stays at %s of %s until there is room",
                    self._file.path,
                    show_size(self._has_space.count(1) * size),
                    show_size(self._file.superblock.file_bytes),
                )
            self.retry_at = self._clock() + _RETRY
            return False

    def _step(self, extent: int) -> int:
        """The end of the extents behind this one that lack space, lie next to it, and are a step together."""
        superblock, end = self._file.superblock, extent + 1
        most = min(extent + max(1, STEP_BYTES // superblock.extent_bytes), superblock.num_extents)
        offsets = superblock.payload_offsets
        while end < most and not self._has_space[end] and offsets[end] == offsets[end - 1] + superblock.extent_bytes:
            end += 1
        return end
