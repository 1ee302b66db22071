"""What the router costs: CPU time of a request, of scoring a long prompt, and memory of its index.

Requests: a real `kvtier route` before two replicas that answer at once and compute nothing, and that have told it by
real events that they hold the prompt; 8 connections that stay open. The figure is the process's CPU time over the
number of requests. Prompts are token ids: nothing is tokenised. Pieces: the same with streams whose events come one by
one, 20 ms apart; a relay in asyncio that only reads and writes them (`_servers.py`) runs beside it.

Scoring: a prompt of 32,768 tokens in blocks of 16, against an index of 1,000,000 blocks (`--quick`: fewer): names from
the tokens, who holds how much, the choice among four replicas; the median CPU time of one thread. "mixed" is a prompt
whose every block another replica has in its L1. Memory: how much more a process has with that index than before.
"""

import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from _report import ROOT, Given, Result, Row, program, progress
from _rig import ServerProcess, free_port, kvtier, posted, resident_bytes, spawned, wait_until

from kvtier.engine.demo import train_tokenizer
from kvtier.service.events import BlockStored, Feeds, PrefixIndex, Publisher, prompt_hashes
from kvtier.service.router import Choice, Reason, decide, make_scores, weights_by_tier
from kvtier.tiers.config import EventsConfig
from kvtier.tiers.hierarchy import Stored
from kvtier.tiers.naming import TokenChain, root_hash

BLOCK_SIZE: Final = 16
PROMPT: Final = 32_768  # tokens
CHAIN: Final = 128  # blocks of a prompt that fills the index
NAMES: Final = ("replica-0", "replica-1", "replica-2", "replica-3")
CONNECTIONS: Final = 8
PAUSE: Final = 0.02  # seconds between two events of a stream
STUB: Final = ROOT / "tests" / "service" / "router" / "_replica_child.py"
RELAY: Final = Path(__file__).with_name("_servers.py")
FINGERPRINT: Final = bytes(32)
Tokens = list[int]


def store(index: PrefixIndex, worker: str, medium: str, names: list[int], tokens: Tokens, parent: int | None) -> None:
    index.apply(worker, BlockStored(names, parent, tokens, BLOCK_SIZE, None, medium, None))


def filled(num_blocks: int, *media: str) -> PrefixIndex:
    """An index of so many different blocks, each in these tiers of one replica."""
    index, draw = PrefixIndex(BLOCK_SIZE), np.random.default_rng(0)
    for number in range(num_blocks // CHAIN):
        tokens = draw.integers(0, 100_000, CHAIN * BLOCK_SIZE).tolist()
        names = draw.integers(0, 1 << 63, CHAIN).tolist()
        for medium in media:
            store(index, NAMES[number % len(NAMES)], medium, names, tokens, None)
    return index


def bytes_a_block(num_blocks: int, *media: str) -> float:
    """Run in a process of its own: bytes more with the index than before."""
    filled(CHAIN, *media)
    before = resident_bytes()
    index = filled(num_blocks, *media)
    return (resident_bytes() - before) / index.num_blocks


def held(index: PrefixIndex, tokens: list[int], kind: str) -> None:
    """Have the replicas hold a prompt: none, all of it, or each block by another set of them than the one before."""
    num_blocks = len(tokens) // BLOCK_SIZE
    first = (1 << 63) + len(kind) * num_blocks
    names = list(range(first, first + num_blocks))
    for place, worker in enumerate(NAMES if kind != "unknown" else ()):
        store(index, worker, "STORAGE", names, tokens, None)
        for block in range(place, num_blocks, len(NAMES)) if kind == "mixed" else ():
            piece = tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
            store(index, worker, "GPU", [names[block]], piece, names[block - 1] if block else None)


def score(index: PrefixIndex, kind: str, rounds: int) -> dict[str, float]:
    tokens = np.random.default_rng(len(kind)).integers(0, 100_000, PROMPT).tolist()
    held(index, tokens, kind)
    sequence = prompt_hashes(tokens, BLOCK_SIZE)
    promised = sum(index.matches(sequence).get(NAMES[0], {}).values())
    assert promised == (0 if kind == "unknown" else len(sequence)), promised
    times, _ = decisions(index, tokens, NAMES, Feeds(NAMES, [None] * len(NAMES), NAMES), rounds)
    named, found, chosen = zip(*times, strict=True)
    return {"names ms": median(named) * 1e3, "index ms": median(found) * 1e3, "choice ms": median(chosen) * 1e3}


def decisions(
    index: PrefixIndex, tokens: Tokens, names: Sequence[str], feeds: Feeds, rounds: int
) -> tuple[list[tuple[float, float, float]], Choice]:
    """Of each time: seconds for the prompt's names, for who holds it, and for the choice; and the last choice."""
    times, clock, number = list[tuple[float, float, float]](), time.thread_time, len(names)
    scores, weights, choice = make_scores(number), weights_by_tier(), Choice(None, Reason.EQUAL, ())
    for row in range(number):
        scores.standing(row, 100.0, float("inf"), 0)
    flags, rows = np.full(number, 3, np.uint8), np.arange(number)  # all are alive, and sure
    for turn in range(rounds):
        began = clock()
        sequence = prompt_hashes(tokens, BLOCK_SIZE)
        after_names = clock()
        counts = index.prefixes(sequence, feeds)
        after_index = clock()
        scores.hold(flags, counts.reshape(-1), rows, weights)
        choice = decide(scores, names, len(sequence), turn)
        times.append((after_names - began, after_index - after_names, clock() - after_index))
    return times, choice


@contextmanager
def router(tokens: list[int]) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A router before two replicas, which have told it that they hold this prompt, and the ports of all three."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        (home / "model").mkdir()
        train_tokenizer().save(str(home / "model" / "tokenizer.json"))
        ports = [free_port() for _ in range(3)]
        command = kvtier("route", "--model", str(home / "model"), "--http", f"127.0.0.1:{ports[0]}")
        publishers = []
        for port in ports[1:]:
            events = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("publish", "replay")}
            publishers.append(Publisher(EventsConfig.model_validate(events)))
            stack.callback(publishers[-1].close)
            nature = {"block_size": BLOCK_SIZE, "fingerprint": FINGERPRINT.hex(), "events": events}
            model = json.dumps({"id": "m", "object": "model", "kvtier": nature})
            stack.enter_context(ServerProcess([str(STUB), str(port), model], home / f"{port}", ready=""))
            command += ["--replica", f"http://127.0.0.1:{port}"]
        server = stack.enter_context(ServerProcess(command, home / "router"))
        chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
        chain.extend(tokens)
        records = tuple(chain.records(0, len(chain.hashes)))
        for publisher in publishers:
            publisher.announce(FINGERPRINT, [Stored("l1", records)])

        def is_up() -> bool:
            told = [(each["state"], each["blocks"]) for each in status(ports[0])["replicas"]]
            return told == [("up", {"GPU": len(records)})] * 2

        wait_until(is_up, "replicas that are up, and their events", 60, 0.1)
        yield server, ports


def status(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as page:
        return json.load(page)


def asking(port: int, path: str, body: dict[str, object]) -> Callable[[int], None]:
    """What one client does: so many requests one after another over a connection that is kept."""

    def ask(count: int) -> None:
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            for _ in range(count):
                posted(connection, path, body)

    return ask


def cpu_of(server: ServerProcess, ask: Callable[[int], None], count: int) -> float:
    """The server's CPU seconds while each of some clients asks so often."""
    before = server.cpu_seconds()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(ask, [count] * CONNECTIONS))
    return server.cpu_seconds() - before


def cpu_ms(server: ServerProcess, port: int, body: dict[str, object], num_requests: int) -> float:
    ask, each = asking(port, "/v1/completions", body), num_requests // CONNECTIONS
    cpu_of(server, ask, 5)  # caches are warm
    return cpu_of(server, ask, each) / (each * CONNECTIONS) * 1e3


def piece_us(server: ServerProcess, port: int, num_pieces: int) -> float:
    """The process's CPU time of one piece of a stream, when each comes alone; less what it does with nothing to do."""
    begun = time.monotonic()
    busy = cpu_of(server, asking(port, "/v1/completions", {"model": "m", "prompt": [1], "stream": True}), 1)
    took, before = time.monotonic() - begun, server.cpu_seconds()
    time.sleep(took)
    return (busy - (server.cpu_seconds() - before)) / (num_pieces * CONNECTIONS) * 1e6


def pieces(server: ServerProcess, ports: list[int], num_pieces: int) -> dict[str, float]:
    """CPU microseconds of a piece in the router, and in a relay that does nothing else."""
    for port in ports[1:]:
        asking(port, "/behave", {"events": num_pieces, "pause": PAUSE})(1)
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        port = free_port()
        with ServerProcess([str(RELAY), "relay", str(port), str(ports[1])], Path(home) / "relay") as relay:
            bare = piece_us(relay, port, num_pieces)
    through = piece_us(server, ports[0], num_pieces)
    for port in ports[1:]:
        asking(port, "/behave", {})(1)
    return {"us": through, "bare relay us": bare, "times a bare relay": through / bare}


@program()
def main(given: Given) -> Result:
    quick, full = (25_600, 5, 80, 100), (1_000_000, 200, 4_000, 1_000)
    num_blocks, rounds, num_requests, num_pieces = quick if given.quick else full
    rows: list[Row] = []
    for media in (("GPU",), ("GPU", "CPU")):
        what = f"index of {num_blocks} blocks in {' and '.join(media)}"
        progress(what)
        rows.append({"what": what, "bytes a block": spawned(bytes_a_block, num_blocks, *media)})
    index = filled(num_blocks, "GPU")
    for kind in ("unknown", "everywhere", "mixed"):
        progress(f"scoring {PROMPT} tokens, {kind}")
        parts = score(index, kind, rounds)
        rows.append({"what": f"scoring {PROMPT} tokens, {kind}", **parts, "ms": sum(parts.values())})
    tokens = np.random.default_rng(1).integers(0, 8192, PROMPT).tolist()
    with router(tokens) as (server, ports):
        progress(f"streams of {num_pieces} events {PAUSE * 1e3:g} ms apart")
        rows.append({"what": "piece of a stream that comes alone", **pieces(server, ports, num_pieces)})
        for what, length in (("whole", 1024), ("stream", 1024), ("whole", PROMPT)):
            progress(f"requests of {length} token ids, {what}")
            body = {"model": "m", "prompt": tokens[:length], "stream": what == "stream"}
            took = cpu_ms(server, ports[0], body, num_requests)
            rows.append({"what": f"request of {length} token ids, answered as a {what}", "ms": took})
            decision = status(ports[0])["decisions"][0]
            assert {each["cached"] for each in decision["scores"]} == {length // BLOCK_SIZE}, decision
    return rows
