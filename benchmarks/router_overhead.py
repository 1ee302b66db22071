"""What the router costs: CPU time of a request, of scoring a long prompt, and memory of its index.

Requests: a real `kvtier route` before two replicas that answer at once and compute nothing. By real events they have
told it that they hold the prompt. It is asked over 8 connections that stay open. The figure is its process's CPU time,
all threads, over the number of requests. Prompts are token ids: nothing is tokenised.

Pieces: the same with streams whose events come one by one, 20 ms apart. A relay in asyncio that only reads and writes
them (`_bare_relay.py`) runs beside it, so what is left is the router's own.

Scoring: a prompt of 32,768 tokens in blocks of 16, against an index of 1,000,000 blocks (`--quick`: fewer). It takes in
the names from the tokens, who holds how much, and the choice among four replicas. The figure is the median CPU time of
one thread. "mixed" is a prompt whose every block another replica has in its L1.

Memory: how much more (RSS) a process has with 1,000,000 blocks in its index than before.
"""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from _process import ROOT, ServerProcess, free_port, kvtier
from _report import Target, parser, progress, report

from kvtier.engine.demo import train_tokenizer
from kvtier.service.events import BlockStored, PrefixIndex, Publisher, prompt_hashes
from kvtier.service.router import Candidate, choose
from kvtier.tiers import BlockRecord
from kvtier.tiers.config import EventsConfig
from kvtier.tiers.hierarchy import Stored
from kvtier.tiers.naming import TokenChain, root_hash

BLOCK_SIZE: Final = 16
PROMPT: Final = 32_768  # tokens
CHAIN: Final = 128  # blocks of a prompt that fills the index
NAMES: Final = ("replica-0", "replica-1", "replica-2", "replica-3")
CONNECTIONS: Final = 8
PAUSE: Final = 0.02  # seconds between two events of a stream
STUB: Final = ROOT / "tests" / "service" / "_replica_child.py"
RELAY: Final = Path(__file__).with_name("_bare_relay.py")
FINGERPRINT: Final = bytes(32)


def filled(num_blocks: int, media: tuple[str, ...]) -> PrefixIndex:
    """An index of so many different blocks, each in these tiers of one replica."""
    index, draw = PrefixIndex(BLOCK_SIZE), np.random.default_rng(0)
    for number in range(num_blocks // CHAIN):
        tokens = draw.integers(0, 100_000, CHAIN * BLOCK_SIZE).tolist()
        names = draw.integers(0, 1 << 63, CHAIN).tolist()
        for medium in media:
            stored = BlockStored(names, None, tokens, BLOCK_SIZE, None, medium, None)
            index.apply(NAMES[number % len(NAMES)], stored)
    return index


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def print_memory(num_blocks: int, *media: str) -> None:
    """Run in a process of its own: bytes more with the index than before."""
    filled(CHAIN, media)
    before = resident()
    index = filled(num_blocks, media)
    print((resident() - before) / index.num_blocks)


def bytes_a_block(num_blocks: int, *media: str) -> float:
    code = f"import router_overhead; router_overhead.print_memory({num_blocks}, *{media!r})"
    folders = f"{ROOT}:{ROOT / 'benchmarks'}"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": folders}, capture_output=True, text=True, check=True
    )
    return float(ran.stdout)


def held(index: PrefixIndex, tokens: list[int], kind: str) -> None:
    """Have the replicas hold a prompt: none, all of it, or each block by another set of them than the one before."""
    num_blocks = len(tokens) // BLOCK_SIZE
    first = (1 << 63) + len(kind) * num_blocks
    names = list(range(first, first + num_blocks))
    for place, worker in enumerate(NAMES if kind != "unknown" else ()):
        index.apply(worker, BlockStored(names, None, tokens, BLOCK_SIZE, None, "STORAGE", None))
        if kind == "mixed":
            for block in range(place, num_blocks, len(NAMES)):
                piece = tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]
                parent = names[block - 1] if block else None
                stored = BlockStored([names[block]], parent, piece, BLOCK_SIZE, None, "GPU", None)
                index.apply(worker, stored)


def score(index: PrefixIndex, kind: str, rounds: int) -> dict[str, float]:
    """CPU milliseconds of each part: medians."""
    tokens = np.random.default_rng(len(kind)).integers(0, 100_000, PROMPT).tolist()
    held(index, tokens, kind)
    sequence = prompt_hashes(tokens, BLOCK_SIZE)
    promised = sum(index.matches(sequence).get(NAMES[0], {}).values())
    assert promised == (0 if kind == "unknown" else len(sequence)), promised
    parts: dict[str, list[float]] = {"names ms": [], "index ms": [], "choice ms": []}
    for turn in range(rounds):
        times = [time.thread_time()]
        sequence = prompt_hashes(tokens, BLOCK_SIZE)
        times.append(time.thread_time())
        prefixes = index.matches(sequence)
        times.append(time.thread_time())
        choose([Candidate(name, prefixes.get(name, {}), 100.0) for name in NAMES], len(sequence), turn=turn)
        times.append(time.thread_time())
        for part, begun, ended in zip(parts, times, times[1:], strict=False):
            parts[part].append((ended - begun) * 1e3)
    return {part: statistics.median(each) for part, each in parts.items()}


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
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            publishers.append(Publisher(EventsConfig(publish=addresses[0], replay=addresses[1])))
            stack.callback(publishers[-1].close)
            events = {"publish": addresses[0], "replay": addresses[1]}
            nature = {"block_size": BLOCK_SIZE, "fingerprint": FINGERPRINT.hex(), "events": events}
            model = json.dumps({"id": "m", "object": "model", "kvtier": nature})
            stub = ServerProcess([str(STUB), str(port), model], home / f"{port}", ready="")
            stack.callback(stub.stop)
            command += ["--replica", f"http://127.0.0.1:{port}"]
        server = ServerProcess(command, home / "router")
        stack.callback(server.stop)
        chain = TokenChain(root_hash(FINGERPRINT), BLOCK_SIZE)
        chain.extend(tokens)
        names = enumerate(chain.hashes)
        records = tuple(BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0) for i, name in names)
        for publisher in publishers:
            publisher.announce(FINGERPRINT, [Stored("l1", records)])
        _until_told(ports[0], len(records))
        yield server, ports


def _until_told(port: int, num_blocks: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        replicas = json.loads(_get(port, "/status"))["replicas"]
        if all(replica["state"] == "up" and replica["blocks"] == {"GPU": num_blocks} for replica in replicas):
            return
        time.sleep(0.1)
    raise SystemExit("router_overhead: the replicas did not come up, or their events did not arrive")


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def asking(port: int, path: str, body: dict[str, object]) -> Callable[[int], None]:
    """What one client does: so many requests one after another over a connection that is kept."""

    def ask(count: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(count):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status == 200, told
        connection.close()

    return ask


def cpu_ms(server: ServerProcess, port: int, body: dict[str, object], num_requests: int) -> float:
    """The router's CPU time of one request."""
    ask = asking(port, "/v1/completions", body)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(ask, [5] * CONNECTIONS))  # connections and caches are warm
        before = server.cpu_seconds()
        list(pool.map(ask, [num_requests // CONNECTIONS] * CONNECTIONS))
    return (server.cpu_seconds() - before) / (num_requests // CONNECTIONS * CONNECTIONS) * 1e3


def piece_us(server: ServerProcess, port: int, num_pieces: int) -> float:
    """The process's CPU time of one piece of a stream, when each comes alone; less what it does with nothing to do."""
    ask = asking(port, "/v1/completions", {"model": "m", "prompt": [1], "stream": True})
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        begun, before = time.monotonic(), server.cpu_seconds()
        list(pool.map(ask, [1] * CONNECTIONS))
        took, busy = time.monotonic() - begun, server.cpu_seconds() - before
    before = server.cpu_seconds()
    time.sleep(took)
    return (busy - (server.cpu_seconds() - before)) / (num_pieces * CONNECTIONS) * 1e6


def pieces(server: ServerProcess, ports: list[int], num_pieces: int) -> dict[str, float]:
    """CPU microseconds of a piece in the router, and in a relay that does nothing else."""
    for port in ports[1:]:
        asking(port, "/behave", {"events": num_pieces, "pause": PAUSE})(1)
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        port = free_port()
        relay = ServerProcess([str(RELAY), str(port), str(ports[1])], Path(home) / "relay")
        try:
            bare = piece_us(relay, port, num_pieces)
        finally:
            relay.stop()
    through = piece_us(server, ports[0], num_pieces)
    for port in ports[1:]:
        asking(port, "/behave", {})(1)
    return {"us": through, "bare relay us": bare, "times a bare relay": through / bare}


def main() -> int:
    options = parser(__doc__).parse_args()
    quick, full = (25_600, 5, 80, 100), (1_000_000, 200, 4_000, 1_000)
    num_blocks, rounds, num_requests, num_pieces = quick if options.quick else full
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    for media in (("GPU",), ("GPU", "CPU")):
        progress(f"memory of {num_blocks} blocks in {' and '.join(media)}")
        each = bytes_a_block(num_blocks, *media)
        rows.append({"what": f"index of {num_blocks} blocks in {' and '.join(media)}", "bytes a block": each})
        if len(media) == 1:
            targets.append(Target("1,000,000 indexed blocks, MB", 300, each))
    index = filled(num_blocks, ("GPU",))
    for kind in ("unknown", "everywhere", "mixed"):
        progress(f"scoring {PROMPT} tokens, {kind}")
        parts = score(index, kind, rounds)
        rows.append({"what": f"scoring {PROMPT} tokens, {kind}", **parts, "ms": sum(parts.values())})
        targets.append(Target(f"prefix scoring of {PROMPT} tokens, {kind}, CPU ms", 2, sum(parts.values())))
    tokens = np.random.default_rng(1).integers(0, 8192, PROMPT).tolist()
    with router(tokens) as (server, ports):
        progress(f"streams of {num_pieces} events {PAUSE * 1e3:g} ms apart")
        alone = pieces(server, ports, num_pieces)
        rows.append({"what": "piece of a stream that comes alone", **alone})
        targets.append(
            Target("CPU of a piece that comes alone, times a bare relay's", 1.5, alone["times a bare relay"])
        )
        for what, length, stream in (("whole", 1024, False), ("stream", 1024, True), ("whole", PROMPT, False)):
            progress(f"requests of {length} token ids, {what}")
            body = {"model": "m", "prompt": tokens[:length], "stream": stream}
            took = cpu_ms(server, ports[0], body, num_requests)
            rows.append({"what": f"request of {length} token ids, answered as a {what}", "ms": took})
            if length == 1024:
                targets.append(Target(f"router's CPU ms of a request, {what}", 2, took))
            decision = json.loads(_get(ports[0], "/status"))["decisions"][0]
            assert {score["cached"] for score in decision["scores"]} == {length // BLOCK_SIZE}, decision
    return report("router_overhead", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
