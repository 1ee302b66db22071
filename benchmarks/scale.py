"""What a fleet of 1, 10, 100 and 1,000 nodes takes, on paper: events, index, decisions, Redis, objects, prices.

The pieces are measured here: a publisher and a consumer of KV events in two processes, the router's index and its
decisions at so many replicas, a publisher that is followed. What a request moves comes from the simulator: the
production trace goes through the pools and extents of one node that has four nodes' memory, as four nodes serve it.
Other figures are those saved by `router_overhead.py` (forwarding) and `redis_bandwidth.py` (one server). The rest is
arithmetic over assumptions, each of which is an option.

Every node serves the same requests, and what a request moves is the same at every size: the router keeps conversations
where their blocks are (`benchmarks/routing.py` measured how well). So all but a decision grows in proportion.

Prices are list prices as they were given, of no offer in particular: give your own.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from _eviction_traces import PRODUCTION, made_up, production_trace
from _loads import Row, picture
from _report import RESULTS, parser, progress, report
from _scale_parts import BLOCK_SIZE, alone, measure_events, measure_follow, measure_index

from kvtier.service.simulation import Capacity, SimulatedTiers, TraceReplay
from kvtier.service.traces import RequestTrace

SHARE: Final = 4  # nodes that serve the trace together
INDEXED: Final = 400_000  # blocks in the index that is measured
CHAINS: Final = 200  # of 512 blocks, whose events are measured
FOLLOWED: Final = 50
QUICK: Final = 200  # requests
FOREVER: Final = 1e12  # seconds
LARGE: Final = 64 << 20  # bytes of a large object
FOR_PEOPLE: Final = {"events": "KV events", "index": "index", "decisions": "decisions", "redis": "Redis"}
GIB: Final = 1 << 30
GB: Final = 1e9
DAY: Final = 86_400.0  # seconds
MONTH: Final = 30 * DAY
NODES: Final = (1, 10, 100, 1000)
MOST: Final = 100_000_000  # nodes; a limit beyond it is none


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
    slab_read: float
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

    publisher_us: float
    consumer_us: float
    wire_bytes: float
    index_bytes: float
    change_us: float  # of the index alone; the consumer's are with reading the event
    decision_us: Mapping[int, float]
    follower_descriptors: float
    follower_threads: float
    follower_kib: float
    follower_idle_us: float
    forward_us: float  # of a request that is forwarded, its decision between two replicas with it
    piece_us: float  # of a piece of a stream
    redis_set_gb: float  # a second, of one server
    redis_get_gb: float

    def decision(self, replicas: float) -> float:
        """Microseconds: a straight line between two sizes that were measured, and on from the last two."""
        sizes = sorted(self.decision_us)
        if len(sizes) == 1 or replicas <= sizes[0]:
            return self.decision_us[sizes[0]]
        low, high = next((pair for pair in pairwise(sizes) if replicas <= pair[1]), (sizes[-2], sizes[-1]))
        slope = (self.decision_us[high] - self.decision_us[low]) / (high - low)
        return self.decision_us[low] + slope * (replicas - low)


class PaperFleet:
    """All figures of a fleet, by its number of nodes."""

    def __init__(self, assumed: Assumptions, measured: PieceCosts, moved: Sequence[RequestMoves]) -> None:
        self.assumed, self.measured = assumed, measured
        self.moved = {each.admit_after: each for each in moved}
        self.usual = moved[0]

    # KV events

    def changes(self, nodes: float, block_tokens: int | None = None) -> float:
        """Blocks a second that come to a tier or leave it."""
        return nodes * self.assumed.rate * self.usual.changes / (block_tokens or self.assumed.block_tokens)

    def event_cores(self, nodes: float, block_tokens: int | None = None) -> float:
        """Cores of one process that reads all of them, and follows two publishers a node."""
        applied = self.changes(nodes, block_tokens) * self.measured.consumer_us / 1e6
        return applied + 2 * nodes * self.measured.follower_idle_us / 1e6

    def events(self) -> list[Row]:
        """A row for each size, as in the other tables."""
        costs, rows = self.measured, list[Row]()
        for nodes in NODES:
            row: Row = {"part": "events", "nodes": nodes, "changes/s": round(self.changes(nodes))}
            row["MB/s on the wire"] = round(self.changes(nodes) * costs.wire_bytes / 1e6, 3)
            row["cores of a publisher"] = round(self.changes(1) * costs.publisher_us / 1e6, 4)
            row["cores of a reader"] = round(self.event_cores(nodes), 4)
            row["descriptors"] = round(2 * nodes * costs.follower_descriptors)
            rows.append(row | {"threads": round(2 * nodes * costs.follower_threads)})
        return rows

    # the index

    def index_gib(self, nodes: float, block_tokens: int | None = None) -> float:
        smaller = self.assumed.block_tokens / (block_tokens or self.assumed.block_tokens)
        names = nodes * self.assumed.names_a_node * smaller
        return (names * self.measured.index_bytes + 2 * nodes * self.measured.follower_kib * 1024) / GIB

    def index(self) -> list[Row]:
        rows = []
        for nodes in NODES:
            gib, names = self.index_gib(nodes), nodes * self.assumed.names_a_node
            row: Row = {"part": "index", "nodes": nodes, "names, M": round(names / 1e6, 2)}
            rows.append(row | {"index GiB": round(gib, 2), "$ a month": round(gib * self.assumed.gib_price, 1)})
        return rows

    # decisions

    def request_cores(self, nodes: float) -> float:
        """Cores for all requests: each is forwarded, decided on, and its answer passed on."""
        pieces = self.assumed.streamed * self.usual.answer * self.measured.piece_us
        each = self.measured.forward_us + pieces + self.measured.decision(nodes)
        return nodes * self.assumed.rate * each / 1e6

    def routers(self, nodes: float) -> int | None:
        """Processes that share the requests, while each reads all events. None: events alone fill a core."""
        left = 1 - self.event_cores(nodes)
        return None if left <= 0 else _up(self.request_cores(nodes) / left)

    def decisions(self) -> list[Row]:
        rows = []
        for nodes in NODES:
            rate, us, count, gib = (nodes * self.assumed.rate, self.measured.decision(nodes), self.routers(nodes),
                                    self.index_gib(nodes))  # fmt: skip
            row: Row = {"part": "decisions", "nodes": nodes, "requests/s": round(rate, 1)}
            row |= {"decision us": round(us), "cores, decisions": round(rate * us / 1e6, 3)}
            row |= {"cores, all of a request": round(self.request_cores(nodes), 3), "routers": count}
            price = self.assumed.core_price + gib * self.assumed.gib_price
            row["GiB, all routers"] = None if count is None else round(count * gib, 1)
            rows.append(row | {"router $ a month": None if count is None else round(count * price)})
        return rows

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

    def redis(self) -> list[Row]:
        """By when a block is stored, and the number of nodes."""
        rows = []
        price = self.assumed.core_price + self.assumed.shard_gib * self.assumed.gib_price
        for admit_after, nodes in product(sorted(self.moved), NODES):
            written, read = self.redis_gb(nodes, admit_after)
            busy, room = self.shards_for_bytes(nodes, admit_after), self.shards_for_room(nodes)
            shards = _up(max(busy, room))
            row: Row = {"part": "redis", "nodes": nodes, "stored from sighting": admit_after}
            row |= {"GB/s written": round(written, 3), "GB/s read": round(read, 3)}
            row |= {"shards, by bytes": round(busy, 2), "shards, by room": round(room, 2)}
            rows.append(row | {"shards": shards, "$ a month": round(shards * price)})
        return rows

    # an object store

    def object_rates(self, nodes: float, admit_after: int, object_bytes: float) -> tuple[float, float]:
        """Objects a second written and read; what is read is read whole."""
        moved, each = self.moved[admit_after], nodes * self.assumed.rate * self.assumed.token_bytes / object_bytes
        return each * moved.slab_stored, each * moved.cold_read

    def objects(self, sizes: Mapping[str, float]) -> list[Row]:
        """By when a block is stored, the size of an object, and the number of nodes."""
        rows = []
        for admit_after, (name, size), nodes in product(sorted(self.moved), sizes.items(), NODES):
            puts, gets = self.object_rates(nodes, admit_after, size)
            requests = (puts * self.assumed.put_price + gets * self.assumed.get_price) / 1000 * MONTH
            kept = puts * size * self.assumed.kept_days * DAY / GB
            row: Row = {"part": "objects", "nodes": nodes, "object": name, "stored from sighting": admit_after}
            row |= {"PUT/s": round(puts, 1), "GET/s": round(gets, 1), "requests $ a month": round(requests)}
            rows.append(row | {"room $ a month": round(kept * self.assumed.gb_month)})
        return rows

    # where it breaks

    def limits(self, object_sizes: Mapping[str, float]) -> list["Limit"]:
        """Each limit, as a load that is 1 where it is reached."""
        assumed, measured = self.assumed, self.measured
        wide = 4 * assumed.block_tokens
        block, large = object_sizes.values()
        first, second = min(self.moved), max(self.moved)
        wider, later = f"the same, blocks of {wide} tokens", f"the same, stored from sighting {second}"
        blocks, loop, descriptors = assumed.max_blocks, assumed.loop_ms, assumed.max_descriptors

        def names(nodes: float) -> float:
            return nodes * assumed.names_a_node / blocks

        def puts(size: float, admit_after: int) -> Callable[[float], float]:
            return lambda nodes: self.object_rates(nodes, admit_after, size)[0] / assumed.puts_a_second

        found: list[tuple[str, str, Callable[[float], float]]] = [
            ("index", f"`max_blocks` of {blocks / 1e6:g} M", names),
            ("index", wider, lambda n: names(n) / 4),
            ("index", f"{assumed.router_gib:g} GiB of memory", lambda n: self.index_gib(n) / assumed.router_gib),
            ("index", wider, lambda n: self.index_gib(n, wide) / assumed.router_gib),
            ("decisions", "one router's core, all its work", lambda n: self.event_cores(n) + self.request_cores(n)),
            ("decisions", f"{loop:g} ms for one decision", lambda n: measured.decision(n) / 1e3 / loop),
            ("events", "one reader's core, events alone", self.event_cores),
            ("events", wider, lambda n: self.event_cores(n, wide)),
            ("events", f"{descriptors:,} descriptors", lambda n: 2 * n * measured.follower_descriptors / descriptors),
            ("redis", "one server's bytes", lambda n: self.shards_for_bytes(n, first)),
            ("redis", later, lambda n: self.shards_for_bytes(n, second)),
            ("redis", f"{assumed.shard_gib:g} GiB of one server", self.shards_for_room),
            ("objects", "PUT/s of one prefix, an object a block", puts(block, first)),
            ("objects", "the same, large objects", puts(large, first)),
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


def _up(number: float) -> int:
    return max(1, -int(-number // 1))


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
    below = run("L2, slab, and all that ever was", l2, slab, everything, FOREVER, admit_after=admit_after)
    shared = run("L2 and Redis", l2, 0, redis, FOREVER, admit_after=admit_after)
    blocks = (asked + answers - in_l1["l2"], below["stored"], below["new"], below["slab"], below["cold"])
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


def measured(chosen: argparse.Namespace, prompt_tokens: float) -> PieceCosts:
    quick = chosen.quick
    progress("KV events: a publisher and a consumer")
    events = measure_events(4 if quick else CHAINS)
    indexes = []
    rounds, blocks = (5, 10_000) if quick else (100, INDEXED)
    for replicas in NODES[:2] if quick else NODES:
        progress(f"the index and decisions of {replicas:,} replicas")
        indexes.append(alone(measure_index, replicas, blocks, int(prompt_tokens), rounds))
    progress("publishers that are followed")
    follow = measure_follow(3 if quick else FOLLOWED, 1.0 if quick else 10.0)
    forward = _saved("router_overhead", "ms", what="request of 1024 token ids, answered as a stream")
    piece = _saved("router_overhead", "us", what="piece of a stream that comes alone")
    server: Row = {"nodes": 1, "block KiB": 2048, "way": "ours", "records": "clear"}
    set_gb, get_gb = (_saved("redis_bandwidth", "redis-benchmark GB/s", verb=v, **server) for v in ("SET", "GET"))
    bytes_a_block, change_us = (max(each[i] for each in indexes) for i in (1, 2))
    decisions = {each.replicas: each.decision_us for each in indexes}
    return PieceCosts(*events, bytes_a_block, change_us, decisions, *follow, 1e3 * forward, piece, set_gb, get_gb)


def _saved(name: str, column: str, **where: object) -> float:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return next(
        float(row[column])
        for row in rows
        if column in row and all(row.get(key) == value for key, value in where.items())
    )


def rows_of(fleet: PaperFleet, limits: Sequence[Limit], sizes: dict[str, float]) -> list[Row]:
    """A table for each part, then what they are made of."""
    pieces = asdict(fleet.measured)
    decisions = pieces.pop("decision_us")
    pieces |= {f"decision_us of {replicas:,} replicas": value for replicas, value in decisions.items()}
    rows: list[Row] = [*fleet.events(), *fleet.index(), *fleet.decisions(), *fleet.redis(), *fleet.objects(sizes)]
    rows += [{"part": "limits", "of": each.part, "limit": each.what, "holds up to": each.nodes} for each in limits]
    rows += [{"part": "a request moves", **asdict(each)} for each in fleet.moved.values()]
    return rows + [{"part": "a piece costs", "piece": name, "measured": value} for name, value in pieces.items()]


def plot(limits: Sequence[Limit], path: Path) -> None:
    shown = [each for each in limits if each.nodes is not None]
    colors = {part: f"C{i}" for i, part in enumerate(dict.fromkeys(each.part for each in shown))}
    labels = [f"{FOR_PEOPLE.get(each.part, each.part)}: {each.what}".replace("`", "") for each in shown]
    wholes = [max(0.5, float(each.nodes or 0)) for each in shown]
    with picture(path, figsize=(9.5, 0.5 + 0.32 * len(shown))) as (_, axes):
        bars = axes.barh(range(len(shown)), wholes, color=[colors[each.part] for each in shown], left=0.1)
        axes.bar_label(bars, [f"{each.nodes:,}" for each in shown], fontsize=8, padding=3)
        axes.set_yticks(range(len(shown)), labels, fontsize=8)
        axes.set(xscale="log", xlabel="nodes", xlim=(0.1, 10 * max(wholes)))
        axes.invert_yaxis()
        for nodes in NODES:
            axes.axvline(nodes, color="grey", linewidth=0.6, linestyle=":")


def options() -> argparse.ArgumentParser:
    given = parser(__doc__)
    given.add_argument("--requests", type=int, help="only the first so many of the trace")
    for field in fields(Assumptions):
        kind = int if field.type is int else float
        default = None if field.name == "rate" else field.default
        told = "a quarter of the trace's, as four nodes serve it" if default is None else f"{default:,}"
        name = f"--{field.name.replace('_', '-')}"
        given.add_argument(name, type=kind, default=default, help=f"({told})")
    return given


def assumptions(chosen: argparse.Namespace, trace: RequestTrace) -> Assumptions:
    """Of the command line. Exits with status 2 if a figure cannot be."""
    named = {field.name: getattr(chosen, field.name) for field in fields(Assumptions)}
    wrong = [f"--{name.replace('_', '-')} {value:g}: give a number above 0" for name, value in named.items()
             if value is not None and not value > 0]  # fmt: skip
    if named["block_tokens"] != BLOCK_SIZE:
        wrong.append(f"--block-tokens {named['block_tokens']}: give {BLOCK_SIZE}: the pieces are measured at that")
    if wrong:
        print(f"scale: {wrong[0]}", file=sys.stderr)
        sys.exit(2)
    if named["rate"] is None:
        named["rate"] = len(trace) / float(trace.begun[-1] - trace.begun[0]) / SHARE
    return Assumptions(**named)


def main() -> int:
    chosen = options().parse_args()
    limit = chosen.requests or (QUICK if chosen.quick else None)
    trace = production_trace(limit)
    name = PRODUCTION if trace is not None else "made up: chats"
    if trace is None:
        trace = made_up("chats", limit=limit)
    assumed = assumptions(chosen, trace)
    each = [moved(trace, assumed, admit_after) for admit_after in (1, 2)]
    fleet = PaperFleet(assumed, measured(chosen, each[0].prompt), each)
    sizes = {f"a block, {assumed.block_bytes >> 20} MiB": float(assumed.block_bytes), "64 MiB": float(LARGE)}
    limits = fleet.limits(sizes)
    if chosen.save:
        plot(limits, RESULTS / "scale.png")
    setup = {"trace": name, "requests": len(trace), **asdict(assumed)}
    return report("scale", rows_of(fleet, limits, sizes), [], chosen.json, chosen.save, setup)


if __name__ == "__main__":
    sys.exit(main())
