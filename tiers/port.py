"""A lower tier as the hierarchy sees it: its threads, its breakers, its measured rate; detaches and re-attaches."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kvtier.tiers.breaker import Breaker
from kvtier.tiers.errors import KVTierError, TierUnavailable
from kvtier.tiers.io_queue import IoQueue
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.rates import Rates
from kvtier.tiers.tier import BlockRecord, ChainHash, Direction, Outcome, Tier

_log = logging.getLogger(__name__)

_FAILURES: Final = frozenset({Outcome.IO_ERROR, Outcome.TIMEOUT})  # what a breaker counts
_CORRUPTION: Final = frozenset({Outcome.CHECKSUM, Outcome.KEY_MISMATCH})
_MAX_QUEUED: Final = 4096  # jobs per tier


@dataclass(frozen=True, slots=True)
class PortSettings:
    """How patient the hierarchy is with one tier."""

    deadline: float = 2.0  # seconds per operation
    failures: int = 5  # in a row, before the breaker opens
    retry_after: float = 1.0  # seconds until the first probe
    num_threads: int = 2


class TierPort:
    """One lower tier behind its breakers. While it is detached or a breaker is open, everything is a miss or a drop.

    `open` makes the tier. A tier that is absent at start (TierUnavailable, OSError) attaches later without a restart: the
    probes ask `open` again. What the user has to mend (ConfigError, FormatError, StoreLocked…) is raised, at start only.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Tier],
        settings: PortSettings,
        metrics: Metrics,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.settings = settings
        self._open = open
        self._metrics = metrics
        self._rates = rates
        self._clock = clock
        self._lock = Lock()  # attach and detach
        self._closed = False
        self.breakers = {
            direction: Breaker(settings.failures, settings.retry_after, clock) for direction in _DIRECTIONS
        }
        self.tier: Tier | None = None
        self._attach((TierUnavailable, OSError))
        self.queue = IoQueue(name, settings.num_threads, _MAX_QUEUED, clock)

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """Leading blocks held, and readable now."""
        tier = self.tier
        return tier.lookup(hashes) if tier is not None and self.breakers["read"].closed else 0

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """`Tier.read`, timed, counted, and reported to the read breaker. Called on this port's threads."""
        tier = self.tier
        if tier is None or not self.breakers["read"].closed:
            return [Outcome.BREAKER_OPEN] * len(hashes)
        start = time.perf_counter()
        results = tier.read(hashes, into)
        seconds = time.perf_counter() - start
        num_bytes = sum(into[i].nbytes for i, r in enumerate(results) if isinstance(r, BlockRecord))
        self._rates.loaded(self.name, num_bytes, seconds)
        self._metrics.moved(self.name, "read", num_bytes, seconds)
        self._judge("read", [r if isinstance(r, Outcome) else Outcome.OK for r in results])
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """`Tier.write`, timed, counted, and reported to the write breaker. Called on this port's threads."""
        tier = self.tier
        if tier is None or not self.breakers["write"].closed:
            return [Outcome.BREAKER_OPEN] * len(records)
        start = time.perf_counter()
        outcomes = tier.write(records, payloads)
        num_bytes = sum(p.nbytes for p, o in zip(payloads, outcomes, strict=True) if o is Outcome.OK)
        self._metrics.moved(self.name, "write", num_bytes, time.perf_counter() - start)
        self._judge("write", outcomes)
        return outcomes

    def failed(self, direction: Direction) -> None:
        """An operation of this tier ran past its deadline."""
        self.breakers[direction].failure()
        self._show_breakers()

    def tick(self) -> None:
        """Expire what is late and send the probe that is due. Cheap; called from every engine-facing call."""
        self.queue.expire()
        for direction in _DIRECTIONS:
            if self.breakers[direction].take_probe():
                probe = _Probe(self, direction, self._clock() + self.settings.deadline)
                if not self.queue.submit(probe, urgent=True):
                    probe.drop(Outcome.QUEUE_FULL)

    def reset(self) -> None:
        """Forget every block of the tier."""
        if self.tier is not None:
            self.tier.reset()

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Forget these blocks."""
        if self.tier is not None:
            self.tier.discard(hashes)

    def check(self) -> None:
        """The tier's conservation law."""
        if self.tier is not None:
            self.tier.check()

    def close(self, timeout: float) -> None:
        """Drop what waits, wait up to `timeout` seconds for what runs, close the tier. Idempotent."""
        if not self.queue.close(timeout):
            _log.warning("%s: an operation still hangs at close", self.name)
        with self._lock:
            self._closed = True
            self._detach()

    def _judge(self, direction: Direction, outcomes: Sequence[Outcome]) -> None:
        breaker = self.breakers[direction]
        if any(outcome in _FAILURES for outcome in outcomes):
            breaker.failure()
            self._show_breakers()
        elif outcomes:
            breaker.success()
        if corrupt := sum(outcome in _CORRUPTION for outcome in outcomes):
            self._metrics.corrupted(self.name, corrupt)

    def _attach(self, expected: tuple[type[Exception], ...]) -> bool:
        """Open the tier if it is not open. False, with one warning, where that fails."""
        with self._lock:
            if self.tier is not None or self._closed:
                return self.tier is not None
            try:
                self.tier = self._open()
            except expected as error:
                if self.breakers["read"].closed:
                    _log.warning("%s tier is off for now, the engine runs on without it: %s", self.name, error)
                for breaker in self.breakers.values():
                    if breaker.closed:
                        breaker.trip()
            self._show_breakers()
            return self.tier is not None

    def _detach(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def probe(self, direction: Direction) -> None:
        """Ask the storage whether it answers again; on this port's threads."""
        tier = self.tier
        answered = self._attach((KVTierError, OSError)) if tier is None else tier.probe(direction)
        if not answered:
            with self._lock:
                self._detach()  # the next probe opens it anew: the file may have been replaced
        if answered and not self.breakers[direction].closed:
            _log.info("%s tier is back (%s)", self.name, direction)
        self.breakers[direction].probed(answered)
        self._show_breakers()

    def _show_breakers(self) -> None:
        for direction, breaker in self.breakers.items():
            self._metrics.breaker(self.name, direction, not breaker.closed)


_DIRECTIONS: Final[tuple[Direction, Direction]] = ("read", "write")


@dataclass(slots=True)
class _Probe:
    """The one operation an open breaker lets through."""

    port: TierPort
    direction: Direction
    deadline: float

    def run(self) -> None:
        self.port.probe(self.direction)

    def drop(self, outcome: Outcome) -> None:
        self.port.breakers[self.direction].probed(False)

    def overdue(self) -> None:
        self.port.breakers[self.direction].probed(False)
