"""kvtier's router beside sglang-router, smg and vllm-router, in front of the same four replicas.

The replicas compute nothing (`_race_replica.py`): prefill takes 30 us for each token that is not in their cache, one
prompt after the other. The caches are bounded, and evict. Chats arrive at fixed times, the same for every router. All
answers are streams of eight tokens. sglang-router, smg and vllm-router (`cache_aware`) guess from the text; kvtier and
vllm-router (`kv_aware`) read the replicas' KV events. Loads, of chats about documents of 3,000 tokens unless said:

- documents: 24 of them, which all caches together hold twice; small caches: 64, three quarters of which fit.
- two routers: 40 documents, which fit once; each chat goes to one of two routers of a kind, by chance.
- restarts: 24 documents; two of the four replicas are killed during the load, one after the other, and start empty.
- tools: 24 sets of tools of 2,500 tokens, all with one system prompt. Guessers that see only the messages see one text.

Then the replica with most of 40 long streams dies in the middle of them, and 20 more chats arrive in the second after
that. What has begun can only end with an error ("told"), or just ends ("cut"); what has not can be answered by another.
CPU is that of the router's processes. A peer is a program: `--smg PATH`, or one of that name in PATH.
"""

import asyncio
import json
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from _race_replica import BLOCK_SIZE, MODEL, WORDS, save_model
from _report import Given, Result, Row, Target, in_turns, option, program, progress
from _rig import ServerProcess, free_port, kvtier

from kvtier.service.bench import Answer, Server
from kvtier.tiers import KVTierError

REPLICA: Final = Path(__file__).with_name("_race_replica.py")
REPLICAS: Final = 4
TOKEN_US: Final = 30.0
PACE: Final = 0.01  # seconds between two tokens of an answer
RATE: Final = 24.0  # chats a second
SECONDS: Final = 9.0  # of a load
DOCUMENT: Final = 3000  # tokens
ROUNDS: Final = 2
STARTS: Final = 60.0  # seconds for a router to answer
STREAMS: Final = 40  # under way when a replica dies
LATER: Final = 20  # in the second after that
OURS: Final = "kvtier"
PERCENTILES: Final = (50, 90, 99)
# A peer's program is started by way of Python, which sets what `_rig.environment` does not.
_EXEC: Final = "import os, sys; os.environ['VLLM_ROUTER_TOKENIZER'] = sys.argv[1]; os.execv(sys.argv[2], sys.argv[2:])"
PEERS: Final = {  # program: its verb, and the policies it races with
    "sglang-router": (("launch",), ("cache_aware",)),
    "smg": (("launch",), ("cache_aware",)),
    "vllm-router": ((), ("cache_aware", "kv_aware")),
}


class RaceReplica:
    """A process; it keeps its addresses when it is killed and started again."""

    def __init__(self, home: Path, num_blocks: int) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        told = {"events": self.events, "replay": self.replay, "blocks": num_blocks, "token_us": TOKEN_US, "pace": PACE}
        self._command, self._log = [str(REPLICA), str(self.port), json.dumps(told)], home / f"replica-{self.port}"
        self.start()

    def start(self) -> None:
        """Start it. A connection of another process may have its port for a moment: then it is tried again."""
        for left in reversed(range(10)):
            try:
                self._process = ServerProcess(self._command, self._log)
                return
            except KVTierError:
                if not left:
                    raise
                time.sleep(0.5)

    def kill(self) -> None:
        self._process.process.kill()
        self._process.process.wait(10)

    def num_live(self) -> int:
        with urllib.request.urlopen(f"{self.url}/get_load", timeout=10) as page:
            return int(json.load(page)["load"])


Command = Callable[[Sequence[RaceReplica], Path, int], list[str]]


def _of_ours(replicas: Sequence[RaceReplica], model: Path, port: int) -> list[str]:
    specs = [f"{r.url},events={r.events},replay={r.replay},block_size={BLOCK_SIZE}" for r in replicas]
    listed = [part for spec in specs for part in ("--replica", spec)]
    return kvtier("route", "--http", f"127.0.0.1:{port}", "--model", str(model), *listed)


def _of_peer(program: str, policy: str, *verb: str) -> Command:
    def command(replicas: Sequence[RaceReplica], model: Path, port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        given = [*where, "--policy", policy, "--log-level", "warning" if "vllm" in program else "warn"]
        if policy == "kv_aware":
            given += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_SIZE)]
            for each in replicas:
                given += ["--kv-event-source", f"{each.url}={each.events}"]
                given += ["--kv-event-replay-source", f"{each.url}={each.replay}"]
        return ["-c", _EXEC, str(model), program, *verb, *given, "--worker-urls", *(each.url for each in replicas)]

    return command


def arms(given: Mapping[str, str | None]) -> tuple[dict[str, Command], list[Row]]:
    """The routers that are there, ours first, and a row for each that is not."""
    found: dict[str, Command] = {OURS: _of_ours}
    missing: list[Row] = []
    for name, (verb, policies) in PEERS.items():
        wanted = given.get(name) or name
        why = f"no program {wanted}: pip install {name} in a venv, and give --{name} PATH"
        for policy in policies:
            if (program := shutil.which(wanted)) is None:
                missing.append({"router": f"{name}, {policy}", "skipped": why})
            else:
                found[f"{name}, {policy}"] = _of_peer(program, policy, *verb)
    return found, missing


class RaceFleet:
    """Replicas, and routers of one kind in front of them."""

    def __init__(self, arm: Command, home: Path, num_blocks: int, num_routers: int, stack: ExitStack) -> None:
        self.replicas = []
        for _ in range(REPLICAS):
            self.replicas.append(RaceReplica(home, num_blocks))
            stack.callback(self.replicas[-1].kill)
        self.ports = [free_port() for _ in range(num_routers)]
        self._routers = []
        for port in self.ports:
            self._routers.append(ServerProcess(arm(self.replicas, home, port), home / f"router-{port}", ready=""))
            stack.callback(self._routers[-1].process.wait, 10)
            stack.callback(self._routers[-1].process.kill)
        asyncio.run(self._answers())

    async def _answers(self) -> None:
        """Wait until each router answers. KVTierError if one does not."""
        async with self.servers() as servers:
            for router, server in zip(self._routers, servers, strict=True):
                end = time.monotonic() + STARTS
                while error := (await send(server, RaceChat(0.0, "hello", "w1"))).error:
                    if router.process.poll() is not None or time.monotonic() > end:
                        raise KVTierError(f"the router does not answer ({error}): {router.last_words()}")
                    await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)  # subscriptions to events arrive

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[list[Server]]:
        """Clients, one of each router."""
        servers = [asked(f"http://127.0.0.1:{port}") for port in self.ports]
        try:
            yield servers
        finally:
            for each in servers:
                await each.close()

    def cpu_seconds(self) -> float:
        return sum(router.cpu_seconds() for router in self._routers)


@contextmanager
def fleet(arm: Command, num_blocks: int, num_routers: int = 1) -> Iterator[RaceFleet]:
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        save_model(home)
        yield RaceFleet(arm, home, num_blocks, num_routers, stack)


class RaceChat(NamedTuple):
    at: float  # seconds since the load began
    system: str
    question: str
    tools: Sequence[object] = ()
    router: int = 0


def asked(url: str) -> Server:
    return Server(url, api="chat", model=MODEL, token=None, deadline=30.0)


async def send(server: Server, chat: RaceChat, num_answer: int = 8) -> Answer:
    more = {"tools": chat.tools} if chat.tools else {}
    return await server.ask(chat.system, [chat.question], num_answer, **more)


def outcome(answer: Answer) -> str:
    """How it ended: whole, with an error in its stream ("told"), with a status, late, or just so ("cut")."""
    error = answer.error or "whole"
    known = {"error in the stream": "told", "whole": "whole"}
    return known.get(error, "late" if "no end" in error else error if error.startswith("status") else "cut")


async def play(fleet: RaceFleet, load: "Load") -> list[Answer]:
    """All chats at their times, beside what happens to replicas."""
    begun = time.perf_counter()

    async def one(chat: RaceChat) -> Answer:
        await asyncio.sleep(begun + chat.at - time.perf_counter())
        late = time.perf_counter() - begun - chat.at
        answer = await send(servers[chat.router], chat)
        answer.ttft = None if answer.ttft is None else answer.ttft + late
        return answer

    async def restart(at: float, number: int) -> None:
        await asyncio.sleep(at)
        await asyncio.to_thread(fleet.replicas[number].kill)
        await asyncio.to_thread(fleet.replicas[number].start)

    async with fleet.servers() as servers, asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(one(each)) for each in load.chats]
        for at, number in load.restarts:
            tasks.create_task(restart(at, number))
    return [each.result() for each in answering]


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    chats: Sequence[RaceChat]
    num_blocks: int  # of each replica's cache
    num_routers: int = 1
    restarts: Sequence[tuple[float, int]] = ()  # when, and which replica


def words(draw: np.random.Generator, number: int) -> str:
    return " ".join(f"w{each}" for each in draw.integers(0, WORDS, number))


def tool_set(draw: np.random.Generator) -> list[dict[str, object]]:
    """Tools of some 2,500 tokens."""
    nothing = {"type": "object", "properties": {}}
    names = [f"w{each}" for each in draw.integers(0, WORDS, 10)]
    told = [{"name": name, "description": words(draw, 220), "parameters": nothing} for name in names]
    return [{"type": "function", "function": each} for each in told]


def loads(seconds: float) -> list[Load]:
    made = []
    for name, number, num_blocks, num_routers in (
        ("documents", 24, 2400, 1),
        ("small caches", 64, 2400, 1),
        ("two routers", 40, 2400, 2),
        ("restarts", 24, 2400, 1),
        ("tools", 24, 1200, 1),
    ):
        draw = np.random.default_rng(len(name))
        weights = 1 / np.arange(1, number + 1) ** 0.8
        documents = [words(draw, DOCUMENT) for _ in range(number if name != "tools" else 1)]
        sets = [tool_set(draw) for _ in range(number)] if name == "tools" else []
        chats = []
        for at in np.cumsum(draw.exponential(1 / RATE, int(seconds * RATE))).tolist():
            which, question = int(draw.choice(number, p=weights / weights.sum())), words(draw, 30)
            router = int(draw.integers(num_routers))
            system, tools = ("w1 w2 w3", sets[which]) if sets else (documents[which], ())
            chats.append(RaceChat(at, system, question, tools, router))
        restarts = [(seconds / 3, 0), (seconds * 2 / 3, 1)] if name == "restarts" else []
        made.append(Load(name, chats, num_blocks, num_routers, restarts))
    return made


class Raced(NamedTuple):
    answers: list[Answer]
    cpu_ms: float  # of a chat


def race(name: str, arm: Command, load: Load) -> Raced:
    progress(f"{load.name}: {name}")
    with fleet(arm, load.num_blocks, load.num_routers) as running:
        before = running.cpu_seconds()
        answers = asyncio.run(play(running, load))
        return Raced(answers, (running.cpu_seconds() - before) / len(answers) * 1e3)


def row_of(load: Load, name: str, rounds: Sequence[Raced]) -> Row:
    answers = [answer for each in rounds for answer in each.answers]
    prompt = sum(answer.num_prompt or 0 for answer in answers)
    firsts = [answer.ttft * 1e3 for answer in answers if answer.ttft is not None]
    row: Row = {"load": load.name, "router": name, "chats": len(answers)}
    row["not whole"] = sum(answer.error is not None for answer in answers)
    row["cached %"] = 100 * sum(answer.num_cached or 0 for answer in answers) / prompt if prompt else 0.0
    row |= {f"TTFT p{q} ms": float(np.percentile(firsts, q)) if firsts else float("inf") for q in PERCENTILES}
    return row | {"CPU ms": median(each.cpu_ms for each in rounds)}


def compared(load: Load, rows: Sequence[Row]) -> list[Target]:
    """Ours over the best other, in each figure; nothing if we are alone."""
    ours, others = rows[0], rows[1:]
    if not others:
        return []
    best = max(row["cached %"] for row in others)
    found = [Target(f"{load.name}: cached share over the best other's", 1, ours["cached %"] / best, False)]
    for column in (*(f"TTFT p{q} ms" for q in PERCENTILES), "CPU ms"):
        best = min(row[column] for row in others)
        found.append(Target(f"{load.name}: {column[:-3]} over the best other's", 1, ours[column] / best))
    return found


async def die(fleet: RaceFleet) -> tuple[int, Counter[str], Counter[str]]:
    """How many streams the replica had; the outcomes of all that were under way, and of chats that came after it."""
    draw, loop = np.random.default_rng(0), asyncio.get_running_loop()
    chats = [RaceChat(0.0, words(draw, 20), words(draw, 20)) for _ in range(STREAMS + LATER)]
    async with fleet.servers() as (server,):
        answering = [asyncio.create_task(send(server, chat, 300)) for chat in chats[:STREAMS]]
        await asyncio.sleep(1.5)
        begun, num_live = loop.time(), [await asyncio.to_thread(each.num_live) for each in fleet.replicas]
        await asyncio.to_thread(fleet.replicas[int(np.argmax(num_live))].kill)
        for number, chat in enumerate(chats[STREAMS:]):
            await asyncio.sleep(begun + number / LATER - loop.time())
            answering.append(asyncio.create_task(send(server, chat)))
        outcomes = [outcome(await each) for each in answering]
    return max(num_live), Counter(outcomes[:STREAMS]), Counter(outcomes[STREAMS:])


def died(name: str, arm: Command) -> Row:
    progress(f"a replica dies: {name}")
    with fleet(arm, 2400) as running:
        num_there, begun, later = asyncio.run(die(running))
    both = begun + later
    row: Row = {"when a replica dies": name, "streams": STREAMS, "there": num_there, "whole": begun["whole"]}
    row |= {"told": begun["told"], "cut": both["cut"] + both["late"], "later": LATER, "answered": later["whole"]}
    return row | {"refused": sum(count for outcome, count in both.items() if outcome.startswith("status"))}


@program(*(option(f"--{name}", metavar="PATH", help=f"the program {name} (PATH)") for name in PEERS))
def main(given: Given) -> Result:
    peers = {name: getattr(given, name.replace("-", "_")) for name in PEERS}
    for name, path in peers.items():
        if path is not None and shutil.which(path) is None:
            raise KVTierError(f"--{name} {path!r}: no program; give the path of one")
    running, missing = arms(peers)
    seconds, rounds = (2.0, 1) if given.quick else (SECONDS, ROUNDS)
    rows, targets = list[Row](), list[Target]()
    for load in loads(seconds):
        raced = in_turns({name: partial(race, name, arm, load) for name, arm in running.items()}, rounds)
        made = [row_of(load, name, each) for name, each in raced.items()]
        rows += made
        targets += compared(load, made)
    deaths = [died(name, arm) for name, arm in running.items()]
    ours = deaths[0]
    targets += [
        Target("a replica dies: answers that just end", 0, ours["cut"]),
        Target("a replica dies: later chats that get no answer", 0, ours["later"] - ours["answered"]),
    ]
    setup: dict[str, Any] = {"replicas": REPLICAS, "chats a second": RATE, "seconds": seconds, "rounds": rounds}
    setup |= {"prefill us a token": TOKEN_US, "blocks": BLOCK_SIZE}
    return [*rows, *deaths, *missing], targets, setup
