"""A block's way through kvtier: calls of kvtier's functions, the files they are in, and moves between files.

One request of one block, three ways: "cold store" (no tier holds it; it is computed, copied to L2, sealed and written
to the file tier), "L2 hit" and "L3 hit" (only the file tier holds it). "engine" is a request of kvtier's own engine
(tiny random model, one token), from `generate` to its answer; "connector" is the same at the connector alone, from
`lookup` to `finished`. Both run in this process and through the daemon (here a thread, whose calls count too).

A call is the start of a function whose file is in kvtier's packages, on any thread; comprehensions belong to their
function. A move is a call whose caller, the innermost kvtier function below it on the thread's stack, is in another
file, or that has none. Waiting for background stores to end is not counted, the stores are. Of all rounds but the first
(caches fill) the one with the fewest calls is reported: a thread that wakes up once more adds some. The counts depend
on Python's version. `--save` also writes the table of docs/architecture.md.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from _report import ROOT as TREE
from _report import Given, Result, Row, Target, option, program
from _rig import AskedRequest, wait_until
from transformers import LlamaConfig

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, EngineConfig, SamplingParams
from kvtier.service.node import Daemon
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.naming import KVShape, TokenChain, root_hash

FINGERPRINT: Final = b"block_way".ljust(32, b".")
BLOCK_SIZE: Final = 16
SHAPE: Final = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")
ROOT: Final = root_hash(FINGERPRINT)
PATIENCE: Final = 10.0  # seconds
PAGE: Final = TREE / "docs" / "architecture.md"
START: Final = "<!-- block_way: written by benchmarks/block_way.py --save -->"
END: Final = "<!-- block_way: end -->"
FOLDERS: Final = ("tiers", "connector", "engine", "service", "kvtier")
WAYS: Final = ("cold store", "L2 hit", "L3 hit")
# What the first form of this program counted before requests became fewer objects. The goal was half of it.
BEFORE: Final = {
    "engine, in process: cold store": {"calls": 669, "files": 42, "moves": 285},
    "engine, in process: L2 hit": {"calls": 425, "files": 34, "moves": 193},
    "engine, in process: L3 hit": {"calls": 717, "files": 40, "moves": 328},
}
MODEL: Final = LlamaConfig(
    vocab_size=211, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


@dataclass
class Way:
    num_moves: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)  # (file, function)

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    @property
    def counts(self) -> dict[str, int]:
        return {"calls": self.num_calls, "files": len(self.files), "moves": self.num_moves}


class Counter:
    """Follows every thread that starts after it, and counts while it is `counting`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._way: Way | None = None
        self._waiting = 0  # the thread that only waits for others: what it calls for that is not the request's
        self._files: dict[CodeType, str | None] = {}
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def close(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[Way]:
        with self._lock:
            self._way = way = Way()
        try:
            yield way
        finally:
            with self._lock:
                self._way = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting = threading.get_ident()
        try:
            yield
        finally:
            self._waiting = 0

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self._way is None or self._waiting == threading.get_ident():
            return
        file = self._file(frame.f_code)
        if file is None or frame.f_code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
            return
        caller, origin = frame.f_back, None
        while caller is not None and (origin := self._file(caller.f_code)) is None:
            caller = caller.f_back
        with self._lock:
            if (way := self._way) is not None:
                way.num_moves += file != origin
                way.calls.append((file, frame.f_code.co_qualname))

    def _file(self, code: CodeType) -> str | None:
        if code not in self._files:
            path = Path(code.co_filename)
            is_ours = path.is_absolute() and path.resolve().is_relative_to(TREE)
            file = path.resolve().relative_to(TREE).as_posix() if is_ours else ""
            self._files[code] = file if file.partition("/")[0] in FOLDERS else None
        return self._files[code]


class EngineClient:
    """kvtier's engine with a tiny random model, and a prompt of a block and a token for each number."""

    def __init__(self, config: Config) -> None:
        settings = EngineConfig(block_size=BLOCK_SIZE, num_blocks=16)
        self.engine = Engine.from_config(MODEL, settings, LocalConnector.connect(config), dtype="float32")
        self.connector: Any = self.engine.connector
        self.close = self.engine.close

    def request(self, number: int, *, held: bool) -> None:
        """A request whose block is held below L1, or by no tier; then its copies have been started and have ended."""
        self.engine.generate([prompt(number)], SamplingParams(max_tokens=1))
        assert held or self.engine.drain(PATIENCE)

    def forget_l1(self) -> None:
        assert self.engine.drain(PATIENCE)
        self.engine.pool.reset()


class ConnectorClient:
    """What an engine does around its compute: it asks, allocates, copies and reports. L1 is one tensor."""

    def __init__(self, config: Config) -> None:
        self.connector: Any = LocalConnector(config, FINGERPRINT, SHAPE, torch.zeros(8, *SHAPE.block_shape))
        self.close = self.connector.close
        self._ids = count()

    def request(self, number: int, *, held: bool) -> None:
        """Ask, then load, or compute (nothing) and store."""
        chain = TokenChain(ROOT, BLOCK_SIZE)
        chain.extend(prompt(number))
        request = AskedRequest(str(next(self._ids)), chain, BLOCK_SIZE + 1)
        scheduler, worker = self.connector.scheduler, self.connector.worker
        while not isinstance(found := scheduler.lookup(request, 0), int):
            scheduler.wait(PATIENCE)
        assert found == held * BLOCK_SIZE
        scheduler.allocated(request.request_id, [0, 1], found)
        if not held:
            scheduler.store(request.request_id, 0, [0])
        plan = scheduler.build_plan()
        worker.start_load(plan)
        worker.start_store(plan)
        worker.wait(PATIENCE)
        update = scheduler.update(worker.poll())
        assert update.loaded == (request.request_id,) if held else update.released == (0,)
        scheduler.finished(request.request_id)

    def forget_l1(self) -> None:
        """L1 has no index here."""


Client = EngineClient | ConnectorClient
CLIENTS: Final[Mapping[str, Callable[[Config], Client]]] = {"engine": EngineClient, "connector": ConnectorClient}


def prompt(number: int) -> list[int]:
    return [number % 200 + 1] * BLOCK_SIZE + [number // 200]


def settle(hierarchy: Hierarchy, num_blocks: int) -> None:
    """Wait until so many blocks are sealed in L2 and written below it."""

    def is_stored() -> bool:
        tier = hierarchy.ports[0].tier
        return tier is not None and tier.stats()["slots_ready"] >= num_blocks

    wait_until(is_stored, "not stored", PATIENCE, 0.001)
    assert hierarchy.drain(PATIENCE)
    time.sleep(0.01)


def measure(counter: Counter, client: Client, hierarchy: Callable[[], Hierarchy], rounds: int) -> dict[str, Way]:
    """Each way, by the request of the fewest calls."""
    best: dict[str, Way] = {}
    for number in range((rounds + 1) * len(WAYS)):
        name = WAYS[number % len(WAYS)]
        held = name != "cold store"
        if held:
            client.request(number, held=False)
            settle(hierarchy(), number + 1)
            client.forget_l1()
        if name == "L3 hit":
            hierarchy().host.pool.reset()
        with counter.counting() as way:
            client.request(number, held=held)
            if not held:
                with counter.waiting():
                    settle(hierarchy(), number + 1)
        if number >= len(WAYS) and (name not in best or way.num_calls < best[name].num_calls):
            best[name] = way
    return best


def in_process(make: Callable[[Config], Client], counter: Counter, directory: Path, rounds: int) -> dict[str, Way]:
    with closing(make(configuration(directory))) as client:
        return measure(counter, client, lambda: client.connector.hierarchy, rounds)


def daemon(make: Callable[[Config], Client], counter: Counter, directory: Path, rounds: int) -> dict[str, Way]:
    """The daemon's tiers, the daemon on a thread of this process."""
    socket = directory / "socket"
    server = Daemon(configuration(directory), socket)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with closing(make(configuration(directory, socket))) as client:
            return measure(counter, client, lambda: server.call(server.namespaces)[0].hierarchy, rounds)
    finally:
        server.stop()
        thread.join(PATIENCE)
        server.close()


def configuration(directory: Path, socket: Path | None = None) -> Config:
    """Small tiers that are always worth loading from, with patience. What `auto` measures would choose either mode."""
    return Config.load(
        cache={"block_size": BLOCK_SIZE, "load_or_recompute": "load", "prefetch_deadline": "10s"},
        host={"size": "1MiB", "huge_pages": False},
        file={"path": str(directory), "size": "16MiB", "mode": "direct", "deadline": "10s"},
        service={} if socket is None else {"socket": str(socket), "deadline": "10s"},
    )


def ways(rounds: int, clients: Sequence[str] = tuple(CLIENTS)) -> dict[str, Way]:
    found = {}
    with closing(Counter()) as counter:
        for who in clients:
            for where, run in (("in process", in_process), ("daemon", daemon)):
                with tempfile.TemporaryDirectory() as directory:
                    for name, way in run(CLIENTS[who], counter, Path(directory), rounds).items():
                        found[f"{who}, {where}: {name}"] = way
    return found


def with_table(page: str, rows: Sequence[Mapping[str, object]]) -> str:
    """The page with these figures between its markers."""
    lines = ["| way | calls | files | moves |", "|---|--:|--:|--:|"]
    lines += [f"| {row['way']} | {row['calls']} | {row['files']} | {row['moves']} |" for row in rows]
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name}: no place for the table; put {START!r} and {END!r} there")
    return "".join((before, start, "\n", *(f"{line}\n" for line in lines), end, after))


@program(option("--trace", metavar="WAY", help='print every call of one way instead: "connector, daemon: L2 hit", say'))
def main(given: Given) -> Result:
    found = ways(2 if given.quick else 8)
    if given.trace:
        print("\n".join(f"{file}: {function}" for file, function in found[given.trace].calls))
        return 0
    rows: list[Row] = [{"way": name, **way.counts} for name, way in found.items()]
    if given.save:
        PAGE.write_text(with_table(PAGE.read_text(), rows))
    targets = [
        Target(f"{name}, {what}: of before", 0.5, found[name].counts[what] / number)
        for name, before in BEFORE.items()
        for what, number in before.items()
    ]
    return rows, targets
