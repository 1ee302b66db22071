"""The lock of everything on its way to L2, and the word that something has moved on."""

from collections.abc import Callable
from threading import Condition
from typing import Final


class Pending:
    """The answer "ask again": blocks are still on their way and the deadline has not passed."""

    def __repr__(self) -> str:
        return "PENDING"


PENDING: Final = Pending()


class Progress(Condition):
    """A condition that tells watchers too: they wait on something else than a lock, as an event loop does."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called at every step forward: under the lock, so it may only make a note."""
        self._watchers.append(told)

    def notify_all(self) -> None:
        """Wake who waits, tell who watches."""
        super().notify_all()
        for told in self._watchers:
            told()
