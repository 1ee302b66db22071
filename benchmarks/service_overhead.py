"""What the daemon costs an engine beside tiers of its own: a step's round trip, lookups and copies.

A real `kvtier serve` on a Unix socket, and the same tiers in this process, asked in turns. A step reserves slots for
the blocks it stores: its only round trip; what the daemon adds is the difference of the pair. What the tiers in this
process hash behind a step has ended before the next one, as behind an engine's. "busy" is a processor
that computes between steps, "idle" one that sleeps, and takes its time to wake up on both sides. The bare echo is a
process that only sends back what it gets: no daemon in Python answers sooner. CPU is of a step with all that belongs to
it, hashing and publishing too: of the daemon's threads, and of the thread that asks. Lookups are chains of 8 and of 128
blocks, 32 on the way at once; their rate is by the daemon's CPU time (all threads), since two noisy cores share two
busy processes. Sixteen clients start at once beside two processes that compute, with the default deadline. A verified
load is the same load (question, promise, copy of 32 MiB) from a daemon with `[host] verify = "always"` and from one
with "never", in turns; beside it what hashing alone does, a block at a time: by xxh3-64, which kvtier uses, and by
BLAKE2b-128 with a key, which nobody can forge. Copies are an engine's loads from L2, scattered blocks, 8 MiB at a time,
from the region each of the two has. What the daemon's memory does in an hour: daemon_memory.py.
"""

import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch
from _daemon_load import DaemonUnderTest, busy, busy_processes, idle, many_clients, time_echo
from _report import Target, parser, progress, report

from kvtier.connector import open_tiers
from kvtier.tiers import BlockRecord, ChainHash, KVTierError, Outcome, checksum
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopies, HostCopyStream
from kvtier.tiers.hierarchy import PENDING, CacheTiers, Claim, Hierarchy, Wanted
from kvtier.tiers.pool import Reservation

FINGERPRINT: Final = b"service_overhead".ljust(32, b".")
BLOCK_SIZE: Final = 16
CHAIN: Final = 128  # blocks in a lookup
FEW: Final = 8  # in a short one
WINDOW: Final = 32  # lookups on the way at once
MAX_STEP_US: Final = {0: 60.0, 1: 60.0, 8: 500.0, 64: 500.0}  # by how many blocks it stores
MIN_LOOKUPS: Final = 10_000.0  # a second of one core
MAX_FEW: Final = 0.5  # of what a lookup of 128 blocks costs, for one of 8
NUM_CLIENTS: Final = 16
ROOM: Final = "640MiB"  # of the daemon: its model's, and sixteen clients' of another
MIN_COPY: Final = 0.95
MAX_VERIFY: Final = 1.05  # of a load without: up to here it would be on by default
LOADED: Final = 256  # blocks in a load that is verified or not
PARENT: Final = b"p" * 32
_numbers = count()


class UnheldBlocks(NamedTuple):
    """The blocks of a model that nobody has."""

    block_size: int
    block_bytes: int


def fresh(num_blocks: int) -> list[ChainHash]:
    """Names nobody has used. They are hashes, as indexes expect of names."""
    return [hashlib.sha256(b"%d" % next(_numbers)).digest() for _ in range(num_blocks)]


@contextmanager
def opened(socket: Path | None, size: str, blocks: UnheldBlocks) -> Iterator[CacheTiers]:
    service = {} if socket is None else {"socket": str(socket)}
    tiers = open_tiers(Config.load(host={"size": size}, service=service), FINGERPRINT, blocks)
    if tiers.region is None:
        raise KVTierError("the daemon did not answer")
    tiers.region.wait_prefaulted(60)
    try:
        yield tiers
    finally:
        tiers.close()


def step(tiers: CacheTiers, num_requests: int, before: Sequence[Reservation]) -> tuple[float, list[Reservation]]:
    """One scheduling step: what the last one stored is sealed, each request stores one block. Seconds of the wait."""
    tiers.seal_each([(reservation, [b"\0" * 4 * BLOCK_SIZE], tiers.epoch) for reservation in before])
    wanted = [Wanted(fresh(1), PARENT, PARENT) for _ in range(num_requests)]
    start = time.perf_counter()
    reservations = tiers.reserve(wanted)
    seconds = time.perf_counter() - start
    return seconds, [reservation for reservation in reservations if reservation is not None]


def time_steps(
    all_tiers: dict[str, CacheTiers], num_requests: int, rounds: int, pause: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of each step's wait, both kinds of tiers in turns, with a pause before each step."""
    times: dict[str, list[float]] = {name: [] for name in all_tiers}
    held: dict[str, list[Reservation]] = {name: [] for name in all_tiers}
    for _ in range(rounds):
        for name, tiers in all_tiers.items():
            pause()
            seconds, held[name] = step(tiers, num_requests, held[name])
            times[name].append(seconds)
            if isinstance(tiers, Hierarchy):  # its hashing, in this process, would hold up the other's next step
                tiers.drain(10.0, below=False)
    for name, reservations in held.items():
        for reservation in reservations:
            all_tiers[name].abandon(reservation, Outcome.ABORTED)
    return times


def time_bare(all_tiers: dict[str, CacheTiers], rounds: int, pause: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of the least that can be asked: is one block held?"""
    times: dict[str, list[float]] = {name: [] for name in all_tiers}
    [name_asked] = fresh(1)
    for _ in range(rounds):
        for name, tiers in all_tiers.items():
            pause()
            start = time.perf_counter()
            tiers.holds([name_asked])
            times[name].append(time.perf_counter() - start)
    return times


def stored(tiers: CacheTiers, num_blocks: int) -> list[ChainHash]:
    """The names of a chain that L2 holds."""
    names = fresh(num_blocks)
    [reservation] = tiers.reserve([Wanted(names, PARENT, PARENT)])
    assert reservation is not None
    parents = [PARENT, *names]
    records = [BlockRecord(name, parents[i], b"\0" * 4 * BLOCK_SIZE, 0) for i, name in enumerate(names)]
    tiers.seal(reservation, records, tiers.epoch)
    assert tiers.drain(30, below=False)
    return names


def look_up(tiers: CacheTiers, chains: Sequence[list[ChainHash]], num_lookups: int) -> None:
    """`num_lookups` lookups, WINDOW on the way at once; what is promised is let go."""
    waiting: list[Claim] = []
    for number in range(num_lookups):
        waiting.append(tiers.ask(chains[number % len(chains)], PARENT, block_size=BLOCK_SIZE))
        while len(waiting) >= WINDOW:
            waiting = _answered(tiers, waiting)
    while waiting:
        waiting = _answered(tiers, waiting)


def _answered(tiers: CacheTiers, waiting: list[Claim]) -> list[Claim]:
    left = []
    for claim in waiting:
        if tiers.poll(claim) is PENDING:
            left.append(claim)
        else:
            tiers.cancel(claim)
    if len(left) == len(waiting):
        tiers.wait_news(1.0)
    return left


def copy_rates(all_tiers: dict[str, CacheTiers], block_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of loads, from each region in turns."""
    per_copy = max(1, (8 << 20) // block_bytes)
    l1 = torch.zeros(256, 1, 2, 1, 1, block_bytes // 2, dtype=torch.uint8)
    draw = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in all_tiers}
    streams = {}
    for name, tiers in all_tiers.items():
        assert tiers.region is not None
        tiers.region.array[:] = draw.integers(0, 256, tiers.region.array.shape[1], dtype=np.uint8)
        streams[name] = HostCopyStream(l1, tiers.region)
    for _ in range(rounds):
        targets = draw.permutation(256)[:per_copy]
        for name, stream in streams.items():
            slots = draw.permutation(all_tiers[name].num_slots)[:per_copy]
            start = time.perf_counter()
            event = stream.load(BlockCopies(targets, slots))
            assert event.wait(30)
            rates[name].append(per_copy * block_bytes / (time.perf_counter() - start) / 1e9)
    for stream in streams.values():
        stream.close(10)
    return rates


def time_loads(all_tiers: dict[str, CacheTiers], block_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from the question to the last byte in L1, both kinds of daemons in turns."""
    l1 = torch.zeros(LOADED, 1, 2, 1, 1, block_bytes // 2, dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in all_tiers}
    chains = {name: stored(tiers, LOADED) for name, tiers in all_tiers.items()}
    streams = {name: HostCopyStream(l1, tiers.region) for name, tiers in all_tiers.items() if tiers.region is not None}
    for _ in range(rounds):
        for name, tiers in all_tiers.items():
            start = time.perf_counter()
            claim = tiers.ask(chains[name], PARENT, block_size=BLOCK_SIZE)
            while tiers.poll(claim) is PENDING:
                tiers.wait_news(1.0)
            with tiers.take(claim) as lease:
                event = streams[name].load(BlockCopies(np.arange(LOADED), np.array(lease.slots)))
                assert event.wait(30)
                times[name].append(time.perf_counter() - start)
    for stream in streams.values():
        stream.close(10)
    return times


def hash_rates(block_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each digest, over more blocks than a processor's cache holds."""
    blocks = np.random.default_rng(0).integers(0, 256, (LOADED, block_bytes), dtype=np.uint8)
    digests: dict[str, Callable[[memoryview], object]] = {
        "xxh3-64": checksum,
        "BLAKE2b-128": lambda block: hashlib.blake2b(block, digest_size=16, key=PARENT).digest(),
    }
    rates: dict[str, list[float]] = {name: [] for name in digests}
    for number in range(rounds):
        part = [memoryview(blocks[(8 * number + i) % LOADED]) for i in range(8)]
        for name, digest in digests.items():
            start = time.perf_counter()
            for block in part:
                digest(block)
            rates[name].append(8 * block_bytes / (time.perf_counter() - start) / 1e9)
    return rates


def main() -> int:
    given = parser(__doc__).parse_args()
    rounds = 300 if given.quick else 5_000
    size, blocks = (
        ("128MiB", UnheldBlocks(BLOCK_SIZE, 131_072)) if given.quick else ("512MiB", UnheldBlocks(BLOCK_SIZE, 131_072))
    )
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        daemon = DaemonUnderTest(Path(directory), ROOM)
        try:
            with opened(None, size, blocks) as own, opened(daemon.socket, size, blocks) as remote:
                both = {"in process": own, "daemon": remote}
                targets = _steps(daemon, both, rounds, rows)
                targets += _lookups(daemon, both, rounds, rows)
                targets += _many(daemon, rounds, rows)
                targets += _copies(both, blocks, rounds // 10, rows)
                targets += _verified(Path(directory), size, remote, blocks, rounds // 10, rows)
        finally:
            daemon.stop()
    return report("service_overhead", rows, targets, given.json, given.save)


def _steps(
    daemon: DaemonUnderTest, both: dict[str, CacheTiers], rounds: int, rows: list[dict[str, object]]
) -> list[Target]:
    targets = []
    for pause in (busy, idle):
        echo = {"what": f"bare echo, {pause.__name__}", "tiers": "", "unit": "us"}
        rows.append({**echo, **_percentiles(time_echo(rounds, pause))})
        for num_requests, limit in MAX_STEP_US.items():
            progress(f"steps that store a block of each of {num_requests} requests, {pause.__name__} between them")
            num_rounds = rounds if num_requests < 64 else rounds // 5
            what = f"step, {num_requests} stores" if num_requests else "round trip alone"
            before = daemon.cpu_seconds()
            if num_requests:
                times = time_steps(both, num_requests, num_rounds, pause)
            else:
                times = time_bare(both, num_rounds, pause)
            cpu = (daemon.cpu_seconds() - before) / num_rounds * 1e6
            added = [b - a for a, b in zip(times["in process"], times["daemon"], strict=True)]
            for name, each in times.items():
                row: dict[str, object] = {"what": f"{what}, {pause.__name__}", "tiers": name, "unit": "us"}
                row |= _percentiles(each)
                if name == "daemon":
                    row |= {"added": median(added) * 1e6, "added p99": _percentiles(added)["p99"], "daemon's CPU": cpu}
                rows.append(row)
            if pause is busy:
                targets.append(Target(f"the daemon adds to a {what}, us", limit, median(added) * 1e6))
    return targets


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds) * 1e6, "p99": float(np.percentile(seconds, 99)) * 1e6}


def _lookups(
    daemon: DaemonUnderTest, both: dict[str, CacheTiers], rounds: int, rows: list[dict[str, object]]
) -> list[Target]:
    targets, rates = [], {}
    for kind in ("hits", "misses"):
        for num_blocks in (FEW, CHAIN):
            what = f"lookups of {num_blocks}, {kind}"
            progress(what)
            for name, tiers in both.items():
                chains = [stored(tiers, num_blocks) if kind == "hits" else fresh(num_blocks) for _ in range(4)]
                look_up(tiers, chains, WINDOW)
                cpu, own, start = daemon.cpu_seconds(), time.thread_time(), time.perf_counter()
                num_lookups = rounds * 10
                look_up(tiers, chains, num_lookups)
                wall, used = time.perf_counter() - start, daemon.cpu_seconds() - cpu
                row: dict[str, object] = {"what": what, "tiers": name, "median": num_lookups / wall, "unit": "1/s"}
                row["asker's CPU, us"] = (time.thread_time() - own) / num_lookups * 1e6
                if name == "daemon":
                    rates[kind, num_blocks] = row["by daemon's CPU"] = num_lookups / used
                rows.append(row)
        rate = rates[kind, CHAIN]
        targets.append(Target(f"lookups of {CHAIN} blocks, {kind}, a core's second", MIN_LOOKUPS, rate, False))
        targets.append(Target(f"a lookup of {FEW} blocks, {kind}, of one of {CHAIN}", MAX_FEW, rate / rates[kind, FEW]))
    return targets


def _many(daemon: DaemonUnderTest, rounds: int, rows: list[dict[str, object]]) -> list[Target]:
    progress(f"{NUM_CLIENTS} clients at once, beside two busy processes")
    with busy_processes(2):
        told = many_clients(daemon, NUM_CLIENTS, max(20, rounds // 50))
    num_kept = sum(each["kept"] for each in told)
    what = f"{NUM_CLIENTS} clients at once"
    attached = [each["seconds"] for each in told]
    rows.append({"what": f"{what}, attached within", "tiers": "daemon", "median": median(attached), "unit": "s"})
    rows[-1]["p99"] = max(attached)
    num_empty, num_steps = sum(each["empty"] for each in told), sum(each["steps"] for each in told)
    rows.append({"what": f"{what}, steps that stored nothing", "tiers": "daemon", "unit": "%"})
    rows[-1]["median"] = 100 * num_empty / num_steps
    rows.append({"what": f"{what}, that kept their daemon", "tiers": "daemon", "median": num_kept, "unit": ""})
    return [Target(f"of {what}, those that kept their daemon", NUM_CLIENTS, num_kept, at_most=False)]


def _copies(
    both: dict[str, CacheTiers], blocks: UnheldBlocks, rounds: int, rows: list[dict[str, object]]
) -> list[Target]:
    progress("copies")
    rates = copy_rates(both, blocks.block_bytes, rounds)
    rows += [{"what": "loads, 8 MiB", "tiers": n, "median": median(each), "unit": "GB/s"} for n, each in rates.items()]
    ratio = median(a / b for a, b in zip(rates["daemon"], rates["in process"], strict=True))
    return [Target("copy rate of the daemon's memory, of our own", MIN_COPY, ratio, at_most=False)]


def _verified(
    directory: Path, size: str, trusting: CacheTiers, blocks: UnheldBlocks, rounds: int, rows: list[dict[str, object]]
) -> list[Target]:
    progress("verified loads")
    daemon = DaemonUnderTest(directory, size, "always")
    try:
        with opened(daemon.socket, size, blocks) as verifying:
            times = time_loads({"never": trusting, "always": verifying}, blocks.block_bytes, rounds)
    finally:
        daemon.stop()
    for name, each in times.items():
        row = {"what": "load of 32 MiB, verify", "tiers": name, "median": median(each) * 1e3, "unit": "ms"}
        rows.append({**row, "p99": float(np.percentile(each, 99)) * 1e3})
    rates = hash_rates(blocks.block_bytes, rounds)
    rows += [
        {"what": "hashing, one core", "tiers": n, "median": median(each), "unit": "GB/s"} for n, each in rates.items()
    ]
    ratio = median(b / a for a, b in zip(times["never"], times["always"], strict=True))
    return [Target("a load with verify = always, of one without", MAX_VERIFY, ratio)]


if __name__ == "__main__":
    sys.exit(main())
