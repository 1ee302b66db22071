"""Verified reads of single blocks at random places of a cold slab, beside fio at its best depth, interleaved.

"a request's" are batches of one request's scattered blocks, from two threads, as the hierarchy reads them.
"16 requests'" are single blocks of sixteen requests at once, through the port's queue. "one block" is a read with
nothing beside it: its latency stands beside fio's at depth 1. fio (libaio, O_DIRECT) runs at depths 1 to 32, and the
fastest counts. Medians over rounds. Every read verifies key and checksum, and its CPU time includes that. Each way is
measured in every round: the extension module's, where it was built, and the Python one.
"""

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import _report
import numpy as np
from _report import DISK, Given, Result, Row, Speed, of_pairs, program, progress, speed_of
from _rig import drop_caches
from file_bandwidth import DiskBench, FioSpeed, RecordChain, fio, fio_best, on_disk

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, Outcome
from kvtier.tiers.file import FileStore
from kvtier.tiers.hierarchy import IoQueue, JoinedJob

NUM_REQUESTS = 16
MOST_LATENCIES = 400


class BlockRead(JoinedJob):
    """One request's read of one block; at its end the next block of `line` is asked for. A `Job`."""

    num_blocks = 1
    deadline = float("inf")

    def __init__(self, requests: "Requests", into: memoryview) -> None:
        self.requests = requests
        self.into = into
        self.name: ChainHash = b""

    def next(self) -> None:
        """Ask for the next block; the last to find none left tells the end."""
        if self.requests.line:
            self.name = self.requests.line.pop()
            assert self.requests.queue.submit(self, urgent=True)
        else:
            self.requests.ended.release()

    def run(self) -> list[BlockRecord | Outcome]:
        return self.requests.store.read([self.name], [self.into])

    def run_with(self, others: Sequence[JoinedJob]) -> list[list[BlockRecord | Outcome]]:
        reads = [self, *(other for other in others if isinstance(other, BlockRead))]
        results = self.requests.store.read([read.name for read in reads], [read.into for read in reads])
        return [[result] for result in results]

    def end(self, result: list[BlockRecord | Outcome], *, late: bool) -> None:
        self.requests.num_read += isinstance(result[0], BlockRecord)
        self.next()

    def overdue(self) -> None:
        """Never told: there is no deadline."""


class Requests:
    """Sixteen requests at once, each for one block after another, over a port's queue."""

    def __init__(self, store: FileStore, names: list[ChainHash], slots: list[memoryview]) -> None:
        self.store, self.line, self.num_read = store, names, 0
        self.ended = threading.Semaphore(0)
        joined = max(1, min(NUM_REQUESTS, BATCH_BYTES // slots[0].nbytes))
        self.queue = IoQueue("file", 2, 4096, time.monotonic, joined)
        self.reads = [BlockRead(self, slot) for slot in slots]

    def run(self) -> Speed:
        total = len(self.line)

        def read_all() -> None:
            for read in self.reads:
                read.next()
            for _ in self.reads:
                self.ended.acquire()

        speed = speed_of(read_all, total * self.reads[0].into.nbytes)
        self.queue.close(10)
        assert self.num_read == total, "a block held was not read"
        return speed


class ScatteredBench(DiskBench):
    def measure(self, seconds: float) -> list[Row]:
        store, block_bytes = self.open(), self.load.block_bytes
        chains = self.chains(int(self.size * 0.9))
        self.load.write(store, chains)
        batches = self.load.held(store, chains)
        store.close()
        limits, singles = list[FioSpeed](), list[FioSpeed]()
        built = _report.is_built("kvtier.tiers.file.read_queue_compiled")
        alone: dict[str, list[list[float]]] = {way: [] for way in (("compiled", "Python") if built else ("Python",))}
        for number in range(self.rounds):
            progress(f"round {number + 1} of {self.rounds}")
            limits.append(fio_best(self.limit_file, block_bytes, seconds))
            singles.append(fio(self.limit_file, "randread", block_bytes, 1, seconds=seconds))
            for way in [*alone][:: 1 if number % 2 else -1]:
                with _report.form(_report.PYTHON if way == "Python" else way):
                    alone[way].append(self._read(way, batches, number))
        return [*self._speeds(limits), *(self._latency(way, singles, each) for way, each in alone.items())]

    def _read(self, way: str, batches: list[RecordChain], number: int) -> list[float]:
        """One round of one way; returns what single blocks took."""
        drop_caches(next(self.directory.glob("*.slab")))
        store, slots = self.open(), self.load.more(NUM_REQUESTS)
        loose = self.load.scattered(batches, self.rng, self.size // 3)
        self.ours.add(f"a request's, {way}", self.load.read(store, loose))
        loose = self.load.scattered(batches, self.rng, self.size // 3)
        names = [record.chain_hash for batch in loose for record in batch]
        self.ours.add(f"16 requests', {way}", Requests(store, [*names], slots).run())
        seconds = []
        for name in random.Random(number).sample(names, min(MOST_LATENCIES, len(names))):
            start = time.perf_counter()
            [found] = store.read([name], slots[:1])
            seconds.append(time.perf_counter() - start)
            assert isinstance(found, BlockRecord), "a block held was not read"
        store.close()
        return seconds

    def _speeds(self, limits: Sequence[FioSpeed]) -> list[Row]:
        best = sorted(limits, key=lambda job: job.gb_per_s)[len(limits) // 2]
        rows = []
        for what, speeds in self.ours.speeds.items():
            ratio = of_pairs([each.gb_per_s for each in speeds], [limit.gb_per_s for limit in limits])
            row: Row = {"block KiB": self.load.block_bytes >> 10, "what": what, "GB/s": self.ours.rate(what)}
            row |= {"fio GB/s": best.gb_per_s, "fio depth": best.depth, "ratio": ratio}
            row |= {"CPU s/GB": self.ours.cpu(what), "fio CPU s/GB": best.cpu_s_per_gb}
            rows.append(row | {"checksum CPU s/GB": self.checksum_cpu()})
        return rows

    def _latency(self, way: str, singles: Sequence[FioSpeed], alone: Sequence[list[float]]) -> Row:
        row: Row = {"block KiB": self.load.block_bytes >> 10, "what": f"one block, {way}"}
        for percent, theirs in ((50, [job.p50 for job in singles]), (99, [job.p99 for job in singles])):
            ours = [float(np.percentile(seconds, percent)) for seconds in alone]
            row |= {f"p{percent} us": 1e6 * median(ours), f"fio p{percent} us": 1e6 * median(theirs)}
            row[f"p{percent} ratio"] = of_pairs(ours, theirs)
        return row


@program(DISK)
def main(given: Given) -> Result:
    size, rounds, seconds = (256 << 20, 1, 0.3) if given.quick else (1 << 30, 5, 1.0)

    def measured(folder: Path, limit_file: Path, block_bytes: int) -> list[Row]:
        return ScatteredBench(folder, limit_file, block_bytes, size, rounds).measure(seconds)

    return on_disk(given, [64, 128, 512, 2048], size, measured)
