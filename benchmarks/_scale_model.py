"""From what one request and one event cost to a fleet of any size: plain arithmetic, all of it stated here.

Every node serves the same requests, and what a request moves is the same at every size: the router keeps conversations
where their blocks are (`benchmarks/routing.py` measured how well). So all but a decision grows in proportion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final, NamedTuple

GIB: Final = 1 << 30
GB: Final = 1e9
DAY: Final = 86_400.0  # seconds
MONTH: Final = 30 * DAY
NODES: Final = (1, 10, 100, 1000)
MOST: Final = 100_000_000  # nodes; a limit beyond it is none

PaperRow = dict[str, Any]


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
    """What the pieces cost. `decision_us` and `change_us` by the number of replicas, as they were measured."""

    publisher_us: float
    consumer_us: float
    wire_bytes: float
    index_bytes: float
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

    def events(self) -> list[PaperRow]:
        """A row for each size, as in the other tables."""
        costs, rows = self.measured, list[PaperRow]()
        for nodes in NODES:
            row: PaperRow = {"part": "events", "nodes": nodes, "changes/s": round(self.changes(nodes))}
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

    def index(self) -> list[PaperRow]:
        rows = []
        for nodes in NODES:
            gib, names = self.index_gib(nodes), nodes * self.assumed.names_a_node
            row: PaperRow = {"part": "index", "nodes": nodes, "names, M": round(names / 1e6, 2)}
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

    def decisions(self) -> list[PaperRow]:
        rows = []
        for nodes in NODES:
            rate, us, count, gib = (nodes * self.assumed.rate, self.measured.decision(nodes), self.routers(nodes),
                                    self.index_gib(nodes))  # fmt: skip
            row: PaperRow = {"part": "decisions", "nodes": nodes, "requests/s": round(rate, 1)}
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

    def redis(self) -> list[PaperRow]:
        """By when a block is stored, and the number of nodes."""
        rows = []
        price = self.assumed.core_price + self.assumed.shard_gib * self.assumed.gib_price
        for admit_after, nodes in product(sorted(self.moved), NODES):
            written, read = self.redis_gb(nodes, admit_after)
            busy, room = self.shards_for_bytes(nodes, admit_after), self.shards_for_room(nodes)
            shards = _up(max(busy, room))
            row: PaperRow = {"part": "redis", "nodes": nodes, "stored from sighting": admit_after}
            row |= {"GB/s written": round(written, 3), "GB/s read": round(read, 3)}
            row |= {"shards, by bytes": round(busy, 2), "shards, by room": round(room, 2)}
            rows.append(row | {"shards": shards, "$ a month": round(shards * price)})
        return rows

    # an object store

    def object_rates(self, nodes: float, admit_after: int, object_bytes: float) -> tuple[float, float]:
        """Objects a second written and read; what is read is read whole."""
        moved, each = self.moved[admit_after], nodes * self.assumed.rate * self.assumed.token_bytes / object_bytes
        return each * moved.slab_stored, each * moved.cold_read

    def objects(self, sizes: Mapping[str, float]) -> list[PaperRow]:
        """By when a block is stored, the size of an object, and the number of nodes."""
        rows = []
        for admit_after, (name, size), nodes in product(sorted(self.moved), sizes.items(), NODES):
            puts, gets = self.object_rates(nodes, admit_after, size)
            requests = (puts * self.assumed.put_price + gets * self.assumed.get_price) / 1000 * MONTH
            kept = puts * size * self.assumed.kept_days * DAY / GB
            row: PaperRow = {"part": "objects", "nodes": nodes, "object": name, "stored from sighting": admit_after}
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
