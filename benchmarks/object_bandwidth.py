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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import obstore
from _report import Speed, Target, parser, progress, report
from obstore.store import S3Store
from redis_bandwidth import HostSlots

from kvtier.tiers import BlockRecord, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.objects import ObjectStore

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "rigs"))
from node_rig import free_port
from object_rig import BUCKET, NO_OBJECTS, object_server

FINGERPRINT: Final = b"object bandwidth".ljust(32, b".")
BLOCK_SIZE: Final = 16
OF_BARE: Final = 0.8  # of the bare client's rate
PART: Final = 2 << 20  # of the bare client's way in parts
CONNECTIONS: Final = 16
VERBS: Final = ("PUT", "GET")
WHOLE, PARTS, OURS = "bare, one request", "bare, in parts", "ours"
SEALED: Final = ("secret", "key_file")  # options of [objects]
SIDES: Final = (OURS, WHOLE, PARTS, *SEALED)


@contextmanager
def in_memory() -> Iterator[str]:
    """The endpoint of a server that costs little."""
    port = free_port()
    program = Path(__file__).with_name("_object_server.py")
    process = subprocess.Popen([sys.executable, str(program), str(port)])
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 30
        while True:
            try:
                obstore.put(client(endpoint), "here", b"1")
            except obstore.exceptions.BaseError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                yield endpoint
                return
    finally:
        process.kill()
        process.wait()


@contextmanager
def real() -> Iterator[str]:
    """The endpoint of moto's server."""
    with tempfile.TemporaryDirectory() as directory, object_server(Path(directory)) as server:
        yield server.endpoint


def client(endpoint: str) -> S3Store:
    """The bare client, set as ours is."""
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="benchmark",
        secret_access_key="benchmark",
        unsigned_payload=True,
        client_options={"allow_http": True, "pool_max_idle_per_host": str(CONNECTIONS)},
        retry_config={"max_retries": 0},
    )


class ObjectBench:
    """One block size on one server."""

    def __init__(self, endpoint: str, slots: HostSlots, num_bytes: int, key_file: Path) -> None:
        self.slots = slots
        self.num_batches = max(1, num_bytes // (slots.per_batch * slots.block_bytes))
        self.speeds: dict[tuple[str, str], list[Speed]] = {}
        self.client = client(endpoint)
        self.pool = ThreadPoolExecutor(CONNECTIONS)
        login = {"access_key_id": "benchmark", "secret_access_key": "benchmark"}
        common = {"bucket": BUCKET, "endpoint": endpoint, "deadline": "60s", **login}
        sides: dict[str, dict[str, str]] = {
            OURS: {},
            "secret": {"secret": "a secret of the benchmark"},
            "key_file": {"key_file": str(key_file)},
        }
        self.stores = {
            side: ObjectStore.open(
                Config.load(objects={**common, **sealing}).objects,
                FINGERPRINT,
                slot_bytes=slots.block_bytes,
                block_size=BLOCK_SIZE,
            )
            for side, sealing in sides.items()
        }
        space = self.stores[OURS].space
        # of an object of ours, all that lies around blocks included
        self.length = space.edges([space.record_bytes] * slots.per_batch)[-1]
        self.content = memoryview(bytearray(os.urandom(self.length)))

    def run(self, rounds: int) -> None:
        """All sides by turns, batch by batch; the first round warms the server's memory and counts for nothing."""
        for number in range(rounds + 1):
            batches = self.slots.chain(str(number), self.num_batches)
            for verb in VERBS:
                sums = {side: [0.0, 0.0] for side in self.sides(verb)}
                for turn, batch in enumerate(batches):
                    first = turn % len(sums)
                    for side in (*[*sums][first:], *[*sums][:first]):
                        wall, cpu = self.timed(verb, side, batch)
                        sums[side][0] += wall
                        sums[side][1] += cpu
                gigabytes = len(batches) * self.slots.per_batch * self.slots.block_bytes / 1e9
                for side, (wall, cpu) in sums.items() if number else ():
                    self.speeds.setdefault((verb, side), []).append(Speed(gigabytes / wall, cpu / gigabytes))
            for side in SIDES:
                self.empty(side, batches)

    @staticmethod
    def sides(verb: str) -> tuple[str, ...]:
        """Who takes part: the bare client puts in one way only, for both of its ways to get."""
        return SIDES if verb == "GET" else tuple(side for side in SIDES if side != PARTS)

    def close(self) -> None:
        """Give the connections back."""
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

    def timed(self, verb: str, side: str, batch: list[BlockRecord]) -> tuple[float, float]:
        """Seconds, and CPU seconds; what ours read is compared afterwards."""
        work: Callable[[list[BlockRecord]], None]
        if side in self.stores:
            work = partial(self.write if verb == "PUT" else self.read, self.stores[side])
        else:
            work = partial(self.put if verb == "PUT" else self.get, side)
        self.slots.forget_targets()
        cpu, start = time.process_time(), time.perf_counter()
        work(batch)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        if verb == "GET" and side in self.stores:
            self.slots.check_targets()
        return wall, cpu

    def put(self, side: str, batch: list[BlockRecord]) -> None:
        """The bare client's."""
        obstore.put(self.client, self.key(batch), self.content, use_multipart=False)

    def get(self, side: str, batch: list[BlockRecord]) -> None:
        """The bare client's, of one object."""
        step = self.length if side == WHOLE else PART
        ends = [(start, min(self.length, start + step)) for start in range(0, self.length, step)]
        key = self.key(batch)
        asked = [self.pool.submit(obstore.get_range, self.client, key, start=a, end=b) for a, b in ends]
        assert sum(len(each.result()) for each in asked) == self.length

    def write(self, store: ObjectStore, batch: list[BlockRecord]) -> None:
        """Ours."""
        outcomes = store.write(batch, self.slots.sources)
        assert set(outcomes) == {Outcome.OK}, f"a write failed: {set(outcomes)}"

    def read(self, store: ObjectStore, batch: list[BlockRecord]) -> None:
        """Ours."""
        results = store.read([record.chain_hash for record in batch], self.slots.targets)
        assert not [r for r in results if isinstance(r, Outcome)], f"a read failed: {results}"

    def rows(self, server: str) -> list[dict[str, object]]:
        """Medians; a ratio is of two passes of one round."""
        found: list[dict[str, object]] = []
        for verb in VERBS:
            what: dict[str, object] = {"server": server, "block KiB": self.slots.block_bytes >> 10, "verb": verb}
            best = WHOLE  # puts have one way
            if verb == "GET":
                best = max((WHOLE, PARTS), key=lambda side: self.speed("GET", side))
            found.append(
                {
                    **what,
                    "records": "clear",
                    "GB/s": self.speed(verb, OURS),
                    "bare GB/s": self.speed(verb, best),
                    "of bare": self.ratio(verb, OURS, best),
                    "CPU s/GB": self.cpu(verb, OURS),
                    "bare CPU s/GB": self.cpu(verb, best),
                    "bare way": best.removeprefix("bare, "),
                }
            )
            found += [
                {
                    **what,
                    "records": side,
                    "GB/s": self.speed(verb, side),
                    "× clear": self.ratio(verb, side, OURS),
                    "CPU s/GB": self.cpu(verb, side),
                }
                for side in SEALED
            ]
        return found

    def speed(self, verb: str, side: str) -> float:
        """GB/s."""
        return statistics.median(speed.gb_per_s for speed in self.speeds[verb, side])

    def ratio(self, verb: str, side: str, other: str) -> float:
        """How many times as fast one side was as the other."""
        pairs = zip(self.speeds[verb, side], self.speeds[verb, other], strict=True)
        return statistics.median(one.gb_per_s / two.gb_per_s for one, two in pairs)

    def cpu(self, verb: str, side: str) -> float:
        """CPU seconds a GB."""
        return statistics.median(speed.cpu_s_per_gb for speed in self.speeds[verb, side])


def targets_of(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    return [
        Target(
            f"{row['verb']}, {row['block KiB']} KiB, {row['server']}: of the bare client",
            OF_BARE,
            row["of bare"],
            at_most=False,
        )
        for row in rows
        if "of bare" in row
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--block-kib", type=int, nargs="*", help="block sizes (default: 128 512 2048 8192)")
    arguments = options.parse_args()
    if NO_OBJECTS:
        sys.exit(f"object_bandwidth: {NO_OBJECTS}")
    num_bytes, rounds = (32 << 20, 1) if arguments.quick else (32 << 20, 15)
    sizes = arguments.block_kib or ([128, 2048] if arguments.quick else [128, 512, 2048, 8192])
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "key"
        key_file.touch(0o600)
        key_file.write_bytes(os.urandom(32))
        for server, running in (("in memory", in_memory), ("moto", real)):
            with running() as endpoint:
                is_fast = server == "in memory"
                for block_kib in sizes if is_fast else sizes[:1]:
                    progress(f"{server}, blocks of {block_kib} KiB")
                    share = num_bytes if is_fast else num_bytes // 2
                    bench = ObjectBench(endpoint, HostSlots(block_kib << 10), share, key_file)
                    bench.run(rounds if is_fast else min(rounds, 5))
                    rows += bench.rows(server)
                    bench.close()
    return report("object_bandwidth", rows, targets_of(rows), arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
