"""Pins a region for the device that copies from it: piece by piece, in the background, while it is in use already."""

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.config import show_size

logger = logging.getLogger(__name__)

# Bytes registered by one call, at most. The device stands still meanwhile, and a call for over 512 GiB always fails. A
# step beside it may wait for one piece at each of its calls, so pieces are small: of an H200's 16 GiB, pieces of 32 MiB
# made a step up to 26 ms longer, those of 8 MiB 2.
PIECE_BYTES: Final = 8 << 20
_PAUSE: Final = 0.0025  # seconds between two pieces, or as long as the last one took: the device gets its turn
_POLL: Final = 1e-3  # seconds between looks at what a copy waits for


class PinDriver(Protocol):
    """What pinning asks of a driver; `CudaDriver` is the real one. RuntimeError where it cannot."""

    def use(self, device: int) -> None:
        """Make the device's context current on this thread."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock [address, address + num_bytes)."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


class Pinnable(Protocol):
    """What is pinned: a `HostRegion`."""

    num_slots: int
    slot_stride: int  # bytes from slot to slot

    @property
    def address(self) -> int:
        """Where slot 0 starts."""

    def wait_prefaulted(self, timeout: float | None = None) -> bool:
        """Wait until every page is there."""


class PinnedPieces:
    """Which slots of a region are pinned by now. No piece ends inside a slot. Thread-safe: a piece becomes pinned once.

    What a copy waits for comes first, the rest in order, once all pages are there: pinning faults them one by one.
    A copy may be asynchronous only if all of its slots are pinned, and no single piece of it reaches over a border.
    """

    def __init__(
        self, region: Pinnable, driver: PinDriver, device: int, *, piece_bytes: int = PIECE_BYTES, pause: float = _PAUSE
    ) -> None:
        """Start pinning; `device` is the number of the one that copies, `pause` the least seconds between pieces."""
        self.slots_per_piece = max(1, piece_bytes // region.slot_stride)
        self.error: str | None = None  # why the rest stays pageable
        self._address = region.address
        self._num_slots = region.num_slots
        self._slot_stride = region.slot_stride
        self._wait_prefaulted = region.wait_prefaulted
        self._driver = driver
        self._device = device
        self._pause = pause
        self._pinned = np.zeros(-(-region.num_slots // self.slots_per_piece), bool)
        self._wanted: deque[int] = deque()  # pieces that copies wait for
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pin, name="kvtier-pin", daemon=True)
        self._thread.start()

    def cover(self, slots: NDArray[np.int64]) -> bool:
        """Whether all of these slots are pinned."""
        return bool(self._pinned[slots // self.slots_per_piece].all())

    def cover_soon(self, slots: NDArray[np.int64], timeout: float) -> bool:
        """Have these slots pinned before others, and wait. False if they will not be, or not in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pieces = np.unique(slots // self.slots_per_piece)
        self._wanted.extend(pieces[~self._pinned[pieces]].tolist())
        while not self.cover(slots):
            if not self._thread.is_alive() or time.monotonic() >= deadline:
                return self.cover(slots)
            time.sleep(_POLL)
        return True

    @property
    def num_bytes(self) -> int:
        """How much is pinned by now."""
        whole = int(np.count_nonzero(self._pinned)) * self.slots_per_piece
        missing = len(self._pinned) * self.slots_per_piece - self._num_slots if self._pinned[-1] else 0
        return (whole - missing) * self._slot_stride

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is pinned or was given up; False if `timeout` seconds passed first."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Pin no more of it; a piece that is just being pinned ends first. Idempotent."""
        self._closing.set()
        self._thread.join()

    def close(self) -> None:
        """Give all of it back; a piece that is just being pinned ends first. Idempotent. No copy may be under way."""
        self.stop()
        if not self._pinned.any():
            return
        with suppress(RuntimeError):  # the interpreter ends, and takes all of it along
            unpinning = threading.Thread(target=self._unpin, name="kvtier-unpin")
            unpinning.start()
            unpinning.join()

    def _unpin(self) -> None:
        """On a thread of its own: `use` changes the thread's current device, and the caller's is the caller's."""
        with suppress(RuntimeError):  # the driver may be shutting down, or its context be broken
            self._driver.use(self._device)
        for piece in np.flatnonzero(self._pinned).tolist():
            self._pinned[piece] = False
            with suppress(RuntimeError):
                self._driver.unregister(self._span(piece)[0])

    def _pin(self) -> None:
        started = time.monotonic()
        try:
            self._driver.use(self._device)
            while not self._pinned.all():
                if self._closing.is_set():
                    return
                if (piece := self._next()) is not None:
                    began = time.monotonic()
                    self._driver.register(*self._span(piece))
                    self._pinned[piece] = True
                    self._closing.wait(max(self._pause, time.monotonic() - began))
        except RuntimeError as error:
            self.error = str(error)
            total = self._num_slots * self._slot_stride
            logger.warning(
                "[host] %s of %s are pinned, copies of the rest are slow: %s; lower [host] size or raise `ulimit -l`",
                show_size(self.num_bytes),
                show_size(total),
                error,
            )
            return
        logger.info("[host] pinned %s in %.1f s", show_size(self.num_bytes), time.monotonic() - started)

    def _next(self) -> int | None:
        """Whose turn it is. None: for a moment nobody's, since pages are still missing."""
        while self._wanted:
            if not self._pinned[piece := self._wanted.popleft()]:
                return piece
        return int(np.argmin(self._pinned)) if self._wait_prefaulted(_PAUSE) else None

    def _span(self, piece: int) -> tuple[int, int]:
        first = piece * self.slots_per_piece
        count = min(self.slots_per_piece, self._num_slots - first)
        return self._address + first * self._slot_stride, count * self._slot_stride
