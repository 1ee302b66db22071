"""A connection between two nodes, and the tag of a block."""

import socket
from collections.abc import Sequence
from typing import Final

from kvtier.tiers import Outcome
from kvtier.tiers.shared import ByteStream, SendBuffer, StorageFailed

TAG_BYTES: Final = 16
KEY_BYTES: Final = 16

PeerAddress = tuple[str, int]


def address_text(address: Sequence[object]) -> str:
    """HOST:PORT of a socket's address, as [peers] nodes takes it."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class BlockTags:
    """Tags under one key. Not thread-safe: it has one state, used for one block after the other. A `BlockMac`.

    A tag costs little beside a block's transfer: some 30 GB/s a core, where Poly1305 has 6 and HMAC-SHA256 1.5. The GIL
    is released meanwhile.
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

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        ffi, lib = self._ffi, self._lib
        calls = (ffi.addressof(lib, f"aegis128x2_mac_{name}") for name in ("reset", "update", "final"))
        state, reset, update, final = (int(ffi.cast("uintptr_t", each)) for each in (self._state.ptr, *calls))
        return state, reset, update, final

    def tag(self, head: SendBuffer, payload: memoryview) -> bytes:
        """Of `head` and `payload` one behind the other. All heads under one key have one length."""
        state, ffi, lib = self._state.ptr, self._ffi, self._lib
        lib.aegis128x2_mac_reset(state)
        lib.aegis128x2_mac_update(state, ffi.from_buffer(head), len(head))
        lib.aegis128x2_mac_update(state, ffi.from_buffer(payload), payload.nbytes)
        lib.aegis128x2_mac_final(state, self._tag, TAG_BYTES)
        return bytes(ffi.buffer(self._tag))


class PeerFailed(StorageFailed):
    """The other end failed: the outcome of a block that it should have sent, and a word for counters."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(outcome, reason)
        self.reason = reason


class PeerStream(ByteStream):
    """A connection to another node. Its methods raise PeerFailed."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, _failed)
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def take(self, num_bytes: int, deadline: float) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(num_bytes)
        self.receive_all(memoryview(data), deadline)
        return bytes(data)


def _failed(outcome: Outcome, _: str) -> PeerFailed:
    return PeerFailed(outcome, "timeout" if outcome is Outcome.TIMEOUT else "hung_up")
