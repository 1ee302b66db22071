"""The tag of a lent block: AEGIS-128X2 as a MAC (draft-irtf-cfrg-aegis-aead), by the library `aeg`."""

from typing import Final

TAG_BYTES: Final = 16
KEY_BYTES: Final = 16


class BlockTags:
    """Tags under one key. Not thread-safe: it has one state, used for one block after the other.

    A tag costs as good as nothing beside a block's way through a socket: some 30 GB/s a core, where Poly1305 has 6 and
    HMAC-SHA256 1.5 (`benchmarks/peers_bandwidth.py` prints them). The GIL is let go of meanwhile.
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
