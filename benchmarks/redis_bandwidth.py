"""The Redis tier's reads and writes beside other clients: redis-py's best way, LMCache's C++ one, `redis-benchmark`.

Ours: `RedisStore.write` from L2 slots and `.read` into L2 slots, in batches as large as the hierarchy's. Every read is
verified (key and checksum), and its expiry renewed. An extension module moves the bytes, if it was built; then Python
alone is a side of its own. redis-py, nothing verified: a pipeline with hiredis and without, MGET and MSET, and a bare
connection (a loop was never the fastest), each between the slots and the wire; the fastest counts, for each verb and
size. LMCache's client is native code with a thread for each of 1, 2 or 4 connections, and verifies nothing. It is
installed into a folder of its own, and knows no cluster.

All sides take turns, on the same servers, which are emptied after each turn. Ratios are medians over rounds. CPU
seconds are this process's. `redis-benchmark`, a C client that throws away what it reads, shows what the servers can do:
the better of a batch in flight on one connection a server, and a block on each of two.
"""

import os
import select
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import redis
from _report import PYTHON, Given, Result, Row, form, is_built, program, progress, speed_of
from _rig import OURS, Slots, StoreRace, installed
from redis._parsers import _RESP2Parser
from redis_rig import NO_REDIS, RedisServer, cluster, standalone

from kvtier.tiers import BlockRecord, KVTierError
from kvtier.tiers.config import Config
from kvtier.tiers.redis import RedisStore

BlockKeys = Sequence[bytes]
SlotBuffers = Sequence[memoryview]

TTL_MS: Final = 86_400_000
LMCACHE: Final = "lmcache==0.5.6"
LMCACHE_CONNECTIONS: Final = (1, 2, 4)
_SECONDS: Final = 60.0  # for a batch of LMCache's
FINGERPRINT: Final = b"redis bandwidth".ljust(32, b".")
VERBS: Final = ("SET", "GET")


class Client(NamedTuple):
    """One way to move a batch: SET from buffers, GET into buffers, and away with the keys."""

    write: Callable[[BlockKeys, SlotBuffers], None]
    read: Callable[[BlockKeys, SlotBuffers], None]
    close: Callable[[], None]


def redis_py(port: int, *, clustered: bool) -> dict[str, Client]:
    """redis-py's ways, each GET followed by the copy into the buffers: with its C parser if hiredis is installed."""
    kind: Any = redis.RedisCluster if clustered else redis.Redis
    client = kind(host="127.0.0.1", port=port)
    ways = {"pipeline": _pipelined(client), "MGET, MSET": _together(client, clustered)}
    if not clustered:
        ways["raw connection"] = _bare(client)
        pool = redis.ConnectionPool(host="127.0.0.1", port=port, parser_class=_RESP2Parser, protocol=2)
        ways["pipeline, no hiredis"] = _pipelined(redis.Redis(connection_pool=pool))
    return ways


def _copied(values: Sequence[Any], into: SlotBuffers) -> None:
    for value, target in zip(values, into, strict=True):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(value, np.uint8))


def _pipelined(client: Any) -> Client:
    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        pipeline = client.pipeline(transaction=False)
        for key, buffer in zip(keys, buffers, strict=True):
            pipeline.set(key, buffer, px=TTL_MS)
        assert all(pipeline.execute())

    def read(keys: BlockKeys, into: SlotBuffers) -> None:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        _copied(pipeline.execute(), into)

    return Client(write, read, client.close)


def _together(client: Any, clustered: bool) -> Client:
    """MSET knows no expiry."""
    mget, mset = (client.mget_nonatomic, client.mset_nonatomic) if clustered else (client.mget, client.mset)

    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        assert mset(dict(zip(keys, buffers, strict=True)))

    return Client(write, lambda keys, into: _copied(mget(keys), into), client.close)


def _bare(client: Any) -> Client:
    """Packed commands and replies of one connection, below the client's own layers."""
    connection = client.connection_pool.get_connection()

    def write(keys: BlockKeys, buffers: SlotBuffers) -> None:
        sets = [("SET", key, buffer, "PX", TTL_MS) for key, buffer in zip(keys, buffers, strict=True)]
        connection.send_packed_command(connection.pack_commands(sets))
        assert all(connection.read_response() for _ in sets)

    def read(keys: BlockKeys, into: SlotBuffers) -> None:
        connection.send_packed_command(connection.pack_commands([("GET", key) for key in keys]))
        for target in into:
            _copied([connection.read_response()], [target])

    return Client(write, read, connection.disconnect)


def lmcache(port: int) -> dict[str, Client] | str:
    """LMCache's C++ client with each number of connections, a thread each; or why it is not to be had here.

    Nothing of LMCache's Python, and none of what it depends on, is needed: its extension wants torch's libraries,
    which importing torch brings. It sets no expiry, and verifies nothing.
    """
    try:
        [found] = installed("benchmark-lmcache", LMCACHE).glob("lmcache/lmcache_redis.cpython-*.so")
        import torch  # noqa: F401  # its libraries, before what is linked to them

        spec = spec_from_file_location("lmcache_redis", found, loader=ExtensionFileLoader("lmcache_redis", str(found)))
        assert spec is not None
        assert spec.loader is not None
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)
        make = module.LMCacheRedisClient
        return {
            f"LMCache {count} connections": _native(make("127.0.0.1", port, count)) for count in LMCACHE_CONNECTIONS
        }
    except (OSError, ImportError, ValueError, AttributeError, subprocess.SubprocessError, RuntimeError) as error:
        return f"not to be had here: {str(error).strip().splitlines()[-1][:120]}"


def _native(client: Any) -> Client:
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)

    def move(submit: Callable[[list[str], list[memoryview]], object], keys: BlockKeys, buffers: SlotBuffers) -> None:
        submit([key.decode() for key in keys], list(buffers))
        while not (done := client.drain_completions()):
            if not poll.poll(_SECONDS * 1000):
                raise RuntimeError("LMCache's client kept silent")
            with suppress(BlockingIOError):
                os.read(client.event_fd(), 8)
        assert all(completion[1] for completion in done), done

    return Client(partial(move, client.submit_batch_set), partial(move, client.submit_batch_get), client.close)


class RedisBench(StoreRace):
    """One block size on one set of servers. `native`: LMCache's clients, or why there are none."""

    def __init__(
        self, servers: Sequence[RedisServer], slots: Slots, num_bytes: int, native: dict[str, Client] | str
    ) -> None:
        self.servers, self.native, self.limits = servers, native, list[dict[str, float]]()
        self.clustered, port = len(servers) > 1, servers[0].port
        common = {"url": ",".join(server.url for server in servers), "deadline": "20s"}
        common["mode"] = "cluster" if self.clustered else "standalone"

        def opened(**options: str) -> RedisStore:
            config = Config.load(redis=common | options).redis
            return RedisStore.open(config, FINGERPRINT, slot_bytes=slots.block_bytes, block_size=16)

        stores = {OURS: opened()}
        if is_built("kvtier.tiers.shared.transfer_compiled"):
            with form(PYTHON):
                stores[PYTHON] = opened(prefix="python-alone")
        super().__init__(slots, num_bytes, stores)
        kind: Any = redis.RedisCluster if self.clustered else redis.Redis
        self.client = kind(host="127.0.0.1", port=port)
        self.ways = {f"redis-py {way}": one for way, one in redis_py(port, clustered=self.clustered).items()}
        self.others = self.ways | (native if isinstance(native, dict) else {})

    def run(self, rounds: int) -> Iterator[Row]:
        """All sides by turns; the first round warms the servers' memory and counts for nothing."""
        sides = [*self.stores, *self.others]
        for number in range(rounds + 1):
            batches = self.chain(number)
            for side in sides if number % 2 else reversed(sides):
                for verb in VERBS:
                    self.forget()
                    speed = speed_of(partial(self.move, verb, side, batches), self.num_batches * self.slots.batch_bytes)
                    if verb == "GET":
                        self.check()
                    if number:
                        self.add((verb, side), speed)
                self.empty(side, batches)
            if number in (1, 2, 3):
                self.limits.append(self.redis_benchmark())
        return self.rows()

    def close(self) -> None:
        """Give the connections back; LMCache's are the caller's."""
        for one in (*self.stores.values(), *self.ways.values(), self.client):
            one.close()

    def keys(self, side: str, batch: list[BlockRecord]) -> list[bytes]:
        return [f"{side.replace(' ', '-')}:{record.chain_hash.hex()}".encode() for record in batch]

    def empty(self, side: str, batches: list[list[BlockRecord]]) -> None:
        for batch in batches:
            if side in self.stores:
                self.discard(side, batch)
                continue
            pipeline = self.client.pipeline(transaction=False)
            for key in self.keys(side, batch):
                pipeline.unlink(key)
            assert all(pipeline.execute())

    def move(self, verb: str, side: str, batches: list[list[BlockRecord]]) -> None:
        for batch in batches:
            if side in self.stores:
                (self.write if verb == "SET" else self.read)(side, batch)
            elif verb == "SET":
                self.others[side].write(self.keys(side, batch), self.slots.sources)
            else:
                self.others[side].read(self.keys(side, batch), self.slots.targets)

    def redis_benchmark(self) -> dict[str, float]:
        """GB/s by verb, the best of: a batch in flight on one connection a server, and a block on each of two.

        Over a cluster it looks at its clock every 250 ms only: it moves more than a pass does.
        """
        num_requests, best = 8 * self.num_batches * self.slots.per_batch, dict.fromkeys(VERBS, 0.0)
        for connections, in_flight in ((1, self.slots.per_batch), (2, 1)):
            command = ["redis-benchmark", "-h", "127.0.0.1", "-p", str(self.servers[0].port), "-t", "set,get", "--csv",
                       "-d", str(self.slots.block_bytes), "-n", str(num_requests), "-P", str(in_flight),
                       "-c", str(connections * len(self.servers)),
                       *(["--cluster"] if self.clustered else [])]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            for line in done.stdout.replace('"', "").splitlines():
                if line.startswith(VERBS):
                    verb, rate, *_ = line.split(",")
                    best[verb] = max(best[verb], float(rate) * self.slots.block_bytes / 1e9)
        return best

    def rows(self) -> Iterator[Row]:
        for verb in VERBS:
            what: Row = {"nodes": len(self.servers), "block KiB": self.slots.block_bytes >> 10, "verb": verb}
            for side in (OURS, PYTHON):
                if side in self.stores:
                    yield {**what, "records": "clear", "way": side, **self.raced(verb, side)}
            for side in self.others:
                yield {**what, "client": side, "GB/s": self.rate((verb, side)), "CPU s/GB": self.cpu((verb, side))}

    def raced(self, verb: str, side: str) -> Row:
        """Records in the clear, by one of our ways, beside the best of the others."""

        def best(sides: Iterable[str]) -> tuple[str, str]:
            return self.best([(verb, other) for other in sides])

        ours, way = (verb, side), best(self.ways)
        row: Row = {"GB/s": self.rate(ours), "CPU s/GB": self.cpu(ours)}
        row["redis-benchmark GB/s"] = median(limit[verb] for limit in self.limits)
        row |= {"best of redis-py": way[1].removeprefix("redis-py "), "× redis-py": self.ratio(ours, way)}
        theirs = self.native if isinstance(self.native, str) else self.ratio(ours, best(self.native))
        return row | {"× LMCache": theirs}


@program()
def main(given: Given) -> Result:
    if NO_REDIS:
        raise KVTierError(NO_REDIS)
    num_bytes, rounds, sizes = (64 << 20, 1, [128, 2048]) if given.quick else (256 << 20, 7, [128, 512, 2048, 8192])
    rows: list[Row] = []
    with ExitStack() as stack:
        alone = [stack.enter_context(standalone())]
        three = stack.enter_context(cluster()).masters
        native = "not looked for in a quick run" if given.quick else lmcache(alone[0].port)
        for client in native.values() if isinstance(native, dict) else ():
            stack.callback(client.close)
        for servers, theirs in ((alone, native), (three, "its client knows no cluster")):
            for block_kib in sizes:
                progress(f"{len(servers)} nodes, blocks of {block_kib} KiB")
                bench = RedisBench(servers, Slots(block_kib << 10), num_bytes, theirs)
                rows += bench.run(rounds)
                bench.close()
    return rows
