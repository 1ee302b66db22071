"""What the daemon costs an engine beside tiers of its own: steps that store, lookups and copies.

A real `kvtier serve` on a Unix socket, and the same tiers in this process, in turns. A step reserves slots for the
blocks it stores; a lookup of 128 blocks waits for its answer. What the daemon adds is the difference of the pair.
Between steps an engine computes for 2 ms ("busy"), or sleeps for 5, and its processor takes time to wake up ("idle").
"Beside load": a process for each core computes without a pause. The bare echo is a process that only sends back what it
gets. CPU is of a step with hashing and publishing: of the daemon's threads, and of the thread that asks. Lookups are
chains of 8 and of 128 blocks, 32 on the way at once; their rate is by the daemon's CPU time, since two noisy cores
share two busy processes. Sixteen clients start at once beside two processes that compute, with the default deadline. A
verified load is the same load (question, promise, copy of 32 MiB) from a daemon with `[host] verify = "always"` and
from one with "never". Copies are loads from L2, scattered blocks, 8 MiB at a time, from the region each of the two has.
What the daemon's memory does in an hour: daemon_memory.py.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from _report import Given, Result, Row, Target, in_turns, of_pairs, program, progress, took
from _rig import ServerProcess, Shape, busy_processes, environment, random_names, records_of, serving, settle_cpu

from kvtier.connector import open_tiers
from kvtier.tiers import ChainHash, KVTierError, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopies, HostCopyStream
from kvtier.tiers.hierarchy import PENDING, CacheTiers, Claim, Hierarchy, Wanted
from kvtier.tiers.pool import Reservation

FINGERPRINT: Final = b"service_overhead".ljust(32, b".")
BLOCKS: Final = Shape(16, 131_072)
CHAIN: Final = 128  # blocks in a lookup
FEW: Final = 8  # in a short one
WINDOW: Final = 32  # lookups on the way at once
STORES: Final = (0, 1, 16, 64)  # blocks of a step; 0: a lookup
NUM_CLIENTS: Final = 16
ROOM: Final = "640MiB"  # of the daemon: its model's, and sixteen clients' of another
LOADED: Final = 256  # blocks in a load that is verified or not
PARENT: Final = b"p" * 32
TOKENS: Final = b"\0" * 4 * BLOCKS.block_size
ECHO: Final = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile d:=s.recv(4096): s.send(d)"
CLIENT: Final = Path(__file__).with_name("_service_client.py")
_draw = np.random.default_rng(1)

AllTiers = Mapping[str, CacheTiers]
Times = dict[str, list[float]]


def fresh(num_blocks: int) -> list[ChainHash]:
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
    """Compute for two milliseconds."""
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass


def time_echo(rounds: int, pause: Callable[[], object]) -> list[float]:
    """Seconds of a round trip to a process that only sends back what it is sent: what any daemon in Python costs."""
    ours, theirs = socket.socketpair()
    echo = subprocess.Popen([sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()

    def turn() -> float:
        pause()
        return took(lambda: (ours.send(bytes(64)), ours.recv(4096)))

    times = in_turns({"echo": turn}, rounds, warm_up=10)["echo"]  # it may be starting before that
    ours.close()
    echo.wait(30)
    return times


def step(tiers: CacheTiers, num_requests: int, before: Sequence[Reservation]) -> tuple[float, list[Reservation]]:
    """One scheduling step: what the last one stored is sealed, each request stores one block. Seconds of the wait."""
    tiers.seal_each([(reservation, [TOKENS], tiers.epoch) for reservation in before])
    wanted = [Wanted(fresh(1), PARENT, PARENT) for _ in range(num_requests)]
    start = time.perf_counter()
    reservations = tiers.reserve(wanted)
    return time.perf_counter() - start, [reservation for reservation in reservations if reservation is not None]


def time_steps(all_tiers: AllTiers, num_requests: int, rounds: int, pause: Callable[[], object]) -> Times:
    """Seconds of each step's wait, both kinds of tiers in turns, a pause before each; without requests a lookup's."""
    held: dict[str, list[Reservation]] = {name: [] for name in all_tiers}
    chains = {name: [stored(tiers, CHAIN)] for name, tiers in all_tiers.items()}

    def turn(name: str, tiers: CacheTiers) -> float:
        pause()
        if not num_requests:
            return took(lambda: look_up(tiers, chains[name], 1))
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
    names = fresh(num_blocks)
    [reservation] = tiers.reserve([Wanted(names, PARENT, PARENT)])
    assert reservation is not None
    tiers.seal(reservation, records_of(names, [0] * num_blocks, PARENT, TOKENS), tiers.epoch)
    assert tiers.drain(30, below=False)
    return names


def ask(tiers: CacheTiers, names: Sequence[ChainHash]) -> Claim:
    return tiers.submit(names, PARENT, block_size=BLOCKS.block_size)


def look_up(tiers: CacheTiers, chains: Sequence[list[ChainHash]], num_lookups: int) -> None:
    waiting: list[Claim] = []
    asked = (ask(tiers, chains[number % len(chains)]) for number in range(num_lookups))
    while waiting or num_lookups:
        waiting += islice(asked, WINDOW - len(waiting))
        answered = [claim for claim in waiting if tiers.poll(claim) is not PENDING]
        for claim in answered:
            tiers.cancel(claim)
            waiting.remove(claim)
        num_lookups -= len(answered)
        if not answered:
            tiers.wait_progress(1.0)


@contextmanager
def copying(all_tiers: AllTiers) -> Iterator[dict[str, Callable[[Any, Any], None]]]:
    """What copies from each region, to blocks of one L1, from slots."""
    l1 = torch.zeros(LOADED, 1, 2, 1, 1, BLOCKS.block_bytes // 2, dtype=torch.uint8)
    streams = {name: HostCopyStream(l1, tiers.region) for name, tiers in all_tiers.items() if tiers.region is not None}

    def copy(stream: HostCopyStream, targets: Any, slots: Any) -> None:
        assert stream.load(BlockCopies(targets, slots)).wait(30)

    yield {name: partial(copy, stream) for name, stream in streams.items()}
    for stream in streams.values():
        stream.close(10)


def copy_rates(all_tiers: AllTiers, rounds: int) -> Times:
    """GB/s of loads, from each region in turns."""
    per_copy = (8 << 20) // BLOCKS.block_bytes
    for tiers in all_tiers.values():
        assert tiers.region is not None
        tiers.region.array[:] = _draw.integers(0, 256, tiers.region.array.shape[1], dtype=np.uint8)
    with copying(all_tiers) as copies:

        def turn(name: str) -> float:
            targets, slots = (_draw.permutation(count)[:per_copy] for count in (LOADED, all_tiers[name].num_slots))
            return per_copy * BLOCKS.block_bytes / 1e9 / took(lambda: copies[name](targets, slots))

        return in_turns({name: partial(turn, name) for name in copies}, rounds)


def time_loads(all_tiers: AllTiers, rounds: int) -> Times:
    """Seconds from the question to the last byte in L1, both kinds of daemons in turns."""
    chains = {name: stored(tiers, LOADED) for name, tiers in all_tiers.items()}
    with copying(all_tiers) as copies:

        def load(name: str, tiers: CacheTiers) -> float:
            start = time.perf_counter()
            claim = ask(tiers, chains[name])
            while tiers.poll(claim) is PENDING:
                tiers.wait_progress(1.0)
            with tiers.lease(claim) as lease:
                copies[name](np.arange(LOADED), np.array(lease.slots))
                return time.perf_counter() - start

        return in_turns({name: partial(load, name, tiers) for name, tiers in all_tiers.items()}, rounds)


class Overhead:
    def __init__(self, daemon: ServerProcess, both: AllTiers, rounds: int) -> None:
        self.daemon, self.both, self.rounds = daemon, both, rounds
        self.rows: list[Row] = []
        self.targets: list[Target] = []

    def row(self, what: str, tiers: str, unit: str, **more: float) -> Row:
        self.rows.append({"what": what, "tiers": tiers, "unit": unit, **more})
        return self.rows[-1]

    def steps(self, how: str, pause: Callable[[], object]) -> None:
        self.row(f"bare echo, {how}", "", "us", **_percentiles(time_echo(self.rounds // 5, pause)))
        for num_requests in STORES:
            what = f"step, {num_requests} stores, {how}" if num_requests else f"lookup of {CHAIN}, {how}"
            progress(what)
            rounds = self.rounds // 5
            before = self.daemon.cpu_seconds()
            times = time_steps(self.both, num_requests, rounds, pause)
            cpu = (self.daemon.cpu_seconds() - before) / rounds * 1e6
            added = of_pairs(times["daemon"], times["in process"], lambda a, b: a - b) * 1e6
            for name, each in times.items():
                row = self.row(what, name, "us", **_percentiles(each))
                if name == "daemon":
                    row |= {"p99 over median": row["p99"] / row["median"], "added": added, "daemon's CPU": cpu}

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
            share = rates[CHAIN] / rates[FEW]
            self.targets.append(Target(f"a lookup of {FEW} blocks, {kind}, of one of {CHAIN}", 0.5, share))

    def clients(self, path: Path) -> None:
        progress(f"{NUM_CLIENTS} clients at once, beside two busy processes")
        command = [sys.executable, str(CLIENT), str(path), str(max(20, self.rounds // 50))]
        with busy_processes(2):
            clients = [subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) for _ in range(NUM_CLIENTS)]
            told = [client.communicate(timeout=600)[0] for client in clients]
        assert not any(client.returncode for client in clients), "a client of the daemon failed"
        what, kept = f"{NUM_CLIENTS} clients at once", sum(map(int, told))
        self.row(f"{what}, that kept their daemon", "daemon", "", median=kept)
        self.targets.append(Target(f"of {what}, those that kept their daemon", NUM_CLIENTS, kept, at_most=False))

    def copies(self) -> None:
        progress("copies")
        rates = copy_rates(self.both, self.rounds // 10)
        for name, each in rates.items():
            self.row("loads, 8 MiB", name, "GB/s", median=median(each))
        ratio = of_pairs(rates["daemon"], rates["in process"])
        self.targets.append(Target("copy rate of the daemon's memory, of our own", 0.95, ratio, at_most=False))

    def verified(self, home: str, size: str) -> None:
        progress("verified loads")
        with (
            serving(home, size, HOST__VERIFY="always") as (_, path),
            opened(size, service={"socket": str(path)}) as verifying,
        ):
            times = time_loads({"never": self.both["daemon"], "always": verifying}, self.rounds // 10)
        for name, each in times.items():
            in_us = _percentiles(each)
            self.row("load of 32 MiB, verify", name, "ms", median=in_us["median"] / 1e3, p99=in_us["p99"] / 1e3)
        ratio = of_pairs(times["always"], times["never"])  # up to the goal it would be on by default
        self.targets.append(Target("a load with verify = always, of one without", 1.05, ratio))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds) * 1e6, "p99": float(np.percentile(seconds, 99)) * 1e6}


@program()
def main(given: Given) -> Result:
    rounds, size = (300, "128MiB") if given.quick else (5_000, "512MiB")
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as home,
        serving(home, ROOM) as (daemon, path),
        opened(size) as own,
        opened(size, service={"socket": str(path)}) as remote,
    ):
        settle_cpu(daemon.cpu_seconds, 60.0)  # it prefaults its memory
        overhead = Overhead(daemon, {"in process": own, "daemon": remote}, rounds)
        overhead.steps("busy", busy)
        overhead.steps("idle", partial(time.sleep, 0.005))
        with busy_processes(os.cpu_count() or 1):
            overhead.steps("beside load", partial(time.sleep, 0.005))
        overhead.lookups()
        overhead.clients(path)
        overhead.copies()
        overhead.verified(home, size)
    return overhead.rows, overhead.targets
