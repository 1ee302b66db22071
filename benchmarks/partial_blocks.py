"""What partial blocks are worth at block sizes of 16 to 256 tokens: off, on, and on with the tails of requests kept.

`--trace`, in Mooncake's form with blocks of 512 tokens, and made-up chats that part at any token (`_prefix_reuse.py`)
are replayed against a cache that evicts nothing. A prompt finds the whole blocks that are held; with partial blocks
also the leading tokens of one more, a full block stored behind the last of these (of eight that the index remembers in
chats). Tails are the unfinished blocks that requests end with. The replay counts, and simulates no time. Names are
hashed as an engine does it. The index's bytes are those of L2's pool and of the slab's mirror, a block. Then kvtier's
engine answers prompts that part from a held one inside a block, out of L1, L2 and the slab, with and without partial
blocks, in turns. The chats are replayed once more over an L2 with room for a part of them: tails age as
blocks do, an eighth of L2 at most.
"""

import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import recovery
import torch
from _prefix_reuse import Exchange, PrefixReuse, chats, computed_in, replay, trace_exchanges
from _report import RESULTS, SHARED, Given, Result, Row, Target, option, program, progress, took
from _rig import leave_only, over_slab, random_tokens, scratch, settle

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, Model, SamplingParams
from kvtier.engine.demo import demo_model
from kvtier.service import Chart, Line, save_png
from kvtier.tiers.file import slab
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.pool import SlotPool

BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
TRACE: Final = SHARED / "traces" / "conversation_trace.jsonl.gz"
ROOT: Final = root_hash(b"partial blocks".ljust(32, b"."))
ROOM: Final = (4, 6, 8, 12, 25, 50)  # % of all that the chats come to, in L2
SAMPLE: Final = 1 << 14  # blocks that the index's bytes are measured on
QUESTION: Final = 24  # tokens of an engine's prompt behind what it shares
LOADED: Final = 'kvtier_bytes_total{tier="l2",direction="load"}'


def hashing(exchanges: Sequence[Exchange], block_size: int) -> tuple[int, float]:
    """How many blocks of all prompts and answers have names, and the CPU seconds it took to name them."""
    names, cpu = 0, 0.0
    for exchange in exchanges:
        chain, tokens = TokenChain(ROOT, block_size), exchange.tokens()
        cpu += took(partial(chain.extend, tokens), time.process_time)
        names += len(chain.hashes)
    return names, cpu


@cache
def index_bytes(block_size: int) -> float:
    """Bytes that L2's index and the slab's mirror keep of a block: how they grow with their blocks."""
    row, known = (slab.entry_dtype(size).itemsize for size in (block_size, recovery.BLOCK_SIZE))
    return _index_growth() + row - known  # a row of the mirror has the block's tokens


@cache
def _index_growth() -> float:
    """Bytes a block of 16 tokens, by two indices of which one has twice the blocks."""
    return (_bytes_of(2 * SAMPLE) - _bytes_of(SAMPLE)) / SAMPLE


def _bytes_of(num_blocks: int) -> int:
    with scratch("partial") as name:
        recovery.build(home := Path(name), num_blocks)
        tracemalloc.start()
        try:
            pool = SlotPool(num_blocks)
            store = recovery.opened(home, num_blocks)
            measured = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert store.num_recovered == pool.num_slots
        store.close()
        return measured


def replayed(workload: str, exchanges: Sequence[Exchange]) -> list[Row]:
    rows: list[Row] = []
    for block_size in BLOCK_SIZES:
        progress(f"{workload}, blocks of {block_size}")
        names, cpu = hashing(exchanges, block_size)
        for reuse in PrefixReuse:
            done = replay(exchanges, block_size, reuse)
            copies = (done.loads + done.stores) / done.num_requests
            row: Row = {"workload": workload, "block": block_size, "partial": reuse.value}
            row["cached %"] = 100 * done.cached_tokens / done.prompt_tokens
            row["computed a request"] = (done.prompt_tokens - done.cached_tokens) / done.num_requests
            row |= {"blocks named": done.held_blocks, "copies a request": copies}
            row |= {"tokens copied a request": copies * block_size}
            row |= {"index MB": done.held_blocks * index_bytes(block_size) / 1e6}
            rows.append(row | {"names hashed": names, "hashing CPU s": cpu})
    return rows


def bounded(exchanges: Sequence[Exchange], held_tokens: int) -> list[Row]:
    """Tokens computed in an L2 with room for a part of what the chats come to."""
    rows: list[Row] = []
    for percent, block_size in product(ROOM, BLOCK_SIZES):
        row: Row = {"workload": "bounded chat", "room %": percent, "block": block_size}
        rows.append(row | {"computed a request": computed_in(exchanges, held_tokens * percent // 100, block_size)})
    return rows


class PartialArm:
    def __init__(self, model: Model, home: Path, block_size: int, length: int, *, partial: bool) -> None:
        config = over_slab(home, "512MiB", "1GiB", block_size=block_size, partial_blocks=partial)
        sizes: Row = {"block_size": block_size, "num_blocks": 4 * length // block_size}
        options = EngineConfig(**sizes, max_num_batched_tokens=1024, partial_blocks=partial)
        self.engine: Any = Engine(model, options, LocalConnector.connect(config))

    def ask(self, prompt: Sequence[int], tier: str) -> tuple[float, float, int, int]:
        """Ask while only `tier` and those below hold anything.

        Returns milliseconds to the first token, CPU milliseconds of all threads until then, tokens that were cached,
        and blocks copied into L1.
        """
        hierarchy = self.engine.connector.hierarchy
        settle(self.engine)
        leave_only(self.engine, tier, page_cache=True)
        before = hierarchy.stats().get(LOADED, 0.0)
        begun = time.process_time()
        [answer] = self.engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        cpu = time.process_time() - begun
        settle(self.engine)
        loaded = int(hierarchy.stats().get(LOADED, 0.0) - before) // self.engine.shape.block_bytes
        copied = loaded + (answer.num_l1_tokens % self.engine.config.block_size > 0)  # in L1 a part is one copy
        return answer.ttft * 1e3, cpu * 1e3, answer.num_l1_tokens + answer.num_external_tokens, copied


def timed(block_sizes: Sequence[int], *, length: int, rounds: int) -> list[Row]:
    """A row for each block size, tier and arm: medians over prompts that share from half of a held one's tokens on.

    Both arms answer a fresh prompt and then, from a tier, one that parts from it. Their order is drawn.
    """
    model = Model.from_config(demo_model(), seed=0)
    rows: list[Row] = []
    for block_size in block_sizes:
        draw = np.random.default_rng(1)
        seen: dict[tuple[str, bool], list[tuple[float, float, int, int]]] = defaultdict(list)
        with scratch("partial") as home:
            arms = {on: PartialArm(model, Path(home, str(on)), block_size, length, partial=on) for on in (False, True)}
            for arm in arms.values():
                arm.ask(random_tokens(draw, 256, 0, 8000), "l1")  # warm up
            for number in range(rounds):
                progress(f"engine, blocks of {block_size}, round {number + 1}/{rounds}")
                for tier in ("l1", "l2", "file"):
                    held = random_tokens(draw, length, 0, 8000)
                    prompt = held[: int(draw.integers(length // 2, length - 1))]
                    prompt += [(held[len(prompt)] + 1) % 8000, *random_tokens(draw, QUESTION, 0, 8000)]
                    for on in draw.permutation([False, True]).tolist():
                        arms[on].ask(held, "l1")
                        seen[tier, on].append(arms[on].ask(prompt, tier))
            for arm in arms.values():
                arm.engine.close()
        for (tier, on), found in seen.items():
            row: Row = {"workload": "engine", "block": block_size, "partial": "on" if on else "off", "tier": tier}
            columns = ("TTFT ms", "CPU ms", "tokens cached", "copies a request")
            rows.append(row | dict(zip(columns, map(median, zip(*found, strict=True)), strict=True)))
    return rows


def targets(rows: Sequence[Row], timings: Sequence[Row]) -> list[Target]:
    """Large blocks lose no hits with partial blocks, and no engine is slower with them."""
    share = {(row["workload"], row["block"], row["partial"]): row["cached %"] for row in rows}
    ttft = {(row["block"], row["tier"], row["partial"]): row["TTFT ms"] for row in timings}
    found = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        best = share[workload, BLOCK_SIZES[0], PrefixReuse.WHOLE.value]
        kept = share[workload, BLOCK_SIZES[-1], PrefixReuse.TAILS.value]
        found.append(Target(f"{workload}: cached at 256 with partial blocks over 16 without", 1.0, kept / best, False))
    for block_size, tier in dict.fromkeys((row["block"], row["tier"]) for row in timings):
        ratio = ttft[block_size, tier, "on"] / ttft[block_size, tier, "off"]
        found.append(Target(f"TTFT, blocks of {block_size} from {tier}: partial on over off", 1.05, ratio))
    return found


def charts(rows: Sequence[Row]) -> Iterator[Chart]:
    for workload, column in product(dict.fromkeys(row["workload"] for row in rows), ("cached %", "copies a request")):
        lines = []
        for reuse in PrefixReuse:
            chosen = [row for row in rows if (row["workload"], row["partial"]) == (workload, reuse.value)]
            label = f"partial blocks {reuse.value}"
            lines.append(Line(label, [row["block"] for row in chosen], [row[column] for row in chosen]))
        yield Chart(workload, "block size, tokens", column, lines, log_x=True, log_y=column != "cached %")


def workloads_of(trace: Path | None, *, quick: bool) -> dict[str, list[Exchange]]:
    found = {"chat": chats(60 if quick else 1000)}
    if trace is None and not TRACE.is_file():
        progress(f"no trace at {TRACE.name}: only chats are replayed; name one in Mooncake's form, by --trace")
        return found
    return found | {"trace": trace_exchanges(trace or TRACE, 200 if quick else None)}


@program(
    option("--trace", type=Path, help="JSON lines in Mooncake's form, .gz or not"),
    option("--no-engine", action="store_true", help="replay only"),
)
@torch.no_grad()
def main(args: Given) -> Result:
    workloads = workloads_of(args.trace, quick=args.quick)
    rows = [row for workload, exchanges in workloads.items() for row in replayed(workload, exchanges)]
    held = next(row["blocks named"] * row["block"] for row in rows)  # of the chats, which come first
    tight = bounded(workloads["chat"], held)
    sizes, length, rounds = (BLOCK_SIZES[::4], 512, 1) if args.quick else (BLOCK_SIZES, 2048, 3)
    timings: list[Row] = [] if args.no_engine else timed(sizes, length=length, rounds=rounds)
    if args.save:
        save_png(RESULTS / "partial_blocks.png", [*charts(rows)])
    setup: Row = {f"{workload} requests": len(exchanges) for workload, exchanges in workloads.items()}
    return [*rows, *tight, *timings], targets(rows, timings), setup
