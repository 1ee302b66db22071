"""A probe tells a model that computes something else from one that only rounds otherwise."""

import numpy as np
import pytest

from kvtier.tiers.errors import FormatError
from kvtier.tiers.naming.kv_probe import PROBE_BYTES, TOLERANCES, KVProbe

PLANES = [np.random.default_rng(seed).normal(size=(2, 7, 16)).astype(np.float32) for seed in range(8)]


def test_it_comes_out_as_it_went_in_and_no_larger_than_there_is_room() -> None:
    for count in (1, 8, 400):
        probe = KVProbe.of(PLANES * (count // 8) or PLANES[:1], "bfloat16")
        packed = probe.packed()
        assert len(packed) <= PROBE_BYTES
        again = KVProbe.unpack(packed.ljust(PROBE_BYTES, b"\0"))  # as a slab has it
        assert again.dtype == "bfloat16"
        assert probe.distance(again) == 0.0


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_is_within_the_tolerance_and_one_layer_of_many_computed_otherwise_is_not(dtype: str) -> None:
    probe = KVProbe.of(PLANES, dtype)
    off = probe.tolerance
    rounded = KVProbe.of([plane * (1 + 0.3 * off * np.cos(plane)) for plane in PLANES], dtype)
    assert probe.distance(rounded) <= off
    turned = KVProbe.of([*PLANES[:5], PLANES[5] + 4 * off * np.roll(PLANES[5], 1), *PLANES[6:]], dtype)
    assert probe.distance(turned) > off


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    probe = KVProbe.of(PLANES, "float32")
    assert probe.distance(KVProbe.of(PLANES[:4], "float32")) == float("inf")
    assert probe.distance(KVProbe.of(PLANES, "float16")) == float("inf")
    assert probe.is_finite
    for odd in (np.nan, np.inf):
        other = KVProbe.of([*PLANES[:-1], PLANES[-1] * odd], "float32")
        assert probe.distance(other) == float("inf")
        assert not other.is_finite
    assert KVProbe.of([], "float32").packed()


def test_bytes_that_are_no_whole_probe_are_a_format_error() -> None:
    packed = KVProbe.of(PLANES, "float32").packed()
    for data in (b"", bytes(PROBE_BYTES), packed[:-1], packed[:30], packed[:40] + b"x" + packed[41:]):
        with pytest.raises(FormatError):
            KVProbe.unpack(data)
