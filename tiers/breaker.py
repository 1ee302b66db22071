"""A circuit breaker per tier and direction: after k failures in a row the tier is left alone until a probe succeeds."""

from collections.abc import Callable
from enum import StrEnum
from threading import Lock
from typing import Final

_MAX_BACKOFF: Final = 32.0  # times `retry_after`


class BreakerState(StrEnum):
    """closed: in use · open: left alone · half_open: one probe is under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts consecutive failures of one direction of one tier. Thread-safe.

    closed → open after `failures` in a row; open → half-open when `take_probe` hands out the one probe, no sooner than
    `retry_after` seconds (doubling per failed probe, up to 32 times); half-open → closed or open by `probed`.
    Misses, checksum failures and a full disk are no failures: the storage answered.
    """

    def __init__(self, failures: int, retry_after: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._retry_after = retry_after
        self._clock = clock
        self._lock = Lock()
        self.failures = 0  # in a row
        self._backoff = 1.0
        self._opened_at = 0.0
        self.state = BreakerState.CLOSED
        self.closed = True  # whether the tier may be used

    def set_limits(self, failures: int, retry_after: float) -> None:
        """From now on these count; an open breaker stays open."""
        self._limit, self._retry_after = failures, retry_after

    def success(self) -> None:
        """The storage answered an ordinary operation. Late answers do not close an open breaker: a probe does."""
        with self._lock:
            self.failures = 0

    def failure(self) -> None:
        """The storage failed or kept silent past a deadline."""
        with self._lock:
            self.failures += 1
            if self.state is BreakerState.CLOSED and self.failures >= self._limit:
                self._open()

    def trip(self) -> None:
        """Open at once (the tier could not be attached)."""
        with self._lock:
            self._open()

    def take_probe(self, *, at_once: bool = False) -> bool:
        """Whether the caller should probe now: true once per waiting time, while the breaker is open.

        `at_once`: the waiting time counts as over. There is one probe at a time all the same.
        """
        if self.closed:
            return False
        with self._lock:
            due = self._clock() - self._opened_at >= self._retry_after * self._backoff
            if self.state is not BreakerState.OPEN or not (due or at_once):
                return False
            self.state = BreakerState.HALF_OPEN
            return True

    def probed(self, answered: bool) -> None:
        """The probe's result: close, or open again for twice as long. Ignored where no probe is under way."""
        with self._lock:
            if self.state is not BreakerState.HALF_OPEN:
                return
            if answered:
                self.state, self.closed, self.failures, self._backoff = BreakerState.CLOSED, True, 0, 1.0
            else:
                self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
                self._open()

    def _open(self) -> None:
        self.state, self.closed = BreakerState.OPEN, False
        self._opened_at = self._clock()
