"""What a run's hits are worth: prefill seconds saved, time to the first token, and money, from rates."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.service.simulation.optimum import Optimum
from kvtier.service.simulation.replay import TIERS, SimulatedRun
from kvtier.service.traces import RequestTrace
from kvtier.tiers import L2, ConfigError


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
    try:
        told: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--from {path}: {error.strerror}; name what kvtier worth --json printed") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--from {path}: not JSON; name what kvtier worth --json printed") from None
    if not isinstance(told, dict) or told.get("kvtier_worth") != 1:
        raise ConfigError(f'--from {path}: no "kvtier_worth": 1 there; name what kvtier worth --json printed')
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
