"""A lower tier behind its I/O threads and breakers, with its measured rate; it detaches and re-attaches."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from threading import Event, Lock, Thread
from typing import Final, Literal, NamedTuple

from kvtier.tiers import (
    BlockRecord,
    Breaker,
    ChainHash,
    Direction,
    Fp8Codec,
    KVTierError,
    Metrics,
    Outcome,
    StoragePlace,
    TenantBounds,
    Tier,
    TierUnavailable,
    checksum,
    tracing,
)
from kvtier.tiers.hierarchy.cache_tiers import SplitPoint
from kvtier.tiers.hierarchy.io_queue import IoQueue, begun
from kvtier.tiers.pool import LOST, EvictionLog

_log = logging.getLogger(__name__)

_WEIGHT: Final = 0.2  # of the newest sample in the moving average
_RETRY: Final = 32  # every so many refusals one load goes through, so that a stale rate can recover
_GAIN: Final = 0.85  # of the best time of loading or computing alone: an overlapped load must be faster …
_SAVED: Final = 0.005  # … and save so many seconds, or its extra steps and claims cost more
MIN_FRONT: Final = 32  # tokens: the smallest front that is worth a step of its own
_MIN_SPREAD: Final = 256.0  # tokens between the positions of samples, before attention's growth is estimated
LoadPolicy = Literal["auto", "load", "recompute"]
_MAX_SPANS: Final = 8  # reads in one sample, when reads follow each other without a pause
_FAILURES: Final = frozenset({Outcome.IO_ERROR, Outcome.TIMEOUT})  # what a breaker counts
_CORRUPTION: Final = frozenset({Outcome.CHECKSUM, Outcome.KEY_MISMATCH})
_MAX_QUEUED: Final = 4096  # jobs per tier
_OPENING: Final = 5  # deadlines that opening may take: it reads all names of a slab
_LEAST_WAIT: Final = 0.02  # seconds between two checks whether a probe is due
_LEAST: Final = 2.0  # seconds for opening, at least
_SENT: Final = 1 << 17  # blocks remembered as stored in a tier that does not report what it drops
WritePolicy = Literal["write_through", "write_back"]
_DIRECTIONS: Final[tuple[Direction, Direction]] = ("read", "write")


class Span(NamedTuple):
    """Consecutive stored tokens of a prompt that could be loaded, and the bytes of each tier."""

    start: int  # tokens before them
    num_tokens: int
    bytes_by_tier: Mapping[str, int]


class Rates:
    """Moving averages: each tier's bytes per second, prefill's seconds per token. Thread-safe."""

    def __init__(self, policy: LoadPolicy) -> None:
        self.policy = policy
        self._lock = Lock()
        self._bytes_per_second: dict[str, float] = {}
        self._token_seconds: float | None = None
        self._growth = _Growth()
        self._refused = 0

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A tier delivered `num_bytes` in `seconds`, over any number of reads (`BusyTime` adds them up).

        A read that delivered nothing is ignored.
        """
        if seconds > 0 and num_bytes > 0:
            with self._lock:
                old = self._bytes_per_second.get(tier, num_bytes / seconds)
                self._bytes_per_second[tier] = old + _WEIGHT * (num_bytes / seconds - old)

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step prefilled `num_tokens` in `seconds`; `position` is how many tokens they followed, on average."""
        if seconds > 0 and num_tokens > 0:
            with self._lock:
                new = seconds / num_tokens
                old = new if self._token_seconds is None else self._token_seconds
                self._token_seconds = old + _WEIGHT * (new - old)
                self._growth.add(position, new)

    @property
    def tokens_per_second(self) -> float | None:
        """Of prefill, as engines measured it; None before the first measurement."""
        return None if self._token_seconds is None else 1 / self._token_seconds

    def prefill_seconds(self, start: int, num_tokens: int) -> float | None:
        """Predicted time to prefill so many tokens after the first `start`; None before the first measurement."""
        with self._lock:
            return None if self._token_seconds is None else self._compute(start, num_tokens)

    def worth_loading(self, span: Span) -> bool:
        """Whether loading these tokens beats computing them. Unknown rates: load, and learn."""
        if not self.is_quicker_computed(span):
            return True
        if self.policy != "auto":
            return False
        with self._lock:
            self._refused += 1
            return self._refused % _RETRY == 0

    def is_quicker_computed(self, span: Span) -> bool:
        """Whether computing these tokens is measured, or configured, to beat loading them. Changes no state."""
        if self.policy != "auto":
            return self.policy == "recompute"
        with self._lock:
            is_known = self._token_seconds is not None
            return is_known and self._load(span.bytes_by_tier) > self._compute(span.start, span.num_tokens)

    def spared(self, span: Span) -> float:
        """Seconds by which loading these tokens beats computing them; inf if unknown or not weighed."""
        with self._lock:
            if self.policy != "auto" or self._token_seconds is None:
                return math.inf
            return max(0.0, self._compute(span.start, span.num_tokens) - self._load(span.bytes_by_tier))

    def split_point(self, span: Span, block_size: int) -> SplitPoint | None:
        """The split point, if computing a front while loading the rest beats either alone; else None.

        None while one of the rates is unknown: loading or computing alone then measures it.
        """
        with self._lock:
            needed = [tier for tier, num_bytes in span.bytes_by_tier.items() if num_bytes]
            if self.policy != "auto" or self._token_seconds is None or not needed:
                return None
            if any(tier not in self._bytes_per_second for tier in needed):
                return None
            load = sum(span.bytes_by_tier[tier] / self._bytes_per_second[tier] for tier in needed)
            num_blocks = span.num_tokens // block_size
            first, end = 0, num_blocks  # the front: the most blocks that are computed before the others are loaded
            while first < end:
                middle = (first + end + 1) // 2
                if self._compute(span.start, middle * block_size) <= load * (1 - middle / num_blocks):
                    first = middle
                else:
                    end = middle - 1
            best_alone = min(load, self._compute(span.start, span.num_tokens))
            seconds = load * (1 - first / num_blocks)
            if first * block_size < MIN_FRONT or seconds > min(_GAIN * best_alone, best_alone - _SAVED):
                return None
            return SplitPoint(span.start // block_size + first, seconds)

    def _load(self, bytes_by_tier: Mapping[str, int]) -> float:
        """Seconds to load so many bytes of each tier; those of unknown rate take none. The caller holds the lock."""
        return sum(n / self._bytes_per_second[t] for t, n in bytes_by_tier.items() if t in self._bytes_per_second)

    def _compute(self, start: int, num_tokens: int) -> float:
        """Seconds to prefill so many tokens after the first `start`. The caller holds the lock; a rate is known."""
        assert self._token_seconds is not None
        more = self._growth.slope * (start + num_tokens / 2 - self._growth.position)
        return num_tokens * max(self._token_seconds + more, self._token_seconds / 8)


class _Growth:
    """How much slower a token gets per token before it: a line fitted to moving averages of step times."""

    def __init__(self) -> None:
        self.position = 0.0  # the samples' average
        self._seconds = 0.0
        self._variance = 0.0  # of the positions
        self._covariance = 0.0
        self._is_first = True

    def add(self, position: float, seconds: float) -> None:
        """One step: tokens at that position took `seconds` each."""
        weight, self._is_first = (1.0 if self._is_first else _WEIGHT), False
        further, longer = position - self.position, seconds - self._seconds
        self.position += weight * further
        self._seconds += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * further * further)
        self._covariance = (1 - weight) * (self._covariance + weight * further * longer)

    @property
    def slope(self) -> float:
        """Seconds a token more per token before it; 0 while all samples lie at about one position."""
        return max(0.0, self._covariance / self._variance) if self._variance > _MIN_SPREAD**2 else 0.0


class BusyTime:
    """Throughput of concurrent reads of one tier: their bytes, over the time in which at least one ran.

    Threads that share a tier's bandwidth each get a part of it; timed one by one, the tier would look slower.
    A read that delivered nothing, or hangs, adds no time. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_running = 0
        self._num_bytes = 0
        self._spans: list[tuple[float, float]] = []  # of reads since the last sample
        self._counted_until = -math.inf  # time before this is in an earlier sample

    def begin(self) -> None:
        """A read starts; `end` must follow."""
        with self._lock:
            self._num_running += 1

    def end(self, num_bytes: int, began: float, ended: float) -> tuple[int, float] | None:
        """A read of `num_bytes` (0: it delivered nothing) ran from `began` to `ended`, in seconds of one clock.

        Returns a sample (bytes, seconds) once no read runs, or after eight reads.
        """
        with self._lock:
            self._num_running -= 1
            if num_bytes:
                self._num_bytes += num_bytes
                self._spans.append((began, ended))
            if not self._spans or (self._num_running and len(self._spans) < _MAX_SPANS):
                return None
            seconds, at = 0.0, self._counted_until
            for start, end in sorted(self._spans):
                seconds += max(0.0, end - max(start, at))
                at = max(at, end)
            sample = self._num_bytes, seconds
            self._num_bytes, self._spans, self._counted_until = 0, [], at
            return sample


@dataclass(frozen=True, slots=True)
class PortSettings:
    """Deadlines, breaker and threads of one tier."""

    deadline: float = 2.0  # seconds per operation
    failures: int = 5  # in a row, before the breaker opens
    retry_after: float = 1.0  # seconds until the first probe
    num_threads: int = 2
    joined: int = 1  # blocks that one call reads for several small reads
    takes_stores: bool = True  # False: blocks are only read from the tier
    codec: Fp8Codec | None = None  # packs the tier's blocks; None: stored unpacked


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    """Values of the configuration, as the hierarchy uses them; see docs/configuration.md."""

    write_policy: WritePolicy = "write_through"
    admit_after: int | Literal["auto"] = 1  # sightings of a block before it is stored; auto: `admission.py`
    store_queue: int | None = None  # bytes leased while they wait for each lower tier; None: a quarter of L2
    prefetch_deadline: float = 2.0  # seconds a request waits for lower tiers
    lease_deadline: float = 60.0  # seconds after its last poll in which a promise expires
    clean_share: float = 0.25  # write-back: the share of L2 kept free or clean for immediate eviction


class TierPort:
    """One lower tier behind its breakers. While it is detached or a breaker is open, everything is a miss or a drop.

    `open` makes the tier. A tier that is absent at start (TierUnavailable, OSError) attaches later without a restart:
    the probes call `open` again. An error the user has to fix (ConfigError, FormatError, StoreLocked…) is raised, at
    start only.
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
        self.opening = open
        self._metrics = metrics
        self._rates = rates
        self._reading = BusyTime()
        self._clock = clock
        self._attaching = Lock()  # held while `open` runs; taken only by the constructor and probes
        self._lock = Lock()  # guards what follows; innermost, never held across I/O
        self._closed = False
        self.why: str | None = None  # it is off, if the cause is not a count of failures
        # Called on an I/O thread when writes work again, with whether the tier was reopened.
        self.recovered: Callable[..., None] | None = None
        self._is_fresh = False  # reopened since the last call of `recovered`
        self.epoch = 0  # counts resets: a write offered before one never lands after it
        self.is_shared = False  # valid once the tier was open
        self.eviction_log: EvictionLog | None = None  # the tier's eviction log, if it has one; else `_sent`
        self._sent: EvictionLog | None = None  # blocks stored in a tier that does not report what it drops
        self._shared_forgot_at = 0  # the epoch at which a shared tier was last reset
        self._num_writing = 0  # writes under way that began in this epoch …
        self._num_stale = 0  # … and in an earlier one
        self.breakers = {
            direction: Breaker(settings.failures, settings.retry_after, clock) for direction in _DIRECTIONS
        }
        self.tier: Tier | None = None
        self._bounds: TenantBounds | None = None
        self._closing = Event()
        self._is_probing = True  # no probes before the queue exists
        self._attach_in_time(max(_LEAST, _OPENING * settings.deadline))
        self.queue = IoQueue(name, settings.num_threads, _MAX_QUEUED, clock, settings.joined)

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks the tier has and can be read now."""
        if (tier := self.tier) is None or self._num_stale or not self.breakers["read"].closed:
            return 0
        return tier.lookup(hashes)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """For each block, whether the tier has it and can be read now."""
        tier = self.readable()
        return tier.holds(hashes) if tier is not None else [False] * len(hashes)

    def room(self) -> Sequence[StoragePlace]:
        """`Tier.room`; empty if the tier is detached."""
        tier = self.tier
        return tier.room() if tier is not None else ()

    def not_stored(self, hashes: Sequence[ChainHash], reason: str) -> None:
        """Record why these blocks were not stored in the tier, if it has an eviction log."""
        if self.eviction_log is not None and hashes:
            self.eviction_log.left(hashes, reason)

    @property
    def locates(self) -> bool:
        """Whether the tier answers now and may have blocks that only a query to it would find."""
        tier = self.readable()
        return tier is not None and not tier.knows_all

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        """`Tier.locate`, reported to the read breaker. Called on this port's threads."""
        tier = self.readable()
        if tier is None:
            return Outcome.BREAKER_OPEN
        began = self._clock()
        answer = tier.locate(hashes)
        self._judge("read", [answer if isinstance(answer, Outcome) else Outcome.OK], began)
        return answer

    @property
    def is_off(self) -> bool:
        """Whether the breaker for reads or for writes is open."""
        return not all(breaker.closed for breaker in self.breakers.values())

    @property
    def wanting(self) -> str | None:
        """Which breakers are not closed, and why; None if both are."""
        left = [f"{name} breaker {each.state}" for name, each in self.breakers.items() if not each.closed]
        why = f" ({self.why})" if self.why is not None else ""
        return f"{self.name}: {', '.join(left)}{why}" if left else None

    @property
    def writable(self) -> bool:
        """Whether a write would be attempted."""
        return self.tier is not None and self.breakers["write"].closed

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """`Tier.read`, timed, counted, and reported to the read breaker. Called on this port's threads."""
        tier = self.tier
        if tier is None or not self.breakers["read"].closed:
            return [Outcome.BREAKER_OPEN] * len(hashes)
        num_bytes, began, start, codec = 0, self._clock(), time.perf_counter(), self.settings.codec
        self._reading.begin()
        try:
            results = tier.read(hashes, into) if codec is None else read_packed(tier, codec, hashes, into)
            num_bytes = sum(into[i].nbytes for i, r in enumerate(results) if isinstance(r, BlockRecord))
        finally:
            end = time.perf_counter()
            sample = self._reading.end(num_bytes, start, end)
        if sample is not None:
            self._rates.loaded(self.name, *sample)
        self._metrics.moved(self.name, "read", num_bytes, end - start)
        failed = [r for r in results if isinstance(r, Outcome)]
        if failed or self.breakers["read"].failures:
            self._judge("read", failed or (Outcome.OK,), began)
        if not _CORRUPTION.isdisjoint(failed):
            corrupt = [h for h, r in zip(hashes, results, strict=True) if r in _CORRUPTION]
            self._metrics.corrupted(self.name, len(corrupt))
            if present := [h for h, is_held in zip(corrupt, tier.holds(corrupt), strict=True) if is_held]:
                tier.discard(present)  # else later lookups would find them again
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], epoch: int) -> list[Outcome]:
        """`Tier.write`, timed, counted, and reported to the write breaker. Called on this port's threads.

        `epoch` is the port's when the blocks were offered. If a reset happens during a write, the write is undone;
        until then `lookup` finds nothing.
        """
        with self._lock:
            tier = self.tier
            if epoch != self.epoch:
                return [Outcome.EPOCH] * len(records)
            if tier is None or not self.breakers["write"].closed:
                return [Outcome.BREAKER_OPEN] * len(records)
            self._num_writing += 1
        began, start, codec = self._clock(), time.perf_counter(), self.settings.codec
        try:
            outcomes = tier.write(records, payloads) if codec is None else write_packed(tier, codec, records, payloads)
            num_bytes = sum(p.nbytes for p, o in zip(payloads, outcomes, strict=True) if o is Outcome.OK)
            self._metrics.moved(self.name, "write", num_bytes, time.perf_counter() - start)
            if tracing.ON:
                since = time.monotonic() - (time.perf_counter() - start)
                tracing.wrote(self.name, records, outcomes, num_bytes, since)
            if self.breakers["write"].failures or not _FAILURES.isdisjoint(outcomes):
                self._judge("write", outcomes, began)
            if self._sent is not None:
                stored = [r.chain_hash for r, o in zip(records, outcomes, strict=True) if o is Outcome.OK]
                self._sent.left(stored, LOST)  # consulted only for blocks that the tier no longer has
        finally:
            with self._lock:
                stale = epoch != self.epoch
                self._num_writing -= not stale
            if stale:
                tier.discard([record.chain_hash for record in records])
                with self._lock:
                    self._num_stale -= 1
        return [Outcome.EPOCH] * len(records) if stale else outcomes

    def bound(self, bounds: TenantBounds) -> None:
        """From now on the tier asks for tenants' bounds before it stores, also when it is opened again."""
        self._bounds = bounds
        if (tier := self.tier) is not None:
            tier.bounds = bounds

    def set_breakers(self, failures: int, retry_after: float) -> None:
        """Change both breakers' limits: failures in a row, and seconds until the first probe."""
        self.settings = replace(self.settings, failures=failures, retry_after=retry_after)
        for breaker in self.breakers.values():
            breaker.set_limits(failures, retry_after)
        if (tier := self.tier) is not None:
            tier.breaker_limits = failures, retry_after

    def failed(self, direction: Direction) -> None:
        """An operation of this tier ran past its deadline."""
        self.breakers[direction].failure()
        self._show_breakers()

    def tick(self, *, at_once: bool = False) -> None:
        """Expire overdue jobs and send a due probe. Cheap; called from every engine-facing call.

        `at_once`: a caller waits for the tier, so its probe is due.
        """
        queue = self.queue
        if (queue.running or queue.urgent or queue.normal) and queue.expire():
            if any(breaker.closed for breaker in self.breakers.values()):
                patience, count = self.settings.deadline, self.settings.num_threads
                self._trip(TierUnavailable(f"all its {count} threads hang, in calls of over {patience:g} s"))
            return  # a probe would find no thread: one is sent as soon as a call ends
        for direction in _DIRECTIONS:
            breaker = self.breakers[direction]
            if not breaker.closed and breaker.take_probe(at_once=at_once):
                probe = _Probe(self, direction, self._clock() + self.settings.deadline)
                if not self.queue.submit(probe, urgent=True):
                    probe.end(Outcome.QUEUE_FULL, late=False)

    def reset(self) -> None:
        """Forget every block of the tier, and every write offered so far."""
        with self._lock:
            self.epoch += 1
            self._num_stale += self._num_writing
            self._num_writing = 0
            if self._sent is not None:
                self._sent.entries[:] = 0
            tier, epoch = self.tier, self.epoch
        if tier is not None:
            tier.reset()
            if tier.is_shared:
                self._shared_forgot_at = epoch

    def check(self) -> None:
        tier = self.tier  # a probe may detach it meanwhile
        if tier is not None:
            tier.check()

    def close(self, timeout: float) -> None:
        """Drop queued jobs, wait up to `timeout` seconds for running ones, close the tier. Idempotent."""
        self._closing.set()
        if not self.queue.close(timeout):
            _log.warning("%s: an operation still hangs at close", self.name)
        with self._lock:
            self._closed = True
        self._detach(self.tier)

    def probe(self, direction: Direction) -> bool:
        """Whether the storage answers again; runs on this port's threads.

        A tier that does not answer is reopened at once: its file may have been replaced. If that fails, both directions
        are off until it succeeds. A tier that `stays_open` still serves reads after a failed write probe.
        """
        tier = self.tier
        if tier is not None:
            if tier.probe(direction):
                return True
            if direction == "write" and tier.stays_open and self.breakers["read"].closed:
                return False
            self._detach(tier)
        fresh = self._attach((KVTierError, OSError))
        self._is_fresh = True
        return fresh is not None and fresh.probe(direction)

    def probed(self, direction: Direction, answered: bool) -> None:
        """The probe that `tick` sent has ended."""
        self.breakers[direction].probed(answered)
        if not self.is_off:
            self.why = None
        self._show_breakers()
        if answered:
            _log.info("%s tier is back (%s)", self.name, direction)
            if self.recovered is not None and self.writable and (direction == "write" or self._is_fresh):
                is_fresh, self._is_fresh = self._is_fresh, False
                self.recovered(is_fresh=is_fresh)

    def readable(self) -> Tier | None:
        """The tier, or None while it is detached, its read breaker is open, or a reset waits for writes."""
        return self.tier if self.breakers["read"].closed and not self._num_stale else None

    def _judge(self, direction: Direction, outcomes: Sequence[Outcome], began: float) -> None:
        breaker = self.breakers[direction]
        if any(outcome in _FAILURES for outcome in outcomes):
            breaker.failure()
            self._show_breakers()
        elif breaker.failures and outcomes and self._clock() - began < self.settings.deadline:
            breaker.success()  # a late answer is not a success: `failed` counted it

    def _attach_in_time(self, timeout: float) -> None:
        """At start: wait at most `timeout` seconds for `open`. Storage that hangs attaches once it answers."""
        opened = begun(f"kvtier-{self.name}-open", lambda: self._attach((TierUnavailable, OSError)))
        if wait((opened,), timeout).done:
            opened.result()
            return
        self._trip(TierUnavailable(f"it has not opened within {timeout:g} s, and attaches once it has"))
        opened.add_done_callback(self._opened_late)

    def _opened_late(self, opened: "Future[Tier | None]") -> None:
        if (error := opened.exception()) is not None:  # raised at start
            _log.warning("%s tier stays off: %s", self.name, error)

    def _attach(self, expected: tuple[type[Exception], ...]) -> Tier | None:
        """The tier, opened if necessary. None, with one warning, if that fails."""
        with self._attaching:
            if self.tier is None and not self._closed:
                try:
                    tier = self.opening()
                except expected as error:
                    self._trip(error)
                    return None
                self._adopt(tier)
                self._show_breakers()
            return self.tier

    def _adopt(self, tier: Tier) -> None:
        """Use a tier that was just opened, unless the port was closed. It may have blocks that a reset did not reach.

        A shared tier is reset only if it never was: other nodes may have stored blocks there since.
        """
        forgot_at = self._shared_forgot_at if tier.is_shared else 0
        while True:
            with self._lock:
                if self._closed:
                    break
                if forgot_at == self.epoch:
                    self.is_shared = tier.is_shared
                    if tier.eviction_log is not None:
                        self.eviction_log = tier.eviction_log
                    elif self.is_shared and self._sent is None:
                        self.eviction_log = self._sent = EvictionLog(self.name, _SENT, clock=self._clock)
                    tier.bounds = self._bounds
                    tier.breaker_limits = self.settings.failures, self.settings.retry_after
                    self.tier = tier
                    return
                forgot_at = self.epoch
            tier.reset()
            if tier.is_shared:
                self._shared_forgot_at = forgot_at
        tier.close()

    def _detach(self, tier: Tier | None) -> None:
        """Close `tier`, unless another thread did."""
        with self._lock:
            mine = tier is not None and self.tier is tier
            if mine:
                self.tier = None
        if mine and tier is not None:
            tier.close()

    def _trip(self, error: Exception) -> None:
        self.why = str(error)
        if any(breaker.closed for breaker in self.breakers.values()):
            _log.warning("%s tier is off for now, the engine runs on without it: %s", self.name, error)
        for breaker in self.breakers.values():
            if breaker.closed:
                breaker.trip()
        self._show_breakers()

    def _show_breakers(self) -> None:
        for direction, breaker in self.breakers.items():
            self._metrics.breaker(self.name, direction, not breaker.closed)
        with self._lock:
            begins, self._is_probing = self.is_off and not self._is_probing, self._is_probing or self.is_off
        if begins and not self._closing.is_set():
            try:
                Thread(target=self._keep_probing, name=f"kvtier-{self.name}-probes", daemon=True).start()
            except RuntimeError as error:  # no more threads: callers that tick still send probes
                self._is_probing = False
                _log.warning("%s: an idle engine will not look for it: %s", self.name, error)

    def probe_alone(self) -> None:
        """From now on send probes even if no caller ticks: an idle engine makes no calls that would send them."""
        self._is_probing = False
        self._show_breakers()

    def _keep_probing(self) -> None:
        """Send probes until both breakers are closed."""
        while not self._closing.wait(max(self.settings.retry_after, _LEAST_WAIT)):
            try:
                self.tick()
            except Exception:
                _log.exception("%s: a probe could not be sent", self.name)
            with self._lock:
                if not self.is_off:
                    self._is_probing = False
                    return


@dataclass(eq=False, slots=True)
class _Probe:
    """The one operation that an open breaker permits. Only its first result counts. Implements `Job`."""

    port: TierPort
    direction: Direction
    deadline: float

    def run(self) -> bool:
        return self.port.probe(self.direction)

    def end(self, result: bool | Outcome, *, late: bool) -> None:
        if not late:
            self.port.probed(self.direction, result is True)

    def overdue(self) -> None:
        self.port.probed(self.direction, False)


@dataclass(frozen=True, slots=True)
class PackedShape:
    """The shape of packed blocks, passed to a tier. Implements `BlockShape`."""

    block_size: int
    block_bytes: int


def read_packed(
    tier: Tier, codec: Fp8Codec, hashes: Sequence[ChainHash], into: Sequence[memoryview]
) -> list[BlockRecord | Outcome]:
    """`Tier.read`. The tier verifies what it stored; then a block is unpacked in the buffer that received it.

    A record's checksum is that of the unpacked block.
    """
    results = tier.read(hashes, [buffer[: codec.packed_bytes] for buffer in into])
    return [
        result if isinstance(result, Outcome) else _unpacked(codec, result, buffer)
        for result, buffer in zip(results, into, strict=True)
    ]


def write_packed(
    tier: Tier, codec: Fp8Codec, records: Sequence[BlockRecord], payloads: Sequence[memoryview]
) -> list[Outcome]:
    """`Tier.write`. A block with a non-finite number is UNSUPPORTED, and the blocks after it are not stored."""
    whole, packed = list[BlockRecord](), list[memoryview]()
    for record, payload in zip(records, payloads, strict=True):
        stored = codec.pack(payload)
        if stored is None:
            break
        whole.append(replace(record, checksum=checksum(stored)))
        packed.append(stored)
    outcomes = tier.write(whole, packed) if whole else []
    if (refused := len(records) - len(whole)) > 0:
        outcomes = [*outcomes, Outcome.UNSUPPORTED, *[Outcome.PARENT_FAILED] * (refused - 1)]
    return outcomes


def _unpacked(codec: Fp8Codec, record: BlockRecord, buffer: memoryview) -> BlockRecord | Outcome:
    if not codec.unpack(buffer[: codec.packed_bytes], buffer):
        return Outcome.CHECKSUM
    return replace(record, checksum=checksum(buffer))
