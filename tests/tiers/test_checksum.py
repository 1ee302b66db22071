"""The checksum: xxh3-64 of the whole payload, and the GIL kept while it is computed."""

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from kvtier.tiers.checksum import checksum


@pytest.mark.parametrize("size", [0, 1, 32_767, 32_768, 32_769, 100_000, 131_072, 1_000_003])
def test_it_is_xxh3_of_the_whole(size: int) -> None:
    payload = np.random.default_rng(size).bytes(size)
    assert checksum(memoryview(payload)) == xxhash.xxh3_64_intdigest(payload)


@pytest.fixture
def switch_interval() -> Iterator[float]:
    """Long enough that losing the GIL once to a busy thread cannot be overlooked."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.3)
    yield 0.3
    sys.setswitchinterval(before)


def test_a_busy_thread_does_not_get_the_gil_meanwhile(switch_interval: float) -> None:
    payload, stop = memoryview(bytearray(4 << 20)), threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        time.sleep(0)  # a time slice of our own begins
        began = time.perf_counter()
        checksum(payload)
        assert time.perf_counter() - began < switch_interval
    finally:
        stop.set()
        thread.join()
