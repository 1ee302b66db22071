"""The Redis tier's reads and writes beside other clients: redis-py's best way, LMCache's C++ one, `redis-benchmark`.

Ours: `RedisStore.write` from L2 slots and `.read` into L2 slots, in batches as large as the hierarchy's. Every read is
verified (key and checksum), and its expiry renewed. redis-py, nothing verified: a pipeline with hiredis and without, a
loop, MGET and MSET, and a bare connection. Each GET ends in the slot, each SET takes the slot's bytes. The fastest way
counts, for each verb and size. LMCache's client is native code with a thread for each connection, and verifies nothing.
The fastest of 1, 2 and 4 connections counts. It is installed into a folder of its own; it knows no cluster.

GET of blocks of 64 KiB and more goes by an extension module, if that was built. Then Python alone is a side of
its own, with the same goals. SET has one way.

All sides take turns, on the same servers, which are emptied after each turn. Ratios are medians over rounds. CPU
seconds are this process's alone. `redis-benchmark`, a C client that throws away what it reads, shows what the servers
themselves can do. The better of two counts: the same batch in flight on one connection to each server, or one block
on each of two connections.

Records sealed by [redis] secret, and records encrypted under [redis] key_file, are written and read in turns with these
and have their own rows. "× clear" is their speed over that of records in the clear in the same round.
"""

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from _redis_clients import Client, lmcache, redis_py
from _report import Speed, Target, parser, progress, report

from kvtier.tiers import BATCH_BYTES, BlockRecord, Outcome, checksum
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import Config
from kvtier.tiers.host import HostRegion
from kvtier.tiers.redis import RedisStore

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "rigs"))
from redis_rig import NO_REDIS, RedisServer, cluster, standalone

FINGERPRINT: Final = b"redis bandwidth".ljust(32, b".")
BLOCK_SIZE: Final = 16
PROTECTED: Final = ("secret", "key_file")  # options of [redis]
PYTHON: Final = "Python alone"
CLEAR: Final = ("ours", PYTHON)
TWIN: Final = "kvtier.tiers.redis.turns_compiled"
CPU_S_PER_GB: Final = 0.4
FASTER: Final = {"GET": 1.3, "SET": 2.0}  # than redis-py's best
VERBS: Final = ("SET", "GET")


class HostSlots:
    """Host slots: as many sources as a batch has blocks, each block's bytes its own, and as many targets."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.per_batch = max(1, BATCH_BYTES // block_bytes)
        region = HostRegion.allocate(2 * self.per_batch, block_bytes)
        assert region.wait_prefaulted(None)
        self.sources = [region.slot(i) for i in range(self.per_batch)]
        self.targets = [region.slot(self.per_batch + i) for i in range(self.per_batch)]
        rng = np.random.default_rng(1)
        for source in self.sources:
            source[:] = rng.bytes(block_bytes)
        self.checksums = [checksum(source) for source in self.sources]

    def chain(self, name: str, num_batches: int) -> list[list[BlockRecord]]:
        """Batches of records; block i of each is source i."""
        parent, batches = bytes(32), []
        for batch in range(num_batches):
            records = []
            for i in range(self.per_batch):
                chain_hash = hashlib.sha256(f"{name}/{batch}/{i}".encode()).digest()
                records.append(BlockRecord(chain_hash, parent, b"\1\0\0\0" * BLOCK_SIZE, self.checksums[i]))
                parent = chain_hash
            batches.append(records)
        return batches

    def forget_targets(self) -> None:
        """What is read next is not there yet."""
        for target in self.targets:
            target[:8] = bytes(8)

    def check_targets(self) -> None:
        """The last batch read holds the bytes written."""
        same = [np.array_equal(a, b) for a, b in zip(self.sources, self.targets, strict=True)]
        assert all(same), "read other bytes than written"


LMCache = dict[str, Client] | str
"""Its clients by their number of connections, or why there are none."""


def opened(block_bytes: int, options: Mapping[str, str]) -> RedisStore:
    """Our side, for blocks of so many bytes."""
    config = Config.load(redis=dict(options)).redis
    return RedisStore.open(config, FINGERPRINT, slot_bytes=block_bytes, block_size=BLOCK_SIZE)


@contextmanager
def python_alone() -> Iterator[None]:
    """What is opened now finds no extension module."""
    before = os.environ.get("KVTIER_COMPILED")
    os.environ["KVTIER_COMPILED"] = "off"
    try:
        yield
    finally:
        del os.environ["KVTIER_COMPILED"]
        if before is not None:
            os.environ["KVTIER_COMPILED"] = before


class RedisBench:
    """One block size on one set of servers."""

    def __init__(
        self, servers: Sequence[RedisServer], slots: HostSlots, num_bytes: int, key_file: Path, native: LMCache
    ) -> None:
        self.servers = servers
        self.slots = slots
        self.num_batches = max(1, num_bytes // (slots.per_batch * slots.block_bytes))
        self.speeds: dict[tuple[str, str], list[Speed]] = {}
        self.limits: dict[str, list[float]] = {}
        clustered = len(servers) > 1
        url = ",".join(server.url for server in servers)
        common = {"url": url, "mode": "cluster" if clustered else "standalone", "deadline": "20s"}
        sides: dict[str, dict[str, str]] = {
            "ours": {},
            "secret": {"secret": "a secret of the benchmark"},
            "key_file": {"key_file": str(key_file)},
        }
        self.stores = {side: opened(slots.block_bytes, {**common, **protection}) for side, protection in sides.items()}
        if extension(TWIN) is not None:
            with python_alone():
                self.stores[PYTHON] = opened(slots.block_bytes, {**common, "prefix": "python-alone"})
        kind: Any = redis.RedisCluster if clustered else redis.Redis
        self.client = kind(host="127.0.0.1", port=servers[0].port)
        self.ways = {
            f"redis-py {way}": client for way, client in redis_py(servers[0].port, clustered=clustered).items()
        }
        self.native = native if isinstance(native, str) else {f"LMCache {way}": one for way, one in native.items()}
        self.others = self.ways | (self.native if isinstance(self.native, dict) else {})

    def run(self, rounds: int) -> None:
        """All sides by turns; the first round warms the servers' memory and counts for nothing."""
        sides = [*self.stores, *self.others]
        for number in range(rounds + 1):
            batches = self.slots.chain(str(number), self.num_batches)
            for side in sides if number % 2 else reversed(sides):
                for verb in VERBS:
                    speed = self.timed(verb, side, batches)
                    if number:
                        self.speeds.setdefault((verb, side), []).append(speed)
                self.empty(side, batches)
            if number in (1, 2, 3):
                for verb, limit in self.redis_benchmark().items():
                    self.limits.setdefault(verb, []).append(limit)

    def close(self) -> None:
        """Give the connections back; LMCache's are the caller's."""
        for one in (*self.stores.values(), *self.ways.values(), self.client):
            one.close()

    def keys(self, side: str, batch: list[BlockRecord]) -> list[bytes]:
        """What another client calls the blocks."""
        return [f"{side.replace(' ', '-')}:{record.chain_hash.hex()}".encode() for record in batch]

    def empty(self, side: str, batches: list[list[BlockRecord]]) -> None:
        """Delete what a side stored."""
        for batch in batches:
            if side in self.stores:
                self.stores[side].discard([record.chain_hash for record in batch])
                continue
            pipeline = self.client.pipeline(transaction=False)
            for key in self.keys(side, batch):
                pipeline.unlink(key)
            assert all(pipeline.execute())

    def timed(self, verb: str, side: str, batches: list[list[BlockRecord]]) -> Speed:
        """One pass over all batches; what was read is compared afterwards."""
        work: Callable[[list[BlockRecord]], None]
        if side in self.stores:
            work = partial(self.write if verb == "SET" else self.read, self.stores[side])
        else:
            work = partial(self.move, verb, side)
        self.slots.forget_targets()
        cpu, start = time.process_time(), time.perf_counter()
        for batch in batches:
            work(batch)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        if verb == "GET":
            self.slots.check_targets()
        gigabytes = len(batches) * self.slots.per_batch * self.slots.block_bytes / 1e9
        return Speed(gigabytes / wall, cpu / gigabytes)

    def move(self, verb: str, side: str, batch: list[BlockRecord]) -> None:
        """Another client's."""
        if verb == "SET":
            self.others[side].write(self.keys(side, batch), self.slots.sources)
        else:
            self.others[side].read(self.keys(side, batch), self.slots.targets)

    def write(self, store: RedisStore, batch: list[BlockRecord]) -> None:
        """Ours."""
        outcomes = store.write(batch, self.slots.sources)
        assert set(outcomes) == {Outcome.OK}, f"a write failed: {set(outcomes)}"

    def read(self, store: RedisStore, batch: list[BlockRecord]) -> None:
        """Ours."""
        results = store.read([record.chain_hash for record in batch], self.slots.targets)
        assert not [r for r in results if isinstance(r, Outcome)], f"a read failed: {results}"

    def redis_benchmark(self) -> dict[str, float]:
        """GB/s by verb, the best of: a batch in flight on one connection a server, and a block on each of two.

        Over a cluster it looks at its clock every 250 ms only: it moves more than a pass does.
        """
        n = len(self.servers)
        shapes = [self.benchmarked(n, self.slots.per_batch), self.benchmarked(2 * n, 1)]
        return {verb: max(shape[verb] for shape in shapes) for verb in VERBS}

    def benchmarked(self, connections: int, in_flight: int) -> dict[str, float]:
        """Of one shape: GB/s by verb."""
        num_requests = 8 * self.num_batches * self.slots.per_batch
        command = ["redis-benchmark", "-h", "127.0.0.1", "-p", str(self.servers[0].port), "-t", "set,get", "--csv",
                   "-d", str(self.slots.block_bytes), "-n", str(num_requests), "-P", str(in_flight),
                   "-c", str(connections), *(["--cluster"] if len(self.servers) > 1 else [])]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        lines = [line.replace('"', "").split(",") for line in done.stdout.splitlines()]
        return {line[0]: float(line[1]) * self.slots.block_bytes / 1e9 for line in lines if line[0] in VERBS}

    def rows(self) -> list[dict[str, object]]:
        """Medians; a ratio is of two passes of one round."""
        found: list[dict[str, object]] = []
        for verb in VERBS:
            what: dict[str, object] = {
                "nodes": len(self.servers),
                "block KiB": self.slots.block_bytes >> 10,
                "verb": verb,
            }
            found += [
                {**what, "records": "clear", "way": side, **self.race(verb, side)}
                for side in CLEAR
                if side in self.stores
            ]
            found += [
                {**what, "client": side, "GB/s": self.speed(verb, side), "CPU s/GB": self.cpu(verb, side)}
                for side in self.others
            ]
            found += [
                {
                    **what,
                    "records": side,
                    "GB/s": self.speed(verb, side),
                    "× clear": self.ratio(verb, side, "ours"),
                    "CPU s/GB": self.cpu(verb, side),
                }
                for side in PROTECTED
            ]
        return found

    def race(self, verb: str, side: str) -> dict[str, object]:
        """Records in the clear, by one of our ways, beside the best of the others."""
        way = self.best(verb, self.ways)
        raced: dict[str, object] = {
            "GB/s": self.speed(verb, side),
            "CPU s/GB": self.cpu(verb, side),
            "redis-benchmark GB/s": statistics.median(self.limits[verb]),
            "best of redis-py": way.removeprefix("redis-py "),
            "× redis-py": self.ratio(verb, side, way),
        }
        if isinstance(self.native, str):
            return {**raced, "× LMCache": self.native}
        return {**raced, "× LMCache": self.ratio(verb, side, self.best(verb, self.native))}

    def best(self, verb: str, sides: Mapping[str, Client]) -> str:
        """The fastest of them."""
        return max(sides, key=lambda side: self.speed(verb, side))

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


def targets_of(rows: Sequence[dict[str, Any]]) -> list[Target]:
    found = []
    for row in rows:
        if row.get("records") != "clear":
            continue
        nodes = "1 node" if row["nodes"] == 1 else f"{row['nodes']} nodes"
        what = f"{row['verb']}, {row['block KiB']} KiB, {nodes}{', Python alone' if row['way'] == PYTHON else ''}"
        found.append(Target(f"{what}: × redis-py's best way", FASTER[row["verb"]], row["× redis-py"], at_most=False))
        if isinstance(row["× LMCache"], float):
            found.append(Target(f"{what}: × LMCache's C++ client", 1.0, row["× LMCache"], at_most=False))
        found.append(Target(f"{what}: CPU s/GB", CPU_S_PER_GB, row["CPU s/GB"]))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--block-kib", type=int, nargs="*", help="block sizes (default: 128 512 2048 8192)")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    options.add_argument(
        "--lmcache", type=Path, default=home / "kvtier" / "benchmark-lmcache", help="the folder LMCache is installed in"
    )
    arguments = options.parse_args()
    if NO_REDIS:
        sys.exit(f"redis_bandwidth: {NO_REDIS}")
    num_bytes, rounds = (64 << 20, 1) if arguments.quick else (256 << 20, 7)
    sizes = arguments.block_kib or ([128, 2048] if arguments.quick else [128, 512, 2048, 8192])
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        key_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        key_file.touch(0o600)
        key_file.write_bytes(os.urandom(32))
        alone = [stack.enter_context(standalone())]
        three = stack.enter_context(cluster()).masters
        native = lmcache(arguments.lmcache, alone[0].port, install=not arguments.quick)
        if isinstance(native, dict):
            for client in native.values():
                stack.callback(client.close)
        for servers, theirs in ((alone, native), (three, "its client knows no cluster")):
            for block_kib in sizes:
                progress(f"{len(servers)} nodes, blocks of {block_kib} KiB")
                bench = RedisBench(servers, HostSlots(block_kib << 10), num_bytes, key_file, theirs)
                bench.run(rounds)
                rows += bench.rows()
                bench.close()
    return report("redis_bandwidth", rows, targets_of(rows), arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
