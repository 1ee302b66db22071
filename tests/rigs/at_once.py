"""Works at once, each on a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]


@contextmanager
def beside(*works: Work) -> Iterator[None]:
    """The works go on beside a block, and end soon after it; what the first of them raised is raised behind it."""
    failures: list[BaseException] = []

    def run(work: Work) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def at_once(*works: Work) -> None:
    """All of them, to their ends."""
    with beside(*works):
        pass
