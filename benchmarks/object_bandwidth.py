"""The object tier's writes and reads beside the bare client, obstore, on the same servers, in turns.

Ours: `ObjectStore.write` from L2 slots and `.read` into L2 slots, in batches as large as the hierarchy's; every read is
verified, key and checksum. The bare client moves as many bytes, verifies nothing, and copies nothing into slots: it
puts an object for each batch from one buffer, and gets it with one request or in parts, all at once: the faster counts.
Two servers on loopback: one in memory that checks nothing (`_servers.py`), beside which the client's own costs
show, and moto's, the S3 server of the tests, which is slow and shows the whole way. Ratios are medians over rounds, CPU
seconds this process's. "× clear": speed of records sealed or encrypted over that of records in the clear.
"""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any, Final

import obstore
from _report import Given, Result, Row, Speed, program, progress, speed_of
from _rig import OURS, ServerProcess, Slots, StoreRace, free_port
from object_rig import BUCKET, NO_OBJECTS, object_server
from obstore.store import S3Store

from kvtier.tiers import BlockRecord, KVTierError
from kvtier.tiers.config import Config
from kvtier.tiers.objects import ObjectStore

FINGERPRINT: Final = b"object bandwidth".ljust(32, b".")
PART: Final = 2 << 20  # of the bare client's way in parts
CONNECTIONS: Final = 16
LOGIN: Final = {"access_key_id": "benchmark", "secret_access_key": "benchmark"}
WHOLE, PARTS = "bare, one request", "bare, in parts"
SIDES: Final = {"PUT": (OURS, WHOLE), "GET": (OURS, WHOLE, PARTS)}  # a put has one bare way


@contextmanager
def in_memory() -> Iterator[str]:
    """The endpoint of a server that costs little."""
    port, program = free_port(), str(Path(__file__).with_name("_servers.py"))
    with tempfile.TemporaryDirectory() as home, ServerProcess([program, "objects", str(port)], Path(home) / "log"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def moto() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory, object_server(Path(directory)) as server:
        yield server.endpoint


def client(endpoint: str) -> S3Store:
    options: dict[str, Any] = {"allow_http": True, "pool_max_idle_per_host": str(CONNECTIONS)}
    more: dict[str, Any] = {"client_options": options, "retry_config": {"max_retries": 0}, "unsigned_payload": True}
    return S3Store(BUCKET, endpoint=endpoint, region="us-east-1", **LOGIN, **more)


class ObjectBench(StoreRace):
    def __init__(self, endpoint: str, slots: Slots, num_bytes: int) -> None:
        config = Config.load(objects={"bucket": BUCKET, "endpoint": endpoint, "deadline": "60s", **LOGIN}).objects
        ours = ObjectStore.open(config, FINGERPRINT, slot_bytes=slots.block_bytes, block_size=16)
        super().__init__(slots, num_bytes, {OURS: ours})
        self.client, self.pool = client(endpoint), ThreadPoolExecutor(CONNECTIONS)
        space = ours.space
        # of an object of ours, all that lies around blocks included
        self.length = space.edges([space.record_bytes] * slots.per_batch)[-1]
        self.content = memoryview(bytearray(os.urandom(self.length)))

    def run(self, rounds: int) -> None:
        """All sides by turns, batch by batch; the first round warms the server's memory and counts for nothing."""
        for number in range(rounds + 1):
            batches = self.chain(number)
            for verb, sides in SIDES.items():
                took: dict[str, list[Speed]] = {side: [] for side in sides}
                for turn, batch in enumerate(batches):
                    first = turn % len(sides)
                    for side in sides[first:] + sides[:first]:
                        took[side].append(self.timed(verb, side, batch))
                for side, speeds in took.items() if number else ():
                    rate = harmonic_mean(speed.gb_per_s for speed in speeds)
                    self.add((verb, side), Speed(rate, fmean(speed.cpu_s_per_gb for speed in speeds)))
            for batch in batches:
                for side in self.stores:
                    self.discard(side, batch)
                obstore.delete(self.client, self.key(batch))

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        self.pool.shutdown()

    def key(self, batch: list[BlockRecord]) -> str:
        """What the bare client calls an object."""
        return f"bare/{batch[0].chain_hash.hex()}"

    def timed(self, verb: str, side: str, batch: list[BlockRecord]) -> Speed:
        """Of one batch; what ours read is compared afterwards."""
        bare, ours = (self.put, self.write) if verb == "PUT" else (self.get, self.read)
        self.forget()
        speed = speed_of(partial(ours if side in self.stores else bare, side, batch), self.slots.batch_bytes)
        if verb == "GET" and side in self.stores:
            self.check()
        return speed

    def put(self, side: str, batch: list[BlockRecord]) -> None:
        obstore.put(self.client, self.key(batch), self.content, use_multipart=False)

    def get(self, side: str, batch: list[BlockRecord]) -> None:
        step, key = self.length if side == WHOLE else PART, self.key(batch)
        ends = [(start, min(self.length, start + step)) for start in range(0, self.length, step)]
        asked = [self.pool.submit(obstore.get_range, self.client, key, start=a, end=b) for a, b in ends]
        assert sum(len(each.result()) for each in asked) == self.length

    def rows(self, server: str) -> Iterator[Row]:
        for verb, sides in SIDES.items():
            what = {"server": server, "block KiB": self.slots.block_bytes >> 10, "verb": verb}
            ours, bare = (verb, OURS), self.best([(verb, side) for side in (WHOLE, PARTS) if side in sides])
            row: Row = {**what, "records": "clear", "GB/s": self.rate(ours), "bare GB/s": self.rate(bare)}
            row |= {"of bare": self.ratio(ours, bare), "CPU s/GB": self.cpu(ours), "bare CPU s/GB": self.cpu(bare)}
            yield row | {"bare way": bare[1].removeprefix("bare, ")}


@program()
def main(given: Given) -> Result:
    if NO_OBJECTS:
        raise KVTierError(NO_OBJECTS)
    sizes, rounds = ([128, 2048], 1) if given.quick else ([128, 512, 2048, 8192], 15)
    rows: list[Row] = []
    for server, running, num_bytes in (("in memory", in_memory, 32 << 20), ("moto", moto, 16 << 20)):
        with running() as endpoint:
            for block_kib in sizes if running is in_memory else sizes[:1]:
                progress(f"{server}, blocks of {block_kib} KiB")
                with closing(ObjectBench(endpoint, Slots(block_kib << 10), num_bytes)) as bench:
                    bench.run(rounds if running is in_memory else min(rounds, 5))
                    rows += bench.rows(server)
    return rows
