"""The epoch all processes of a model's objects share: a number in an object of its own, raised by a reset."""

import threading
import time
from collections.abc import Callable
from typing import Final

from kvtier.tiers import Outcome
from kvtier.tiers.objects.bucket import Bucket, BucketError, ObjectRange
from kvtier.tiers.shared import format_epoch, parse_epoch

LOOKED_AT: Final = 10.0  # seconds: so long after a reset others may go on in the epoch before
_FIRST: Final = 1  # if nobody ever reset: then there is no object, and readers need not write one


class ObjectEpoch:
    """Part of the key of every object stored under it. Thread-safe.

    It is the time of the last reset, in microseconds; the highest one counts. It is looked at again every `LOOKED_AT`
    seconds, before a request that needs it. Nobody goes back: whoever knows a higher one than stands there writes it
    again. `forget` is called whenever it changes.
    """

    def __init__(
        self, bucket: Bucket, key: str, forget: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._forget = forget
        self._clock = clock
        self._asking = threading.Lock()  # held while the bucket is asked, by one thread
        self._lock = threading.Lock()  # guards what follows; never held across I/O
        self._known = 0  # the highest seen, or wanted by a reset
        self._fresh_until = 0.0  # 0: not agreed on

    @property
    def value(self) -> int | None:
        """What objects are stored and looked for under; None until it is agreed on."""
        with self._lock:
            return self._known if self._fresh_until else None

    def reset(self) -> None:
        """From now on nothing stored before counts here; `settle` tells the others."""
        with self._lock:
            self._known, self._fresh_until = max(time.time_ns() // 1000, self._known + 1), 0.0
            self._forget()

    def settle(self, deadline: float) -> BucketError | None:
        """Have a value by `deadline` (time.monotonic), asking if need be. None, or why there is none."""
        if self._is_fresh():
            return None
        if not self._asking.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return BucketError(Outcome.TIMEOUT, "no epoch in time")
        try:
            while not self._is_fresh():
                self._agree(deadline)
        except BucketError as error:
            return error
        finally:
            self._asking.release()
        return None

    def _is_fresh(self) -> bool:
        with self._lock:
            return self._clock() < self._fresh_until

    def _agree(self, deadline: float) -> None:
        """Look what stands there, and write ours if it is higher. BucketError."""
        known, number = self._known, self._stored(deadline)
        if number < max(known, 1):
            number = known or time.time_ns() // 1000
            self._bucket.put(self._key, [format_epoch(number)])
        with self._lock:
            if number >= self._known:  # else reset meanwhile: once more
                if number > self._known:
                    self._forget()
                self._known, self._fresh_until = number, self._clock() + LOOKED_AT

    def _stored(self, deadline: float) -> int:
        """0 for something that no epoch is."""
        try:
            return parse_epoch(bytes(self._bucket.get(ObjectRange(self._key, 0, 64), deadline)))
        except BucketError as error:
            if error.outcome is Outcome.ABSENT:
                return _FIRST
            if error.outcome is Outcome.CHECKSUM:  # an empty object
                return 0
            raise
