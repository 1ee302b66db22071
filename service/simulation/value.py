"""What a run's hits are worth, from rates: prefill seconds saved, time to the first token, money; as people see it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.service import Chart, Line, Table, measured_by
from kvtier.service.simulation.optimum import Optimum
from kvtier.service.simulation.replay import TIERS, SimulatedRun
from kvtier.service.traces import RequestTrace
from kvtier.tiers import L2, ConfigError
from kvtier.tiers.config import show_size


@dataclass(frozen=True, slots=True)
class LoadRates:
    """How fast a prompt is computed, and how fast KV comes from each tier."""

    prefill: float = 10_000.0  # tokens a second
    l2: float = 20e9  # bytes a second
    file: float = 3e9
    redis: float = 1e9


@dataclass(frozen=True, slots=True)
class RunValue:
    """One row of a simulation. Shares are of 1; times are seconds of the whole trace if not said otherwise."""

    policy: str
    memory_bytes: int
    disk_bytes: int
    redis_bytes: int
    block_hit_share: float
    token_hit_share: float
    l2_hit_share: float  # of blocks, as the next two
    file_hit_share: float
    redis_hit_share: float
    optimum_block_hit_share: float  # with room for all that memory and disk hold together
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
    """The rates that `kvtier worth --json` measured, over those given. ConfigError if the file is none of its."""
    told = measured_by(path)
    found: dict[str, float] = {}
    for name in (each.name for each in fields(LoadRates)):
        value = told.get("prefill_tokens_per_second" if name == "prefill" else f"{name}_bytes_per_second")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            raise ConfigError(f"--from {path}: {name}: {value!r:.40} is no rate; measure anew, by kvtier worth --json")
        found[name] = float(value)
    return replace(rates, **found)


def optimum_of(trace: RequestTrace) -> Optimum:
    """The bound for a trace."""
    return Optimum([trace.chain(request).tolist() for request in range(len(trace))], trace.num_prompt.tolist())


def value_of(
    run: SimulatedRun, trace: RequestTrace, optimum: Optimum, block_bytes: int, rates: LoadRates, gpu_hour: float | None
) -> RunValue:
    """A run in figures. A request loads what it found only where that is faster than computing it."""
    found = run.found.astype(np.int64)
    blocks, prompts = found.sum(1), np.maximum(trace.num_tokens, 1)
    load = found @ (block_bytes / np.array([rates.l2, rates.file, rates.redis]))
    saved = np.maximum(blocks * trace.block_size / rates.prefill - load, 0.0)
    without = prompts / rates.prefill
    asked = max(1, optimum.num_asked)
    capacity = run.capacity
    shares = dict(zip(TIERS, (found.sum(0) / asked).tolist(), strict=True))
    seconds = float(saved.sum())
    return RunValue(
        policy=capacity.policy,
        memory_bytes=capacity.memory,
        disk_bytes=capacity.disk,
        redis_bytes=capacity.redis,
        block_hit_share=float(blocks.sum()) / asked,
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


# --- as people see it ------------------------------------------------------------------------------------------------

_GIB: Final = 1 << 30


def table_of_runs(values: Sequence[RunValue], requests: RequestTrace, assumed: Sequence[str]) -> Table:
    """A row for each run; columns of tiers and of money only where there are some."""
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
    """Hit share and time to the first token by memory: a line for each policy, and for each size of what lies below."""
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
        Chart("Blocks that were found", "memory, GiB", "% of blocks asked for", hits, log_x=True),
        Chart("Time to the first token", "memory, GiB", "mean TTFT, ms", times, log_x=True),
    ]
