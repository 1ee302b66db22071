"""The epoch all processes of a namespace share: agreed on, learned of, renewed by a reset."""

import threading
import time
from collections.abc import Callable

from kvtier.tiers.redis_batch import Batches
from kvtier.tiers.redis_lanes import UNASKED, command
from kvtier.tiers.redis_records import is_epoch, new_epoch
from kvtier.tiers.redis_wire import Refusal, Reply, WireError
from kvtier.tiers.tier import Outcome


class Epoch:
    """A random number in a key of its own, part of the key of every block stored under it. Thread-safe.

    A reset writes a new one: nothing stored before is found any more, by anybody. It never returns to an old one, so
    if the key is lost (an emptied server, an eviction) blocks are lost with it, but none that was reset comes back.
    `forget` is called whenever it changes.
    """

    def __init__(self, batches: Batches, forget: Callable[[], None]) -> None:
        self._batches = batches
        self._key = batches.space.epoch_key
        self._forget = forget
        self._asking = threading.Lock()  # held while a server is asked, by one thread
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._value: bytes | None = None  # None: to be agreed on
        self._reset_due: bytes | None = None  # what a reset will write

    @property
    def value(self) -> bytes | None:
        """What blocks are stored and looked for under; None until it is agreed on."""
        return self._value

    @property
    def reset_due(self) -> bool:
        """Whether a reset has still to reach the servers."""
        return self._reset_due is not None

    def reset(self) -> None:
        """From now on nothing stored before counts here; `settle` tells the servers."""
        with self._lock:
            self._value, self._reset_due = None, new_epoch()
            self._forget()

    def settle(self, deadline: float) -> Outcome | None:
        """Have a value by `deadline` (time.monotonic), asking its server if need be. None, or why there is none."""
        if self._value is not None:
            return None
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return Outcome.TIMEOUT
        try:
            while self._value is None:
                due = self._reset_due
                agreed = self._agree(due, deadline)
                if not isinstance(agreed, bytes):
                    return agreed
                with self._lock:
                    if self._reset_due == due:  # else reset again meanwhile: once more
                        self._value, self._reset_due = agreed, None
        except WireError as error:
            return error.outcome
        finally:
            self._asking.release()
        return None

    def learn(self, used: bytes, seen: Reply) -> bool:
        """A batch went by `used` while its server had `seen`. False where the batch is of no use any more."""
        with self._lock:
            if self._value != used:  # a reset, or another batch learned first
                return False
            if seen == used or isinstance(seen, Refusal):  # or it was not told
                return True
            self._value = seen if isinstance(seen, bytes) and is_epoch(seen) else None
            self._forget()
            return False

    def _agree(self, due: bytes | None, deadline: float) -> bytes | Outcome:
        """What stands there, after having written `due`, or a new one where nothing stands. WireError."""
        get = command(b"GET", self._key)
        if due is None:
            (seen,) = self._batches.ask(self._key, [get], deadline)
            if isinstance(seen, bytes) and is_epoch(seen):
                return seen
            nothing = seen is None
            first = command(b"SET", self._key, new_epoch(), *([b"NX"] if nothing else []))
        else:
            first = command(b"SET", self._key, due)
        answer, seen = self._batches.ask(self._key, [first, get], deadline)
        if isinstance(seen, bytes) and is_epoch(seen) and (due is None or not isinstance(answer, Refusal)):
            return seen
        refusal = answer if isinstance(answer, Refusal) else UNASKED
        return Outcome.FULL if refusal.code == "OOM" else Outcome.IO_ERROR
