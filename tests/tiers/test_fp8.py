"""Blocks as fp8: near enough, the same again and again, right at the edges, and no rubbish taken for a block."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier.tiers.compiled import extension
from kvtier.tiers.errors import FormatError
from kvtier.tiers.fp8 import Fp8Codec, fp8_form

GROUP: Final = 16
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
LOOPS: Final[Any] = extension("kvtier.tiers.fp8_compiled")


def codec_of(dtype: str, group: int, num_bytes: int) -> Fp8Codec:
    """The Python one, held to the same outcome as the compiled one where that is built."""
    return Both(dtype, group, num_bytes) if LOOPS is not None else Fp8Codec(dtype, group, num_bytes)


class Both(Fp8Codec):
    """Whatever is packed or unpacked goes both ways, and comes out the same."""

    def __init__(self, dtype: str, group: int, num_bytes: int) -> None:
        super().__init__(dtype, group, num_bytes)
        self.compiled = Fp8Codec(dtype, group, num_bytes, LOOPS)

    def pack(self, payload: memoryview) -> memoryview | None:
        ours, theirs = super().pack(payload), self.compiled.pack(payload)
        assert (ours is None) == (theirs is None)
        assert ours is None or ours == theirs
        return ours

    def unpack(self, packed: memoryview, into: memoryview) -> bool:
        other = memoryview(bytearray(into.nbytes))
        is_whole = self.compiled.unpack(packed, other)
        assert super().unpack(packed, into) is is_whole
        assert not is_whole or into == other
        return is_whole


def bytes_of(numbers: "torch.Tensor | Sequence[float]", dtype: str) -> bytes:
    tensor = torch.as_tensor(numbers, dtype=torch.float64).to(DTYPES[dtype])
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def numbers_of(payload: "bytes | bytearray", dtype: str) -> NDArray[np.float64]:
    return np.asarray(torch.frombuffer(bytearray(payload), dtype=DTYPES[dtype]).double().numpy())


def packed(payload: bytes, dtype: str, group: int = GROUP) -> bytes:
    stored = codec_of(dtype, group, len(payload)).pack(memoryview(payload))
    assert stored is not None
    return bytes(stored)


def restored(stored: bytes, dtype: str, num_bytes: int, group: int = GROUP) -> bytes:
    """Unpacked in the buffer that begins with it."""
    buffer = bytearray(stored.ljust(num_bytes, b"\xee")[: max(num_bytes, len(stored))])
    assert codec_of(dtype, group, num_bytes).unpack(memoryview(buffer)[: len(stored)], memoryview(buffer)[:num_bytes])
    return bytes(buffer[:num_bytes])


def round_trip(payload: bytes, dtype: str) -> bytes:
    """There and back, twice: what has lost its bits once loses nothing more."""
    stored = packed(payload, dtype)
    once = restored(stored, dtype, len(payload))
    assert packed(once, dtype) == stored
    return once


@each_dtype
def test_it_rounds_as_torch_does(dtype: str) -> None:
    """Another implementation of e4m3, over groups of very different size."""
    drawn = torch.randn(400, GROUP, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = torch.logspace(-3, 2, 400, dtype=torch.float64)[:, None]
    payload = bytes_of(drawn * sizes * drawn.abs() ** 3, dtype)
    stored = packed(payload, dtype)
    codes, scales = stored[: 400 * GROUP], torch.frombuffer(bytearray(stored[400 * GROUP :]), dtype=torch.uint8)
    given_numbers = torch.from_numpy(numbers_of(payload, dtype)).reshape(400, GROUP)
    scaled = given_numbers / 2.0 ** (scales.double()[:, None] - 127)
    assert 232 < float(scaled.abs().amax(dim=1).min())  # the least scale that will do …
    assert float(scaled.abs().max()) <= 464  # … and not less
    expected = scaled.float().to(torch.float8_e4m3fn)
    assert codes == expected.view(torch.uint8).numpy().tobytes()
    back = expected.double() * 2.0 ** (scales.double()[:, None] - 127)
    assert np.array_equal(numbers_of(round_trip(payload, dtype), dtype).reshape(400, GROUP), back.numpy())


def finite(dtype: str) -> "st.SearchStrategy[list[float]]":
    most = {"float16": 65504.0, "float32": float(np.finfo(np.float32).max), "bfloat16": float.fromhex("0x1.fep127")}
    bounds: dict[str, Any] = {
        "min_value": -most[dtype],
        "max_value": most[dtype],
        "allow_nan": False,
        "allow_infinity": False,
    }
    one = st.floats(**bounds, width=16) if dtype == "float16" else st.floats(**bounds, width=32)
    usual = st.floats(-8, 8, width=16)
    return st.lists(st.one_of(one, usual), min_size=2 * GROUP, max_size=2 * GROUP)


@each_dtype
@settings(max_examples=brief(30, 150), deadline=None)
@given(data=st.data())
def test_any_numbers_come_back_near_enough(dtype: str, data: st.DataObject) -> None:
    payload = bytes_of(data.draw(finite(dtype)), dtype)
    before = numbers_of(payload, dtype).reshape(2, GROUP)
    after = numbers_of(round_trip(payload, dtype), dtype).reshape(2, GROUP)
    assert np.isfinite(after).all()
    largest = np.abs(before).max(axis=1, keepdims=True)
    # Half of the last of three bits; below 2^-14 of the largest, half of the least step. Of numbers that the dtype
    # itself holds as subnormal ones, its own step.
    least = 2.0**-149 if dtype == "float32" else 2.0**-24 if dtype == "float16" else 2.0**-133
    bound = np.maximum(np.abs(before) * 2.0**-4, largest * 2.0**-17.8) * 1.0001 + max(least, 2.0**-130) / 2
    if dtype == "float16":
        bound += least / 2
    assert (np.abs(after - before) <= bound).all()
    assert (np.signbit(after) == np.signbit(before)).all()


@each_dtype
def test_the_edges(dtype: str) -> None:
    info = torch.finfo(DTYPES[dtype])
    zeros = bytes_of([0.0] * GROUP, dtype)
    assert round_trip(zeros, dtype) == zeros
    signed = bytes_of([-0.0, 0.0] * (GROUP // 2), dtype)
    assert round_trip(signed, dtype) == signed
    # What rounds to more than the dtype has stays its largest number.
    ends = bytes_of([info.max, -info.max] * (GROUP // 2), dtype)
    assert round_trip(ends, dtype) == ends
    # An outlier takes bits from numbers far below it alone, and only from those of its own group.
    row = [1000.0] + [1.0] * (GROUP - 1)
    assert list(numbers_of(round_trip(bytes_of(row, dtype), dtype), dtype)) == [1024.0, *row[1:]]
    far = [60000.0] + [0.001] * (GROUP - 1) + [0.001] * GROUP
    after = numbers_of(round_trip(bytes_of(far, dtype), dtype), dtype)
    assert list(after[1:GROUP]) == [0.0] * (GROUP - 1)
    assert np.allclose(after[GROUP:], 0.001, rtol=2**-4)
    # The smallest numbers there are.
    tiny = info.smallest_normal
    after = numbers_of(round_trip(bytes_of([tiny * 2] * GROUP, dtype), dtype), dtype)
    assert np.allclose(after, tiny * 2, rtol=2**-4)


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, GROUP - 1, 70_000 // GROUP * GROUP + 3])
def test_a_number_that_is_not_finite_is_refused_wherever_it_is(dtype: str, bad: float, place: int) -> None:
    row = torch.ones(80_000, dtype=torch.float64)
    codec = codec_of(dtype, GROUP, row.numel() * DTYPES[dtype].itemsize)
    assert codec.pack(memoryview(bytes_of(row, dtype))) is not None
    row[place] = bad
    assert codec.pack(memoryview(bytes_of(row, dtype))) is None


def test_bytes_are_as_documented() -> None:
    """docs/format.md, by hand: a code for each number, then a scale for each group."""
    row = [448.0, 1.0, -1.5, 2.0**-6, 2.0**-9, 0.0, -(2.0**-7), 208.0]
    expected = bytes([0x7E, 0x38, 0xBC, 0x08, 0x01, 0x00, 0x84, 0x75])
    assert packed(bytes_of([*row, *[each * 4 for each in row]], "float32"), "float32", 8) == (
        expected + expected + bytes([127, 129])
    )
    assert packed(bytes(32), "float32", 8)[:8] == bytes(8)


@each_dtype
def test_what_nobody_packed_is_not_unpacked(dtype: str) -> None:
    payload = bytes_of(torch.linspace(-3, 3, 8 * GROUP), dtype)
    stored, codec = packed(payload, dtype), codec_of(dtype, GROUP, len(payload))
    target = memoryview(bytearray(len(payload)))
    assert codec.unpack(memoryview(stored), target)
    assert codec.packed_bytes == len(stored) == 8 * GROUP + 8
    for wrong in (stored[:-1], stored + b"\0", b"", payload + b"\0"):
        assert not codec.unpack(memoryview(wrong), target)
    for at, byte in ((0, 0x7F), (5, 0xFF), (8 * GROUP, 248), (8 * GROUP + 1, 0), (len(stored) - 1, 255)):
        assert not codec.unpack(memoryview(stored[:at] + bytes([byte]) + stored[at + 1 :]), target)


@each_dtype
def test_any_bytes_give_finite_numbers_or_nothing(dtype: str) -> None:
    draw = np.random.default_rng(1)
    codec = codec_of(dtype, GROUP, 64 * DTYPES[dtype].itemsize)
    taken = 0
    for _ in range(300):
        target = bytearray(codec.num_bytes)
        if codec.unpack(memoryview(draw.integers(1, 250, codec.packed_bytes, np.uint8).tobytes()), memoryview(target)):
            taken += 1
            assert np.isfinite(numbers_of(target, dtype)).all()
    assert taken > 100


def test_forms_that_do_not_fit_are_refused() -> None:
    assert Fp8Codec.of(fp8_form("bfloat16", 64), 256).packed_bytes == 130
    groups = [f"fp8-e4m3/bfloat16/{group}" for group in ("", "x", "4", "256", "9999", "-8", "64/2")]
    for form in ("", "fp8", "fp8-e4m3/bfloat16", "fp8-e5m2/bfloat16/64", "fp8-e4m3/int8/64", *groups):
        with pytest.raises(FormatError):
            Fp8Codec.of(form, 256)
    for num_bytes in (0, 255, 64, 128 + 2):
        with pytest.raises(FormatError):
            Fp8Codec.of(fp8_form("bfloat16", 64), num_bytes)


@pytest.mark.skipif(LOOPS is None, reason="not built: `make compiled`")
def test_all_numbers_of_16_bits_go_both_ways_the_same() -> None:
    """Every finite number, beside a large one, a small one, and alone among its like."""
    for dtype in ("bfloat16", "float16"):
        every = np.arange(1 << 16, dtype=np.uint16)
        finite_bits = every[np.isfinite(torch.from_numpy(every).view(DTYPES[dtype]).float().numpy())]
        for beside in (1.0, 2.0**-10, 60000.0, 0.0):
            rows = np.full((len(finite_bits), GROUP), 0, np.uint16)
            rows[:, 1:] = np.frombuffer(bytes_of([beside], dtype), np.uint16)
            rows[:, 0] = finite_bits
            round_trip(rows.tobytes(), dtype)


@pytest.mark.skipif(LOOPS is None, reason="not built: `make compiled`")
def test_compiled_loops_take_no_arrays_that_do_not_belong_together() -> None:
    codes, scales, numbers = np.zeros(32, np.uint8), np.ones(2, np.uint8), np.zeros(32, np.uint16)
    assert LOOPS.unpack(codes, scales, numbers, 16, 0)
    for arguments in (
        (codes[1:], scales, numbers, 16, 0), (codes, scales[1:], numbers, 16, 0), (codes, scales, numbers[1:], 16, 0),
        (codes, scales, numbers, 16, 2), (codes, scales, numbers, 16, 3), (codes, scales, numbers, 0, 0),
        (codes, scales, numbers, 256, 0), (codes, scales, numbers, -16, 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="group"):
            LOOPS.unpack(*arguments)
        with pytest.raises(ValueError, match="group"):
            LOOPS.pack(arguments[2], arguments[0], arguments[1], *arguments[3:])
    assert LOOPS.pack(numbers[:0], codes[:0], scales[:0], 16, 0)


@each_dtype
def test_a_thread_without_subnormal_numbers_packs_the_same(dtype: str) -> None:
    """As a library that was built for speed leaves a process, and all its threads."""
    draw = torch.randn(40 * GROUP, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sizes = 10.0 ** torch.linspace(-5, 0, len(draw), dtype=torch.float64)
    payload = bytes_of((draw * sizes).reshape(GROUP, -1).T, dtype)
    stored = packed(payload, dtype)
    before = restored(stored, dtype, len(payload))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has them")
    try:
        assert packed(payload, dtype) == stored
        assert restored(stored, dtype, len(payload)) == before
    finally:
        torch.set_flush_denormal(False)
