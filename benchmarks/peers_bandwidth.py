"""Node to node beside a bare socket: how fast blocks come out of another daemon's memory, over loopback.

Ours: `PeersStore.read` from a lender in a process of its own, in batches as large as the hierarchy's, into L2 slots.
The lender hashes each block and makes its tag. The reader verifies tag, name and checksum. A bare socket: the other
process sends the same slots by `sendmsg`, this one receives them into the same slots by `recvmsg_into`, and nobody
looks at them. Blocks are lent again and again, so the lender has their tags but for the first time. Both have one
connection, with the same options, and ask for a batch at a time. With two threads, as the hierarchy reads, each has a
connection of its own.

Both sides take turns. Ratios are of two passes of one round, and their median counts. CPU seconds are those of both
ends, which share this machine's cores: half of them, on two cores, is the least time a GB can take. The last columns
are what one core computes, of blocks of that size; HMAC and Poly1305 are what the tag is not.
"""

import hmac
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from _report import Speed, Target, parser, progress, report
from cryptography.hazmat.primitives.poly1305 import Poly1305

from kvtier.service.node import PeerServer
from kvtier.tiers import BATCH_BYTES, BlockRecord, checksum
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import open_hierarchy
from kvtier.tiers.host import HostRegion, slot_stride
from kvtier.tiers.peers import PeersStore, prepare, receive_into, send, wire

FINGERPRINT: Final = b"peers bandwidth".ljust(32, b".")
BLOCK_SIZE: Final = 16
SHARE: Final = 0.8  # of a bare socket's rate
FOREVER: Final = 600.0  # seconds
SIDES: Final = ("ours", "bare")


class BenchBlocks:
    """The blocks of one size: a `BlockShape`, and their names."""

    def __init__(self, block_bytes: int) -> None:
        self.block_size = BLOCK_SIZE
        self.block_bytes = block_bytes
        self.per_batch = max(1, BATCH_BYTES // block_bytes)
        self.names = [i.to_bytes(32, "little") for i in range(1, 2 * self.per_batch + 1)]  # two batches


def lend(blocks: BenchBlocks, config: Config, told: int) -> None:
    """The other process: a memory full of blocks, lent and sent bare, until its parent ends it."""
    size = {"size": len(blocks.names) * slot_stride(blocks.block_bytes)}
    memory = Config.model_validate({"host": size})
    hierarchy = open_hierarchy(memory, FINGERPRINT, blocks)
    host, region = hierarchy.host, hierarchy.host.region
    assert region.wait_prefaulted(None)
    reservation = host.pool.reserve(blocks.names)
    assert reservation is not None
    rng, slots = np.random.default_rng(1), reservation.slots
    for slot in slots:
        region.slot(slot)[:] = rng.bytes(blocks.block_bytes)
    parents = [bytes(32), *blocks.names]
    records = [
        BlockRecord(name, parent, b"\1\0\0\0" * BLOCK_SIZE, checksum(region.slot(slot)))
        for name, parent, slot in zip(blocks.names, parents, slots, strict=False)
    ]
    host.describe(slots, records)
    host.pool.seal(reservation).release()
    peer_server = PeerServer(config.peers)
    peer_server.lend(hierarchy, FINGERPRINT, blocks)
    bare = socket.create_server(("127.0.0.1", 0))
    os.write(told, f"{peer_server.address} {bare.getsockname()[1]}\n".encode())
    while True:
        connection, _ = bare.accept()
        prepare(connection)
        views = [region.slot(slot) for slot in slots]
        batches = (views[: blocks.per_batch], views[blocks.per_batch :])
        threading.Thread(target=send_bare, args=(connection, batches), daemon=True).start()


def send_bare(connection: socket.socket, batches: Sequence[Sequence[memoryview]]) -> None:
    """A batch for each byte that comes, by turns."""
    for number in count():
        if not connection.recv(1):
            return
        send(connection, batches[number % len(batches)], time.monotonic() + FOREVER)


@contextmanager
def lending(blocks: BenchBlocks, config: Config) -> Iterator[tuple[str, int, int]]:
    """The address of a lender, and the port of a bare socket, of another process, and its id."""
    told, tell = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            lend(blocks, config, tell)
        finally:
            os._exit(1)
    os.close(tell)
    try:
        with os.fdopen(told) as lines:
            address, _, port = lines.readline().partition(" ")
        yield address, int(port), child
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


class PeersBench:
    """One block size and number of threads."""

    def __init__(
        self, blocks: BenchBlocks, num_threads: int, num_bytes: int, config: Config, port: int, peer_server: int
    ) -> None:
        self.blocks = blocks
        self.peer_server = peer_server
        self.num_threads = num_threads
        self.num_batches = max(2, num_bytes // BATCH_BYTES // num_threads)  # of each thread
        self.speeds: dict[str, list[Speed]] = {side: [] for side in SIDES}
        region = HostRegion.allocate(num_threads * blocks.per_batch, blocks.block_bytes)
        assert region.wait_prefaulted(None)
        self.into = [
            [region.slot(thread * blocks.per_batch + i) for i in range(blocks.per_batch)]
            for thread in range(num_threads)
        ]
        lent = wire.LentBlocks(FINGERPRINT, blocks.block_bytes, BLOCK_SIZE)
        self.session = wire.PeerSession(bytes(32), bytes(32), bytes(32), lent)
        self.store = PeersStore.open(config, FINGERPRINT, slot_bytes=blocks.block_bytes, block_size=BLOCK_SIZE)
        deadline = time.monotonic() + FOREVER
        while not self.store.stats()["answering"]:
            assert time.monotonic() < deadline, "no peer"
            time.sleep(0.01)
        self.bare = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_threads)]
        for connection in self.bare:
            prepare(connection)

    def run(self, rounds: int) -> None:
        """Both by turns; the first round warms up and counts for nothing."""
        for number in range(rounds + 1):
            for side in SIDES if number % 2 else reversed(SIDES):
                speed = self.timed(self.read if side == "ours" else self.receive)
                if number:
                    self.speeds[side].append(speed)

    def timed(self, work: Callable[[int], None]) -> Speed:
        """One pass, of all threads."""
        assert self.store.locate(self.blocks.names) == len(self.blocks.names)
        cpu, start = self.cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(self.num_threads) as threads:
            list(threads.map(work, range(self.num_threads)))
        wall, cpu = time.perf_counter() - start, self.cpu_seconds() - cpu
        moved = self.num_threads * self.num_batches * self.blocks.per_batch * self.blocks.block_bytes / 1e9
        return Speed(moved / wall, cpu / moved)

    def cpu_seconds(self) -> float:
        """Of this process and the other one, as it counts them: in ticks."""
        ticks = Path(f"/proc/{self.peer_server}/stat").read_text().rpartition(")")[2].split()[11:13]
        return time.process_time() + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def read(self, thread: int) -> None:
        """Ours."""
        per_batch = self.blocks.per_batch
        for number in range(self.num_batches):
            first = number % 2 * per_batch
            results = self.store.read(self.blocks.names[first : first + per_batch], self.into[thread])
            assert all(isinstance(result, BlockRecord) for result in results), f"a read failed: {set(results)}"

    def receive(self, thread: int) -> None:
        """A bare socket."""
        connection, deadline = self.bare[thread], time.monotonic() + FOREVER
        for _ in range(self.num_batches):
            connection.sendall(b"b")
            receive_into(connection, self.into[thread], deadline)

    def row(self) -> dict[str, object]:
        """Medians; the ratio is of two passes of one round."""
        ours, bare = self.speeds["ours"], self.speeds["bare"]
        ratios = [one.gb_per_s / two.gb_per_s for one, two in zip(ours, bare, strict=True)]
        return {
            "block KiB": self.blocks.block_bytes >> 10,
            "threads": self.num_threads,
            "GB/s": statistics.median(speed.gb_per_s for speed in ours),
            "bare GB/s": statistics.median(speed.gb_per_s for speed in bare),
            "× bare": statistics.median(ratios),
            "CPU s/GB": statistics.median(speed.cpu_s_per_gb for speed in ours),
            "bare CPU s/GB": statistics.median(speed.cpu_s_per_gb for speed in bare),
            "tag GB/s": self.computed(self.tag),
            "Poly1305 GB/s": self.computed(lambda view: Poly1305.generate_tag(bytes(32), view)),
            "HMAC GB/s": self.computed(lambda view: hmac.digest(bytes(32), view, "sha256")),
            "checksum GB/s": self.computed(checksum),
        }

    def computed(self, function: Callable[[memoryview], object]) -> float:
        """GB/s of what is computed of each block, the best of some passes over a batch."""
        best = 0.0
        for _ in range(5):
            start = time.perf_counter()
            for view in self.into[0]:
                function(view)
            best = max(best, len(self.into[0]) * self.blocks.block_bytes / 1e9 / (time.perf_counter() - start))
        return best

    def tag(self, view: memoryview) -> bytes:
        """Of one block."""
        return self.session.tag(bytes(self.session.head_bytes), view)

    def close(self) -> None:
        """Hang up."""
        self.store.close()
        for connection in self.bare:
            connection.close()


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target(
            f"blocks of {row['block KiB']} KiB, {row['threads']} thread{'s' * (row['threads'] > 1)}: × a bare socket",
            SHARE,
            row["× bare"],
            at_most=False,
        )
        for row in rows
    ]


def configured(key_file: Path, *nodes: str) -> Config:
    """As patient as it takes."""
    peers = {"key_file": key_file, "nodes": nodes, "deadline": "20s", "connect_timeout": "20s"}
    return Config.model_validate({"peers": {**peers, "listen": "127.0.0.1:0"}})


def main() -> int:
    arguments = parser(__doc__).parse_args()
    num_bytes, rounds = (64 << 20, 2) if arguments.quick else (512 << 20, 9)
    sizes = [128, 2048] if arguments.quick else [32, 128, 512, 2048, 8192]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "key"
        key_file.touch(0o600)
        key_file.write_bytes(os.urandom(32))
        for block_kib in sizes:
            blocks = BenchBlocks(block_kib << 10)
            with lending(blocks, configured(key_file)) as (address, port, peer_server):
                for num_threads in (1, 2):
                    progress(f"blocks of {block_kib} KiB, {num_threads} threads")
                    bench = PeersBench(blocks, num_threads, num_bytes, configured(key_file, address), port, peer_server)
                    bench.run(rounds)
                    rows.append(bench.row())
                    bench.close()
    return report("peers_bandwidth", rows, targets_of(rows), arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
