"""Memory of L2 besides the blocks' own bytes: index, order, child index and records, all slots filled.

Blocks are stored as the hierarchy stores them (reserve, describe, seal, release), but of their bytes no page is
touched. `bytes_a_block` is what the process grew by; tokens are 4 bytes each of that, and stand in a column of their
own. `gc_pass_ms` is one full collection, of a process that holds nothing else.
"""

import gc
import mmap
import os
import time
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from _report import Given, Result, Row, Target, program, progress, took
from _rig import random_names, records_of, reserved, resident_bytes, spawned

from kvtier.tiers import ChainHash
from kvtier.tiers.host import HostRegion, HostTier, slot_stride

COUNTS: Final = (100_000, 1_000_000, 10_000_000)
WARM_UP: Final = 4096  # blocks of a first tier in each process: what a process takes once is no block's
BLOCK_SIZES: Final = (16, 64)  # tokens
BATCH: Final = 2048  # blocks of one chain
MAP_NORESERVE: Final = 0x4000  # Linux's, which Python 3.11 has no name for
GC_MS: Final = 5.0  # that a pass may take longer than of an empty process


class Footprint(NamedTuple):
    resident: int  # bytes
    gc_ms: float

    @classmethod
    def now(cls) -> "Footprint":
        """After a full collection."""
        gc.collect()
        gc_ms = min(took(gc.collect, time.process_time) for _ in range(5)) * 1e3
        return cls(resident_bytes(), gc_ms)


def unbacked_region(num_blocks: int) -> HostRegion:
    """Slots of a page each, more than the machine has memory for: nothing is written to them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return HostRegion(mmap.mmap(-1, num_blocks * slot_stride(1), flags=flags), num_blocks, 1, None)


def names_of(number: int, num_blocks: int = BATCH) -> tuple[list[ChainHash], ChainHash]:
    """The names of a chain's blocks, and its parent: always the same, so that none need be kept."""
    root, *names = random_names(np.random.default_rng(number), num_blocks + 1)
    return names, root


def fill(host: HostTier, block_size: int) -> None:
    for number, first in enumerate(range(0, host.pool.num_slots, BATCH)):
        names, root = names_of(number, min(BATCH, host.pool.num_slots - first))
        checksums, tokens = [1 << 63 | number] * len(names), os.urandom(4 * block_size)
        reservation = reserved(host.pool, names, root)
        host.describe(reservation.slots, records_of(names, checksums, root, tokens))
        host.pool.seal(reservation).release()


def measure(num_blocks: int, block_size: int) -> Row:
    """A tier of so many blocks, full."""
    if num_blocks > WARM_UP:
        measure(WARM_UP, block_size)
    region, before = unbacked_region(num_blocks), Footprint.now()
    host = HostTier(region, block_size=block_size)
    fill(host, block_size)
    after = Footprint.now()
    assert host.pool.lookup(names_of(0)[0]) == BATCH
    total = (after.resident - before.resident) / num_blocks
    host.close()
    row = {"blocks": num_blocks, "block_tokens": block_size, "bytes_a_block": round(total, 1)}
    row |= {"of_tokens": 4 * block_size, "besides": round(total - 4 * block_size, 1)}
    return row | {"gc_pass_ms": round(after.gc_ms, 2), "gc_pass_ms_empty": round(before.gc_ms, 2)}


@program()
def main(given: Given) -> Result:
    rows: list[Row] = []
    for num_blocks, block_size in product(COUNTS[:1] if given.quick else COUNTS, BLOCK_SIZES):
        progress(f"{num_blocks:,} blocks of {block_size} tokens")
        rows.append(spawned(measure, num_blocks, block_size))
    targets = []
    for row in rows:
        name = f"{row['blocks']:,} blocks of {row['block_tokens']} tokens in L2"
        longer = round(row["gc_pass_ms"] - row["gc_pass_ms_empty"], 2)
        targets.append(Target(f"{name}: ms that a gc pass takes longer than of none", GC_MS, longer))
    return rows, targets
