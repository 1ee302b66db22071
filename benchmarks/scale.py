"""What a fleet of 1, 10, 100 and 1,000 nodes takes, on paper: events, index, decisions, Redis, objects, prices.

The pieces are measured here: a publisher and a consumer of KV events in two processes, the router's index and its
decisions at so many replicas, a publisher that is followed. What a request moves comes from the simulator: the
production trace goes through the pools and extents of one node that has four nodes' memory, as four nodes serve it.
Other figures are those saved by `router_overhead.py` (forwarding) and `redis_bandwidth.py` (one server). The rest is
arithmetic over assumptions, each of which is an option. Objects are as large as kvtier writes them (`BATCH_BYTES`). A
read is a GET of the object's table and one of its blocks; each lookup ends with a GET that finds nothing.

Every node serves the same requests, and what a request moves is the same at every size: the router keeps conversations
where their blocks are (`benchmarks/routing.py` measured how well). So all but a decision grows in proportion.

Prices are list prices as they were given, of no offer in particular: give your own.
"""

import argparse
import gc
import json
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from _eviction_traces import PRODUCTION, made_up, production_trace
from _report import RESULTS, Given, Result, Row, program, progress
from _rig import child, received, resident_bytes, spawned, wait_until
from router_overhead import decisions

from kvtier.service import events as feed
from kvtier.service.events import BlockRemoved, BlockStored, EventConsumer, PrefixIndex, Publisher
from kvtier.service.simulation import Capacity, SimulatedTiers, TraceReplay
from kvtier.service.traces import RequestTrace
from kvtier.tiers import BATCH_BYTES, TIERS, KVTierError
from kvtier.tiers.config import EventsConfig, PeersConfig
from kvtier.tiers.hierarchy import Event, Removed, Stored
from kvtier.tiers.naming import TokenChain, root_hash, token_array
from kvtier.tiers.objects import LOOKED_AT
from kvtier.tiers.peers import KEY_BYTES, MAX_PEERS, AnnouncedNames, NamesRoom

BLOCK_SIZE: Final = 16  # tokens
CHAIN: Final = 512  # blocks of a prompt whose blocks are stored and removed: 8,192 tokens
FINGERPRINT: Final = b"scale".ljust(32, b".")
DEADLINE: Final = 600.0  # seconds, of one measurement
GPU, CPU = (kind.medium for kind in (TIERS["l1"], TIERS["l2"]))
SHARE: Final = 4  # nodes that serve the trace together
GIB: Final = 1 << 30
GB: Final = 1e9
DAY: Final = 86_400.0  # seconds
MONTH: Final = 30 * DAY
NODES: Final = (1, 10, 100, 1000)
MOST: Final = 100_000_000  # nodes; a limit beyond it is none


# the pieces, measured; each in a process of its own, times are CPU time


def events_of_chains(num_chains: int) -> list[list[Event]]:
    """For each chain: its blocks come to L2 in one run, and later leave it."""
    draw, changes = np.random.default_rng(7), list[list[Event]]()
    for _ in range(num_chains):
        tokens = draw.integers(0, 100_000, CHAIN * BLOCK_SIZE)
        chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
        chain.extend(tokens)
        changes.append([Stored("l2", tuple(chain.records(0, CHAIN))), Removed("l2", tuple(chain.hashes))])
    return changes


def consume(address: str, pipe: Connection) -> None:
    """Follow a publisher until the parent has said which number is its last; then send the CPU seconds it took."""
    index = PrefixIndex(BLOCK_SIZE)
    consumer = EventConsumer("node", index, address, f"{address}-replay", topic=feed.topic_of(FINGERPRINT))
    wait_until(lambda: consumer.is_live, "a feed of events", DEADLINE)
    began = time.process_time()
    pipe.send("live")
    last = int(pipe.recv())
    wait_until(lambda: (consumer.state.seq or 0) >= last, "the last event", DEADLINE)
    took = time.process_time() - began
    consumer.close()
    index.check()
    pipe.send((took, index.num_blocks, dict(index.counts)))


def measure_events(num_chains: int) -> float:
    """Microseconds of an event in a real consumer with its index: another process than the publisher's."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        address = f"ipc://{home}/events"
        events = EventsConfig(publish=address, replay=f"{address}-replay", buffer=100_000)
        publisher = stack.enter_context(Publisher(events))
        pipe, _ = stack.enter_context(child(consume, address))
        assert received(pipe, DEADLINE) == "live"
        for event in (each for events in events_of_chains(num_chains) for each in events):
            publisher.announce(FINGERPRINT, [event])
            assert publisher.flush(DEADLINE), "the publisher does not publish"
        pipe.send(publisher.seq - 1)
        consumed, num_left, counts = received(pipe, DEADLINE)
        assert (num_left, counts) == (0, {}), (num_left, counts)
    return float(consumed) / (2 * CHAIN * num_chains) * 1e6


def measure_index(replicas: int, num_blocks: int, prompt_tokens: int, rounds: int) -> tuple[float, float, float]:
    """Fill an index, route prompts by it, and remove as much again. Run it `spawned`: memory is the process's.

    A prompt begins with 64 blocks that all replicas hold. One replica and its node hold the rest but its last tenth.
    Returns bytes of a name, and microseconds of a change and of a decision.
    """
    engines, nodes = ([f"{kind}-{i}" for i in range(replicas)] for kind in ("engine", "node"))
    index, draw = PrefixIndex(BLOCK_SIZE, max_blocks=1 << 60), np.random.default_rng(3)
    system = draw.integers(0, 100_000, 64 * BLOCK_SIZE).tolist()
    names_of_system = list(range(1 << 62, (1 << 62) + 64))
    for worker, medium in [(engine, GPU) for engine in engines] + [(node, CPU) for node in nodes]:
        index.apply(worker, BlockStored(names_of_system, None, system, BLOCK_SIZE, None, medium, None))
    gc.collect()
    before, num_chains, changed, took = resident_bytes(), -(-num_blocks // CHAIN), 0, 0.0
    for number in range(num_chains):
        tokens = token_array(draw.integers(0, 100_000, CHAIN * BLOCK_SIZE))  # as events bring them
        names = draw.integers(0, 1 << 62, CHAIN).tolist()
        stored = BlockStored(names, None, tokens, BLOCK_SIZE, None, CPU, None)
        node, began = nodes[number % replicas], time.thread_time()
        for event in (stored, BlockRemoved(names, CPU), stored)[: 3 if number % 8 == 0 else 1]:  # one leaves again
            index.apply(node, event)
            changed += CHAIN
        took += time.thread_time() - began
    gc.collect()
    bytes_a_block = (resident_bytes() - before) / (CHAIN * num_chains)
    decision_us = _route(index, engines, nodes, system, prompt_tokens, rounds)
    index.check()
    return bytes_a_block, took / changed * 1e6, decision_us


def _route(
    index: PrefixIndex, engines: list[str], nodes: list[str], system: list[int], prompt_tokens: int, rounds: int
) -> float:
    """Microseconds of a decision, the median: the prompt's names, who holds it, each replica's part, the choice."""
    draw = np.random.default_rng(5)
    tokens = system + draw.integers(0, 100_000, max(0, prompt_tokens - len(system))).tolist()
    num_held = len(tokens) // BLOCK_SIZE * 9 // 10
    names = [1 << 63 | i for i in range(num_held)]
    for worker, medium in ((engines[-1], GPU), (nodes[-1], CPU)):
        held = tokens[: num_held * BLOCK_SIZE]
        index.apply(worker, BlockStored(names, None, held, BLOCK_SIZE, None, medium, None))
    times, choice = decisions(index, tokens, engines, feed.Feeds(engines, nodes, nodes), rounds)
    assert choice.name == engines[-1], choice
    return statistics.median(map(sum, times)) * 1e6


def follow(address: str, number: int, seconds: float) -> dict[str, float]:
    """What each of so many followers of a silent publisher costs, with sockets and a thread. Run it `spawned`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    index = PrefixIndex(BLOCK_SIZE)
    warm = EventConsumer("warm", index, address, f"{address}-replay")
    wait_until(lambda: warm.is_live, "a feed of events", DEADLINE)
    before = len(os.listdir("/proc/self/fd")), resident_bytes()
    consumers = [EventConsumer(f"node-{i}", index, address, f"{address}-replay") for i in range(number)]
    for each in consumers:
        wait_until(lambda each=each: each.is_live, "a feed of events", DEADLINE)
    time.sleep(1.0)  # the replays end
    after = len(os.listdir("/proc/self/fd")), resident_bytes()
    began = time.process_time()
    time.sleep(seconds)
    idle = (time.process_time() - began) / seconds / (number + 1)
    for end in (EventConsumer.stop, EventConsumer.close):
        for consumer in (warm, *consumers):
            end(consumer)
    descriptors, memory = ((now - then) / number for now, then in zip(after, before, strict=True))
    used = {"follower_descriptors": descriptors, "follower_kib": memory / 1024}
    return used | {"follower_idle_us": idle * 1e6}


def measure_follow(number: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        address = f"ipc://{home}/events"
        with Publisher(EventsConfig(publish=address, replay=f"{address}-replay")) as publisher:
            publisher.announce(FINGERPRINT, events_of_chains(1)[0][:1])
            assert publisher.flush(DEADLINE)
            return spawned(follow, address, number, seconds)


def measure_peers(num_blocks: int) -> dict[str, float]:
    """Names of one other node come, and half of them go again. Run it `spawned`: memory is the process's."""
    draw = np.random.default_rng(11)
    runs = [draw.bytes(KEY_BYTES * CHAIN) for _ in range(-(-num_blocks // CHAIN))]
    before, names = resident_bytes(), AnnouncedNames(NamesRoom(num_blocks + CHAIN))
    began = time.thread_time()
    for run in runs:
        names.store([run[at : at + KEY_BYTES] for at in range(0, len(run), KEY_BYTES)])
    took, used = time.thread_time() - began, resident_bytes() - before
    began = time.thread_time()
    for run in runs[::2]:
        names.remove([run[at : at + KEY_BYTES] for at in range(0, len(run), KEY_BYTES)])
    took += time.thread_time() - began
    absent, began = [draw.bytes(32) for _ in range(CHAIN)], time.thread_time()
    for _ in range(1000):
        assert names.leading(absent) == 0
    lookup_us = (time.thread_time() - began) * 1e3
    names.check()
    num_names = CHAIN * len(runs)
    cost = {"peer_name_bytes": used / num_names, "peer_name_us": took / (1.5 * num_names) * 1e6}
    return cost | {"peer_lookup_us": lookup_us}


# the paper


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What nobody measured here: load, sizes, machines, list prices. Each is an option of `scale.py`."""

    rate: float  # requests a second of a node
    token_bytes: int = 128 << 10  # of KV; an 8 B model with 8 KV heads, bf16
    block_tokens: int = 16
    l1_gib: float = 48.0
    l2_gib: float = 128.0
    slab_gib: float = 1024.0
    redis_gib: float = 64.0  # of Redis, for each node
    shard_gib: float = 64.0  # memory of one Redis server
    shard_gbit: float = 25.0  # its network
    router_gib: float = 64.0
    max_descriptors: int = 65_536
    max_blocks: int = 4_000_000  # `[router] max_blocks`
    peer_blocks: int = PeersConfig().max_blocks  # `[peers] max_blocks`
    loop_ms: float = 10.0  # that one decision may hold up all other requests
    streamed: float = 1.0  # share of the answers that come token by token
    put_price: float = 0.005  # of 1,000 requests that write an object
    get_price: float = 0.0004  # of 1,000 that read one
    gb_month: float = 0.023  # of a GB kept for a month
    kept_days: float = 1.0  # that an object is kept
    puts_a_second: float = 3500.0  # that one prefix of a bucket takes
    gets_a_second: float = 5500.0
    core_price: float = 30.0  # of a core for a month
    gib_price: float = 3.0  # of a GiB of memory for a month

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def names_a_node(self) -> float:
        """Names that a router holds for a node: its engine's, and those of its daemon, whose slab has what L2 has."""
        return (self.l1_gib + max(self.l2_gib, self.slab_gib)) * GIB / self.block_bytes


@dataclass(frozen=True, slots=True)
class RequestMoves:
    """What a request moves, in tokens, by the simulation; of `admit_after` sightings before a block is stored."""

    admit_after: int
    prompt: float
    answer: float
    l1_stored: float
    l2_stored: float
    slab_stored: float
    cold_read: float  # that only a store without limits had, behind L2 and the slab
    redis_stored: float  # if Redis is what stands below L2
    redis_read: float

    @property
    def changes(self) -> float:
        """Tokens that come to a tier or leave it: once a tier is full, each that comes drives another out."""
        return 2 * (self.l1_stored + self.l2_stored + self.slab_stored)


@dataclass(frozen=True, slots=True)
class PieceCosts:
    """What the pieces cost. `decision_us` by the number of replicas, as they were measured."""

    consumer_us: float  # CPU, for each block that came or went
    index_bytes: float  # of a name
    change_us: float  # of the index alone; the consumer's are with reading the event
    decision_us: Mapping[int, float]
    follower_descriptors: float
    follower_kib: float
    follower_idle_us: float
    forward_us: float  # of a request that is forwarded, its decision between two replicas with it
    piece_us: float  # of a piece of a stream
    redis_set_gb: float  # a second, of one server
    redis_get_gb: float
    peer_name_bytes: float  # of a block that another node has, as a daemon knows it by events
    peer_name_us: float  # for each that comes or goes, beside reading the event
    peer_lookup_us: float  # of a lookup of `CHAIN` blocks, for each node that has none of them

    def decision(self, replicas: float) -> float:
        """Microseconds: a straight line between two sizes that were measured, and on from the last two."""
        sizes = sorted(self.decision_us)
        if len(sizes) == 1 or replicas <= sizes[0]:
            return self.decision_us[sizes[0]]
        low, high = next((pair for pair in pairwise(sizes) if replicas <= pair[1]), (sizes[-2], sizes[-1]))
        slope = (self.decision_us[high] - self.decision_us[low]) / (high - low)
        return self.decision_us[low] + slope * (replicas - low)


class PaperFleet:
    def __init__(self, assumed: Assumptions, measured: PieceCosts, moved: Sequence[RequestMoves]) -> None:
        self.assumed, self.measured = assumed, measured
        self.moved = {each.admit_after: each for each in moved}
        self.usual = moved[0]

    # KV events

    def changes(self, nodes: float) -> float:
        """Blocks a second that come to a tier or leave it."""
        return nodes * self.assumed.rate * self.usual.changes / self.assumed.block_tokens

    def event_cores(self, nodes: float) -> float:
        """Cores of one process that reads all of them, and follows two publishers a node."""
        return (self.changes(nodes) * self.measured.consumer_us + 2 * nodes * self.measured.follower_idle_us) / 1e6

    # other nodes' memory: every daemon follows every other

    def peer_names(self, nodes: float) -> float:
        """Names of other nodes' L2 that a daemon knows."""
        return (nodes - 1) * self.assumed.l2_gib * GIB / self.assumed.block_bytes

    def peer_cores(self, nodes: float) -> float:
        """Cores of one daemon that reads what all others announce, and looks each prompt up at all of them."""
        blocks = 2 * self.usual.l2_stored / self.assumed.block_tokens
        read_us = self.measured.consumer_us - self.measured.change_us + self.measured.peer_name_us
        each = self.assumed.rate * (blocks * read_us + self.measured.peer_lookup_us) + self.measured.follower_idle_us
        return (nodes - 1) * each / 1e6

    # the index

    def index_gib(self, nodes: float) -> float:
        name_bytes = self.assumed.names_a_node * self.measured.index_bytes
        return nodes * (name_bytes + 2 * self.measured.follower_kib * 1024) / GIB

    # decisions

    def request_cores(self, nodes: float) -> float:
        """Cores for all requests: each is forwarded, decided on, and its answer passed on."""
        pieces = self.assumed.streamed * self.usual.answer * self.measured.piece_us
        each = self.measured.forward_us + pieces + self.measured.decision(nodes)
        return nodes * self.assumed.rate * each / 1e6

    # Redis

    def redis_gb(self, nodes: float, admit_after: int) -> tuple[float, float]:
        moved, each = self.moved[admit_after], nodes * self.assumed.rate * self.assumed.token_bytes / GB
        return each * moved.redis_stored, each * moved.redis_read

    def shards_for_bytes(self, nodes: float, admit_after: int) -> float:
        written, read = self.redis_gb(nodes, admit_after)
        network = self.assumed.shard_gbit / 8
        set_gb, get_gb = (min(network, each) for each in (self.measured.redis_set_gb, self.measured.redis_get_gb))
        return written / set_gb + read / get_gb

    def shards_for_room(self, nodes: float) -> float:
        return nodes * self.assumed.redis_gib / self.assumed.shard_gib

    def redis(self) -> Iterator[Row]:
        price = self.assumed.core_price + self.assumed.shard_gib * self.assumed.gib_price
        for admit_after, nodes in product(sorted(self.moved), NODES):
            written, read = self.redis_gb(nodes, admit_after)
            busy, room = self.shards_for_bytes(nodes, admit_after), self.shards_for_room(nodes)
            shards = math.ceil(max(1.0, busy, room))
            row: Row = {"part": "redis", "nodes": nodes, "stored from sighting": admit_after}
            row |= {"GB/s written": round(written, 3), "GB/s read": round(read, 3)}
            row |= {"shards, by bytes": round(busy, 2), "shards, by room": round(room, 2)}
            yield row | {"shards": shards, "$ a month": round(shards * price)}

    # an object store

    def object_rates(self, nodes: float, admit_after: int, object_bytes: float) -> tuple[float, float]:
        """PUTs and GETs a second: objects are read whole, their tables first; each lookup ends with a GET in vain.

        Every node reads the bucket's epoch from time to time.
        """
        moved, each = self.moved[admit_after], nodes * self.assumed.rate * self.assumed.token_bytes / object_bytes
        return each * moved.slab_stored, 2 * each * moved.cold_read + nodes * (self.assumed.rate + 1 / LOOKED_AT)

    def objects(self, sizes: Mapping[str, float]) -> Iterator[Row]:
        for admit_after, (name, size), nodes in product(sorted(self.moved), sizes.items(), NODES):
            puts, gets = self.object_rates(nodes, admit_after, size)
            requests = (puts * self.assumed.put_price + gets * self.assumed.get_price) / 1000 * MONTH
            kept = puts * size * self.assumed.kept_days * DAY / GB
            row: Row = {"part": "objects", "nodes": nodes, "object": name, "stored from sighting": admit_after}
            row |= {"PUT/s": round(puts, 1), "GET/s": round(gets, 1), "requests $ a month": round(requests)}
            yield row | {"room $ a month": round(kept * self.assumed.gb_month)}

    # where it breaks

    def limits(self, object_sizes: Mapping[str, float]) -> list["Limit"]:
        """Each limit, as a load that is 1 where it is reached."""
        assumed, measured = self.assumed, self.measured
        wide = PaperFleet(replace(assumed, block_tokens=4 * assumed.block_tokens), measured, [*self.moved.values()])
        block, large = object_sizes.values()
        first, second = min(self.moved), max(self.moved)
        wider, later = (
            f"the same, blocks of {wide.assumed.block_tokens} tokens",
            f"the same, stored from sighting {second}",
        )
        blocks, peers, loop, descriptors = (
            getattr(assumed, name) for name in ("max_blocks", "peer_blocks", "loop_ms", "max_descriptors")
        )

        def puts(size: float, admit_after: int) -> Callable[[float], float]:
            return lambda nodes: self.object_rates(nodes, admit_after, size)[0] / assumed.puts_a_second

        found: list[tuple[str, str, Callable[[float], float]]] = [
            ("index", f"`max_blocks` of {blocks / 1e6:g} M", lambda n: n * assumed.names_a_node / blocks),
            ("index", wider, lambda n: n * wide.assumed.names_a_node / blocks),
            ("index", f"{assumed.router_gib:g} GiB of memory", lambda n: self.index_gib(n) / assumed.router_gib),
            ("index", wider, lambda n: wide.index_gib(n) / assumed.router_gib),
            ("decisions", "one router's core, all its work", lambda n: self.event_cores(n) + self.request_cores(n)),
            ("decisions", f"{loop:g} ms for one decision", lambda n: measured.decision(n) / 1e3 / loop),
            ("events", "one reader's core, events alone", self.event_cores),
            ("events", wider, wide.event_cores),
            ("events", f"{descriptors:,} descriptors", lambda n: 2 * n * measured.follower_descriptors / descriptors),
            ("peers", f"{MAX_PEERS} other nodes a daemon follows", lambda n: (n - 1) / MAX_PEERS),
            ("peers", f"`max_blocks` of {peers / 1e6:g} M", lambda n: self.peer_names(n) / peers),
            ("peers", wider, lambda n: wide.peer_names(n) / peers),
            ("peers", "a tenth of a core of each daemon", lambda n: 10 * self.peer_cores(n)),
            ("peers", wider, lambda n: 10 * wide.peer_cores(n)),
            ("redis", "one server's bytes", lambda n: self.shards_for_bytes(n, first)),
            ("redis", later, lambda n: self.shards_for_bytes(n, second)),
            ("redis", f"{assumed.shard_gib:g} GiB of one server", self.shards_for_room),
            ("objects", "PUT/s of one prefix, an object a block", puts(block, first)),
            ("objects", f"the same, objects of {large / (1 << 20):g} MiB, as kvtier writes them", puts(large, first)),
            ("objects", later, puts(large, second)),
        ]
        return [Limit(*each) for each in found]


class Limit(NamedTuple):
    part: str
    what: str
    load: Callable[[float], float]  # of a number of nodes: 1 is the limit; it only rises

    @property
    def nodes(self) -> int | None:
        """The largest fleet within the limit: 0 if one node is too many, None if no fleet is."""
        if self.load(1) > 1:
            return 0
        low, high = 1, MOST
        if self.load(high) <= 1:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.load(middle) <= 1 else (low, middle)
        return low


def moved(trace: RequestTrace, assumed: Assumptions, admit_after: int) -> RequestMoves:
    """What a request moves: tokens, the mean of all requests. Tiers begin empty."""
    replay = TraceReplay(trace, trace.block_size * assumed.token_bytes)
    everything = trace.num_names * replay.block_bytes
    l1, l2, slab, redis = (
        int(SHARE * gib * GIB) for gib in (assumed.l1_gib, assumed.l2_gib, assumed.slab_gib, assumed.redis_gib)
    )
    asked, answers = float(trace.num_prompt.mean()), float(np.diff(trace.starts).mean() - trace.num_prompt.mean())

    def run(told: str, *sizes: Any, **options: Any) -> dict[str, float]:
        progress(f"stored from sighting {admit_after}: {told}")
        return _run(replay, Capacity(*sizes, **options))

    in_l1 = run("L1", l1, policy="lru")
    below = run("L2, slab, and all that ever was", l2, slab, everything, 1e12, admit_after=admit_after)
    shared = run("L2 and Redis", l2, 0, redis, 1e12, admit_after=admit_after)
    blocks = (asked + answers - in_l1["l2"], below["stored"], below["new"], below["cold"])
    return RequestMoves(
        admit_after,
        float(trace.num_tokens.mean()),
        float(trace.num_output.mean()),
        *(float(trace.block_size) * number for number in (*blocks, shared["new"], shared["cold"])),
    )


def _run(replay: TraceReplay, capacity: Capacity) -> dict[str, float]:
    """Blocks a request: found in each tier, stored in L2, and of those the new ones, which go on to the tiers below."""
    trace = replay.trace
    tiers = SimulatedTiers(capacity, replay.block_bytes, trace.block_size)
    found = np.zeros(3)
    for request, begun in enumerate(trace.begun.tolist()):
        found += tiers.request(replay.end(request), begun)
    tiers.check()
    counts = tiers.pool.counts()
    stored = (tiers.pool.num_evicted + tiers.pool.num_slots - counts.free) / len(trace)
    l2, slab, cold = (found / len(trace)).tolist()
    return {"l2": l2, "slab": slab, "cold": cold, "stored": stored, "new": stored - slab - cold}


def measured(chosen: Given, prompt_tokens: float) -> PieceCosts:
    quick = chosen.quick
    progress("KV events: a publisher and a consumer")
    consumer_us = measure_events(4 if quick else 200)
    indexes: dict[int, tuple[float, float, float]] = {}
    rounds, blocks = (5, 10_000) if quick else (100, 400_000)
    for replicas in NODES[:2] if quick else NODES:
        progress(f"the index and decisions of {replicas:,} replicas")
        indexes[replicas] = spawned(measure_index, replicas, blocks, int(prompt_tokens), rounds)
    progress("publishers that are followed")
    follow = measure_follow(3 if quick else 50, 1.0 if quick else 10.0)
    forward = _saved("router_overhead", "ms", what="request of 1024 token ids, answered as a stream")
    piece = _saved("router_overhead", "us", what="piece of a stream that comes alone")
    server: Row = {"nodes": 1, "block KiB": 2048, "way": "ours", "records": "clear"}
    set_gb, get_gb = (_saved("redis_bandwidth", "redis-benchmark GB/s", verb=v, **server) for v in ("SET", "GET"))
    progress("names of other nodes' blocks")
    peers = spawned(measure_peers, 10_000 if quick else 1_000_000)
    return PieceCosts(
        **follow | peers,
        consumer_us=consumer_us,
        index_bytes=max(each[0] for each in indexes.values()),
        change_us=max(each[1] for each in indexes.values()),
        decision_us={replicas: each[2] for replicas, each in indexes.items()},
        forward_us=1e3 * forward,
        piece_us=piece,
        redis_set_gb=set_gb,
        redis_get_gb=get_gb,
    )


def _saved(name: str, column: str, **where: object) -> float:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return next(
        float(row[column])
        for row in rows
        if column in row and all(row.get(key) == value for key, value in where.items())
    )


def rows_of(fleet: PaperFleet, limits: Sequence[Limit], sizes: dict[str, float]) -> list[Row]:
    pieces = asdict(fleet.measured)
    decisions = pieces.pop("decision_us")
    pieces |= {f"decision_us of {replicas:,} replicas": value for replicas, value in decisions.items()}
    rows: list[Row] = [*fleet.redis(), *fleet.objects(sizes)]
    rows += [{"part": "limits", "of": each.part, "limit": each.what, "holds up to": each.nodes} for each in limits]
    rows += [{"part": "a request moves", **asdict(each)} for each in fleet.moved.values()]
    return rows + [{"part": "a piece costs", "piece": name, "measured": value} for name, value in pieces.items()]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help="only the first so many of the trace")
    for field in fields(Assumptions):
        kind = int if field.type is int else float
        default = None if field.name == "rate" else field.default
        told = "a quarter of the trace's, as four nodes serve it" if default is None else f"{default:,}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default, help=f"({told})")


def assumptions(chosen: Given, trace: RequestTrace) -> Assumptions:
    """Of the command line. KVTierError if a figure cannot be."""
    named = {field.name: getattr(chosen, field.name) for field in fields(Assumptions)}
    wrong = [f"--{name.replace('_', '-')} {value:g}: give a number above 0" for name, value in named.items()
             if value is not None and not value > 0]  # fmt: skip
    if named["block_tokens"] != BLOCK_SIZE:
        wrong.append(f"--block-tokens {named['block_tokens']}: give {BLOCK_SIZE}: the pieces are measured at that")
    if wrong:
        raise KVTierError(wrong[0])
    if named["rate"] is None:
        named["rate"] = len(trace) / float(trace.begun[-1] - trace.begun[0]) / SHARE
    return Assumptions(**named)


@program(options)
def main(chosen: Given) -> Result:
    limit = chosen.requests or (200 if chosen.quick else None)
    trace = production_trace(limit)
    name = PRODUCTION if trace is not None else "made up: chats"
    if trace is None:
        trace = made_up("chats", limit=limit)
    assumed = assumptions(chosen, trace)
    each = [moved(trace, assumed, admit_after) for admit_after in (1, 2)]
    fleet = PaperFleet(assumed, measured(chosen, each[0].prompt), each)
    sizes = {f"a block, {assumed.block_bytes >> 20} MiB": float(assumed.block_bytes)}
    sizes[f"{BATCH_BYTES >> 20} MiB, as written"] = float(BATCH_BYTES)
    limits = fleet.limits(sizes)
    setup = {"trace": name, "requests": len(trace), **asdict(assumed)}
    return rows_of(fleet, limits, sizes), [], setup
