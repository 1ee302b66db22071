"""Memory of L2 besides the blocks' own bytes: index, order, child index and records, all slots filled.

Blocks are stored as the hierarchy stores them (reserve, describe, seal, release), but of their bytes no page is
touched. `bytes_a_block` is what the process grew by; tokens are 4 bytes each of that, and stand in a column of their
own. `gc_pass_ms` is one full collection, of a process that holds nothing else. `gc_objects` and `python_blocks` are
what the garbage collector and Python's allocator have more of. Times are CPU time, lookups by batches of 2,048 names.
"""

import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import _report
import numpy as np

from kvtier.tiers import BlockRecord, ChainHash
from kvtier.tiers.host import HostRegion, HostTier, slot_stride

COUNTS: Final = (100_000, 1_000_000, 10_000_000)
WARM_UP: Final = 4096  # blocks of a first tier in each process: what a process takes once is no block's
BLOCK_SIZES: Final = (16, 64)  # tokens
BATCH: Final = 2048  # blocks of one chain
LOOKUPS: Final = 100
BYTES: Final = 200  # a block, tokens apart
MAP_NORESERVE: Final = 0x4000  # Linux's, which Python 3.11 has no name for
DEADLINE: Final = 1800  # seconds, of a row
GC_MS: Final = 5.0  # that a pass may take longer than of an empty process


@dataclass(frozen=True)
class Footprint:
    """What the process has taken by now."""

    resident: int  # bytes
    tracked: int  # objects the garbage collector goes through
    allocated: int  # blocks of Python's allocator
    gc_ms: float

    @classmethod
    def now(cls) -> "Footprint":
        """After a full collection."""
        gc.collect()
        gc_ms = min(cpu_seconds(gc.collect) for _ in range(5)) * 1e3
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        return cls(resident, len(gc.get_objects()), sys.getallocatedblocks(), gc_ms)


def cpu_seconds(action: Callable[[], object]) -> float:
    """How long it took this process."""
    started = time.process_time()
    action()
    return time.process_time() - started


def unbacked_region(num_blocks: int) -> HostRegion:
    """Slots of a page each, more than the machine has memory for: nothing is written to them."""
    size = num_blocks * slot_stride(1)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return HostRegion(mmap.mmap(-1, size, flags=flags), num_blocks, 1, None)


def names_of(number: int, num_blocks: int) -> tuple[list[ChainHash], ChainHash]:
    """The names of a chain's blocks, and its parent: always the same, so that none need be kept."""
    joined = np.random.default_rng(number).bytes(32 * (num_blocks + 1))
    root, *names = (joined[i : i + 32] for i in range(0, len(joined), 32))
    return names, root


def fill(host: HostTier, block_size: int) -> None:
    """Store as many blocks as there are slots."""
    width, num_slots = 4 * block_size, host.pool.num_slots
    for number in range(-(-num_slots // BATCH)):
        names, root = names_of(number, min(BATCH, num_slots - number * BATCH))
        tokens = os.urandom(width * len(names))
        records = [
            BlockRecord(name, parent, tokens[i * width : (i + 1) * width], 1 << 63 | number)
            for i, (name, parent) in enumerate(zip(names, [root, *names[:-1]], strict=True))
        ]
        reservation = host.pool.reserve(names, root)
        if reservation is None:
            raise RuntimeError("the pool has fewer slots than it says")
        host.describe(reservation.slots, records)
        host.pool.seal(reservation).release()


def lookup_us(host: HostTier, batches: Sequence[Sequence[ChainHash]], num_found: int) -> float:
    """Microseconds a name."""

    def ask() -> None:
        for names in batches:
            if host.pool.lookup(names) != min(num_found, len(names)):
                raise RuntimeError("a lookup found something else than was stored")

    ask()
    return cpu_seconds(ask) / sum(map(len, batches)) * 1e6


def measure(num_blocks: int, block_size: int) -> dict[str, object]:
    """One row: a tier of so many blocks, full. A process of its own has no memory of an earlier row to use again."""
    if num_blocks > WARM_UP:
        measure(WARM_UP, block_size)
    region, before = unbacked_region(num_blocks), Footprint.now()
    host = HostTier(region, block_size=block_size)
    started = time.process_time()
    fill(host, block_size)
    fill_seconds = time.process_time() - started
    after = Footprint.now()
    num_full = num_blocks // BATCH
    held = [names_of(number, BATCH)[0] for number in range(0, num_full, max(1, num_full // LOOKUPS))]
    gone = [names_of(num_full + 1 + number, BATCH)[0] for number in range(LOOKUPS)]
    hits, misses = lookup_us(host, held, BATCH), lookup_us(host, gone, 0)
    one = lookup_us(host, [[name] for names in held for name in names[:: BATCH // 16]], 1)
    total = (after.resident - before.resident) / num_blocks
    row: dict[str, object] = {
        "blocks": num_blocks,
        "block_tokens": block_size,
        "bytes_a_block": round(total, 1),
        "of_tokens": 4 * block_size,
        "besides": round(total - 4 * block_size, 1),
        "gc_pass_ms": round(after.gc_ms, 2),
        "gc_pass_ms_empty": round(before.gc_ms, 2),
        "gc_objects": after.tracked - before.tracked,
        "python_blocks": after.allocated - before.allocated,
        "fill_us_a_block": round(fill_seconds / num_blocks * 1e6, 2),
        "lookup_us_a_hit": round(hits, 3),
        "lookup_us_a_miss": round(misses, 3),
        "lookup_us_one_name": round(one, 2),
    }
    host.close()
    return row


def main() -> int:
    """Measure, print, and say whether the targets were met."""
    parser = _report.parser(__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="how many, instead of 0.1, 1 and 10 M")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="tokens in a block, instead of 16 and 64")
    options = parser.parse_args()
    counts = options.blocks or (COUNTS[:1] if options.quick else COUNTS)
    rows: list[dict[str, object]] = []
    for num_blocks in counts:
        for block_size in options.tokens or BLOCK_SIZES:
            _report.progress(f"{num_blocks:,} blocks of {block_size} tokens")
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                rows.append(process.submit(measure, num_blocks, block_size).result(timeout=DEADLINE))
    targets = []
    for row in rows:
        name = f"{row['blocks']:,} blocks of {row['block_tokens']} tokens in L2"
        slower = round(float(str(row["gc_pass_ms"])) - float(str(row["gc_pass_ms_empty"])), 2)
        targets += [
            _report.Target(f"{name}: bytes a block, tokens apart", BYTES, float(str(row["besides"]))),
            _report.Target(f"{name}: bytes a block with its tokens", BYTES, float(str(row["bytes_a_block"]))),
            _report.Target(f"{name}: ms that a gc pass takes longer than of none", GC_MS, slower),
        ]
    return _report.report("memory", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
