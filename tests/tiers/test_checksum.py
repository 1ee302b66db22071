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
def _nobody_is_interrupted() -> Iterator[None]:
    """Who has the GIL keeps it until it gives it up, or for half a minute."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_nobody_is_interrupted")
def test_a_busy_thread_does_not_get_the_gil_meanwhile() -> None:
    payload, stop = memoryview(bytearray(64 << 20)), threading.Event()
    num_turns = 0

    def spin() -> None:
        nonlocal num_turns
        while not stop.is_set():
            num_turns += 1
            time.sleep(0)  # whoever wants the GIL has it now

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        while num_turns < 100:
            time.sleep(0)
        before = num_turns
        checksum(payload)
        assert num_turns == before
    finally:
        stop.set()
        thread.join()
