"""Slab writes and verified reads beside fio (libaio, O_DIRECT), same disk, same I/O size, interleaved.

Two threads move batches as large as the hierarchy's. "cold read" reads whole chains back. "scattered" reads single
blocks in random order, against fio at the block size and its best depth (all sizes: `scattered_blocks.py`). "fresh" is
a new slab; its writes stand beside fio's into a new preallocated file. "aged" is the same slab, overwritten three
times by chains of mixed length, some of them hit. The page cache is dropped and the slab opened anew before every cold
read. Ratios are of medians over rounds. Every read verifies key and checksum.
"""

import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _busy import busy_thread
from _report import Speed, Target, parser, progress, report

from kvtier.tiers import BATCH_BYTES, BlockRecord, Outcome, checksum
from kvtier.tiers.file import FileStore, Mode

FINGERPRINT = b"bandwidth benchmark".ljust(32, b".")
NUM_THREADS = 2
FIO_DEPTHS = (1, 2, 4, 8, 16, 32)
NUM_PAYLOADS = 16  # batches of distinct bytes; blocks share them in turn
RecordChain = list[BlockRecord]


class Workload:
    """Chains of blocks of one size, their payloads, and host slots to read into."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.per_batch = BATCH_BYTES // block_bytes
        self.per_write = BATCH_BYTES // block_bytes
        self.payloads = self._slots(NUM_PAYLOADS * self.per_batch, np.random.default_rng(1))
        self.checksums = [checksum(payload) for payload in self.payloads]
        self.targets = [self._slots(self.per_batch, None) for _ in range(NUM_THREADS)]

    def _slots(self, count: int, rng: np.random.Generator | None) -> list[memoryview]:
        size = count * self.block_bytes
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        region = raw[start : start + size]
        region[:] = 1 if rng is None else np.frombuffer(rng.bytes(size), np.uint8)
        view = memoryview(region)
        return [view[i * self.block_bytes : (i + 1) * self.block_bytes] for i in range(count)]

    def chain(self, name: int, num_blocks: int) -> RecordChain:
        """Records of a chain; block i's payload is number (name + i), wrapped round."""
        records, parent = [], bytes(32)
        for i in range(num_blocks):
            chain_hash = hashlib.sha256(b"%d/%d" % (name, i)).digest()
            records.append(BlockRecord(chain_hash, parent, b"\1\0\0\0" * 16, self.checksums[self._which(name, i)]))
            parent = chain_hash
        return records

    def payloads_of(self, name: int, first: int, count: int) -> list[memoryview]:
        """The bytes of a chain's blocks."""
        return [self.payloads[self._which(name, i)] for i in range(first, first + count)]

    def _which(self, name: int, index: int) -> int:
        return (name * 7 + index) % len(self.payloads)


def timed(work: Callable[[int], int]) -> Speed:
    """Run `work(thread)` on every thread; it returns bytes moved."""
    moved = [0] * NUM_THREADS

    def run(index: int) -> None:
        moved[index] = work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(NUM_THREADS)]
    cpu, start = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    gigabytes = sum(moved) / 1e9
    assert gigabytes
    return Speed(gigabytes / wall, cpu / gigabytes)


def write_chains(store: FileStore, load: Workload, chains: Sequence[tuple[int, RecordChain]]) -> Speed:
    def work(index: int) -> int:
        moved = 0
        for name, chain in chains[index::NUM_THREADS]:
            for first in range(0, len(chain), load.per_write):
                records = chain[first : first + load.per_write]
                outcomes = store.write(records, load.payloads_of(name, first, len(records)))
                moved += load.block_bytes * outcomes.count(Outcome.OK)
        return moved

    return timed(work)


def read_batches(store: FileStore, load: Workload, batches: Sequence[Sequence[BlockRecord]]) -> Speed:
    def work(index: int) -> int:
        moved = 0
        for batch in batches[index::NUM_THREADS]:
            results = store.read([record.chain_hash for record in batch], load.targets[index][: len(batch)])
            assert not any(isinstance(result, Outcome) for result in results), "a block held was not read"
            moved += load.block_bytes * len(batch)
        return moved

    return timed(work)


def held_batches(store: FileStore, load: Workload, chains: Sequence[tuple[int, RecordChain]]) -> list[RecordChain]:
    """What the store holds of the chains, in chain order, a batch at a time."""
    batches = []
    for _, chain in chains:
        held = [r for r, there in zip(chain, store.holds([r.chain_hash for r in chain]), strict=True) if there]
        batches += [held[first : first + load.per_batch] for first in range(0, len(held), load.per_batch)]
    return batches


def scattered(batches: Sequence[RecordChain], load: Workload, rng: random.Random, num_bytes: int) -> list[RecordChain]:
    blocks = [record for batch in batches for record in batch]
    rng.shuffle(blocks)
    blocks = blocks[: num_bytes // load.block_bytes]
    return [blocks[first : first + load.per_batch] for first in range(0, len(blocks), load.per_batch)]


def drop_caches(path: Path) -> None:
    os.sync()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        progress("not root: page cache dropped by posix_fadvise alone")


@dataclass(frozen=True, slots=True)
class FioSpeed:
    """What one fio job moved, and how long one of its reads took: seconds, of half of them and of 99 in 100.

    As a caller sees it: fio's "lat". Its "clat" leaves out `io_submit`, in which a virtual disk may do it all.
    """

    depth: int
    gb_per_s: float
    cpu_s_per_gb: float
    p50: float
    p99: float


def fio(path: Path, what: str, block_bytes: int, depth: int, seconds: float) -> FioSpeed:
    """One fio job on an existing, written file."""
    size = path.stat().st_size // block_bytes * block_bytes
    return _fio(path, what, block_bytes, depth, "--time_based", f"--runtime={seconds}", f"--size={size}")


def fio_best(path: Path, block_bytes: int, seconds: float) -> FioSpeed:
    """Random reads at the depth that is fastest: a limit that another depth beats is no limit."""
    jobs = [fio(path, "randread", block_bytes, depth, seconds) for depth in FIO_DEPTHS]
    return max(jobs, key=lambda job: job.gb_per_s)


def fio_fresh(path: Path, size: int) -> float:
    """GB/s of fio writing a file anew that was only allocated, as a new slab is."""
    try:
        whole = size // BATCH_BYTES * BATCH_BYTES
        return _fio(path, "write", BATCH_BYTES, NUM_THREADS, "--fallocate=posix", f"--size={whole}").gb_per_s
    finally:
        path.unlink(missing_ok=True)


def _fio(path: Path, what: str, block_bytes: int, depth: int, *more: str) -> FioSpeed:
    command = ["fio", "--name=limit", f"--filename={path}", f"--rw={what}", f"--bs={block_bytes}",
               f"--iodepth={depth}", "--ioengine=libaio", "--direct=1", "--lat_percentiles=1",
               "--output-format=json", *more]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["write" if "write" in what else "read"]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    p50, p99 = (moved["lat_ns"]["percentile"][f"{percent}.000000"] / 1e9 for percent in (50, 99))
    return FioSpeed(depth, moved["bw_bytes"] / 1e9, cpu / (moved["io_bytes"] / 1e9), p50, p99)


class DiskBench:
    """One block size on one disk: rows of (what, ours, fio, ratio)."""

    def __init__(self, directory: Path, block_bytes: int, size: int, rounds: int) -> None:
        self.directory = directory
        self.load = Workload(block_bytes)
        self.size = size
        self.rounds = rounds
        self.seconds = 1.0
        self.rng = random.Random(1)
        self.ours: dict[str, list[Speed]] = {}
        self.limits: dict[str, list[float]] = {}
        self.next_name = 0

    def open(self, mode: Mode = "direct") -> FileStore:
        """The slab under test."""
        return FileStore.open(self.directory, FINGERPRINT, slot_bytes=self.load.block_bytes, block_size=16,
                              size=self.size, mode=mode)  # fmt: skip

    def chains(self, num_bytes: int, mixed: bool) -> list[tuple[int, RecordChain]]:
        """New chains of so many bytes together; mixed: of any length up to eight batches."""
        made, left = [], num_bytes // self.load.block_bytes
        while left > 0:
            most = self.load.per_batch * 8
            length = min(left, self.rng.randrange(1, most) if mixed else most)
            made.append((self.next_name, self.load.chain(self.next_name, length)))
            self.next_name += 1
            left -= length
        return made

    def run(self, limit_file: Path) -> None:
        """Fill, read, age, read again."""
        part = self.size // 4
        store = self.open()
        live = self.chains(int(self.size * 0.9), mixed=False)
        quarters = [live[i::4] for i in range(4)]
        for quarter in quarters:
            self.limits.setdefault("write, fresh", []).append(fio_fresh(limit_file.with_name("fresh"), part))
            self.note("write, fresh", write_chains(store, self.load, quarter))
        self.reads(store, live, limit_file, "fresh", part)
        store = self.open()
        aged: list[tuple[int, RecordChain]] = []
        for index in range(12):  # three times round, some of what is there hit on the way
            piece = self.chains(part, mixed=True)
            if index % 3 == 0:
                self.limit("write", limit_file)
            self.note("write, aged", write_chains(store, self.load, piece))
            aged = [*aged, *piece][-400:]
            hit = held_batches(store, self.load, self.rng.sample(aged, len(aged) // 6))
            read_batches(store, self.load, hit[:20] or held_batches(store, self.load, aged[-1:]))
        self.reads(store, aged, limit_file, "aged", part)

    def reads(
        self, store: FileStore, chains: Sequence[tuple[int, RecordChain]], limit_file: Path, age: str, part: int
    ) -> None:
        """Writes beside a busy thread; cold reads: coalesced, scattered, beside one; closes the store at the end."""
        for _ in range(self.rounds):
            rewritten = self.chains(part // 4, mixed=False)
            with busy_thread():
                self.note(f"write beside a busy thread, {age}", write_chains(store, self.load, rewritten))
        for _ in range(self.rounds):
            batches = held_batches(store, self.load, chains)
            self.rng.shuffle(batches)
            whole = [batch for batch in batches if len(batch) == self.load.per_batch]
            picked = whole[: part // BATCH_BYTES]
            store.close()
            drop_caches(store.path)
            store = self.open()
            self.limit("read", limit_file)
            self.note(f"cold read, {age}", read_batches(store, self.load, picked))
            if self.load.block_bytes < BATCH_BYTES:
                self.limit("randread", limit_file)
                loose = scattered(whole, self.load, self.rng, part)
                self.note(f"scattered read, {age}", read_batches(store, self.load, loose))
            with busy_thread():
                self.note(
                    f"read beside a busy thread, {age}", read_batches(store, self.load, picked[: len(picked) // 2])
                )
            store.close()
            store = self.open("buffered")
            warm = held_batches(store, self.load, chains)[: (256 << 20) // BATCH_BYTES]
            read_batches(store, self.load, warm)
            self.note(f"warm read, buffered, {age}", read_batches(store, self.load, warm))
            store.close()
            store = self.open("mmap")
            self.note(f"warm read, mmap, {age}", read_batches(store, self.load, warm))
            store.close()
            store = self.open()
        store.close()

    def note(self, what: str, speed: Speed) -> None:
        """Keep a measurement of ours."""
        self.ours.setdefault(what, []).append(speed)

    def limit(self, what: str, path: Path) -> None:
        """fio at the size and depth we issue: whole batches, one per thread; scattered: blocks, at fio's best depth."""
        if what == "randread":
            speed = fio_best(path, self.load.block_bytes, self.seconds / 2)
        else:
            speed = fio(path, what, BATCH_BYTES, NUM_THREADS, self.seconds)
        self.limits.setdefault(what, []).append(speed.gb_per_s)

    def rows(self) -> list[dict[str, object]]:
        """Medians, beside fio's."""
        hashing = self.checksum_cpu()
        found: list[dict[str, object]] = []
        for what, speeds in self.ours.items():
            against = "randread" if "scattered" in what else "write" if "write" in what else "read"
            against = what if what in self.limits else against
            ours = statistics.median(speed.gb_per_s for speed in speeds)
            row: dict[str, object] = {"block KiB": self.load.block_bytes >> 10, "what": what, "GB/s": ours}
            if "warm" not in what and "busy" not in what:
                limit = statistics.median(self.limits[against])
                row |= {"fio GB/s": limit, "ratio": ours / limit}
            cpu = statistics.median(speed.cpu_s_per_gb for speed in speeds)
            if "busy" not in what:
                row["CPU s/GB besides checksum"] = cpu - (hashing if "read" in what else 0)
            found.append(row)
        return found

    def checksum_cpu(self) -> float:
        """CPU seconds to hash a GB: the least of some passes, so that what is left for the rest is not flattered."""
        seconds = []
        for _ in range(9):
            start = time.process_time()
            for payload in self.load.payloads:
                checksum(payload)
            seconds.append(time.process_time() - start)
        return min(seconds) / (len(self.load.payloads) * self.load.block_bytes / 1e9)


def targets_of(rows: Sequence[dict[str, object]]) -> list[Target]:
    found = []
    for row in rows:
        what = f"{row['what']}, {row['block KiB']} KiB"
        if isinstance(ratio := row.get("ratio"), float):
            found.append(Target(f"{what}: ratio to fio", 0.9, ratio, at_most=False))
        if isinstance(cpu := row.get("CPU s/GB besides checksum"), float) and ("cold" in what or "write" in what):
            found.append(Target(f"{what}: CPU s/GB besides checksum", 0.1, cpu, at_most=True))
        if "busy" in what and isinstance(speed := row["GB/s"], float):
            found.append(Target(f"{what}: GB/s", 0.8, speed, at_most=False))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--directory", type=Path, default=Path(), help="a directory on the disk to measure")
    options.add_argument("--block-kib", type=int, nargs="*", default=None, help="block sizes (default: 128 1024)")
    arguments = options.parse_args()
    if not shutil.which("fio"):
        sys.exit("file_bandwidth: fio is not installed (Debian: apt-get install fio)")
    size, rounds = (512 << 20, 1) if arguments.quick else (2 << 30, 3)
    rows: list[dict[str, object]] = []
    directory = Path(tempfile.mkdtemp(prefix=".bandwidth-", dir=arguments.directory))
    try:
        limit_file = directory / "fio"
        progress("writing fio's file")
        with limit_file.open("wb") as file:
            chunk = np.random.default_rng(2).bytes(16 << 20)
            for _ in range(size // 2 // len(chunk)):
                file.write(chunk)
        for block_kib in arguments.block_kib or ([128] if arguments.quick else [128, 1024]):
            progress(f"blocks of {block_kib} KiB")
            bench = DiskBench(directory / str(block_kib), block_kib << 10, size, rounds)
            bench.run(limit_file)
            rows += bench.rows()
            shutil.rmtree(directory / str(block_kib))
    finally:
        shutil.rmtree(directory)
    return report("file_bandwidth", rows, targets_of(rows), arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
