"""The object tier's writes and reads beside the bare client, obstore, on the same servers, in turns.

Ours: `ObjectStore.write` from L2 slots and `.read` into L2 slots, in batches as large as the hierarchy's. Every read is
verified, key and checksum. The bare client moves as many bytes, verifies nothing, and copies nothing into slots: it
puts one object of each batch from one buffer, and gets it with one request, as ours does, or in parts, all at once.
The faster way counts.

Two servers on loopback. One keeps objects in memory and checks nothing (`_object_server.py`): beside it the client's
own costs show. The other is moto's, the real S3 server of the tests; it is slow, and shows the whole way.

Ratios are medians over rounds. CPU seconds are this process's alone. Records sealed by [objects] secret, and records
encrypted under [objects] key_file, have their own rows: "× clear" is their speed over that of records in the clear.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Final

import obstore
from _bandwidth import OURS, SEALED, StoreRace, sides_of
from _blocks import Slots, key_file
from _process import free_port
from _races import Row, Speed, speed_of
from _report import parser, progress, report
from obstore.store import S3Store

from kvtier.tiers import BlockRecord
from kvtier.tiers.config import Config
from kvtier.tiers.objects import ObjectStore

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "rigs"))
from object_rig import BUCKET, NO_OBJECTS, object_server

FINGERPRINT: Final = b"object bandwidth".ljust(32, b".")
PART: Final = 2 << 20  # of the bare client's way in parts
CONNECTIONS: Final = 16
LOGIN: Final = {"access_key_id": "benchmark", "secret_access_key": "benchmark"}
WHOLE, PARTS = "bare, one request", "bare, in parts"
SIDES: Final = {"PUT": (OURS, WHOLE, *SEALED), "GET": (OURS, WHOLE, PARTS, *SEALED)}  # a put has one bare way


@contextmanager
def in_memory() -> Iterator[str]:
    """The endpoint of a server that costs little."""
    port = free_port()
    program = Path(__file__).with_name("_object_server.py")
    process = subprocess.Popen([sys.executable, str(program), str(port)])
    endpoint, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 30
    try:
        while True:
            try:
                obstore.put(client(endpoint), "here", b"1")
                break
            except obstore.exceptions.BaseError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield endpoint
    finally:
        process.kill()
        process.wait()


@contextmanager
def moto() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory, object_server(Path(directory)) as server:
        yield server.endpoint


def client(endpoint: str) -> S3Store:
    """The bare client, set as ours is."""
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        **LOGIN,
        unsigned_payload=True,
        client_options={"allow_http": True, "pool_max_idle_per_host": str(CONNECTIONS)},
        retry_config={"max_retries": 0},
    )


class ObjectBench(StoreRace):
    """One block size on one server."""

    def __init__(self, endpoint: str, slots: Slots, num_bytes: int, key: Path) -> None:
        common = {"bucket": BUCKET, "endpoint": endpoint, "deadline": "60s", **LOGIN}
        stores = {
            side: ObjectStore.open(
                Config.load(objects=common | options).objects,
                FINGERPRINT,
                slot_bytes=slots.block_bytes,
                block_size=16,
            )
            for side, options in sides_of(key).items()
        }
        super().__init__(slots, num_bytes, stores)
        self.client = client(endpoint)
        self.pool = ThreadPoolExecutor(CONNECTIONS)
        space = stores[OURS].space
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
            for side in SIDES["GET"]:
                self.empty(side, batches)

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        self.pool.shutdown()

    def empty(self, side: str, batches: list[list[BlockRecord]]) -> None:
        """Delete what a side stored."""
        if side in self.stores:
            self.stores[side].discard([record.chain_hash for batch in batches for record in batch])
        else:
            obstore.delete(self.client, [self.key(batch) for batch in batches])

    def key(self, batch: list[BlockRecord]) -> str:
        """What the bare client calls an object."""
        return f"bare/{batch[0].chain_hash.hex()}"

    def timed(self, verb: str, side: str, batch: list[BlockRecord]) -> Speed:
        """Of one batch; what ours read is compared afterwards."""
        bare, ours = (self.put, self.write) if verb == "PUT" else (self.get, self.read)
        self.forget()
        speed = speed_of(lambda: (ours if side in self.stores else bare)(side, batch), self.slots.batch_bytes)
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

    def rows(self, server: str) -> list[Row]:
        """Medians; a ratio is of two passes of one round."""
        found: list[Row] = []
        for verb, sides in SIDES.items():
            what = {"server": server, "block KiB": self.slots.block_bytes >> 10, "verb": verb}
            ours, bare = (verb, OURS), self.best([(verb, side) for side in (WHOLE, PARTS) if side in sides])
            row = {"records": "clear", "GB/s": self.rate(ours), "bare GB/s": self.rate(bare)}
            row |= {"of bare": self.ratio(ours, bare), "CPU s/GB": self.cpu(ours), "bare CPU s/GB": self.cpu(bare)}
            found += [{**what, **row, "bare way": bare[1].removeprefix("bare, ")}, *self.sealed_rows(what)]
        return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--block-kib", type=int, nargs="*", help="block sizes (default: 128 512 2048 8192)")
    given = options.parse_args()
    if NO_OBJECTS:
        sys.exit(f"object_bandwidth: {NO_OBJECTS}")
    sizes = given.block_kib or ([128, 2048] if given.quick else [128, 512, 2048, 8192])
    rounds, rows = 1 if given.quick else 15, list[Row]()
    with tempfile.TemporaryDirectory() as directory:
        key = key_file(directory)
        for server, running, num_bytes in (("in memory", in_memory, 32 << 20), ("moto", moto, 16 << 20)):
            with running() as endpoint:
                for block_kib in sizes if running is in_memory else sizes[:1]:
                    progress(f"{server}, blocks of {block_kib} KiB")
                    bench = ObjectBench(endpoint, Slots(block_kib << 10), num_bytes, key)
                    bench.run(rounds if running is in_memory else min(rounds, 5))
                    rows += bench.rows(server)
                    bench.close()
    return report("object_bandwidth", rows, [], given.json, given.save)


if __name__ == "__main__":
    sys.exit(main())
