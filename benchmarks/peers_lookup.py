"""Knowing which blocks other nodes hold: by their KV events, and by a question by names.

Other nodes are processes on this machine, each a lender and a publisher of events, with the same blocks in memory. The
prompt's blocks are held by all of them, or by none. "by events" is `lookup` of the tier in other nodes' memory, which a
daemon's loop waits for. "by names" is `locate`: it waits for the slowest node's answer, on another thread, so that the
request waits for it and the loop does not. Both are asked by turns. CPU time is this process's. What a question costs
the asked nodes comes on top of it.

"questions" are those to other nodes, for a lookup. "bytes a block" is what a name known by events takes here, for each
node that holds it. "known after" is how long after it was announced a block is known: the median of some blocks.
"""

import gc
import os
import socket
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

from _report import parser, progress, report

from kvtier.service.events import Publisher
from kvtier.service.node import PeerFeeds, PeerServer
from kvtier.tiers import BlockRecord
from kvtier.tiers.config import Config, EventsConfig
from kvtier.tiers.hierarchy import EventSource, Hierarchy, open_hierarchy
from kvtier.tiers.host import slot_stride
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.peers import FEEDS, AnnouncedNames, EventsAt, NamesRoom, PeersStore

FINGERPRINT: Final = b"lookups of peers".ljust(32, b".")
BLOCK_SIZE: Final = 16
BLOCK_BYTES: Final = 4096  # what they hold is not read
MOST: Final = 2048  # blocks of the longest prompt
NEWS: Final = 20  # blocks whose way is timed
FOREVER: Final = 120.0  # seconds


class LookupBlocks:
    """The blocks of the prompts: a `BlockShape`."""

    block_size = BLOCK_SIZE
    block_bytes = BLOCK_BYTES


def chain_of(num_blocks: int, first_token: int = 0) -> TokenChain:
    chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
    chain.extend(range(first_token, first_token + num_blocks * BLOCK_SIZE))
    return chain


def put(hierarchy: Hierarchy, chain: TokenChain) -> None:
    """Into host memory, whatever its bytes."""
    host = hierarchy.host
    reservation = host.pool.reserve(chain.hashes)
    assert reservation is not None
    records = [BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0) for i, name in enumerate(chain.hashes)]
    host.describe(reservation.slots, records)
    host.pool.seal(reservation).release()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_a_node(config: Config, told: int, asked: int) -> None:
    """The other process: lends and announces, until its parent ends it. A byte that it reads is one block more."""
    memory = Config.model_validate({"host": {"size": 2 * MOST * slot_stride(BLOCK_BYTES)}})
    hierarchy = open_hierarchy(memory, FINGERPRINT, LookupBlocks())
    put(hierarchy, chain_of(MOST))
    peer_server = PeerServer(config.peers)
    model = peer_server.lend(hierarchy, FINGERPRINT, LookupBlocks())
    events = EventsConfig.model_validate({name: f"tcp://127.0.0.1:{free_port()}" for name in ("publish", "replay")})
    publisher = Publisher(events, has_peers=True)
    feed = publisher.feed(FINGERPRINT, EventSource(hierarchy))
    at = EventsAt.bound(publisher.endpoint, publisher.replay_endpoint)
    model.events = lambda: replace(at, tells_all=feed.tells_all)
    while feed.pump():
        publisher.flush(FOREVER)
    os.write(told, f"{peer_server.address}\n".encode())
    for number in range(1, 256):
        if not os.read(asked, 1):
            break
        put(hierarchy, chain_of(1, 1_000_000 * number))
        feed.pump()


@contextmanager
def other_node(config: Config) -> Iterator[tuple[str, int]]:
    """The address of a node in another process, and where a byte makes it hold a block more."""
    told, tell = os.pipe()
    asked, ask = os.pipe()
    sys.stdout.flush()
    if not (child := os.fork()):
        os.close(ask)
        try:
            be_a_node(config, tell, asked)
            time.sleep(FOREVER)
        finally:
            os._exit(1)
    os.close(tell)
    try:
        with os.fdopen(told) as lines:
            yield lines.readline().strip(), ask
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ask)
        os.close(asked)


def waited(holds: Callable[[], object], pause: float = 0.01) -> None:
    deadline = time.monotonic() + FOREVER
    while not holds():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(pause)


@contextmanager
def tier_over(config: Config, *, by_events: bool) -> Iterator[PeersStore]:
    """The tier in other nodes' memory, once all of them answer; `by_events`: once nobody needs to be asked."""
    FEEDS.open = PeerFeeds(EventsConfig()).open if by_events else None
    store = PeersStore.open(config, FINGERPRINT, slot_bytes=BLOCK_BYTES, block_size=BLOCK_SIZE)
    try:
        waited(lambda: store.stats()["sure" if by_events else "answering"] == len(config.peers.nodes))
        yield store
    finally:
        store.close()


class LookupTimes:
    """Times of one kind of lookup, by turns with others."""

    def __init__(self, lookup: Callable[[], object]) -> None:
        self._lookup = lookup
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def run(self, count: int) -> None:
        """So many lookups, one after another."""
        cpu = time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            self._lookup()
            self.wall.append(1e6 * (time.perf_counter() - start))
        self.cpu.append(1e6 * (time.process_time() - cpu) / count)


def row_of(told: PeersStore, asked: PeersStore, num_blocks: int, *, held: bool, rounds: int) -> dict[str, object]:
    """One prompt, both ways."""
    names = chain_of(num_blocks, 0 if held else 500_000_000).hashes
    expected = num_blocks if held else 0
    assert told.lookup(names) == expected
    assert asked.locate(names) == expected
    ways = LookupTimes(lambda: told.lookup(names)), LookupTimes(lambda: asked.locate(names))
    before = [store.stats().get("questions", 0) for store in (told, asked)]
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            way.run(50)
    after = [store.stats().get("questions", 0) for store in (told, asked)]
    by_events, by_names = ways
    return {
        "blocks": num_blocks,
        "held by": "all" if held else "none",
        "by events us": median(by_events.wall),
        "by names us": median(by_names.wall),
        "by events CPU us": median(by_events.cpu),
        "by names CPU us": median(by_names.cpu),
        "questions by events": (after[0] - before[0]) / (50 * rounds),
        "questions by names": (after[1] - before[1]) / (50 * rounds),
    }


def known_after(told: PeersStore, ask: int) -> float:
    """Milliseconds from a word to a node until what it stores then is known here."""
    took = []
    for number in range(1, NEWS + 1):
        names = chain_of(1, 1_000_000 * number).hashes
        start = time.perf_counter()
        os.write(ask, b"1")
        waited(lambda names=names: told.lookup(names), 0.0002)
        took.append(1e3 * (time.perf_counter() - start))
    return median(took)


def bytes_a_block(num_blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    names = AnnouncedNames(NamesRoom(num_blocks))
    for first in range(0, num_blocks, 512):
        names.store([i.to_bytes(8, "big") for i in range(first, min(num_blocks, first + 512))])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / num_blocks


def configured(key_file: Path, *nodes: str) -> Config:
    peers = {"key_file": key_file, "nodes": nodes, "deadline": "20s", "connect_timeout": "20s"}
    return Config.model_validate({"peers": {**peers, "listen": "127.0.0.1:0"}})


def rows_of(sizes: Sequence[int], fleets: Sequence[int], rounds: int) -> Iterator[dict[str, object]]:
    with ExitStack() as stack:
        key_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        key_file.touch(0o600)
        key_file.write_bytes(os.urandom(32))
        nodes = [stack.enter_context(other_node(configured(key_file))) for _ in range(max(fleets))]
        for num_nodes in fleets:
            config = configured(key_file, *(address for address, _ in nodes[:num_nodes]))
            with tier_over(config, by_events=True) as told, tier_over(config, by_events=False) as asked:
                for num_blocks in sizes:
                    for held in (True, False):
                        progress(f"{num_nodes} nodes, {num_blocks} blocks, held by {'all' if held else 'none'}")
                        row = row_of(told, asked, num_blocks, held=held, rounds=rounds)
                        yield {"other nodes": num_nodes, **row}
        with tier_over(configured(key_file, nodes[0][0]), by_events=True) as told:
            progress("how soon a block is known")
            num_blocks = 1_000_000 if rounds > 2 else 100_000
            news = known_after(told, nodes[0][1])
            yield {"known names": num_blocks, "bytes a block": bytes_a_block(num_blocks), "known after ms": news}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    sizes, fleets, rounds = ([128], [1, 2], 2) if arguments.quick else ([16, 128, MOST], [1, 4, 8], 9)
    rows = list(rows_of(sizes, fleets, rounds))
    return report("peers_lookup", rows, [], arguments.json, arguments.save)


if __name__ == "__main__":
    sys.exit(main())
