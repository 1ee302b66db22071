"""The epoch all processes of a namespace share: agreed on, learned of, raised by a reset, never lowered."""

import threading
import time
from collections.abc import Callable
from typing import Final

from kvtier.tiers import Outcome
from kvtier.tiers.redis.batch import Batches
from kvtier.tiers.redis.lanes import ask_epoch, command
from kvtier.tiers.redis.stream import WireError
from kvtier.tiers.redis.wire import RedisReply, Refusal
from kvtier.tiers.shared import format_epoch, parse_epoch

_NOT_OURS: Final = "WRONGTYPE"  # somebody put something else there: as if nothing was


class Epoch:
    """A number in a key of its own, part of the key of every block stored under it. Thread-safe.

    It is the time somebody began the namespace or last reset it, in microseconds; the highest one counts. A reset
    raises it: nothing stored before is found any more, by anybody. Nobody goes back: if a server has lost it (was
    emptied, evicted it), whoever knows it writes it again; a process that knows none begins a new one, and what was
    stored before is lost rather than taken for what it may not be. `forget` is called whenever it changes.
    """

    def __init__(self, batches: Batches, forget: Callable[[], None]) -> None:
        self._batches = batches
        self._key = batches.space.epoch_key
        self._forget = forget
        self._asking = threading.Lock()  # held while a server is asked, by one thread
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._known = 0  # the highest seen, or wanted by a reset
        self._agreed = False  # the servers have heard of it
        self._lost = False  # and have forgotten it since
        self.refusal: Refusal | None = None  # what the server said last time it would not agree

    @property
    def value(self) -> int | None:
        """What blocks are stored and looked for under; None until it is agreed on."""
        with self._lock:
            return self._known if self._agreed else None

    def reset(self) -> None:
        """From now on nothing stored before counts here; `settle` tells the servers."""
        with self._lock:
            self._known, self._agreed = max(_now(), self._known + 1), False
            self._forget()

    def settle(self, deadline: float) -> Outcome | None:
        """Have a value by `deadline` (time.monotonic), asking its server if need be. None, or why there is none."""
        if self._agreed and not self._lost:
            return None
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return Outcome.TIMEOUT
        try:
            while not self._agreed or self._lost:
                refusal = self._agree(deadline)
                if refusal is not None:
                    return None if self._agreed else refusal  # what the server has only forgotten serves on
        except WireError as error:
            return None if self._agreed else error.outcome
        finally:
            self._asking.release()
        return None

    def learn(self, used: int, seen: RedisReply) -> bool:
        """A batch went by `used` while its server had `seen`. False if the batch is of no use any more."""
        if isinstance(seen, Refusal) and seen.code != _NOT_OURS:  # nobody was asked, or had an answer
            return self.value == used
        number = parse_epoch(seen)
        with self._lock:
            if number > self._known:
                self._known, self._agreed = number, True
                self._forget()
            self._lost = number < self._known
            return self._agreed and self._known == used

    def _agree(self, deadline: float) -> Outcome | None:
        """Ask what stands there; write ours if it is higher, or a new one if nobody has any. WireError."""
        get, exists = ask_epoch(self._batches.space), command(b"EXISTS", self._key)
        seen, there = self._batches.ask(self._key, [get, exists], deadline)
        answer = seen
        known, number = self._known, parse_epoch(seen)
        if number < max(known, 1) and (not isinstance(seen, Refusal) or seen.code == _NOT_OURS):
            only_new = [b"NX"] if there == 0 else []  # another process may begin at this very moment
            write = command(b"SET", self._key, format_epoch(known or _now()), *only_new)
            answer, seen = self._batches.ask(self._key, [write, get], deadline)
            number = parse_epoch(seen)
        if number < max(known, 1):
            self.refusal = answer if isinstance(answer, Refusal) else None
            return Outcome.FULL if self.refusal is not None and self.refusal.code == "OOM" else Outcome.IO_ERROR
        with self._lock:
            if number >= self._known:  # else reset meanwhile: once more
                if number > self._known:
                    self._forget()
                self._known, self._agreed, self._lost = number, True, False
        return None


def _now() -> int:
    return time.time_ns() // 1000
