"""Knowing which blocks other nodes hold: by their KV events, and by a question by names.

Other nodes are processes here, each a lender and a publisher of events, with the same blocks in memory. The prompt's
blocks are held by all of them, or by none. "by events" is `lookup` of the tier in other nodes' memory, which a daemon's
loop waits for. "by names" is `locate`: it waits for the slowest node's answer, on another thread. Both are asked by
turns; CPU time is this process's. "questions" are those to other nodes, for a lookup. "bytes a block" is what a name
known by events takes here, for each node that holds it. "known after" is how long after it was announced a block is
known: the median of some blocks.
"""

import gc
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Final

from _blocks import Shape, key_file
from _process import forked, free_port, wait_until
from _races import in_turns, took
from _report import Row, parser, progress, report
from peers_bandwidth import FINGERPRINT, configured, holding, put

from kvtier.service.events import Publisher
from kvtier.service.node import PeerFeeds, PeerServer
from kvtier.tiers import BlockRecord
from kvtier.tiers.config import Config, EventsConfig
from kvtier.tiers.hierarchy import EventSource
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.peers import FEEDS, AnnouncedNames, EventsAt, NamesRoom, PeersStore

BLOCKS: Final = Shape(16, 4096)  # what they hold is not read
MOST: Final = 2048  # blocks of the longest prompt
NEWS: Final = 20  # blocks whose way is timed
GROUP: Final = 50  # lookups
FOREVER: Final = 120.0  # seconds


def chain_of(num_blocks: int, first_token: int = 0) -> list[BlockRecord]:
    chain = TokenChain(root_hash(FINGERPRINT), BLOCKS.block_size)
    chain.extend(range(first_token, first_token + num_blocks * BLOCKS.block_size))
    return [BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0) for i, name in enumerate(chain.hashes)]


def names_of(num_blocks: int, first_token: int) -> list[bytes]:
    return [record.chain_hash for record in chain_of(num_blocks, first_token)]


def be_a_node(config: Config, told: int, asked: int) -> None:
    """The other process: lends and announces. A byte that it reads is one block more."""
    hierarchy = holding(BLOCKS, 2 * MOST, chain_of(MOST))
    peer_server = PeerServer(config.peers)
    model = peer_server.lend(hierarchy, FINGERPRINT, BLOCKS)
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
def tier_over(config: Config, *, by_events: bool) -> Iterator[PeersStore]:
    """The tier in other nodes' memory, once all of them answer; `by_events`: once nobody needs to be asked."""
    FEEDS.open = PeerFeeds(EventsConfig()).open if by_events else None
    store = PeersStore.open(config, FINGERPRINT, slot_bytes=BLOCKS.block_bytes, block_size=BLOCKS.block_size)
    try:
        column = "sure" if by_events else "answering"
        wait_until(lambda: store.stats()[column] == len(config.peers.nodes), "answers of all nodes")
        yield store
    finally:
        store.close()


def row_of(told: PeersStore, asked: PeersStore, num_blocks: int, *, held: bool, rounds: int) -> Row:
    names = names_of(num_blocks, 0 if held else 500_000_000)
    ways = {"by events": (told, told.lookup), "by names": (asked, asked.locate)}
    for _, lookup in ways.values():
        assert lookup(names) == (num_blocks if held else 0)

    def turn(lookup: Callable[[list[bytes]], object]) -> tuple[list[float], float]:
        """Microseconds of each lookup, and CPU microseconds of one."""
        cpu = time.process_time()
        wall = [1e6 * took(lambda: lookup(names)) for _ in range(GROUP)]
        return wall, 1e6 * (time.process_time() - cpu) / GROUP

    before = [store.stats().get("questions", 0) for store, _ in ways.values()]
    found = in_turns({way: partial(turn, lookup) for way, (_, lookup) in ways.items()}, rounds)
    after = [store.stats().get("questions", 0) for store, _ in ways.values()]
    row: Row = {"blocks": num_blocks, "held by": "all" if held else "none"}
    row |= {f"{way} us": median(us for wall, _ in times for us in wall) for way, times in found.items()}
    row |= {f"{way} CPU us": median(cpu for _, cpu in times) for way, times in found.items()}
    each = zip(ways, before, after, strict=True)
    return row | {f"questions {way}": (more - less) / (GROUP * rounds) for way, less, more in each}


def known_after(told: PeersStore, ask: int) -> float:
    """Milliseconds from a word to a node until what it stores then is known here."""
    seconds = []
    for number in range(1, NEWS + 1):
        names = names_of(1, 1_000_000 * number)
        start = time.perf_counter()
        os.write(ask, b"1")
        wait_until(partial(told.lookup, names), "news of a block", pause=0.0002)
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)


def bytes_a_block(num_blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    names = AnnouncedNames(NamesRoom(num_blocks))
    for first in range(0, num_blocks, 512):
        names.store([i.to_bytes(8, "big") for i in range(first, min(num_blocks, first + 512))])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / num_blocks


def rows_of(sizes: Sequence[int], fleets: Sequence[int], rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        key = key_file(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [stack.enter_context(forked(partial(be_a_node, configured(key)))) for _ in range(max(fleets))]
        for num_nodes in fleets:
            config = configured(key, *(address for address, *_ in nodes[:num_nodes]))
            with tier_over(config, by_events=True) as told, tier_over(config, by_events=False) as asked:
                for num_blocks in sizes:
                    for held in (True, False):
                        progress(f"{num_nodes} nodes, {num_blocks} blocks, held by {'all' if held else 'none'}")
                        row = row_of(told, asked, num_blocks, held=held, rounds=rounds)
                        yield {"other nodes": num_nodes, **row}
        address, ask, _ = nodes[0]
        with tier_over(configured(key, address), by_events=True) as told:
            progress("how soon a block is known")
            num_blocks = 1_000_000 if rounds > 2 else 100_000
            news = known_after(told, ask)
            yield {"known names": num_blocks, "bytes a block": bytes_a_block(num_blocks), "known after ms": news}


def main() -> int:
    given = parser(__doc__).parse_args()
    sizes, fleets, rounds = ([128], [1, 2], 2) if given.quick else ([16, 128, MOST], [1, 4, 8], 9)
    return report("peers_lookup", list(rows_of(sizes, fleets, rounds)), [], given.json, given.save)


if __name__ == "__main__":
    sys.exit(main())
