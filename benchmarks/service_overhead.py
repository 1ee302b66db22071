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
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from _blocks import Shape, random_names, records_of
from _process import ServerProcess, busy_processes, environment, serving
from _races import Row, in_turns, took
from _report import Target, parser, progress, report

from kvtier.connector import open_tiers
from kvtier.tiers import ChainHash, KVTierError, Outcome, checksum
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopies, HostCopyStream
from kvtier.tiers.hierarchy import PENDING, CacheTiers, Claim, Hierarchy, Wanted
from kvtier.tiers.pool import Reservation

FINGERPRINT: Final = b"service_overhead".ljust(32, b".")
BLOCKS: Final = Shape(16, 131_072)
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
TOKENS: Final = b"\0" * 4 * BLOCKS.block_size
ECHO: Final = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile d:=s.recv(4096): s.send(d)"
CLIENT: Final = Path(__file__).with_name("_service_client.py")
_draw = np.random.default_rng(1)

AllTiers = Mapping[str, CacheTiers]
Times = dict[str, list[float]]


def fresh(num_blocks: int) -> list[ChainHash]:
    """Names nobody has used."""
    return random_names(_draw, num_blocks)


@contextmanager
def opened(size: str, blocks: Shape = BLOCKS, **options: Any) -> Iterator[CacheTiers]:
    tiers = open_tiers(Config.load(host={"size": size}, **options), FINGERPRINT, blocks)
    if tiers.region is None:
        raise KVTierError("the daemon did not answer")
    tiers.region.wait_prefaulted(60)
    try:
        yield tiers
    finally:
        tiers.close()


def busy() -> None:
    """Compute for a fifth of a millisecond: a processor that slept takes as long to wake up as a step waits."""
    end = time.perf_counter() + 0.0002
    while time.perf_counter() < end:
        pass


def idle() -> None:
    """Sleep for a millisecond, as an engine that waits for its device."""
    time.sleep(0.001)


def time_echo(rounds: int, pause: Callable[[], object]) -> list[float]:
    """Seconds of a round trip to a process that only sends back what it is sent: what any daemon in Python costs."""
    ours, theirs = socket.socketpair()
    echo = subprocess.Popen([sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()

    def turn() -> float:
        pause()
        return took(lambda: (ours.send(bytes(64)), ours.recv(4096)))

    times = in_turns({"echo": turn}, rounds, warm_up=10)["echo"]  # before that it may be starting
    ours.close()
    echo.wait(30)
    return times


def step(tiers: CacheTiers, num_requests: int, before: Sequence[Reservation]) -> tuple[float, list[Reservation]]:
    """One scheduling step: what the last one stored is sealed, each request stores one block. Seconds of the wait."""
    tiers.seal_each([(reservation, [TOKENS], tiers.epoch) for reservation in before])
    wanted = [Wanted(fresh(1), PARENT, PARENT) for _ in range(num_requests)]
    start = time.perf_counter()
    reservations = tiers.reserve(wanted)
    seconds = time.perf_counter() - start
    return seconds, [reservation for reservation in reservations if reservation is not None]


def time_steps(all_tiers: AllTiers, num_requests: int, rounds: int, pause: Callable[[], object]) -> Times:
    """Seconds of each step's wait, both kinds of tiers in turns, with a pause before each step.

    Without requests it is the least that can be asked: is one block held?
    """
    held: dict[str, list[Reservation]] = {name: [] for name in all_tiers}
    asked = fresh(1)

    def turn(name: str, tiers: CacheTiers) -> float:
        pause()
        if not num_requests:
            return took(lambda: tiers.holds(asked))
        seconds, held[name] = step(tiers, num_requests, held[name])
        if isinstance(tiers, Hierarchy):  # its hashing, in this process, would hold up the other's next step
            tiers.drain(10.0, below=False)
        return seconds

    times = in_turns({name: partial(turn, name, tiers) for name, tiers in all_tiers.items()}, rounds)
    for name, reservations in held.items():
        for reservation in reservations:
            all_tiers[name].abandon(reservation, Outcome.ABORTED)
    return times


def stored(tiers: CacheTiers, num_blocks: int) -> list[ChainHash]:
    """The names of a chain that L2 holds."""
    names = fresh(num_blocks)
    [reservation] = tiers.reserve([Wanted(names, PARENT, PARENT)])
    assert reservation is not None
    tiers.seal(reservation, records_of(names, [0] * num_blocks, PARENT, TOKENS), tiers.epoch)
    assert tiers.drain(30, below=False)
    return names


def ask(tiers: CacheTiers, names: Sequence[ChainHash]) -> Claim:
    return tiers.submit(names, PARENT, block_size=BLOCKS.block_size)


def look_up(tiers: CacheTiers, chains: Sequence[list[ChainHash]], num_lookups: int) -> None:
    """`num_lookups` lookups, WINDOW on the way at once; what is promised is let go."""
    waiting: list[Claim] = []
    number = 0
    while number < num_lookups or waiting:
        while number < num_lookups and len(waiting) < WINDOW:
            waiting.append(ask(tiers, chains[number % len(chains)]))
            number += 1
        left = []
        for claim in waiting:
            if tiers.poll(claim) is PENDING:
                left.append(claim)
            else:
                tiers.cancel(claim)
        if len(left) == len(waiting):
            tiers.wait_progress(1.0)
        waiting = left


def copy_rates(all_tiers: AllTiers, rounds: int) -> Times:
    """GB/s of loads, from each region in turns."""
    block_bytes = BLOCKS.block_bytes
    per_copy = max(1, (8 << 20) // block_bytes)
    l1 = torch.zeros(256, 1, 2, 1, 1, block_bytes // 2, dtype=torch.uint8)
    streams = streams_of(all_tiers, l1)
    for tiers in all_tiers.values():
        assert tiers.region is not None
        tiers.region.array[:] = _draw.integers(0, 256, tiers.region.array.shape[1], dtype=np.uint8)

    def turn(name: str) -> float:
        targets, slots = _draw.permutation(256)[:per_copy], _draw.permutation(all_tiers[name].num_slots)[:per_copy]
        return per_copy * block_bytes / 1e9 / took(lambda: copied(streams[name], targets, slots))

    rates = in_turns({name: partial(turn, name) for name in streams}, rounds)
    for stream in streams.values():
        stream.close(10)
    return rates


def streams_of(all_tiers: AllTiers, l1: torch.Tensor) -> dict[str, HostCopyStream]:
    return {name: HostCopyStream(l1, tiers.region) for name, tiers in all_tiers.items() if tiers.region is not None}


def copied(stream: HostCopyStream, targets: Any, slots: Any) -> None:
    assert stream.load(BlockCopies(targets, slots)).wait(30)


def time_loads(all_tiers: AllTiers, rounds: int) -> Times:
    """Seconds from the question to the last byte in L1, both kinds of daemons in turns."""
    l1 = torch.zeros(LOADED, 1, 2, 1, 1, BLOCKS.block_bytes // 2, dtype=torch.uint8)
    chains = {name: stored(tiers, LOADED) for name, tiers in all_tiers.items()}
    streams = streams_of(all_tiers, l1)

    def load(name: str, tiers: CacheTiers) -> float:
        start = time.perf_counter()
        claim = ask(tiers, chains[name])
        while tiers.poll(claim) is PENDING:
            tiers.wait_progress(1.0)
        with tiers.lease(claim) as lease:
            copied(streams[name], np.arange(LOADED), np.array(lease.slots))
            return time.perf_counter() - start

    times = in_turns({name: partial(load, name, tiers) for name, tiers in all_tiers.items()}, rounds)
    for stream in streams.values():
        stream.close(10)
    return times


def hash_rates(rounds: int) -> Times:
    """GB/s of each digest, over more blocks than a processor's cache holds."""
    blocks = np.random.default_rng(0).integers(0, 256, (LOADED, BLOCKS.block_bytes), dtype=np.uint8)
    parts = [[memoryview(block) for block in blocks[first : first + 8]] for first in range(0, LOADED, 8)]
    digests: dict[str, Callable[[memoryview], object]] = {
        "xxh3-64": checksum,
        "BLAKE2b-128": lambda block: hashlib.blake2b(block, digest_size=16, key=PARENT).digest(),
    }
    turns = {name: iter(parts * (rounds // len(parts) + 1)) for name in digests}

    def turn(name: str) -> float:
        part = next(turns[name])
        return 8 * BLOCKS.block_bytes / 1e9 / took(lambda: list(map(digests[name], part)))

    return in_turns({name: partial(turn, name) for name in digests}, rounds)


def many_clients(path: Path, num_steps: int) -> list[Row]:
    """What clients told that were all started at once, with the default deadline."""
    command = [sys.executable, str(CLIENT), str(path), str(num_steps)]
    clients = [subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) for _ in range(NUM_CLIENTS)]
    told = []
    for client in clients:
        said, _ = client.communicate(timeout=600)
        if client.returncode:
            raise KVTierError(f"a client of the daemon ended with status {client.returncode}")
        told.append(json.loads(said))
    return told


class Overhead:
    """Rows and targets, of a daemon and of tiers in this process."""

    def __init__(self, daemon: ServerProcess, both: AllTiers, rounds: int) -> None:
        self.daemon, self.both, self.rounds = daemon, both, rounds
        self.rows: list[Row] = []
        self.targets: list[Target] = []

    def row(self, what: str, tiers: str, unit: str, **more: float) -> Row:
        self.rows.append({"what": what, "tiers": tiers, "unit": unit, **more})
        return self.rows[-1]

    def steps(self) -> None:
        for pause in (busy, idle):
            self.row(f"bare echo, {pause.__name__}", "", "us", **_percentiles(time_echo(self.rounds, pause)))
            for num_requests, limit in MAX_STEP_US.items():
                progress(f"steps that store a block of each of {num_requests} requests, {pause.__name__} between them")
                rounds = self.rounds if num_requests < 64 else self.rounds // 5
                what = f"step, {num_requests} stores" if num_requests else "round trip alone"
                before = self.daemon.cpu_seconds()
                times = time_steps(self.both, num_requests, rounds, pause)
                cpu = (self.daemon.cpu_seconds() - before) / rounds * 1e6
                added = _percentiles([b - a for a, b in zip(times["in process"], times["daemon"], strict=True)])
                for name, each in times.items():
                    row = self.row(f"{what}, {pause.__name__}", name, "us", **_percentiles(each))
                    if name == "daemon":
                        row |= {"added": added["median"], "added p99": added["p99"], "daemon's CPU": cpu}
                if pause is busy:
                    self.targets.append(Target(f"the daemon adds to a {what}, us", limit, added["median"]))

    def lookups(self) -> None:
        rates, num_lookups = {}, self.rounds * 10
        for kind in ("hits", "misses"):
            for num_blocks in (FEW, CHAIN):
                what = f"lookups of {num_blocks}, {kind}"
                progress(what)
                for name, tiers in self.both.items():
                    chains = [stored(tiers, num_blocks) if kind == "hits" else fresh(num_blocks) for _ in range(4)]
                    look_up(tiers, chains, WINDOW)
                    cpu, own, start = self.daemon.cpu_seconds(), time.thread_time(), time.perf_counter()
                    look_up(tiers, chains, num_lookups)
                    wall, used = time.perf_counter() - start, self.daemon.cpu_seconds() - cpu
                    row = self.row(what, name, "1/s", median=num_lookups / wall)
                    row["asker's CPU, us"] = (time.thread_time() - own) / num_lookups * 1e6
                    if name == "daemon":
                        rates[num_blocks] = row["by daemon's CPU"] = num_lookups / used
            few = Target(f"a lookup of {FEW} blocks, {kind}, of one of {CHAIN}", MAX_FEW, rates[CHAIN] / rates[FEW])
            many = Target(f"lookups of {CHAIN} blocks, {kind}, a core's second", MIN_LOOKUPS, rates[CHAIN], False)
            self.targets += [many, few]

    def clients(self, path: Path) -> None:
        progress(f"{NUM_CLIENTS} clients at once, beside two busy processes")
        with busy_processes(2):
            told = many_clients(path, max(20, self.rounds // 50))
        what, attached = f"{NUM_CLIENTS} clients at once", [each["seconds"] for each in told]
        kept, empty, steps = (sum(each[name] for each in told) for name in ("kept", "empty", "steps"))
        self.row(f"{what}, attached within", "daemon", "s", median=median(attached), p99=max(attached))
        self.row(f"{what}, steps that stored nothing", "daemon", "%", median=100 * empty / steps)
        self.row(f"{what}, that kept their daemon", "daemon", "", median=kept)
        self.targets.append(Target(f"of {what}, those that kept their daemon", NUM_CLIENTS, kept, at_most=False))

    def copies(self) -> None:
        progress("copies")
        rates = copy_rates(self.both, self.rounds // 10)
        for name, each in rates.items():
            self.row("loads, 8 MiB", name, "GB/s", median=median(each))
        ratio = median(a / b for a, b in zip(rates["daemon"], rates["in process"], strict=True))
        self.targets.append(Target("copy rate of the daemon's memory, of our own", MIN_COPY, ratio, at_most=False))

    def verified(self, home: str, size: str) -> None:
        progress("verified loads")
        with serving(home, size, "always") as (_, path), opened(size, service={"socket": str(path)}) as verifying:
            times = time_loads({"never": self.both["daemon"], "always": verifying}, self.rounds // 10)
        for name, each in times.items():
            in_us = _percentiles(each)
            self.row("load of 32 MiB, verify", name, "ms", median=in_us["median"] / 1e3, p99=in_us["p99"] / 1e3)
        for name, each in hash_rates(self.rounds // 10).items():
            self.row("hashing, one core", name, "GB/s", median=median(each))
        ratio = median(b / a for a, b in zip(times["never"], times["always"], strict=True))
        self.targets.append(Target("a load with verify = always, of one without", MAX_VERIFY, ratio))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds) * 1e6, "p99": float(np.percentile(seconds, 99)) * 1e6}


def main() -> int:
    given = parser(__doc__).parse_args()
    rounds, size = (300, "128MiB") if given.quick else (5_000, "512MiB")
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as home,
        serving(home, ROOM) as (daemon, path),
        opened(size) as own,
        opened(size, service={"socket": str(path)}) as remote,
    ):
        daemon.settle()
        overhead = Overhead(daemon, {"in process": own, "daemon": remote}, rounds)
        overhead.steps()
        overhead.lookups()
        overhead.clients(path)
        overhead.copies()
        overhead.verified(home, size)
    return report("service_overhead", overhead.rows, overhead.targets, given.json, given.save)


if __name__ == "__main__":
    sys.exit(main())
