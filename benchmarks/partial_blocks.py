"""What partial blocks are worth at block sizes of 16 to 256 tokens: off, on, and on with the tails of requests kept.

Two workloads are replayed against a cache that evicts nothing: `--trace`, in Mooncake's form with blocks of 512 tokens,
and made-up chats that part at any token (benchmarks/_chats.py). A prompt finds the whole blocks that are held. With
partial blocks it also finds the leading tokens of one more: of a full block that was stored behind the last of these,
one of eight that the index remembers in chats. Tails are the unfinished blocks that requests end with.

The replay counts. Nothing there is simulated in time. Names are hashed as an engine does it, every prompt anew. The
index's bytes are those of L2's pool and of the slab's mirror, a block. Then kvtier's engine answers prompts that part
from a held one inside a block, out of L1, L2 and the slab, with and without partial blocks, in turns.

The chats are replayed once more over an L2 with room for a part of all they come to. Tails are not kept there, go
before any whole block, or age as blocks do, an eighth of L2 at most: that is what kvtier does.

The block size that wins is the largest one that computes and copies next to nothing more than the best.
"""

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import matplotlib
import recovery
import torch
from _bounded_reuse import Tails, computed_in
from _chats import Exchange, chats, trace_exchanges
from _partial_engine import timed
from _prefix_reuse import PrefixReuse, Replayed, replay
from _report import RESULTS, Target, parser, progress, report

from kvtier.tiers import KVTierError
from kvtier.tiers.file import FileStore, slab
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.pool import SlotPool

matplotlib.use("Agg")
from matplotlib import pyplot

BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
TRACE: Final = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl.gz"
ROOT: Final = root_hash(b"partial blocks".ljust(32, b"."))
COMPUTED: Final = 1.02  # times the fewest tokens a request: next to nothing more
COPIED: Final = 1.10  # times the fewest tokens copied a request
ROOM: Final = (4, 6, 8, 12, 25, 50)  # % of all that the chats come to, in L2
_SAMPLE: Final = 1 << 14  # blocks that the index's bytes are measured on

Row = dict[str, Any]


def hashing(exchanges: Sequence[Exchange], block_size: int) -> tuple[int, float]:
    """How many blocks of all prompts and answers have names, and the CPU seconds it took to name them."""
    names, cpu = 0, 0.0
    for exchange in exchanges:
        tokens = exchange.tokens()
        begun = time.process_time()
        chain = TokenChain(ROOT, block_size)
        chain.extend(tokens)
        cpu += time.process_time() - begun
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
    return (_bytes_of(2 * _SAMPLE) - _bytes_of(_SAMPLE)) / _SAMPLE


def _bytes_of(num_blocks: int) -> int:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=Path(__file__).parent) as home:
        recovery.build(Path(home), num_blocks)
        tracemalloc.start()
        try:
            pool = SlotPool(num_blocks)
            store = FileStore.open(
                Path(home),
                recovery.FINGERPRINT,
                slot_bytes=recovery.SLOT_BYTES,
                block_size=recovery.BLOCK_SIZE,
                size=recovery.size_of(num_blocks),
            )
            measured = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert store.num_recovered == pool.num_slots
        store.close()
        return measured


def replayed(workload: str, exchanges: Sequence[Exchange]) -> list[Row]:
    """A row for each block size and kind of reuse."""
    rows = []
    for block_size in BLOCK_SIZES:
        progress(f"{workload}, blocks of {block_size}")
        names, cpu = hashing(exchanges, block_size)
        for reuse in PrefixReuse:
            done = replay(exchanges, block_size, reuse)
            rows.append(row_of(workload, block_size, reuse, done) | {"names hashed": names, "hashing CPU s": cpu})
    return rows


def bounded(exchanges: Sequence[Exchange], held_tokens: int) -> list[Row]:
    """Chats over an L2 with room for a part of all that they come to, with tails and without."""
    rows = []
    for percent in ROOM:
        progress(f"chat, room for {percent} %")
        for block_size in BLOCK_SIZES:
            for tails in Tails:
                computed = computed_in(exchanges, held_tokens * percent // 100, block_size, tails)
                rows.append({"workload": "bounded chat", "room %": percent, "block": block_size, "tails": tails.value,
                             "computed a request": computed})  # fmt: skip
    return rows


def row_of(workload: str, block_size: int, reuse: PrefixReuse, done: Replayed) -> Row:
    per = done.num_requests
    copies = (done.loads + done.stores) / per
    return {
        "workload": workload,
        "block": block_size,
        "partial": reuse.value,
        "cached %": 100 * done.cached_tokens / done.prompt_tokens,
        "all children known %": 100 * done.ideal_tokens / done.prompt_tokens,
        "computed a request": (done.prompt_tokens - done.cached_tokens) / per,
        "blocks named": done.held_blocks,
        "copies a request": copies,
        "tokens copied a request": copies * block_size,
        "index MB": done.held_blocks * index_bytes(block_size) / 1e6,
    }


def winner(rows: Sequence[Row], reuse: PrefixReuse) -> tuple[int, str]:
    """The largest block size that is next to the best in every workload, and why it is that one."""
    chosen = [row for row in rows if row["partial"] == reuse.value]
    workloads = sorted({row["workload"] for row in chosen})
    best = {
        (workload, column): min(row[column] for row in chosen if row["workload"] == workload)
        for workload in workloads
        for column in ("computed a request", "tokens copied a request")
    }
    able: list[int] = []
    for block_size in BLOCK_SIZES:
        ratios = [
            (row["computed a request"] / best[row["workload"], "computed a request"],
             row["tokens copied a request"] / best[row["workload"], "tokens copied a request"])
            for row in chosen
            if row["block"] == block_size
        ]  # fmt: skip
        if all(computed <= COMPUTED and copied <= COPIED for computed, copied in ratios):
            able.append(block_size)
    size = max(able, default=BLOCK_SIZES[0])
    told = [_reason(chosen, workload, size) for workload in workloads]
    return size, f"partial blocks {reuse.value}: blocks of {size} win. {' '.join(told)}"


def _reason(rows: Sequence[Row], workload: str, size: int) -> str:
    at = {row["block"]: row for row in rows if row["workload"] == workload}
    ours, first = at[size], at[BLOCK_SIZES[0]]
    return (
        f"{workload}: {ours['computed a request']:.1f} tokens computed a request ({first['computed a request']:.1f} at "
        f"{BLOCK_SIZES[0]}), {ours['tokens copied a request']:.0f} copied ({first['tokens copied a request']:.0f}) in "
        f"{ours['copies a request']:.1f} copies ({first['copies a request']:.1f}), "
        f"{ours['names hashed'] / first['names hashed']:.3f} of the names, "
        f"{ours['index MB'] / first['index MB']:.3f} of the index."
    )


def targets(rows: Sequence[Row], timings: Sequence[Row]) -> list[Target]:
    """Large blocks lose no hits with partial blocks, and no engine is slower with them."""
    at = {(row["workload"], row["block"], row["partial"]): row for row in rows}
    found = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        best = at[workload, BLOCK_SIZES[0], PrefixReuse.WHOLE.value]["cached %"]
        kept = at[workload, BLOCK_SIZES[-1], PrefixReuse.TAILS.value]["cached %"]
        found.append(Target(f"{workload}: cached at 256 with partial blocks over 16 without", 1.0, kept / best, False))
    ttft = {(row["block"], row["tier"], row["partial"]): row["TTFT ms"] for row in timings}
    for block_size, tier in dict.fromkeys((row["block"], row["tier"]) for row in timings):
        ratio = ttft[block_size, tier, "on"] / ttft[block_size, tier, "off"]
        found.append(Target(f"TTFT, blocks of {block_size} from {tier}: partial on over off", 1.05, ratio))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Cached share and copies over the block size, a column for each workload."""
    workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
    figure, axes = pyplot.subplots(
        2, len(workloads), figsize=(4.4 * len(workloads), 5), layout="constrained", squeeze=False
    )
    styles = {PrefixReuse.WHOLE: "o:", PrefixReuse.PARTIAL: "s--", PrefixReuse.TAILS: "D-"}
    for place, workload in enumerate(workloads):
        for line, (column, label) in enumerate((("cached %", "prompt tokens cached, %"), ("copies a request",) * 2)):
            axis = axes[line][place]
            for reuse, style in styles.items():
                chosen = [row for row in rows if (row["workload"], row["partial"]) == (workload, reuse.value)]
                axis.plot([row["block"] for row in chosen], [row[column] for row in chosen], style,
                          label=f"partial blocks {reuse.value}", markersize=4)  # fmt: skip
            axis.set(xscale="log", ylabel=label, xlabel="block size, tokens" if line else "")
            axis.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
            axis.minorticks_off()
            if line:
                axis.set_yscale("log")
            else:
                axis.set_title(workload, fontsize=10)
        axes[0][place].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def workloads_of(args: argparse.Namespace) -> dict[str, list[Exchange]]:
    """The chats, and the trace if it is there."""
    found = {"chat": chats(60 if args.quick else 1000)}
    if args.trace is None and not TRACE.is_file():
        progress(f"no trace at {TRACE.name}: only chats are replayed; name one in Mooncake's form, by --trace")
        return found
    path = args.trace or TRACE
    return found | {"trace": trace_exchanges(path, 200 if args.quick else None)}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, help="JSON lines in Mooncake's form, .gz or not")
    options.add_argument("--no-engine", action="store_true", help="replay only")
    args = options.parse_args()
    try:
        workloads = workloads_of(args)
    except KVTierError as error:
        print(f"partial_blocks: {error}", file=sys.stderr)
        return 2
    rows = [row for workload, exchanges in workloads.items() for row in replayed(workload, exchanges)]
    held = next(row["blocks named"] * row["block"] for row in rows)  # of the chats, which come first
    tight = bounded(workloads["chat"], held)
    sizes = BLOCK_SIZES[::4] if args.quick else BLOCK_SIZES
    length, rounds = (512, 1) if args.quick else (2048, 3)
    timings: list[Row] = [] if args.no_engine else timed(sizes, length=length, rounds=rounds)
    if args.save:
        plot(rows, RESULTS / "partial_blocks.png")
    conclusions = {reuse.value: winner(rows, reuse) for reuse in PrefixReuse}
    setup: Mapping[str, object] = {
        **{f"{workload} requests": len(exchanges) for workload, exchanges in workloads.items()},
        **{f"winner, partial blocks {name}": size for name, (size, _) in conclusions.items()},
        "why": conclusions[PrefixReuse.TAILS.value][1],
    }
    if not args.json:
        for _, reason in conclusions.values():
            progress(reason)
    return report("partial_blocks", [*rows, *tight, *timings], targets(rows, timings), args.json, args.save, setup)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
