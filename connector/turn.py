"""Turn: lets one thread at a time use an object that is not thread-safe, only in the process that made it."""

import os
import threading
from typing import Final, Self
from weakref import WeakKeyDictionary

from kvtier.tiers import RequestError

_PATIENCE: Final = 600.0  # seconds without the end of a turn, after which its thread counts as hanging


class Turn:
    """`with turn:` waits in line for the other threads. RequestError:

    in a fork of the process that made it, in a thread that already has the turn, or if the thread that has it hangs.
    """

    def __init__(self, what: str) -> None:
        """`what` is the name of the guarded object in messages."""
        self._what = what
        self._pid = os.getpid()
        self._queue = threading.Lock()  # held by the next in line: else the thread that leaves could re-enter first
        self.is_wanted = self._queue.locked  # whether a thread waits in line
        self._lock = threading.Lock()
        self._holder: int | None = None  # a thread's ident
        self._num_ended = 0

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return self._pid != os.getpid()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._holder == threading.get_ident()

    @property
    def refusal(self) -> str:
        """The message of errors in a fork."""
        why = f"this {self._what} is process {self._pid}'s, and a fork has neither its threads nor its memory"
        return f"{why}; make one in each worker, behind the fork (gunicorn: in post_fork, or without --preload)"

    def require_here(self) -> None:
        """RequestError in a fork."""
        if self._pid != os.getpid():
            raise RequestError(self.refusal)

    def __enter__(self) -> Self:
        if self._pid != os.getpid():
            raise RequestError(self.refusal)
        if self._holder == threading.get_ident():
            raise RequestError(f"this {self._what} was called from inside one of its own calls; call it afterwards")
        if not self._queue.acquire(blocking=False):
            self._wait_for(self._queue)
        try:
            if not self._lock.acquire(blocking=False):
                self._wait_for(self._lock)
        finally:
            self._queue.release()
        self._holder = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        """End the turn."""
        self._holder = None
        self._num_ended += 1
        self._lock.release()

    leave = __exit__

    def taken_at_once(self) -> bool:
        """Take the turn, until `leave`, if no thread has it or waits for it. Never waits, never raises."""
        if self.is_inherited or self._queue.locked() or not self._lock.acquire(blocking=False):
            return False
        self._holder = threading.get_ident()
        return True

    def _wait_for(self, lock: threading.Lock) -> None:
        while True:
            num_ended = self._num_ended
            if lock.acquire(timeout=_PATIENCE):
                return
            if self._num_ended == num_ended:
                hung = f"another thread has been in this {self._what} for {_PATIENCE:.0f} s"
                raise RequestError(f"{hung}; end that call, or start the process again")


class Turns:
    """One turn per object, for its lifetime; a new one in a fork."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._turns = WeakKeyDictionary[object, Turn]()

    def of(self, thing: object) -> Turn:
        """The turn of this object."""
        with self._lock:
            turn = self._turns.get(thing)
            if turn is None or turn.is_inherited:
                turn = self._turns[thing] = Turn(self._what)
            return turn
