"""Simulates tiers of other sizes and policies under a trace, and their value in seconds and money."""

import multiprocessing
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.service import Chart, Line, Table, measured_by
from kvtier.service.simulation.optimum import Optimum
from kvtier.service.traces import HINTS, RequestTrace
from kvtier.tiers import BATCH_BYTES, L2, ChainHash, ConfigError
from kvtier.tiers.config import show_size
from kvtier.tiers.file import BareSlab
from kvtier.tiers.pool import Lease, SlotPool
from kvtier.tiers.reuse import Hint, RequestEnd

_SIGHTINGS_PER_SLOT: Final = 4  # remembered, as in `tiers/hierarchy/stores.py`
_ROOT: Final = bytes(32)  # the parent of first blocks: the slab begins a run there, as at a model's own root


@dataclass(frozen=True, slots=True)
class Capacity:
    memory: int  # bytes of L2
    disk: int = 0  # bytes of the slab; 0: none
    redis: int = 0  # bytes in Redis; 0: none
    redis_ttl: float = 86400.0  # seconds
    policy: str = "predicted"  # of L2
    admit_after: int = 1  # sightings of a block before it is stored


class SimulatedTiers:
    """What a node's tiers would find and keep, request by request. For one thread.

    A request ends as soon as it arrives: blocks that it finds are leased and loaded into L2; the rest is computed,
    stored in L2 and written through to the tiers below. Nothing fails, and no queue is ever full.
    """

    def __init__(self, capacity: Capacity, block_bytes: int, block_size: int) -> None:
        """ValueError if memory has no room for one block."""
        num_slots = capacity.memory // block_bytes
        if num_slots < 1:
            raise ValueError("no room for a block in memory")
        self.now = 0.0
        self.pool = SlotPool(num_slots, policy=capacity.policy, clock=lambda: self.now)
        self.slab = BareSlab(capacity.disk, block_bytes, block_size) if capacity.disk else None
        self._admit_after, self._sightings = capacity.admit_after, OrderedDict[ChainHash, int]()
        self.redis = _ExpiringStore(capacity.redis // block_bytes, capacity.redis_ttl) if capacity.redis else None

    def request(self, end: RequestEnd, now: float, ended: float | None = None) -> tuple[int, int, int]:
        """A request at `now` that ends at `ended` (None: at once). Returns the leading blocks of L2, slab and Redis."""
        self.now = now
        names = end.names
        leases, found = self._find(names[: end.num_prompt])
        at = sum(found)
        leases += self._store(names[at:], names[at - 1] if at else None)
        self.now = now if ended is None else ended
        if (resolved := self.pool.ended(end)) is not None and self.slab is not None:
            self.slab.ended(resolved)
        for lease in leases:
            lease.release()
        return found[0], found[1], found[2]

    def check(self) -> None:
        """Raise AssertionError if a law of the pool or the slab is broken."""
        self.pool.check()
        if self.slab is not None:
            self.slab.check()

    def _find(self, prompt: Sequence[ChainHash]) -> tuple[list[Lease], list[int]]:
        """Lease the prompt's leading blocks from any tier; returns also how many each tier had."""
        lease = self.pool.lease(prompt)
        leases, found = [lease], [len(lease), 0, 0]
        at = len(lease)
        while at < len(prompt) and (self.slab is not None or self.redis is not None):
            if at > len(leases[0]) and len(lease := self.pool.lease(prompt[at:])):
                leases.append(lease)
                found[0] += len(lease)
                at += len(lease)
                continue
            tier, count = self._below(prompt[at:])
            lease_or_none = self._load(prompt, at, count, tier) if count else None
            if lease_or_none is None:
                break
            leases.append(lease_or_none)
            found[tier] += len(lease_or_none)
            at += len(lease_or_none)
        return leases, found

    def _below(self, rest: Sequence[ChainHash]) -> tuple[int, int]:
        """The lower tier that has the first block, and its leading blocks, up to the next that L2 has."""
        tier, count = 1, self.slab.lookup(rest) if self.slab is not None else 0
        if not count and self.redis is not None:
            tier, count = 2, self.redis.lookup(rest, self.now)
        held = self.pool.holds(rest[:count])
        return tier, held.index(True) if True in held else count

    def _load(self, prompt: Sequence[ChainHash], at: int, count: int, tier: int) -> Lease | None:
        """Load blocks into L2, fewer if room is short, and link the block behind them to them again."""
        parent, after = prompt[at - 1] if at else None, at + count
        behind = [name for name in prompt[after : after + 1] if self.pool.holds([name])[0]]
        reservation = self.pool.reserve([*prompt[at:after], *behind], parent)
        while reservation is None and count > 1:
            count //= 2
            reservation = self.pool.reserve(prompt[at : at + count], parent)
        if reservation is None:
            return None
        if tier == 1 and self.slab is not None:
            self.slab.read(prompt[at : at + count])
        return self.pool.seal(reservation)

    def _store(self, names: Sequence[ChainHash], parent: ChainHash | None) -> list[Lease]:
        """Store computed blocks, or as many leading ones as fit."""
        count = self._seen_enough(names) if self._admit_after > 1 else len(names)
        is_lowest = self.slab is None and self.redis is None  # as in `tiers/hierarchy/stores.py`
        while count:
            if (reservation := self.pool.reserve(names[:count], parent, if_worth=is_lowest)) is not None:
                stored = list(reservation.hashes)
                lease = self.pool.seal(reservation)
                if stored and self.slab is not None:
                    self.slab.write(stored, reservation.parents[0] or _ROOT)
                if stored and self.redis is not None:
                    self.redis.write(stored, self.now)
                return [lease]
            count //= 2
        return []

    def _seen_enough(self, names: Sequence[ChainHash]) -> int:
        """How many leading blocks have been seen often enough to be stored, including this time."""
        num_seen = 0
        for i, name in enumerate(names):
            self._sightings[name] = times = self._sightings.pop(name, 0) + 1
            num_seen += num_seen == i and times >= self._admit_after
        while len(self._sightings) > _SIGHTINGS_PER_SLOT * self.pool.num_slots:
            self._sightings.popitem(last=False)
        return num_seen


class _ExpiringStore:
    """Redis as a number of blocks, each with an expiry that a hit renews; the least recently used makes room."""

    def __init__(self, num_blocks: int, ttl: float) -> None:
        self._num_blocks, self._ttl = num_blocks, ttl
        self._used: OrderedDict[ChainHash, float] = OrderedDict()

    def lookup(self, hashes: Sequence[ChainHash], now: float) -> int:
        """How many leading blocks it has; counts as a use of each."""
        while self._used and now - next(iter(self._used.values())) >= self._ttl:
            self._used.popitem(last=False)
        count = next((i for i, name in enumerate(hashes) if name not in self._used), len(hashes))
        self.write(hashes[:count], now)
        return count

    def write(self, hashes: Sequence[ChainHash], now: float) -> None:
        for name in reversed(hashes):
            self._used[name] = now
            self._used.move_to_end(name)
        while len(self._used) > self._num_blocks:
            self._used.popitem(last=False)


# --- one run for each capacity ---------------------------------------------------------------------------------------

_HINTS: Final = (None, *map(Hint, HINTS))
TIERS: Final = (L2, "file", "redis")
_MOST_DISK: Final = 4  # times all blocks, since extents are not filled completely


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    capacity: Capacity
    found: NDArray[np.int32]  # [requests, tiers]: leading blocks of each prompt that a tier had
    num_evicted: int  # blocks of L2
    num_written: int  # blocks, to the slab


class TraceReplay:
    """One trace, ready to run at any capacity. Its blocks get names of 32 bytes, as in a pool."""

    def __init__(self, trace: RequestTrace, block_bytes: int) -> None:
        self.trace, self.block_bytes = trace, block_bytes
        words = np.zeros((trace.num_names, 4), np.uint64)
        # Plain numbers: the index mixes them, so consecutive numbers spread evenly over its buckets.
        words[:, 0] = np.arange(1, trace.num_names + 1)
        raw = words.tobytes()
        self._names = [raw[at : at + 32] for at in range(0, len(raw), 32)]

    def end(self, request: int) -> RequestEnd:
        trace = self.trace
        names: list[ChainHash] = [self._names[block] for block in trace.chain(request).tolist()]
        hint, tenant = _HINTS[trace.hints[request]], int(trace.tenants[request])
        return RequestEnd(names, int(trace.num_prompt[request]), int(trace.num_output[request]), hint, tenant)

    def run(self, capacity: Capacity) -> SimulatedRun:
        """Run all requests in order. ValueError without room for a block. Room beyond the trace's takes no memory."""
        most = max(1, self.trace.num_names) * self.block_bytes
        disk = min(capacity.disk, _MOST_DISK * (most + BATCH_BYTES))
        room = replace(capacity, memory=min(capacity.memory, most), disk=disk)
        tiers = SimulatedTiers(room, self.block_bytes, self.trace.block_size)
        found = np.zeros((len(self.trace), len(TIERS)), np.int32)
        for request, begun in enumerate(self.trace.begun.tolist()):
            found[request] = tiers.request(self.end(request), begun)
        written = tiers.slab.num_written if tiers.slab is not None else 0
        return SimulatedRun(capacity, found, tiers.pool.num_evicted, written)


_REPLAYS: list[TraceReplay] = []  # the trace of a worker process


def sweep(
    replay: TraceReplay, capacities: Sequence[Capacity], progress: Callable[[int, int], None], num_processes: int = 0
) -> list[SimulatedRun]:
    """A run at each capacity, in order. `progress` gets the number of ended ones. `num_processes` 0: one per core."""
    workers = min(len(capacities), num_processes or len(os.sched_getaffinity(0)))
    if workers <= 1:
        runs: list[SimulatedRun] = []
        for capacity in capacities:
            progress(len(runs), len(capacities))
            runs.append(replay.run(capacity))
        progress(len(runs), len(runs))
        return runs
    # Not forks of this process: a progress bar has a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(replay.trace, replay.block_bytes))
    others = {*multiprocessing.active_children()}
    try:
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGINT,)
        )  # workers never get it: their parent ends them
        try:
            waiting = {pool.submit(_run, capacity): at for at, capacity in enumerate(capacities)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done: dict[int, SimulatedRun] = {}
        progress(0, len(waiting))
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            progress(len(done), len(waiting))
    except BaseException:  # Ctrl-C, too: a pool would complete all that was submitted
        for worker in {*multiprocessing.active_children()} - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [done[at] for at in range(len(capacities))]


def _begin(trace: RequestTrace, block_bytes: int) -> None:
    threading.Thread(target=_follow, daemon=True).start()
    _REPLAYS.append(TraceReplay(trace, block_bytes))


def _follow() -> None:
    """End this worker with its parent: no one else ends it if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(capacity: Capacity) -> SimulatedRun:
    return _REPLAYS[0].run(capacity)


# --- its value -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadRates:
    prefill: float = 10_000.0  # tokens a second
    l2: float = 20e9  # bytes a second
    file: float = 3e9
    redis: float = 1e9


@dataclass(frozen=True, slots=True)
class RunValue:
    """One row of a simulation. Shares are of 1; times are seconds of the whole trace unless noted."""

    policy: str
    memory_bytes: int
    disk_bytes: int
    redis_bytes: int
    block_hit_share: float
    token_hit_share: float
    l2_hit_share: float  # of blocks, as are the next two
    file_hit_share: float
    redis_hit_share: float
    optimum_block_hit_share: float  # with memory's and disk's room together
    prefill_seconds: float  # without kvtier
    seconds_saved: float  # prefill that was not computed, less the time of loading
    mean_ttft: float
    mean_ttft_without: float
    p95_ttft: float
    p95_ttft_without: float
    num_evicted: int  # blocks of L2
    bytes_written: int  # to the slab
    money_saved: float | None = None


def rates_from(path: Path, rates: LoadRates) -> LoadRates:
    """The rates that `kvtier worth --json` measured, else those given. ConfigError if the file is not its output."""
    measured = measured_by(path)
    found: dict[str, float] = {}
    for name in (each.name for each in fields(LoadRates)):
        value = measured.get("prefill_tokens_per_second" if name == "prefill" else f"{name}_bytes_per_second")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise ConfigError(f"--from {path}: {name}: {value!r:.40} is no rate; measure again by kvtier worth --json")
        found[name] = float(value)
    return replace(rates, **found)


def optimum_of(trace: RequestTrace) -> Optimum:
    return Optimum([trace.chain(request).tolist() for request in range(len(trace))], trace.num_prompt.tolist())


def value_of(
    run: SimulatedRun, trace: RequestTrace, optimum: Optimum, block_bytes: int, rates: LoadRates, gpu_hour: float | None
) -> RunValue:
    """A run in figures. A request loads found blocks only if that is faster than computing them."""
    found = run.found.astype(np.int64)
    blocks, prompts = found.sum(1), np.maximum(trace.num_tokens, 1)
    load = found @ (block_bytes / np.array([rates.l2, rates.file, rates.redis]))
    saved = np.maximum(blocks * trace.block_size / rates.prefill - load, 0.0)
    without = prompts / rates.prefill
    num_prompt_blocks = max(1, optimum.num_asked)
    capacity = run.capacity
    shares = dict(zip(TIERS, (found.sum(0) / num_prompt_blocks).tolist(), strict=True))
    seconds = float(saved.sum())
    return RunValue(
        policy=capacity.policy,
        memory_bytes=capacity.memory,
        disk_bytes=capacity.disk,
        redis_bytes=capacity.redis,
        block_hit_share=float(blocks.sum()) / num_prompt_blocks,
        token_hit_share=float(blocks.sum()) * trace.block_size / float(prompts.sum()),
        l2_hit_share=shares[L2],
        file_hit_share=shares["file"],
        redis_hit_share=shares["redis"],
        optimum_block_hit_share=optimum.share(sum((capacity.memory, capacity.disk, capacity.redis)) // block_bytes),
        prefill_seconds=float(without.sum()),
        seconds_saved=seconds,
        mean_ttft=float((without - saved).mean()),
        mean_ttft_without=float(without.mean()),
        p95_ttft=float(np.percentile(without - saved, 95)),
        p95_ttft_without=float(np.percentile(without, 95)),
        num_evicted=run.num_evicted,
        bytes_written=run.num_written * block_bytes,
        money_saved=None if gpu_hour is None else seconds / 3600 * gpu_hour,
    )


# --- for people ------------------------------------------------------------------------------------------------------

_GIB: Final = 1 << 30


def table_of_runs(values: Sequence[RunValue], requests: RequestTrace, assumed: Sequence[str]) -> Table:
    """A row for each run; columns of tiers and of money only if there are any."""
    with_disk, with_redis = any(each.disk_bytes for each in values), any(each.redis_bytes for each in values)
    with_money = any(each.money_saved is not None for each in values)
    heads = ["memory", *["disk"] * with_disk, *["redis"] * with_redis, "policy", "hits", "optimum", "tokens"]
    heads += [*["from disk"] * with_disk, *["from redis"] * with_redis, "saved", "TTFT", "without"]
    heads += ["money saved"] * with_money
    rows, share = [], "{:.2%}".format
    for each in values:
        cells = [show_size(each.memory_bytes)]
        cells += [show_size(each.disk_bytes)] * with_disk + [show_size(each.redis_bytes)] * with_redis
        cells += [each.policy, share(each.block_hit_share), share(each.optimum_block_hit_share)]
        cells += [share(each.token_hit_share)]
        cells += [share(each.file_hit_share)] * with_disk + [share(each.redis_hit_share)] * with_redis
        cells += [f"{each.seconds_saved:,.0f} s", f"{each.mean_ttft * 1e3:,.0f} ms"]
        cells += [f"{each.mean_ttft_without * 1e3:,.0f} ms"]
        cells += [f"{each.money_saved:,.2f}"] if each.money_saved is not None else ["–"] * with_money
        rows.append(cells)
    title = f"{len(requests):,} requests, {int(requests.num_tokens.sum()):,} prompt tokens"
    return Table(title, heads, rows, "assumed:\n" + "\n".join(f"- {each}" for each in assumed))


def charts_of_runs(values: Sequence[RunValue]) -> list[Chart]:
    """Hit share and time to the first token by memory: a line for each policy and for each size of the tiers below."""
    below = list(dict.fromkeys((each.disk_bytes, each.redis_bytes) for each in values))
    hits, times = [], []
    for rooms in below:
        runs = [each for each in values if (each.disk_bytes, each.redis_bytes) == rooms]
        suffix = "".join(
            f", {name} {show_size(room)}" for name, room in zip(("disk", "redis"), rooms, strict=True) if room
        )
        for policy in dict.fromkeys(each.policy for each in runs):
            own = sorted((each for each in runs if each.policy == policy), key=lambda each: each.memory_bytes)
            sizes = [each.memory_bytes / _GIB for each in own]
            hits.append(Line(policy + suffix, sizes, [100 * each.block_hit_share for each in own]))
            times.append(Line(policy + suffix, sizes, [1000 * each.mean_ttft for each in own]))
        best = {each.memory_bytes: each.optimum_block_hit_share for each in runs}
        sizes = [size / _GIB for size in sorted(best)]
        hits.append(Line("optimum" + suffix, sizes, [100 * best[size] for size in sorted(best)], is_dashed=True))
    sizes = sorted({each.memory_bytes / _GIB for each in values})
    times.append(Line("without", sizes, [1000 * values[0].mean_ttft_without] * len(sizes), is_dashed=True))
    return [
        Chart("Blocks that were found", "memory, GiB", "% of blocks looked up", hits, log_x=True),
        Chart("Time to the first token", "memory, GiB", "mean TTFT, ms", times, log_x=True),
    ]
