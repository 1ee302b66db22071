"""Tags of lent blocks: what the library's own class computes, and nothing without the library."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import ConfigError
from kvtier.tiers.peers import TAG_BYTES, wire
from kvtier.tiers.peers.stream import KEY_BYTES, BlockTags

aegis = pytest.importorskip("aeg.aegis128x2", reason="no aeg here")

KEY = bytes(range(32))


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=5000)), min_size=1, max_size=5),
    st.binary(min_size=KEY_BYTES, max_size=32),
)
def test_it_is_the_mac_of_head_and_payload_block_by_block(blocks: list[tuple[bytes, bytes]], key: bytes) -> None:
    tags = BlockTags(key)
    for head, payload in blocks:
        expected = aegis.mac(key[:KEY_BYTES], bytes(aegis.NONCEBYTES), head + payload, TAG_BYTES)
        assert tags.tag(head, memoryview(payload)) == bytes(expected)


@pytest.mark.parametrize("where", ["head", "payload", "key"])
def test_one_bit_makes_another_tag(where: str) -> None:
    bits = {"head": bytearray(100), "payload": bytearray(70_000), "key": bytearray(KEY_BYTES)}

    def tag() -> bytes:
        return BlockTags(bytes(bits["key"])).tag(bytes(bits["head"]), memoryview(bits["payload"]))

    before = tag()
    for at in (0, len(bits[where]) // 2, len(bits[where]) - 1):
        bits[where][at] ^= 1
        assert tag() != before
        bits[where][at] ^= 1
    assert tag() == before


def test_without_the_library_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(KEY)
    assert len(wire.shared_key(path)) == 32
    monkeypatch.setitem(sys.modules, "aeg", None)
    with pytest.raises(
        ConfigError, match=r"^\[peers\] key_file .*needs aeg.*pip install 'aeg~=0\.9\.0' 'cryptography>=43'"
    ):
        wire.shared_key(path)
