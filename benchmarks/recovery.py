"""Reopening a slab of 1,000,000 entries: CPU seconds and Python memory, beside reading the same table plainly.

"gc" is what one full collection of Python's garbage takes with the slab open: no object a block means next to nothing.

The payloads are 4 KiB, never written: recovery reads the entry table alone. The table is in the page cache, so the
figure is CPU, not disk. Each run is a process of its own.
"""

import gc
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from _report import Target, parser, progress, report

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
    superblock = file.superblock
    rng = np.random.default_rng(1)
    step = superblock.slots_per_extent
    for extent in range(superblock.num_extents):
        first = extent * step
        count = min(step, num_entries - first)
        if count <= 0:
            break
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


def child(directory: Path, num_entries: int, what: str) -> None:
    """One measurement, printed as JSON."""
    if what == "memory":
        tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    if what == "read":
        path = next(directory.glob("*.slab"))
        with path.open("rb", buffering=0) as file:
            buffer = np.empty(num_entries * slab.entry_dtype(BLOCK_SIZE).itemsize, np.uint8)
            view = memoryview(buffer)
            for begin in range(0, len(view), 8 << 20):
                file.readinto(view[begin : begin + (8 << 20)])
    else:
        store = FileStore.open(
            directory,
            FINGERPRINT,
            slot_bytes=SLOT_BYTES,
            block_size=BLOCK_SIZE,
            size=size_of(num_entries),
            mode="buffered",
        )
        assert store.num_recovered == num_entries
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    start_gc = time.process_time()
    gc.collect()
    collecting = time.process_time() - start_gc
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    memory = tracemalloc.get_traced_memory() if what == "memory" else (0, 0)
    resident = (after.ru_maxrss - before.ru_maxrss) * 1024
    print(
        json.dumps(
            {"gc": collecting, "cpu": cpu, "wall": wall, "now": memory[0], "peak": memory[1], "resident": resident}
        )
    )
    sys.stdout.flush()
    os._exit(0)


def measure(directory: Path, num_entries: int, what: str) -> dict[str, float]:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--child", str(directory), str(num_entries), what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, default=Path(), help="where to put the slab (default: here)")
    arguments = options.parse_args()
    num_entries, repeats = (100_000, 3) if arguments.quick else (1_000_000, 5)
    directory = Path(tempfile.mkdtemp(prefix=".recovery-", dir=arguments.directory))
    try:
        progress(f"building a slab of {num_entries:,} entries ({size_of(num_entries) / 1e9:.1f} GB, preallocated)")
        build(directory, num_entries)
        runs: dict[str, list[dict[str, float]]] = {"read": [], "open": []}
        for index in range(repeats):
            progress(f"run {index + 1} of {repeats}")
            for what, found in runs.items():  # interleaved
                found.append(measure(directory, num_entries, what))
        memory = measure(directory, num_entries, "memory")
    finally:
        shutil.rmtree(directory)
    cpu = {what: statistics.median(run["cpu"] for run in found) for what, found in runs.items()}
    wall = {what: statistics.median(run["wall"] for run in found) for what, found in runs.items()}
    resident = statistics.median(run["resident"] for run in runs["open"])
    rows = [
        {"what": "read the table plainly", "entries": num_entries, "cpu s": cpu["read"], "wall s": wall["read"]},
        {"what": "FileStore.open", "entries": num_entries, "cpu s": cpu["open"], "wall s": wall["open"],
         "gc ms": 1e3 * statistics.median(run["gc"] for run in runs["open"]),
         "bytes/entry": memory["now"] / num_entries, "peak bytes/entry": memory["peak"] / num_entries,
         "peak resident/entry": resident / num_entries},
    ]  # fmt: skip
    scale = 1_000_000 / num_entries
    targets = [
        Target("recovery of 1 M entries, CPU s", 0.5, cpu["open"] * scale),
        Target("Python memory, bytes per entry", 120, memory["now"] / num_entries),
    ]
    return report("recovery", rows, targets, arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
