"""What the pieces of a fleet cost, measured: KV events, the router's index, a decision, a publisher that is followed.

Each runs the product's own code, in a process of its own. Times are CPU time.
"""

import gc
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import zmq

from kvtier.service.events import (
    BlockRemoved,
    BlockStored,
    EventConsumer,
    Feeds,
    PrefixIndex,
    Publisher,
    prompt_hashes,
    topic_of,
)
from kvtier.service.router import decide, make_scores, weights_by_tier
from kvtier.tiers import TIERS, BlockRecord, ChainHash
from kvtier.tiers.config import EventsConfig
from kvtier.tiers.hierarchy import Event, Removed, Stored
from kvtier.tiers.naming import TokenChain, root_hash, token_array

BLOCK_SIZE: Final = 16  # tokens
CHAIN: Final = 512  # blocks of a prompt whose blocks are stored and removed: 8,192 tokens
FINGERPRINT: Final = b"scale".ljust(32, b".")
DEADLINE: Final = 600.0  # seconds, of one measurement
GPU, CPU = (kind.medium for kind in (TIERS["l1"], TIERS["l2"]))

P = ParamSpec("P")
T = TypeVar("T")


def alone(action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What it returns in a fresh process: its memory and its threads are its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(action, *arguments, **options).result(timeout=DEADLINE)


class EventCost(NamedTuple):
    """Of one change: one block that came to a tier, or left it."""

    publisher_us: float
    consumer_us: float
    wire_bytes: float


def events_of_chains(num_chains: int) -> list[list[Event]]:
    """For each chain: its blocks come to L2 in one run, and later leave it."""
    draw, changes = np.random.default_rng(7), list[list[Event]]()
    for _ in range(num_chains):
        tokens = draw.integers(0, 100_000, CHAIN * BLOCK_SIZE)
        chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
        chain.extend(tokens)
        names: Sequence[ChainHash] = chain.hashes
        records = tuple(BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0) for i, name in enumerate(names))
        changes.append([Stored("l2", records), Removed("l2", tuple(names))])
    return changes


def consume(address: str, pipe: Connection) -> None:
    """Follow a publisher until the parent has said which number is its last; then send the CPU seconds it took."""
    index = PrefixIndex(BLOCK_SIZE)
    consumer = EventConsumer("node", index, address, f"{address}-replay", topic=topic_of(FINGERPRINT))
    _wait(lambda: consumer.is_live)
    began = time.process_time()
    pipe.send("live")
    last = int(pipe.recv())
    _wait(lambda: (consumer.state.seq or 0) >= last)
    took = time.process_time() - began
    consumer.close()
    index.check()
    pipe.send((took, index.num_blocks, dict(index.counts)))


def measure_events(num_chains: int) -> EventCost:
    """A real publisher and, in another process, a real consumer with its index. The bytes are those of the frames."""
    changes, context = events_of_chains(num_chains), zmq.Context()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        address = f"ipc://{home}/events"
        publisher = stack.enter_context(
            Publisher(EventsConfig(publish=address, replay=f"{address}-replay", buffer=100_000))
        )
        ours, theirs = get_context("spawn").Pipe()
        reader = get_context("spawn").Process(target=consume, args=(address, theirs))
        reader.start()
        stack.callback(reader.join, 10.0)
        stack.callback(reader.terminate)
        counter: zmq.Socket[bytes] = context.socket(zmq.SUB)
        stack.callback(context.destroy, 0)
        counter.setsockopt(zmq.RCVHWM, 0)
        counter.subscribe(b"")
        counter.connect(address)
        assert ours.poll(DEADLINE), "the consumer does not connect"
        assert ours.recv() == "live"
        took, sizes = 0.0, list[int]()  # of each batch
        for events in changes:
            began = time.process_time()
            for event in events:
                publisher.announce(FINGERPRINT, [event])
            assert publisher.flush(DEADLINE), "the publisher does not publish"
            took += time.process_time() - began
            while counter.poll(0 if sizes else 1000):
                sizes.append(sum(map(len, counter.recv_multipart())))
        while len(sizes) < publisher.seq and counter.poll(5000):
            sizes.append(sum(map(len, counter.recv_multipart())))
        assert len(sizes) == publisher.seq, f"{len(sizes)} batches of {publisher.seq} were counted"
        ours.send(publisher.seq - 1)
        assert ours.poll(DEADLINE), "the consumer does not end"
        consumed, num_left, counts = ours.recv()
        assert (num_left, counts) == (0, {}), (num_left, counts)
    num_changes = 2 * CHAIN * num_chains
    return EventCost(took / num_changes * 1e6, consumed / num_changes * 1e6, sum(sizes) / num_changes)


class IndexCost(NamedTuple):
    """Of a router that knows so many replicas, each with an engine's publisher and a daemon's."""

    replicas: int
    bytes_a_block: float  # of the process, for each name that a publisher has
    change_us: float  # CPU of the index alone, for each block that came or went
    decision_us: float


def measure_index(replicas: int, num_blocks: int, prompt_tokens: int, rounds: int) -> IndexCost:
    """Fill an index, route prompts by it, and remove as much again. Run it `alone`: memory is the process's.

    A prompt begins with 64 blocks that all replicas hold. One replica and its node hold the rest but its last tenth.
    """
    engines, nodes = ([f"{kind}-{i}" for i in range(replicas)] for kind in ("engine", "node"))
    index, draw = PrefixIndex(BLOCK_SIZE, max_blocks=1 << 60), np.random.default_rng(3)
    system = draw.integers(0, 100_000, 64 * BLOCK_SIZE).tolist()
    names_of_system = list(range(1 << 62, (1 << 62) + 64))
    for worker, medium in [(engine, GPU) for engine in engines] + [(node, CPU) for node in nodes]:
        index.apply(worker, BlockStored(names_of_system, None, system, BLOCK_SIZE, None, medium, None))
    gc.collect()
    before, num_chains, changed, took = _resident(), -(-num_blocks // CHAIN), 0, 0.0
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
    bytes_a_block = (_resident() - before) / (CHAIN * num_chains)
    decision_us = _route(index, engines, nodes, system, prompt_tokens, rounds)
    index.check()
    return IndexCost(replicas, bytes_a_block, took / changed * 1e6, decision_us)


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
    feeds, scores, weights = Feeds(engines, nodes, nodes), make_scores(len(engines)), weights_by_tier()
    for row in range(len(engines)):
        scores.standing(row, 100.0, float("inf"), 4)
    rows, flags, times = np.arange(len(engines)), np.full(len(engines), 3, np.uint8), []
    for turn in range(rounds):
        began = time.thread_time()
        sequence = prompt_hashes(tokens, BLOCK_SIZE)
        scores.hold(flags, index.prefixes(sequence, feeds).reshape(-1), rows, weights)
        choice = decide(scores, engines, len(sequence), turn)
        times.append((time.thread_time() - began) * 1e6)
        assert choice.name == engines[-1], choice
    return statistics.median(times)


class FollowCost(NamedTuple):
    """Of one publisher that a router follows and that says nothing."""

    descriptors: float
    threads: float
    kib: float
    idle_us_a_second: float  # CPU


def follow(address: str, number: int, seconds: float) -> FollowCost:
    """Follow one publisher so many times, each with sockets and a thread of its own. Run it `alone`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    index = PrefixIndex(BLOCK_SIZE)
    warm = EventConsumer("warm", index, address, f"{address}-replay")
    _wait(lambda: warm.is_live)
    before = _in_use()
    consumers = [EventConsumer(f"node-{i}", index, address, f"{address}-replay") for i in range(number)]
    for each in consumers:
        _wait(lambda each=each: each.is_live)
    time.sleep(1.0)  # the replays end
    after = _in_use()
    began = time.process_time()
    time.sleep(seconds)
    idle = (time.process_time() - began) / seconds / (number + 1)
    for end in (EventConsumer.stop, EventConsumer.close):
        for consumer in (warm, *consumers):
            end(consumer)
    descriptors, threads, memory = ((now - then) / number for now, then in zip(after, before, strict=True))
    return FollowCost(descriptors, threads, memory / 1024, idle * 1e6)


def measure_follow(number: int, seconds: float) -> FollowCost:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        address = f"ipc://{home}/events"
        with Publisher(EventsConfig(publish=address, replay=f"{address}-replay")) as publisher:
            publisher.announce(FINGERPRINT, events_of_chains(1)[0][:1])
            assert publisher.flush(DEADLINE)
            return alone(follow, address, number, seconds)


def _wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not until():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came of {threading.current_thread().name} in {DEADLINE:g} s")
        time.sleep(0.01)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _in_use() -> tuple[int, int, int]:
    """Descriptors, threads, and bytes of memory of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _resident()
