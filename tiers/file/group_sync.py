"""One fdatasync for many writers: whoever asks while one runs shares the next."""

import errno
import threading
from collections.abc import Callable


class GroupSync:
    """Makes earlier writes durable, together. Thread-safe.

    A sync that began before a caller's write says nothing about it, so a caller waits for one that began after its
    call; at most one runs and any number of callers wait for the next.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._changed = threading.Condition()
        self._begun = 0
        self._done = 0
        self._failed: dict[int, OSError] = {}

    def __call__(self) -> None:
        """Return once all this thread wrote is on stable storage; OSError if the sync that covers it failed."""
        with self._changed:
            mine = self._begun + 1
            while self._done < mine and self._begun > self._done:
                self._changed.wait()
            if self._done >= mine:
                self._raise_failure(mine)
                return
            self._begun = mine
        failure: OSError | None = OSError(errno.EINTR, "the sync was interrupted")
        try:
            self._sync()
            failure = None
        except OSError as error:
            failure = error
        finally:
            with self._changed:
                self._done = mine
                if failure is not None:
                    self._failed = {mine: failure}
                self._changed.notify_all()
        with self._changed:
            self._raise_failure(mine)

    def _raise_failure(self, mine: int) -> None:
        # Only the last failure is kept. A waiter that wakes late may be told of a later one: it errs on the safe side.
        for number, failure in self._failed.items():
            if number >= mine:
                raise OSError(failure.errno, failure.strerror)
