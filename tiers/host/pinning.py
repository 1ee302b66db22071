"""Pins a region for the device that copies from it, piece by piece, in the background; the driver calls for that."""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.config import show_size

# --- the driver ------------------------------------------------------------------------------------------------------

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process
_MAPPED: Final = 2  # CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read and write it
_BATCHES_SINCE: Final = 12080  # CUDA 12.8: cuMemcpyBatchAsync with the index of the piece that failed
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources may be read only when the stream comes to it
_AT_ANY_TIME: Final = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY: sources are already filled
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_BESIDE_COMPUTE: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, a hint


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),  # targets, sources, sizes, how many
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),  # attributes, from which piece on each, how many of these
    *(ctypes.c_void_p, ctypes.c_void_p),  # the piece that failed, the stream
)


class CudaError(RuntimeError):
    """A call of the driver has failed: which one, and the driver's name of the error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # CUresult


class CudaDriver:
    """One loaded libcuda. CudaError says which call failed, with the driver's name of the error and its number."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """CudaError: the driver cannot start, for instance since there is no device."""
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        pointer, found = ctypes.c_void_p(), ctypes.c_int()
        name, flags = b"cuMemcpyBatchAsync", ctypes.c_uint64(0)
        resolve = getattr(library, "cuGetProcAddress_v2", None)
        status = resolve and resolve(name, ctypes.byref(pointer), _BATCHES_SINCE, flags, ctypes.byref(found))
        self._batch = _BATCH(pointer.value) if status == 0 and pointer.value else None

    @classmethod
    def load(cls, library: str = "libcuda.so.1") -> Self | None:
        """The machine's driver; None if there is none, or none that can start."""
        try:
            return cls(ctypes.CDLL(library))
        except (OSError, CudaError):
            return None

    @property
    def copies_in_batches(self) -> bool:
        """Whether `copy` is available: from CUDA 12.8 on, driver 570."""
        return self._batch is not None

    @property
    def version(self) -> str:
        """The CUDA version that the driver has, as in "12.8"; "unknown" if it does not report one."""
        number = ctypes.c_int()
        get = getattr(self._library, "cuDriverGetVersion", None)
        if get is None or get(ctypes.byref(number)):
            return "unknown"
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def use(self, device: int) -> None:
        """Make a device's context, the one that torch uses too, current on the calling thread."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Calls of this thread meanwhile neither fail nor spoil a CUDA graph that any thread captures.

        Otherwise a capture in torch's usual mode forbids other threads, too, to query an event or to pin memory.
        """
        exchange = getattr(self._library, "cuThreadExchangeStreamCaptureMode", None)
        if exchange is None:  # a driver from before CUDA 10.1
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        exchange(ctypes.byref(mode))  # `mode` is the former one now
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock memory and make it known to the devices. The calling thread needs a context (`use`)."""
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE | _MAPPED)
        with self.beside_captures():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, flags)

    def unregister(self, address: int) -> None:
        """Undo `register` of the same address."""
        with self.beside_captures():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int,
        *, at_any_time: bool,
    ) -> None:  # fmt: skip
        """Enqueue one batch of copies on a stream (not the NULL stream): addresses, and sizes in bytes.

        `at_any_time`: sources may be read at once. No piece may cross the border of two registered ranges.
        """
        assert self._batch is not None
        targets, sources, sizes = (np.ascontiguousarray(array, np.uint64) for array in (targets, sources, sizes))
        order = _AT_ANY_TIME if at_any_time else _IN_STREAM_ORDER
        attributes, first = _Attributes(order=order, flags=_BESIDE_COMPUTE), ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        status = self._batch(
            *(array.ctypes.data for array in (targets, sources, sizes)), len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed), stream,
        )  # fmt: skip
        if status:
            message = f"cuMemcpyBatchAsync, piece {failed.value} of {len(sizes)}: {self._error(status)}"
            raise CudaError(message, status)

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise CudaError(f"{name}: {self._error(status)}", status)

    def _error(self, status: int) -> str:
        name = ctypes.c_char_p()
        known = getattr(self._library, "cuGetErrorName", None)
        if known is None or known(status, ctypes.byref(name)) or name.value is None:
            return f"error {status}"
        return f"{name.value.decode()} ({status})"


@cache
def cuda_driver() -> CudaDriver | None:
    """The machine's driver, loaded once."""
    return CudaDriver.load()


# --- pinned pieces ---------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

# Bytes registered by one call, at most. The device stands still meanwhile, and a call for over 512 GiB always fails. A
# step beside it may wait for one piece at each of its calls, so pieces are small. On an H200 with 16 GiB, pieces of
# 32 MiB made a step up to 26 ms longer, those of 8 MiB 2.
PIECE_BYTES: Final = 8 << 20
_PAUSE: Final = 0.0025  # seconds between two pieces, or as long as the last one took: the device gets its turn
_POLL: Final = 1e-3  # seconds between checks of slots that a copy waits for


class PinDriver(Protocol):
    """The driver calls that pinning needs; `CudaDriver` is the real one. RuntimeError if a call fails."""

    def use(self, device: int) -> None:
        """Make the device's context current on this thread."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock [address, address + num_bytes)."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


class Pinnable(Protocol):
    """Memory to be pinned: a `HostRegion`."""

    num_slots: int
    slot_stride: int  # bytes from slot to slot

    @property
    def address(self) -> int:
        """Where slot 0 starts."""

    def wait_prefaulted(self, timeout: float | None = None) -> bool:
        """Wait until every page is there."""


class PinnedPieces:
    """Which slots of a region are pinned by now. No piece ends inside a slot. Thread-safe: a piece becomes pinned once.

    Pieces that a copy waits for come first, the rest in order, once all pages are there: pinning faults them one by
    one. A copy may be asynchronous only if all of its slots are pinned, and no single piece of it crosses a border.
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
        """Pin these slots before others, and wait. False if they will not be, or not in `timeout` seconds."""
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
        """Wait until all is pinned or pinning has ended; False if `timeout` seconds passed first."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Pin no more of it; the current piece ends first. Idempotent."""
        self._closing.set()
        self._thread.join()

    def close(self) -> None:
        """Unpin all of it; the current piece ends first. Idempotent. No copy may be under way."""
        self.stop()
        if not self._pinned.any():
            return
        with suppress(RuntimeError):  # the interpreter ends, and unpins all of it
            unpinning = threading.Thread(target=self._unpin, name="kvtier-unpin")
            unpinning.start()
            unpinning.join()

    def _unpin(self) -> None:
        """On a thread of its own, as `use` changes the thread's current device, which is the caller's."""
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
        """The next piece. None: for a moment there is none, since pages are still missing."""
        while self._wanted:
            if not self._pinned[piece := self._wanted.popleft()]:
                return piece
        return int(np.argmin(self._pinned)) if self._wait_prefaulted(_PAUSE) else None

    def _span(self, piece: int) -> tuple[int, int]:
        first = piece * self.slots_per_piece
        count = min(self.slots_per_piece, self._num_slots - first)
        return self._address + first * self._slot_stride, count * self._slot_stride
