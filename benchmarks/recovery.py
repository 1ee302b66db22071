"""Reopening a slab of 1,000,000 entries: CPU seconds and Python memory, beside reading the same table plainly.

The payloads are 4 KiB, never written: recovery reads the entry table alone. The table is in the page cache, so the
figure is CPU, not disk. Each run is a process of its own.
"""

import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _report import DISK, Given, Result, Row, in_turns, program, progress
from _rig import spawned

from kvtier.tiers.file import PAGE, FileIO, FileStore, open_slab, release, slab, write_all

FINGERPRINT = b"recovery benchmark".ljust(32, b".")
SLOT_BYTES, BLOCK_SIZE = 4096, 16


def size_of(num_entries: int) -> int:
    row = slab.entry_dtype(BLOCK_SIZE).itemsize
    return num_entries * (SLOT_BYTES + row) + 8 * (slab.EXTENT_BYTES + PAGE)


def build(directory: Path, num_entries: int) -> None:
    """A slab whose every row is valid, written straight into its table: chains of random hashes."""
    io = FileIO()
    wanted = slab.plan(FINGERPRINT, SLOT_BYTES, BLOCK_SIZE, size_of(num_entries))
    file = open_slab(io, directory, wanted, size_of(num_entries))
    superblock, rng = file.superblock, np.random.default_rng(1)
    for first in range(0, num_entries, superblock.slots_per_extent):
        count = min(superblock.slots_per_extent, num_entries - first)
        rows = np.zeros(count, slab.entry_dtype(BLOCK_SIZE))
        rows["state"], rows["generation"] = slab.READY, 1
        rows["seq"] = rows["slot"] = np.arange(first, first + count)
        rows["seq"] += 1
        for field in ("chain_hash", "parent"):
            rows[field] = np.frombuffer(rng.bytes(32 * count), "V32")
        rows["payload_checksum"] = rng.integers(0, 2**63, count)
        rows["payload_bytes"], rows["num_tokens"] = SLOT_BYTES, BLOCK_SIZE
        rows["tokens"] = np.frombuffer(rng.bytes(4 * BLOCK_SIZE * count), f"V{4 * BLOCK_SIZE}")
        slab.seal_rows(rows, superblock)
        write_all(io, file.fd, [slab.byte_view(rows)], superblock.row_offset(first))
    release(io, file)


def opened(directory: Path, num_entries: int, **options: Any) -> FileStore:
    size = size_of(num_entries)
    return FileStore.open(directory, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=size, **options)


def measure(directory: Path, num_entries: int, what: str) -> dict[str, float]:
    """In a process of its own: reading the table, or opening the slab, with `memory` under tracemalloc."""
    if what == "memory":
        tracemalloc.start()
    before = time.process_time()
    if what == "read":
        with next(directory.glob("*.slab")).open("rb", buffering=0) as file:
            view = memoryview(np.empty(num_entries * slab.entry_dtype(BLOCK_SIZE).itemsize, np.uint8))
            for begin in range(0, len(view), 8 << 20):
                file.readinto(view[begin : begin + (8 << 20)])
    else:
        assert opened(directory, num_entries, mode="buffered").num_recovered == num_entries
    return {"cpu": time.process_time() - before, "memory": tracemalloc.get_traced_memory()[0]}


@program(DISK)
def main(given: Given) -> Result:
    num_entries, repeats = (100_000, 3) if given.quick else (1_000_000, 5)
    with tempfile.TemporaryDirectory(prefix=".recovery-", dir=given.directory) as home:
        directory = Path(home)
        progress(f"building a slab of {num_entries:,} entries ({size_of(num_entries) / 1e9:.1f} GB, preallocated)")
        build(directory, num_entries)
        turns = {what: partial(spawned, measure, directory, num_entries, what) for what in ("read", "open")}
        runs = in_turns(turns, repeats)
        memory = spawned(measure, directory, num_entries, "memory")
    read, rose = ({column: median(run[column] for run in each) for column in each[0]} for each in runs.values())
    rows: list[Row] = [
        {"what": what, "entries": num_entries, "cpu s": each["cpu"]}
        for what, each in (("read the table plainly", read), ("FileStore.open", rose))
    ]
    rows[1]["bytes/entry"] = memory["memory"] / num_entries
    return rows
