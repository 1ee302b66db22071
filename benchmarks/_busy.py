"""A thread that holds the GIL as long as Python lets it, beside which benchmarks measure."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_thread() -> Iterator[None]:
    """A pure-Python thread that never gives the GIL up by itself, as an engine's scheduler at its worst."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(1000):
                count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
