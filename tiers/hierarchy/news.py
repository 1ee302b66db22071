"""The lock of everything that is on its way to L2, and the news that a claim has moved on."""

from collections.abc import Callable
from threading import Condition


class NewsCondition(Condition):
    """A condition that also tells watchers, which wait for something else than a lock: an event loop does."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called at every step forward. It is called under the lock, so it may only make a note."""
        self._watchers.append(told)

    def notify_all(self) -> None:
        """Wake every thread that waits, and tell every watcher."""
        super().notify_all()
        for told in self._watchers:
            told()
