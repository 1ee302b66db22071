"""An open slab gives up its tail when another opener asks for room: no reader or writer is in it when it goes."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtier.tiers.config import show_size
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab import Superblock
from kvtier.tiers.file.slab_file import SlabFile, ask_for_room, cut, read_asked

_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.2  # between two looks whether somebody asks
_RETRY_SECONDS: Final = 5.0  # from a cut that the disk refused to the next try
_STOP_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 10.0  # that calls under way have to leave; with a hung disk the next look tries again


class Calls:
    """Who is inside an open store. Its file is released once it is closed and the last of them has left.

    A descriptor closed under a call could be another file's by the time the call uses it. Thread-safe.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._round = 0  # calls of a round that is over are waited for by `quiet`
        self._inside: dict[int, int] = {}
        self._closed = False

    def enter(self) -> "Visit":
        """Whether the store is open; its file then stays open until the block ends."""
        return Visit(self)

    def begin(self) -> int | None:
        """A call comes in: the round it is counted in, which `end` takes; None: the store is closed."""
        with self._lock:
            if self._closed:
                return None
            self._inside[self._round] = self._inside.get(self._round, 0) + 1
            return self._round

    def end(self, number: int) -> None:
        """The call has left."""
        with self._lock:
            left = self._inside[number] - 1
            if left:
                self._inside[number] = left
            else:
                del self._inside[number]
                self._changed.notify_all()
            is_last = self._closed and not self._inside
        if is_last:
            self._release()

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            is_last = not self._inside
        if is_last:
            self._release()

    def quiet(self, timeout: float) -> bool:
        """Wait until all who are inside now have left, whoever comes in later; the caller must not be inside.

        False if that takes more than `timeout` seconds, or the store is closed meanwhile.
        """
        with self._changed:
            self._round += 1
            number = self._round
            self._changed.wait_for(lambda: self._closed or min(self._inside, default=number) >= number, timeout)
            return not self._closed and min(self._inside, default=number) >= number


class Visit:
    """One call inside an open store, for `with`: `begin` and `end` where four calls more do not count."""

    __slots__ = ("_calls", "_number")

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._number: int | None = None

    def __enter__(self) -> bool:
        self._number = self._calls.begin()
        return self._number is not None

    def __exit__(self, *failure: object) -> None:
        if self._number is not None:
            self._calls.end(self._number)


class TailGiver:
    """Looks now and then whether somebody asks for room, on a thread of its own, and gives the slab's tail up.

    First the tail's blocks are forgotten, then every call under way ends. Then its rows are blanked, the superblock
    is rewritten and the file is cut. A kill at any moment leaves the slab whole, at its old size or its new one.
    `lock` guards `blocks`.
    """

    def __init__(self, io: FileIO, file: SlabFile, blocks: ExtentMap, lock: threading.Lock, calls: Calls) -> None:
        self._io = io
        self._file = file
        self._blocks = blocks
        self._lock = lock
        self._calls = calls
        self._uncut: Superblock | None = None  # what the file still is, if the disk refused to cut it
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="kvtier-file-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more; call it once the store lets nobody in. Waits a moment for a cut under way, idempotent."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _look(self) -> None:
        pause = _LOOK_SECONDS
        while not self._stopped.wait(pause):
            pause = _LOOK_SECONDS
            try:
                with self._calls.enter() as is_open:
                    asked = read_asked(self._file.fd) if is_open else 0
                if asked or self._uncut:
                    self.give(asked or self._file.superblock.file_bytes)
            except OSError as error:
                pause = _RETRY_SECONDS
                _log.warning("[file] %s: %s while giving up its tail", self._file.path, error)

    def give(self, num_bytes: int) -> bool:
        """Cut the slab down to `num_bytes`, but to no less than one extent.

        False if a call under way would not end: nothing is cut. OSError if the disk refuses. Then the tail is out
        of use, and the next call, or the next opening of the slab, cuts it off.
        """
        superblock = self._file.superblock
        least = superblock.payload_offsets[0] + superblock.extent_bytes
        target = max(num_bytes, least)
        num_extents = superblock.resized(target).num_extents
        num_lost = 0
        if num_extents < superblock.num_extents:
            with self._lock:
                num_lost = self._blocks.retire(num_extents)
            if not self._calls.quiet(_QUIET_SECONDS):
                with self._lock:
                    self._blocks.revive(num_extents)
                return False
        with self._calls.enter() as is_open:
            if is_open:
                self._cut(target, num_lost)
                ask_for_room(self._io, self._file.fd, 0)
        return True

    def _cut(self, num_bytes: int, num_lost: int) -> None:
        file = self._file
        with file.rewriting:
            old = file.superblock
            resized = old.resized(num_bytes)
            if resized.num_slots < old.num_slots:
                self._uncut = self._uncut or old
                with self._lock:
                    self._blocks.shorten(resized.num_extents)
                    file.superblock = resized
                _log.warning(
                    "[file] %s: cut down from %s to %s for another model's slab, %d blocks went",
                    file.path,
                    show_size(old.file_bytes),
                    show_size(resized.file_bytes),
                    num_lost,
                )
            if self._uncut:
                cut(self._io, replace(file, superblock=self._uncut), file.superblock)
                self._uncut = None
