"""Node to node beside a bare socket: how fast blocks come out of another daemon's memory, over loopback.

Ours: `PeersStore.read` from a lender in a process of its own, in batches as large as the hierarchy's, into L2 slots.
The lender hashes each block and makes its tag (once: blocks are lent again and again); the reader verifies tag, name
and checksum. A bare socket: the same slots by `sendmsg` and `recvmsg_into`, and nobody looks at them. Both have a
connection a thread, with the same options, and ask for a batch at a time. Where NIXL is installed, "NIXL" is the same
store with [peers] transport "nixl": UCX reads the slots out of the other process's memory, with as many checks.

All take turns; ratios are of two passes of one round, and their median counts. CPU seconds are those of both ends,
which share this machine's cores.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from _report import Given, Race, Result, Row, Speed, in_turns, program, progress, speed_of
from _rig import Shape, Slots, child, cpu_seconds, key_file, received, records_of, reserved, wait_until

from kvtier.service.node import PeerServer
from kvtier.tiers import BlockRecord, ChainHash, ConfigError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy, open_hierarchy
from kvtier.tiers.host import slot_stride
from kvtier.tiers.peers import PeersStore, load_nixl

FINGERPRINT: Final = b"peers bandwidth".ljust(32, b".")
IOVECS: Final = 512  # of one call
NUM_BATCHES: Final = 2  # that are lent


def names_of(slots: Slots) -> list[ChainHash]:
    return [i.to_bytes(32, "little") for i in range(1, NUM_BATCHES * slots.per_batch + 1)]


def holding(shape: Shape, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> Hierarchy:
    """A memory that has these blocks."""
    size = {"size": len(records) * slot_stride(shape.block_bytes)}
    hierarchy = open_hierarchy(Config.model_validate({"host": size}), FINGERPRINT, shape)
    assert hierarchy.host.region.wait_prefaulted(None)
    host = hierarchy.host
    reservation = reserved(host.pool, [record.chain_hash for record in records])
    for slot, payload in zip(reservation.slots, payloads, strict=True):
        host.region.slot(slot)[:] = payload
    host.describe(reservation.slots, records)
    host.pool.seal(reservation).release()
    return hierarchy


def lend(block_bytes: int, config: Config, pipe: Connection) -> None:
    """The other process: a memory full of blocks, lent and sent bare, until its parent ends it."""
    slots, shape = Slots(block_bytes, NUM_BATCHES), Shape(16, block_bytes)
    names = names_of(slots)
    hierarchy = holding(shape, records_of(names, slots.checksums), slots.sources)
    peer_server = PeerServer(config.peers)
    lent = peer_server.lend(hierarchy, FINGERPRINT, shape)
    while config.peers.transport == "nixl" and lent.memory() is None:
        time.sleep(0.01)
    bare = socket.create_server(("127.0.0.1", 0))
    pipe.send((peer_server.address, bare.getsockname()[1]))
    views = [hierarchy.host.region.slot(slot) for slot in hierarchy.host.pool.lease(names).slots]
    batches = [views[: slots.per_batch], views[slots.per_batch :]]
    while True:
        connection, _address = bare.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=send_bare, args=(connection, batches), daemon=True).start()


def send_bare(connection: socket.socket, batches: Sequence[Sequence[memoryview]]) -> None:
    """A batch for each byte that comes, by turns."""
    for number in count():
        if not connection.recv(1):
            return
        bare(batches[number % len(batches)], connection.sendmsg)


def bare(buffers: Sequence[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """As many calls as the kernel needs for them; nothing is looked at."""
    left = list(buffers)
    while left:
        count = move(left[:IOVECS])
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]


class PeersBench(Race):
    def __init__(
        self, slots: Slots, num_threads: int, num_bytes: int, config: Config, port: int, peer_server: int
    ) -> None:
        super().__init__()
        self.slots, self.names, self.num_threads, self.peer_server = slots, names_of(slots), num_threads, peer_server
        self.num_batches = max(2, num_bytes // slots.batch_bytes // num_threads)  # of each thread
        self.into = [slots.more(slots.per_batch) for _ in range(num_threads)]
        configs = {"ours": config}
        if has_nixl():
            nixl = {"peers": config.peers.model_copy(update={"transport": "nixl"})}
            configs["NIXL"] = config.model_copy(update=nixl)
        shape = {"slot_bytes": slots.block_bytes, "block_size": 16}
        self.stores = {side: PeersStore.open(each, FINGERPRINT, **shape) for side, each in configs.items()}
        wait_until(lambda: all(store.stats()["answering"] for store in self.stores.values()), "an answer of the peer")
        self.bare = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_threads)]
        for connection in self.bare:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, rounds: int) -> Row:
        turns = {name: partial(self.timed, partial(self.read, store)) for name, store in self.stores.items()}
        turns["bare"] = partial(self.timed, self.receive)
        self.speeds |= in_turns(turns, rounds, warm_up=1)
        return self.row()

    def timed(self, work: Callable[[int], None]) -> Speed:
        """One pass, of all threads; CPU time is of this process and the other one."""
        for store in self.stores.values():
            assert store.locate(self.names) == len(self.names)

        def both_ends() -> float:
            return time.process_time() + cpu_seconds(self.peer_server)

        with ThreadPoolExecutor(self.num_threads) as threads:
            moved = self.num_threads * self.num_batches * self.slots.batch_bytes
            return speed_of(lambda: list(threads.map(work, range(self.num_threads))), moved, both_ends)

    def read(self, store: PeersStore, thread: int) -> None:
        per_batch = self.slots.per_batch
        for number in range(self.num_batches):
            first = number % NUM_BATCHES * per_batch
            results = store.read(self.names[first : first + per_batch], self.into[thread])
            assert all(isinstance(result, BlockRecord) for result in results), f"a read failed: {set(results)}"

    def receive(self, thread: int) -> None:
        for _ in range(self.num_batches):
            self.bare[thread].sendall(b"b")
            bare(self.into[thread], lambda left: self.bare[thread].recvmsg_into(left, 0, socket.MSG_WAITALL)[0])

    def row(self) -> Row:
        row: Row = {"block KiB": self.slots.block_bytes >> 10, "threads": self.num_threads, "GB/s": self.rate("ours")}
        row |= {"bare GB/s": self.rate("bare"), "× bare": self.ratio("ours", "bare")}
        row |= {"CPU s/GB": self.cpu("ours"), "bare CPU s/GB": self.cpu("bare")}
        if "NIXL" in self.stores:
            row |= {"NIXL GB/s": self.rate("NIXL"), "NIXL × bare": self.ratio("NIXL", "bare")}
            row["NIXL CPU s/GB"] = self.cpu("NIXL")
        return row

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        for connection in self.bare:
            connection.close()


def has_nixl() -> bool:
    try:
        load_nixl()
    except ConfigError:
        return False
    return True


def configured(key: Path, *nodes: str, **options: str) -> Config:
    patience = {"deadline": "20s", "connect_timeout": "20s"}
    peers = {**options, **patience, "key_file": key, "nodes": nodes, "listen": "127.0.0.1:0"}
    return Config.model_validate({"peers": peers})


@program()
def main(given: Given) -> Result:
    num_bytes, rounds = (64 << 20, 2) if given.quick else (512 << 20, 9)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        key = key_file(directory)
        for block_kib in [128, 2048] if given.quick else [32, 128, 512, 2048, 8192]:
            lender = configured(key, transport="nixl" if has_nixl() else "tcp")
            with child(lend, block_kib << 10, lender) as (pipe, peer_server):
                address, port = received(pipe)
                for num_threads in (1, 2):
                    progress(f"blocks of {block_kib} KiB, {num_threads} threads")
                    reader = configured(key, address)
                    bench = PeersBench(Slots(block_kib << 10), num_threads, num_bytes, reader, port, peer_server)
                    rows.append(bench.run(rounds))
                    bench.close()
    return rows
