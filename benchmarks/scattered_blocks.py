"""Verified reads of single blocks at random places of a cold slab, beside fio at its best depth, interleaved.

"a request's" are batches of one request's scattered blocks, from two threads, as the hierarchy reads them.
"16 requests'" are single blocks of sixteen requests at once, through the port's queue. "one block" is a read with
nothing beside it: its latency stands beside fio's at depth 1. fio (libaio, O_DIRECT) runs at depths 1 to 32, and the
fastest counts. Medians over rounds. Every read verifies key and checksum, and its CPU time includes that. Each way is
measured in every round: the extension module's, where it was built, and the Python one.
"""

import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from _report import Speed, Target, parser, progress, report
from file_bandwidth import (
    DiskBench,
    FioSpeed,
    RecordChain,
    drop_caches,
    fio,
    fio_best,
    held_batches,
    read_batches,
    scattered,
)
from file_bandwidth import write_chains as fill

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, Outcome
from kvtier.tiers.compiled import extension
from kvtier.tiers.file import FileStore
from kvtier.tiers.hierarchy import IoQueue, JoinedJob

NUM_REQUESTS = 16
MOST_LATENCIES = 400


class BlockRead(JoinedJob):
    """One request's read of one block; at its end the next block of `line` is asked for. A `Job`."""

    num_blocks = 1
    deadline = float("inf")

    def __init__(self, bench: "Requests", into: memoryview) -> None:
        self.bench = bench
        self.into = into
        self.name: ChainHash = b""

    def next(self) -> None:
        """Ask for the next block; the last to find none left tells the end."""
        try:
            self.name = self.bench.line.pop()
        except IndexError:
            self.bench.ended.release()
            return
        assert self.bench.queue.submit(self, urgent=True)

    def run(self) -> list[BlockRecord | Outcome]:
        """Read it alone."""
        return self.bench.store.read([self.name], [self.into])

    def run_with(self, others: Sequence[JoinedJob]) -> list[list[BlockRecord | Outcome]]:
        """Read it and the others' in one call."""
        reads = [self, *(other for other in others if isinstance(other, BlockRead))]
        results = self.bench.store.read([read.name for read in reads], [read.into for read in reads])
        return [[result] for result in results]

    def end(self, result: list[BlockRecord | Outcome], *, late: bool) -> None:
        """Count it, and ask for the next."""
        self.bench.num_read += isinstance(result[0], BlockRecord)
        self.next()

    def overdue(self) -> None:
        """Never told: there is no deadline."""


class Requests:
    """Sixteen requests at once, each for one block after another, over a port's queue."""

    def __init__(self, store: FileStore, names: list[ChainHash], slots: list[memoryview]) -> None:
        self.store = store
        self.line = names
        self.num_read = 0
        self.ended = threading.Semaphore(0)
        joined = max(1, min(NUM_REQUESTS, BATCH_BYTES // slots[0].nbytes))
        self.queue = IoQueue("file", 2, 4096, time.monotonic, joined)
        self.reads = [BlockRead(self, slot) for slot in slots]

    def run(self) -> Speed:
        """Read all of the line."""
        total = len(self.line)
        cpu, start = time.process_time(), time.perf_counter()
        for read in self.reads:
            read.next()
        for _ in self.reads:
            self.ended.acquire()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.queue.close(10)
        assert self.num_read == total, "a block held was not read"
        gigabytes = total * self.reads[0].into.nbytes / 1e9
        return Speed(gigabytes / wall, cpu / gigabytes)


def latencies(store: FileStore, blocks: Sequence[BlockRecord], slot: memoryview) -> list[float]:
    """Seconds of each block, read with nothing beside it."""
    took = []
    for block in blocks:
        start = time.perf_counter()
        (result,) = store.read([block.chain_hash], [slot])
        took.append(time.perf_counter() - start)
        assert isinstance(result, BlockRecord), "a block held was not read"
    return took


class ScatteredBench(DiskBench):
    """One block size: its rows, each beside fio's."""

    def measure(self, limit_file: Path) -> list[dict[str, object]]:
        """Fill, then read in rounds, each way in turn."""
        store = self.open()
        chains = self.chains(int(self.size * 0.9), mixed=False)
        fill(store, self.load, chains)
        batches = held_batches(store, self.load, chains)
        store.close()
        limits, singles = list[FioSpeed](), list[FioSpeed]()
        is_built = extension("kvtier.tiers.file.read_queue_compiled") is not None
        took = {way: list[list[float]]() for way in (["compiled", "Python"] if is_built else ["Python"])}
        for number in range(self.rounds):
            progress(f"round {number + 1} of {self.rounds}")
            limits.append(fio_best(limit_file, self.load.block_bytes, self.seconds))
            singles.append(fio(limit_file, "randread", self.load.block_bytes, 1, self.seconds))
            for way in [*took][:: 1 if number % 2 else -1]:
                with patch.dict(os.environ, {} if way == "compiled" else {"KVTIER_COMPILED": "off"}):
                    took[way].append(self._read(way, batches, number))
        return [*self._speeds(limits), *(self._latency(way, singles, seconds) for way, seconds in took.items())]

    def _read(self, way: str, batches: list[RecordChain], number: int) -> list[float]:
        """One round of one way; returns what single blocks took."""
        drop_caches(next(self.directory.glob("*.slab")))
        store = self.open()
        slots = self.load._slots(NUM_REQUESTS, None)
        loose = scattered(batches, self.load, self.rng, self.size // 3)
        self.note(f"a request's, {way}", read_batches(store, self.load, loose))
        loose = scattered(batches, self.load, self.rng, self.size // 3)
        names = [record.chain_hash for batch in loose for record in batch]
        self.note(f"16 requests', {way}", Requests(store, names, slots).run())
        alone = [record for batch in loose for record in batch]
        seconds = latencies(store, random.Random(number).sample(alone, min(MOST_LATENCIES, len(alone))), slots[0])
        store.close()
        return seconds

    def _speeds(self, limits: Sequence[FioSpeed]) -> list[dict[str, object]]:
        best = sorted(limits, key=lambda job: job.gb_per_s)[len(limits) // 2]
        rows: list[dict[str, object]] = []
        for what, speeds in self.ours.items():
            ours = statistics.median(speed.gb_per_s for speed in speeds)
            ratio = statistics.median(
                speed.gb_per_s / limit.gb_per_s for speed, limit in zip(speeds, limits, strict=True)
            )
            cpu = statistics.median(speed.cpu_s_per_gb for speed in speeds)
            row: dict[str, object] = {"block KiB": self.load.block_bytes >> 10, "what": what, "GB/s": ours}
            row |= {"fio GB/s": best.gb_per_s, "fio depth": best.depth, "ratio": ratio, "CPU s/GB": cpu}
            row |= {"fio CPU s/GB": best.cpu_s_per_gb, "checksum CPU s/GB": self.checksum_cpu()}
            rows.append(row)
        return rows

    def _latency(self, way: str, singles: Sequence[FioSpeed], took: Sequence[list[float]]) -> dict[str, object]:
        row: dict[str, object] = {"block KiB": self.load.block_bytes >> 10, "what": f"one block, {way}"}
        for percent, theirs in ((50, [job.p50 for job in singles]), (99, [job.p99 for job in singles])):
            ours = [float(np.percentile(seconds, percent)) for seconds in took]
            row[f"p{percent} us"] = 1e6 * statistics.median(ours)
            row[f"fio p{percent} us"] = 1e6 * statistics.median(theirs)
            row[f"p{percent} ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        return row


def targets_of(rows: Sequence[dict[str, object]]) -> list[Target]:
    """Every size has its goals, also those it misses."""
    found = []
    for row in rows:
        what = f"{row['what']}, {row['block KiB']} KiB"
        if isinstance(ratio := row.get("ratio"), float):
            found.append(Target(f"{what}: ratio to fio's best depth", 0.9, ratio, at_most=False))
        if isinstance(cpu := row.get("CPU s/GB"), float):
            found.append(Target(f"{what}: CPU s/GB, checksum included", 0.2, cpu))
        if isinstance(tail := row.get("p99 ratio"), float):
            found.append(Target(f"{what}: p99 ratio to fio's", 1.5, tail))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, default=Path(), help="a directory on the disk to measure")
    options.add_argument("--block-kib", type=int, nargs="*", default=[64, 128, 512, 2048], help="block sizes")
    arguments = options.parse_args()
    if not shutil.which("fio"):
        sys.exit("scattered_blocks: fio is not installed (Debian: apt-get install fio)")
    size, rounds, seconds = (256 << 20, 1, 0.3) if arguments.quick else (1 << 30, 5, 1.0)
    rows: list[dict[str, object]] = []
    directory = Path(tempfile.mkdtemp(prefix=".scattered-", dir=arguments.directory))
    try:
        limit_file = directory / "fio"
        progress("writing fio's file")
        with limit_file.open("wb") as file:
            chunk = np.random.default_rng(2).bytes(16 << 20)
            for _ in range(size // len(chunk)):
                file.write(chunk)
        drop_caches(limit_file)
        for block_kib in arguments.block_kib:
            progress(f"blocks of {block_kib} KiB")
            bench = ScatteredBench(directory / str(block_kib), block_kib << 10, size, rounds)
            bench.seconds = seconds
            rows += bench.measure(limit_file)
            shutil.rmtree(directory / str(block_kib))
    finally:
        shutil.rmtree(directory)
    return report("scattered_blocks", rows, targets_of(rows), arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
