"""The few calls of CUDA's driver that kvtier makes by itself, through ctypes: to pin memory, and to copy in batches.

The driver's own interface, not the runtime's: a call that fails here leaves no error behind that the next call of
torch would die of. https://docs.nvidia.com/cuda/cuda-driver-api
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process
_MAPPED: Final = 2  # CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read and write it
_BATCHES_SINCE: Final = 12080  # CUDA 12.8: cuMemcpyBatchAsync with the index of the piece that failed
_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources may be read only when the stream comes to it
_AT_ANY_TIME: Final = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY: sources hold what is to be copied already
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
        """The machine's driver; None where there is none, or none that can start."""
        try:
            return cls(ctypes.CDLL(library))
        except (OSError, CudaError):
            return None

    @property
    def copies_in_batches(self) -> bool:
        """Whether `copy` is there: from CUDA 12.8 on, driver 570."""
        return self._batch is not None

    @property
    def version(self) -> str:
        """The CUDA version that the driver has, as in "12.8"; "unknown" of one that does not say."""
        number = ctypes.c_int()
        ask = getattr(self._library, "cuDriverGetVersion", None)
        if ask is None or ask(ctypes.byref(number)):
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
        """What this thread calls meanwhile neither fails nor spoils a CUDA graph that any thread captures.

        Otherwise a capture in torch's usual mode forbids other threads, too, to ask about an event or to pin memory.
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
        """Enqueue one batch of copies on a stream of its own (not the NULL stream): addresses, and sizes in bytes.

        `at_any_time`: sources may be read at once, whatever the stream waits for. No piece may reach over the border of
        two registered ranges.
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
    """The machine's driver, looked for once."""
    return CudaDriver.load()
