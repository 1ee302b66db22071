"""Every counter kvtier keeps, on a registry of its own: what was found, missed, moved, dropped, and why."""

import logging
import math
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Final, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvtier.tiers.kinds import L2, MISS, lookup_results
from kvtier.tiers.tier import Outcome, StoragePlace

_log = logging.getLogger(__name__)

_LOADS: Final = ("read", "load")  # the directions towards the engine; their time is what a request waits
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_MINUTES: Final = 5  # whole ones, besides the one under way
_TOGETHER: Final = 128  # lookups, or batches moved, that are counted together
_SHARE: Final = 0.1  # of the blocks offered or looked up that may be lost: as in deploy/prometheus/rules.yml
LOOKED_UP: Final = "looked up"
STORED: Final = "stored"
_MORE_ROOM: Final = "raise [host] size"
_FASTER: Final = f'{_MORE_ROOM}, or set [cache] admit_after = "auto"'


Causes = Mapping[tuple[str, str], int]


class Found(Protocol):
    """What a lookup found: `Attribution`."""

    @property
    def blocks(self) -> int: ...
    @property
    def miss(self) -> int: ...
    @property
    def by_tier(self) -> Mapping[str, int]: ...


class Series(NamedTuple):
    """One series with its value now. Or a family of series: then `labels` are the names of labels and `value` is 0."""

    name: str
    text: str
    labels: tuple[str, ...]
    is_counter: bool
    value: float = 0.0


class CopyMetrics:
    """The counters of copies between L1 on a GPU and L2. `way` is one of `copy_ways.py`."""

    def __init__(self, counter: "Callable[..., _Counter]", gauge: Callable[..., Gauge]) -> None:
        self._batches = counter("kvtier_copies", "Batches of copies given to a GPU, by the way they went", "way")
        self._bytes = counter("kvtier_copy_bytes", "Bytes of copies given to a GPU, by the way they went", "way")
        self._batch_from = gauge(
            "kvtier_copy_batch_from_bytes", "Pieces from this size on are copied by the driver; -1: never", "device"
        )
        self._grid = gauge("kvtier_copy_grid", "Blocks of threads of the copy kernel", "device")

    def made(self, way: str, num_bytes: int) -> None:
        """One batch of copies was given to the device."""
        self._batches.add(1, way)
        self._bytes.add(num_bytes, way)

    def chosen(self, device: str, batch_from: int | None, grid: int) -> None:
        """From which size of pieces on the driver copies for a device (None: never), and how large the kernel is."""
        self._batch_from.labels(device).set(-1 if batch_from is None else batch_from)
        self._grid.labels(device).set(grid)


class Metrics:
    """The counters of one hierarchy. Thread-safe; callers count whole batches, one call costs less than a microsecond.

    `tier` is a name from the table of tiers (`kinds.py`), a reason an `Outcome`. Directions are "read" and "write"
    between L2 and the tiers below it, "load" and "store" between L2 and L1.
    """

    def __init__(self) -> None:
        self.losses = Losses()
        self._lock = self.losses.lock  # of counters and histograms, too
        self._registry = registry = CollectorRegistry()
        self._families: list[Series] = []
        self._lookup = self._counter("kvtier_lookup_blocks", "Blocks looked up, by where they were found", "tier")
        self._miss = self._counter("kvtier_miss", "Blocks not served from the cache, by reason", "reason")
        self._absent = self._counter(
            "kvtier_absent_blocks",
            "Blocks that no tier held, by what became of them",
            "cause",
            "tier",
        )
        self._store = self._counter("kvtier_store_blocks", "Blocks stored", "tier")
        self._drop = self._counter("kvtier_store_dropped", "Blocks not stored, by reason", "tier", "reason")
        self._hints = self._counter("kvtier_hints_ignored", "Hints of requests that counted as none", "reason")
        self._blends = self._counter(
            "kvtier_blends", "Requests with marked segments, by what became of them", "outcome"
        )
        self._segments = self._counter("kvtier_segment_tokens", "Tokens of segments, and those repaired", "kind")
        self._bytes = self._counter("kvtier_bytes", "Payload bytes moved", "tier", "direction")
        self._corruption = self._counter("kvtier_corruption", "Blocks that failed verification", "tier")
        self._evict = self._counter("kvtier_evicted", "Blocks evicted", "tier")
        self._requests = self._counter(
            "kvtier_storage_requests", "Requests to storage that is paid by them, by kind", "tier", "kind"
        )
        self._traffic = self._counter(
            "kvtier_storage_traffic_bytes",
            "Bytes of such requests, with all that lies around blocks",
            "tier",
            "way",
        )
        self._saved = self._counter(
            "kvtier_compression_saved_bytes",
            "Bytes of blocks that compression kept off the way to a tier's storage and back",
            "tier",
            "way",
        )
        self._breaker = self._gauge("kvtier_breaker_open", "1 while a tier is detached", "tier", "direction")
        self._selective = self._gauge(
            "kvtier_selective_admission", "1 while a tier takes only blocks that were seen before", "tier", "why"
        )
        self._waiting = self._gauge(
            "kvtier_store_waiting_blocks", "Blocks of L2 that a tier is still to get: queued, or in line", "tier"
        )
        self._slots = self._gauge("kvtier_pool_slots", "Slots by state", "tier", "state")
        self._used = self._gauge(
            "kvtier_storage_used_bytes", "Of what a tier lies on, a file system or a server", "tier", "place"
        )
        self._limit = self._gauge("kvtier_storage_limit_bytes", "What there may be of it, if bounded", "tier", "place")
        self._taken = self._gauge("kvtier_slab_taken_bytes", "Disk space that a slab takes", "tier", "place")
        self._slab = self._gauge("kvtier_slab_limit_bytes", "Disk space that a slab may take", "tier", "place")
        self._places: dict[str, Sequence[StoragePlace]] = {}
        self.copies = CopyMetrics(self._counter, self._gauge)
        self._load_seconds = defaultdict[str, list[float]](lambda: [0.0] * (len(_SECONDS) + 2))
        text = "Time of one batch moved towards the engine"
        registry.register(_Histograms("kvtier_load_seconds", text, self._load_seconds, _SECONDS))
        self._ages: dict[str, Sequence[int]] = {}
        text, bounds = "How long blocks that were evicted had been in the tier", [2.0**power for power in range(64)]
        registry.register(_Histograms("kvtier_evicted_age_seconds", text, self._ages, bounds))
        self._refresh: list[Callable[[], None]] = []
        # Of each request, not counted yet. Appending needs no lock.
        self._finds = deque[tuple[Found, Outcome | None, Causes | None]]()
        self._stores = deque[tuple[str, int]]()
        self._moves = deque[tuple[str, str, int, float]]()
        # All of them at once: Prometheus computes no rate of a series that does not exist yet.
        self._lookup.values.update({(tier,): 0.0 for tier in lookup_results()})

    def looked_up(
        self,
        found: "Found",
        missing: Outcome | None = Outcome.ABSENT,
        causes: Causes | None = None,
    ) -> None:
        """One lookup's blocks, by the tier that had each when it began, and those that none had.

        These are counted under `missing`, too, and if absent, under their causes.
        """
        self._finds.append((found, missing, causes))
        if len(self._finds) > _TOGETHER:
            self._count_up()

    def missed(self, reason: str, num_blocks: int) -> None:
        """Blocks that some tier held or might have held, and that were not served."""
        with self._lock:
            self._miss.values[reason,] += num_blocks
            if reason == Outcome.NO_SLOT:
                self.losses.count("", reason, num_blocks)

    def ages(self, tier: str, counts: Sequence[int]) -> None:
        """How long the blocks lived that a tier has evicted: a count a bucket of seconds, then the sum of all."""
        self._ages[tier] = counts

    def age_counts(self) -> dict[str, list[int]]:
        """Of each tier the evicted blocks by age: below 1 s, 2 s, 4 s and so on, at last all that were older."""
        self._refreshed()
        return {tier: [*counts[:-1]] for tier, counts in self._ages.items()}

    def hint_ignored(self, reason: str) -> None:
        """A request said a hint that counts as none."""
        self._hints.add(1, reason)

    def blended(self, outcome: str, num_reused: int = 0, num_repaired: int = 0) -> None:
        """A request of vLLM's with segments was blended, or computed as usual for a reason."""
        self._blends.add(1, outcome)
        if num_reused:
            self._segments.add(num_reused, "segment")
            self._segments.add(num_repaired, "repaired")

    def stored(self, tier: str, num_blocks: int) -> None:
        """Blocks that became findable in a tier."""
        self._stores.append((tier, num_blocks))
        if len(self._stores) > _TOGETHER:
            self._count_up()

    def dropped(self, tier: str, reason: str, num_blocks: int) -> None:
        """Blocks that were offered to a tier and not stored."""
        with self._lock:
            self._drop.values[tier, reason] += num_blocks
            if _fix_of(tier, reason) is not None:
                self.losses.count(tier, reason, num_blocks)
        if reason == Outcome.NO_SLOT and tier == L2 and (num_lost := self.losses.to_log(num_blocks)):
            _log.warning(
                "%d blocks found no slot in host memory and are not kept. A larger [host] size keeps them", num_lost
            )

    def evicted(self, tier: str, total: int) -> None:
        """How many blocks made room for others since the start, as the tier itself counts them."""
        self._evict.advance(total, tier)

    def paid(self, tier: str, name: str, total: int) -> None:
        """Totals since the start: `requests_{kind}`, `bytes_{way}`, or what compression saved, `saved_{way}`."""
        what, _, which = name.partition("_")
        {"requests": self._requests, "bytes": self._traffic, "saved": self._saved}[what].advance(total, tier, which)

    def corrupted(self, tier: str, num_blocks: int) -> None:
        """Blocks whose key or checksum was not the one stored. They were not served."""
        self._corruption.add(num_blocks, tier)

    def moved(self, tier: str, direction: str, num_bytes: int, seconds: float) -> None:
        """One batch of payload moved between `tier` and the one above; `seconds` is its wall time."""
        self._moves.append((tier, direction, num_bytes, seconds))
        if len(self._moves) > _TOGETHER:
            self._count_up()

    def breaker(self, tier: str, direction: str, is_open: bool) -> None:
        """Whether one direction of a tier is detached now."""
        self._breaker.labels(tier, direction).set(is_open)

    def waiting(self, tier: str, num_blocks: int) -> None:
        """So many blocks of L2 are still to be written to the tier."""
        self._waiting.labels(tier).set(num_blocks)

    def selective(self, tier: str, why: str, is_on: bool) -> None:
        """Whether a tier takes only blocks that were seen before, for this reason (`hierarchy/demote.py`)."""
        self._selective.labels(tier, why).set(is_on)

    def pool(self, tier: str, state: str, num_slots: int) -> None:
        """How many slots of a pool are in a state now."""
        self._slots.labels(tier, state).set(num_slots)

    def room(self, tier: str, places: Sequence[StoragePlace]) -> None:
        """How full what a tier lies on is now: all of its places."""
        for gone in self._places.get(tier, ()):
            for gauge in self._room_of(gone):
                gauge.remove(tier, gone.place)
        for each in places:
            used, limit = self._room_of(each)
            used.labels(tier, each.place).set(each.used)
            if each.limit is not None:
                limit.labels(tier, each.place).set(each.limit)
        self._places[tier] = places

    def _room_of(self, place: StoragePlace) -> tuple[Gauge, Gauge]:
        """What is used of a place, and the most there may be."""
        return (self._taken, self._slab) if place.is_own else (self._used, self._limit)

    def before_read(self, refresh: Callable[[], None]) -> None:
        """Have `refresh` called before every reading: it sets what is a state, not an event."""
        self._refresh.append(refresh)

    def text(self) -> str:
        """The exposition format Prometheus scrapes."""
        self._refreshed()
        return generate_latest(self._registry).decode()

    def snapshot(self) -> dict[str, float]:
        """Every sample by its exposition name, as in `kvtier_store_blocks_total{tier="l2"}`."""
        self._refreshed()
        return {
            _series(sample.name, sample.labels): sample.value
            for family in self._registry.collect()
            for sample in family.samples
        }

    def collect(self) -> Iterator[Metric]:
        """Every family with its series now, histograms too: for an exposition that joins several models."""
        self._refreshed()
        yield from self._registry.collect()

    def families(self) -> list[Series]:
        """Every counter and gauge there can be, for an engine that has a registry of its own."""
        return list(self._families)

    def samples(self) -> Iterator[Series]:
        """Every counter and gauge now."""
        self._refreshed()
        for family in self._registry.collect():
            for sample in family.samples:
                if family.type in ("counter", "gauge"):
                    labels = tuple(sample.labels.values())
                    yield Series(family.name, family.documentation, labels, family.type == "counter", sample.value)

    @property
    def load_seconds(self) -> float:
        """The time of all batches moved towards the engine."""
        self._count_up()
        return sum(counts[-1] for counts in [*self._load_seconds.values()])

    @property
    def wanting(self) -> dict[str, str]:
        """What there is too little of, and why one thinks so: "file stores", "l2 slots"."""
        self._count_up()
        return self.losses.wanting

    def _counter(self, name: str, text: str, *labels: str) -> "_Counter":
        self._families.append(Series(name, text, labels, is_counter=True))
        counter = _Counter(name, text, labels, self._lock)
        self._registry.register(counter)
        return counter

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self._families.append(Series(name, text, labels, is_counter=False))
        return Gauge(name, text, labels, registry=self._registry)

    def _count_up(self) -> None:
        """Count what each request adds: many at once, since the lock and the clock cost more than the sums."""
        with self._lock:
            num_looked_up, counts, is_recent = 0, self._lookup.values, self.losses.is_recent()
            while self._finds:
                found, missing, causes = self._finds.popleft()
                num_looked_up += found.blocks
                for tier, num_blocks in found.by_tier.items():
                    counts[tier,] += num_blocks
                if not found.miss:
                    continue
                counts[MISS,] += found.miss
                if missing is not None:
                    self._miss.values[missing,] += found.miss
                if missing is Outcome.NO_SLOT and is_recent:
                    self.losses.count("", missing, found.miss)
                if causes and missing is Outcome.ABSENT:
                    for cause_and_tier, num_blocks in causes.items():
                        self._absent.values[cause_and_tier] += num_blocks
            if num_looked_up and is_recent:
                self.losses.count("", LOOKED_UP, num_looked_up)
            while self._stores:
                tier, num_blocks = self._stores.popleft()
                self._store.values[tier,] += num_blocks
                if is_recent:
                    self.losses.count(tier, STORED, num_blocks)
            while self._moves:
                tier, direction, num_bytes, seconds = self._moves.popleft()
                self._bytes.values[tier, direction] += num_bytes
                if direction in _LOADS:
                    row = self._load_seconds[tier]
                    row[bisect_left(_SECONDS, seconds)] += 1
                    row[-1] += seconds

    def _refreshed(self) -> None:
        for refresh in self._refresh:
            refresh()
        self._count_up()


class _Counter(Collector):
    """A family of counters. Prometheus's own take several times as long to add to."""

    def __init__(self, name: str, text: str, labels: Sequence[str], lock: Lock) -> None:
        self.values = defaultdict[tuple[str, ...], float](float)  # changed under the lock
        self._totals: dict[tuple[str, ...], float] = {}
        self._family = name, text, labels
        self._lock = lock

    def add(self, amount: float, *labels: str) -> None:
        with self._lock:
            self.values[labels] += amount

    def advance(self, total: float, *labels: str) -> None:
        """Add what the total, counted elsewhere, has more than the last one."""
        self.add(max(0.0, total - self._totals.get(labels, 0.0)), *labels)
        self._totals[labels] = total

    def collect(self) -> Iterator[Metric]:
        name, text, names = self._family
        family = CounterMetricFamily(name, text, labels=names)
        for labels, value in self.values.copy().items():
            family.add_metric([*map(str, labels)], value)  # a reason is an `Outcome`
        yield family


class _Histograms(Collector):
    """Histograms by tier: in each row a count a bucket, the last one without a bound, then the sum."""

    def __init__(self, name: str, text: str, rows: Mapping[str, Sequence[float]], bounds: Sequence[float]) -> None:
        self._family = name, text
        self._rows, self._bounds = rows, bounds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=["tier"])
        for tier, (*counts, total) in dict(self._rows).items():
            bounds = [*map(str, self._bounds[: len(counts) - 1]), "+Inf"]
            family.add_metric([tier], list(zip(bounds, accumulate(counts), strict=True)), total)
        yield family


def _series(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def _fix_of(tier: str, reason: str) -> str | None:
    """The option that helps a tier which drops stores for this reason; None if nothing is too small or too slow."""
    match reason:
        case Outcome.NO_SLOT:
            return _MORE_ROOM
        case Outcome.EVICTED | Outcome.QUEUE_FULL:
            return _FASTER
        case Outcome.FULL:
            return "raise [file] size, or free some of its disk" if tier == "file" else f"give {tier} more room"
        case Outcome.TIMEOUT:
            return f"raise [{'service' if tier == L2 else tier}] deadline"
    return None  # a quota and an admission are intended; a breaker that opens is reported as such


class Losses:
    """Blocks lost of late for want of room or time, by minute: a reason to call a process degraded. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lock = Lock()
        self._counts = defaultdict[tuple[str, str], int](int)  # of the minute under way
        self._minutes: deque[tuple[int, dict[tuple[str, str], int]]] = deque(maxlen=_MINUTES + 1)
        self._next_minute = self._logged_at = -math.inf
        self._num_unlogged = 0
        self._counted_up_at = clock()

    def is_recent(self) -> bool:
        """Whether what was added since the last call belongs to this minute, about. The caller has `lock`."""
        before, self._counted_up_at = self._counted_up_at, self._clock()
        return self._counted_up_at - before <= 60.0

    def count(self, tier: str, what: str, num_blocks: int) -> None:
        """`what`: LOOKED_UP, STORED, or why they were lost. `tier`: "" for blocks that were to be loaded.

        The caller has `lock`.
        """
        if (now := self._clock()) >= self._next_minute:
            self._counts = defaultdict[tuple[str, str], int](int)
            self._minutes.append((int(now // 60), self._counts))
            self._next_minute = now // 60 * 60 + 60
        self._counts[tier, what] += num_blocks

    def to_log(self, num_blocks: int) -> int:
        """So many more found no slot: how many the log says now, once a minute."""
        with self.lock:
            self._num_unlogged += num_blocks
            if self._clock() - self._logged_at < 60.0:
                return 0
            num_logged, self._num_unlogged, self._logged_at = self._num_unlogged, 0, self._clock()
        return num_logged

    @property
    def wanting(self) -> dict[str, str]:
        """What there is too little of, and why one thinks so: "file stores", "l2 slots"."""
        oldest, seen = int(self._clock() // 60) - _MINUTES, Tally[tuple[str, str]]()
        with self.lock:
            for minute, counts in self._minutes:
                if minute >= oldest:
                    seen.update(counts)
        found = {}
        for tier in sorted({tier for tier, _ in seen} - {""}):
            lost = Tally({why: n for (of, why), n in seen.items() if of == tier and why != STORED})
            all_lost, offered = lost.total(), lost.total() + seen[tier, STORED]
            if all_lost > _SHARE * offered:
                reasons = ", ".join(f"{reason} {num_blocks}" for reason, num_blocks in lost.most_common())
                fix = _fix_of(tier, lost.most_common(1)[0][0])
                found[f"{tier} stores"] = f"{_of(all_lost, offered)} were not stored ({reasons}); {fix}"
        crowded, looked_up = seen["", Outcome.NO_SLOT], seen["", LOOKED_UP]
        if crowded > _SHARE * looked_up:
            found["l2 slots"] = (
                f"{_of(crowded, max(crowded, looked_up))} had no slot to be loaded to (no_slot); {_MORE_ROOM}"
            )
        return found


def _of(num_blocks: int, of: int) -> str:
    return f"{num_blocks / of:.0%} of {of} blocks in the last {_MINUTES} minutes"
