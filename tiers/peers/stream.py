"""Bytes to and from a TCP socket, all or an error, before a deadline for the whole transfer; a block's tag."""

import socket
import time
from collections.abc import Sequence
from struct import Struct
from typing import Final

from kvtier.tiers import Outcome

TAG_BYTES: Final = 16
KEY_BYTES: Final = 16


class BlockTags:
    """Tags under one key. Not thread-safe: it has one state, used for one block after the other.

    A tag costs little beside a block's transfer: some 30 GB/s a core, where Poly1305 has 6 and HMAC-SHA256 1.5
    (`benchmarks/peers_bandwidth.py` prints them). The GIL is released meanwhile.
    """

    def __init__(self, key: bytes) -> None:
        """Raises ImportError without `aeg`."""
        # The binding itself: the package's own class allocates and wipes two states for a tag, in 25 us of Python.
        from aeg import aegis128x2
        from aeg._loader import ffi, lib

        self._ffi, self._lib = ffi, lib
        self._state = aegis128x2.new_mac_state()
        self._tag = ffi.new("uint8_t[]", TAG_BYTES)
        lib.aegis128x2_mac_init(self._state.ptr, key[:KEY_BYTES], ffi.NULL)

    def tag(self, head: bytes | memoryview, payload: memoryview) -> bytes:
        """Of `head` and `payload` one behind the other. All heads under one key have one length."""
        state, ffi, lib = self._state.ptr, self._ffi, self._lib
        lib.aegis128x2_mac_reset(state)
        lib.aegis128x2_mac_update(state, ffi.from_buffer(head), len(head))
        lib.aegis128x2_mac_update(state, ffi.from_buffer(payload), payload.nbytes)
        lib.aegis128x2_mac_final(state, self._tag, TAG_BYTES)
        return bytes(ffi.buffer(self._tag))


_BUFFERS: Final = 512  # in one call
_TIME: Final = Struct("ll")  # a timeval


class PeerFailed(Exception):
    """The other end failed: the outcome of a block that it should have sent, and a word for counters."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


def prepare(connection: socket.socket) -> None:
    """No delay, no Python timeouts (they `poll`): the kernel keeps deadlines, and its own buffer sizes, the largest."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many bytes. PeerFailed."""
    data = bytearray(num_bytes)
    receive_into(connection, [memoryview(data)], deadline)
    return bytes(data)


def receive_into(connection: socket.socket, buffers: Sequence[memoryview], deadline: float) -> None:
    """Fill all buffers, in order. PeerFailed."""
    left = list(buffers)
    at = 0
    while at < len(left):
        _allow(connection, socket.SO_RCVTIMEO, deadline)
        try:
            count = connection.recvmsg_into(left[at : at + _BUFFERS], 0, socket.MSG_WAITALL)[0]
        except OSError as error:
            raise _failed(error) from None
        if not count:
            raise PeerFailed(Outcome.IO_ERROR, "hung_up")
        at = _advance(left, at, count)


def send(connection: socket.socket, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
    """Send all buffers from where they lie. PeerFailed."""
    left = [memoryview(buffer) for buffer in buffers]
    at = 0
    while at < len(left):
        _allow(connection, socket.SO_SNDTIMEO, deadline)
        try:
            count = connection.sendmsg(left[at : at + _BUFFERS])
        except OSError as error:
            raise _failed(error) from None
        at = _advance(left, at, count)


def _advance(left: list[memoryview], at: int, count: int) -> int:
    """Skip `count` bytes of the buffers from `at` on."""
    while at < len(left) and count >= len(left[at]):
        count -= len(left[at])
        at += 1
    if count:
        left[at] = left[at][count:]
    return at


def _allow(connection: socket.socket, direction: int, deadline: float) -> None:
    """The next call in that direction returns by the deadline, with the bytes moved by then."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise PeerFailed(Outcome.TIMEOUT, "timeout")
    whole = int(seconds)
    connection.setsockopt(socket.SOL_SOCKET, direction, _TIME.pack(whole, max(1, int(1e6 * (seconds - whole)))))


def _failed(error: OSError) -> PeerFailed:
    if isinstance(error, BlockingIOError | TimeoutError):
        return PeerFailed(Outcome.TIMEOUT, "timeout")
    return PeerFailed(Outcome.IO_ERROR, "hung_up")
