"""BlockCodec: blocks come back bit by bit; what is damaged, of another length or a bomb makes no block."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers import compression
from kvtier.tiers.compression import AS_IS, BlockCodec, require_compression
from kvtier.tiers.errors import ConfigError

SIZE = 64 << 10
DRAW = np.random.default_rng(1)


def kv(width: int, seed: int = 0) -> bytes:
    """Numbers as KV has them: near zero, of this many bytes; of one byte they are noise."""
    numbers = np.random.default_rng(seed).normal(0, 1, SIZE // width).astype(np.float32)
    if width == 4:
        return numbers.tobytes()
    if width == 2:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16
    return np.random.default_rng(seed).bytes(SIZE)


def back(codec: BlockCodec, split: int, stored: memoryview, size: int = SIZE) -> bytes | None:
    """What is restored, or None; the bytes come to where the block is to be, as from a socket."""
    into = bytearray(b"\xaa" * size)
    into[: stored.nbytes] = stored
    view = memoryview(into)
    return bytes(into) if codec.restore(split, view[: stored.nbytes], view) else None


@pytest.mark.parametrize("width", [2, 4])
def test_numbers_are_split_by_their_width_and_come_back(width: int) -> None:
    codec = BlockCodec(SIZE)
    payload = kv(width)
    split, stored = codec.shrink(memoryview(payload))
    assert split == width
    assert stored.nbytes < SIZE * 0.9
    assert stored.nbytes < len(zstandard.compress(payload, 1))  # the split is what does it
    assert back(codec, split, stored) == payload
    # by another process, which has chosen nothing yet
    assert back(BlockCodec(SIZE), split, stored) == payload


def test_noise_is_stored_from_where_it_lies_and_is_not_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = BlockCodec(SIZE)
    payload = memoryview(kv(1))
    assert codec.shrink(payload) == (AS_IS, payload)
    assert back(codec, AS_IS, payload) == bytes(payload)
    monkeypatch.setattr(codec, "_packed", lambda *_: pytest.fail("tried again"))
    split, stored = codec.shrink(payload)
    assert split == AS_IS
    assert stored is payload  # no copy


def test_the_choice_is_made_again_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_AGAIN", 3)
    codec = BlockCodec(SIZE)
    assert codec.shrink(memoryview(kv(1)))[0] == AS_IS
    assert [codec.shrink(memoryview(kv(2)))[0] for _ in range(4)] == [AS_IS] * 3 + [2]
    # chosen for numbers, met by noise: that block alone is stored as it is
    assert codec.shrink(memoryview(kv(1)))[0] == AS_IS
    assert codec.shrink(memoryview(kv(2)))[0] == 2


@given(st.binary(min_size=64, max_size=64), st.sampled_from([8, 63, 64, 1024, 4093]))
def test_any_bytes_of_any_length_come_back(piece: bytes, size: int) -> None:
    payload = (piece * (size // 64 + 1))[:size]
    codec = BlockCodec(size)
    split, stored = codec.shrink(memoryview(payload))
    assert stored.nbytes <= size
    assert back(codec, split, stored, size) == payload


def test_a_frame_of_another_length_is_refused_before_anything_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = BlockCodec(SIZE)
    split, stored = codec.shrink(memoryview(kv(2)))
    low, high = np.frombuffer(stored[:8], "<u4").tolist()
    assert (split, low) == (2, SIZE // 2)  # the noise is as it was
    plane, plane_bytes = bytes(stored[8 : 8 + low]), SIZE // 2

    def put(frame: bytes) -> memoryview:
        return memoryview(np.array([low, len(frame)], "<u4").tobytes() + plane + frame)

    assert back(codec, 2, put(bytes(stored[8 + low :]))) == kv(2)
    monkeypatch.setattr(codec._own, "decompressor", None)  # whoever would decompress fails
    bomb = zstandard.compress(bytes(1 << 28), 1)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(plane_bytes))
    assert high == stored.nbytes - 8 - low
    for frame in (bomb, zstandard.compress(bytes(plane_bytes - 1)), unsized, b""):
        assert back(codec, 2, put(frame)) is None


def test_what_is_no_frame_of_ours_makes_no_block() -> None:
    codec = BlockCodec(SIZE)
    payload = kv(2)
    split, stored = codec.shrink(memoryview(payload))
    frame = bytes(stored)
    wrong = {
        "cut": (split, frame[:-1]),
        "more behind it": (split, frame + b"\0"),
        "another frame behind it": (split, frame + zstandard.compress(b"more")),
        "no lengths": (split, frame[:7]),
        "lengths of zero": (split, b"\0" * 100),
        "lengths beyond the block": (split, b"\xff" * 100),
        "lengths that are exchanged": (split, frame[4:8] + frame[:4] + frame[8:]),
        "a split that there is not": (3, frame),
        "a split beyond all": (255, frame),
        "as it is, but short": (AS_IS, frame),
        "longer than the block": (split, frame.ljust(SIZE, b"\0")),
    }
    made = {what: back(codec, how, memoryview(given)) for what, (how, given) in wrong.items()}
    assert made == dict.fromkeys(wrong)


def test_every_damaged_byte_is_an_error_or_other_bytes_never_a_crash() -> None:
    codec = BlockCodec(4096)
    payload = kv(2)[:4096]
    split, stored = codec.shrink(memoryview(payload))
    for place in range(stored.nbytes):
        damaged = bytearray(stored)
        damaged[place] ^= 0x41
        made = back(codec, split, memoryview(damaged), 4096)
        assert made is None or len(made) == 4096  # a checksum over the payload tells (tests/tiers/redis)


def test_many_threads_share_one() -> None:
    codec, start = BlockCodec(SIZE), threading.Barrier(4, timeout=30)

    def work(seed: int) -> bool:
        start.wait()
        payloads = [kv(2, seed * 100 + i) for i in range(20)]
        return all(back(codec, *codec.shrink(memoryview(each))) == each for each in payloads)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4), timeout=60))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compression("[redis] compression")
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"\[redis\] compression .*pip install 'zstandard>=0\.23'"):
        require_compression("[redis] compression")
