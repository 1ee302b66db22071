"""Slab writes and verified reads beside fio (libaio, O_DIRECT), same disk, same I/O size, interleaved.

Two threads move batches as large as the hierarchy's. "cold read" reads whole chains back. "scattered" reads single
blocks in random order, against fio at the block size and its best depth (all sizes: `scattered_blocks.py`). "fresh" is
a new slab; its writes stand beside fio's into a new preallocated file. "aged" is the same slab, overwritten three
times by chains of mixed length, some of them hit. The page cache is dropped and the slab opened anew before every cold
read. Ratios are of medians over rounds. Every read verifies key and checksum.
"""

import hashlib
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from _report import DISK, Given, Race, Result, Row, Speed, program, progress, speed_of, took
from _rig import Slots, busy_thread, drop_caches, records_of

from kvtier.tiers import BATCH_BYTES, BlockRecord, KVTierError, Outcome, checksum
from kvtier.tiers.file import FileStore, Mode

FINGERPRINT: Final = b"bandwidth benchmark".ljust(32, b".")
NUM_THREADS: Final = 2
FIO_DEPTHS: Final = (1, 2, 4, 8, 16, 32)
RecordChain = list[BlockRecord]
NamedChains = Sequence[tuple[int, RecordChain]]


class Workload(Slots):
    """Chains of blocks of one size, their payloads, and host slots for each thread to read into."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes, num_batches=16)
        self.into = [self.targets, *(self.more(self.per_batch) for _ in range(1, NUM_THREADS))]

    def opened(self, home: Path, size: int, mode: Mode = "direct", key: bytes | None = None) -> FileStore:
        shape = {"slot_bytes": self.block_bytes, "block_size": 16, "size": size}
        return FileStore.open(home, FINGERPRINT, **shape, mode=mode, key=key)

    def chain(self, name: int, num_blocks: int) -> RecordChain:
        """Block i's payload is number (name + i), wrapped round."""
        hashes = [hashlib.sha256(b"%d/%d" % (name, i)).digest() for i in range(num_blocks)]
        return records_of(hashes, [self.checksums[self._which(name, i)] for i in range(num_blocks)])

    def write(self, store: FileStore, chains: NamedChains) -> Speed:
        num_written = [0] * NUM_THREADS

        def work(thread: int) -> None:
            for name, chain in chains[thread::NUM_THREADS]:
                for first in range(0, len(chain), self.per_batch):
                    records = chain[first : first + self.per_batch]
                    payloads = [self.sources[self._which(name, first + i)] for i in range(len(records))]
                    num_written[thread] += store.write(records, payloads).count(Outcome.OK)

        return self._timed(work, lambda: sum(num_written))

    def read(self, store: FileStore, batches: Sequence[Sequence[BlockRecord]]) -> Speed:
        def work(thread: int) -> None:
            for batch in batches[thread::NUM_THREADS]:
                results = store.read([record.chain_hash for record in batch], self.into[thread][: len(batch)])
                assert not any(isinstance(result, Outcome) for result in results), "a block held was not read"

        return self._timed(work, lambda: sum(map(len, batches)))

    def held(self, store: FileStore, chains: NamedChains) -> list[RecordChain]:
        """What the store holds of the chains, in chain order, a batch at a time."""
        batches = []
        for _, chain in chains:
            there = store.holds([record.chain_hash for record in chain])
            batches += self.batches([record for record, is_held in zip(chain, there, strict=True) if is_held])
        return batches

    def batches(self, records: RecordChain) -> list[RecordChain]:
        return [records[first : first + self.per_batch] for first in range(0, len(records), self.per_batch)]

    def scattered(self, batches: Sequence[RecordChain], rng: random.Random, num_bytes: int) -> list[RecordChain]:
        """Single blocks of these, in random order."""
        blocks = [record for batch in batches for record in batch]
        rng.shuffle(blocks)
        return self.batches(blocks[: num_bytes // self.block_bytes])

    def _which(self, name: int, index: int) -> int:
        return (name * 7 + index) % len(self.sources)

    def _timed(self, work: Callable[[int], None], num_moved: Callable[[], int]) -> Speed:
        """`work(thread)` on every thread; then it is known how many blocks were moved."""
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            speed = speed_of(lambda: list(threads.map(work, range(NUM_THREADS))), 1e9)
        gigabytes = num_moved() * self.block_bytes / 1e9
        return Speed(gigabytes * speed.gb_per_s, speed.cpu_s_per_gb / gigabytes)


class FioSpeed(NamedTuple):
    depth: int
    gb_per_s: float
    cpu_s_per_gb: float
    p50: float
    p99: float


def fio(path: Path, what: str, block_bytes: int, depth: int, *more: str, seconds: float = 0) -> FioSpeed:
    """One fio job; with `seconds`, on a file that is there, written."""
    if seconds:
        size = path.stat().st_size // block_bytes * block_bytes
        more = ("--time_based", f"--runtime={seconds}", f"--size={size}")
    command = ["fio", "--name=limit", f"--filename={path}", f"--rw={what}", f"--bs={block_bytes}",
               f"--iodepth={depth}", "--ioengine=libaio", "--direct=1", "--lat_percentiles=1",
               "--output-format=json", *more]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["write" if "write" in what else "read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    p50, p99 = (moved["lat_ns"]["percentile"][f"{percent}.000000"] / 1e9 for percent in (50, 99))
    return FioSpeed(depth, moved["bw_bytes"] / 1e9, cpu / (moved["io_bytes"] / 1e9), p50, p99)


def fio_best(path: Path, block_bytes: int, seconds: float) -> FioSpeed:
    """Random reads at the depth that is fastest: a limit that another depth beats is no limit."""
    jobs = [fio(path, "randread", block_bytes, depth, seconds=seconds) for depth in FIO_DEPTHS]
    return max(jobs, key=lambda job: job.gb_per_s)


class DiskBench:
    """One block size on one disk, beside fio on a file of its own."""

    def __init__(self, directory: Path, limit_file: Path, block_bytes: int, size: int, rounds: int) -> None:
        self.directory, self.limit_file, self.size, self.rounds = directory, limit_file, size, rounds
        self.load = Workload(block_bytes)
        self.rng = random.Random(1)
        self.ours = Race()
        self.limits: defaultdict[str, list[float]] = defaultdict(list)
        self.next_name = 0

    def open(self, mode: Mode = "direct") -> FileStore:
        return self.load.opened(self.directory, self.size, mode)

    def reopened(self, store: FileStore, mode: Mode = "direct") -> FileStore:
        store.close()
        if mode == "direct":
            drop_caches(store.path)
        return self.open(mode)

    def chains(self, num_bytes: int, *, mixed: bool = False) -> list[tuple[int, RecordChain]]:
        """New chains of so many bytes together; mixed: of any length up to eight batches."""
        made, left = [], num_bytes // self.load.block_bytes
        while left > 0:
            most = self.load.per_batch * 8
            length = min(left, self.rng.randrange(1, most) if mixed else most)
            made.append((self.next_name, self.load.chain(self.next_name, length)))
            self.next_name += 1
            left -= length
        return made

    def run(self) -> list[Row]:
        load, part = self.load, self.size // 4
        store = self.open()
        live = self.chains(int(self.size * 0.9))
        for quarter in [live[i::4] for i in range(4)]:
            self.limits["write, fresh"].append(self.fio_fresh(part))
            self.ours.add("write, fresh", load.write(store, quarter))
        self.reads(store, live, "fresh", part)
        store = self.open()
        aged: list[tuple[int, RecordChain]] = []
        for index in range(12):  # three times round, some of what is there hit on the way
            piece = self.chains(part, mixed=True)
            if index % 3 == 0:
                self.limit("write")
            self.ours.add("write, aged", load.write(store, piece))
            aged = [*aged, *piece][-400:]
            hit = load.held(store, self.rng.sample(aged, len(aged) // 6))
            load.read(store, hit[:20] or load.held(store, aged[-1:]))
        self.reads(store, aged, "aged", part)
        return self.rows()

    def reads(self, store: FileStore, chains: NamedChains, age: str, part: int) -> None:
        """Writes beside a busy thread; cold reads: coalesced, scattered, beside one; closes the store at the end."""
        load, ours = self.load, self.ours
        for _ in range(self.rounds):
            rewritten = self.chains(part // 4)
            with busy_thread():
                ours.add(f"write beside a busy thread, {age}", load.write(store, rewritten))
        for _ in range(self.rounds):
            batches = load.held(store, chains)
            self.rng.shuffle(batches)
            whole = [batch for batch in batches if len(batch) == load.per_batch]
            picked = whole[: part // BATCH_BYTES]
            store = self.reopened(store)
            self.limit("read")
            ours.add(f"cold read, {age}", load.read(store, picked))
            if load.block_bytes < BATCH_BYTES:
                self.limits["randread"].append(fio_best(self.limit_file, load.block_bytes, 0.5).gb_per_s)
                ours.add(f"scattered read, {age}", load.read(store, load.scattered(whole, self.rng, part)))
            with busy_thread():
                ours.add(f"read beside a busy thread, {age}", load.read(store, picked[: len(picked) // 2]))
            store = self.reopened(store, "buffered")
            warm = load.held(store, chains)[: (256 << 20) // BATCH_BYTES]
            load.read(store, warm)
            ours.add(f"warm read, buffered, {age}", load.read(store, warm))
            store = self.reopened(store, "mmap")
            ours.add(f"warm read, mmap, {age}", load.read(store, warm))
            store = self.reopened(store)
        store.close()

    def limit(self, what: str) -> None:
        """fio at the size and depth we issue: whole batches, one per thread."""
        self.limits[what].append(fio(self.limit_file, what, BATCH_BYTES, NUM_THREADS, seconds=1.0).gb_per_s)

    def fio_fresh(self, size: int) -> float:
        """GB/s of fio writing a file anew that was only allocated, as a new slab is."""
        path, whole = self.limit_file.with_name("fresh"), size // BATCH_BYTES * BATCH_BYTES
        try:
            return fio(path, "write", BATCH_BYTES, NUM_THREADS, "--fallocate=posix", f"--size={whole}").gb_per_s
        finally:
            path.unlink(missing_ok=True)

    def rows(self) -> list[Row]:
        hashing, found = self.checksum_cpu(), []
        for what in self.ours.speeds:
            against = "randread" if "scattered" in what else "write" if "write" in what else "read"
            row: Row = {"block KiB": self.load.block_bytes >> 10, "what": what, "GB/s": self.ours.rate(what)}
            if "warm" not in what and "busy" not in what:
                limit = median(self.limits[what if what in self.limits else against])
                row |= {"fio GB/s": limit, "ratio": row["GB/s"] / limit}
            if "busy" not in what:
                row["CPU s/GB besides checksum"] = self.ours.cpu(what) - (hashing if "read" in what else 0)
            found.append(row)
        return found

    def checksum_cpu(self) -> float:
        """CPU seconds to hash a GB: the least of some passes, so that what is left for the rest is not flattered."""
        sources = self.load.sources
        least = min(took(lambda: list(map(checksum, sources)), time.process_time) for _ in range(9))
        return least / (len(sources) * self.load.block_bytes / 1e9)


def on_disk(
    given: Given,
    sizes_kib: Sequence[int],
    limit_bytes: int,
    measured: Callable[[Path, Path, int], Sequence[Row]],
) -> list[Row]:
    """`measured(folder, fio's file, bytes of a block)`, at each block size."""
    if not shutil.which("fio"):
        raise KVTierError("fio is not installed (Debian: apt-get install fio)")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=".bandwidth-", dir=given.directory) as home:
        limit_file = Path(home) / "fio"
        progress("writing fio's file")
        with limit_file.open("wb") as file:
            chunk = np.random.default_rng(2).bytes(16 << 20)
            for _ in range(limit_bytes // len(chunk)):
                file.write(chunk)
        drop_caches(limit_file)
        for block_kib in sizes_kib:
            progress(f"blocks of {block_kib} KiB")
            folder = Path(home) / str(block_kib)
            rows += measured(folder, limit_file, block_kib << 10)
            shutil.rmtree(folder)
    return rows


@program(DISK)
def main(given: Given) -> Result:
    sizes, size, rounds = ([128], 512 << 20, 1) if given.quick else ([128, 1024], 2 << 30, 3)

    return on_disk(given, sizes, size // 2, lambda home, fio, each: DiskBench(home, fio, each, size, rounds).run())
