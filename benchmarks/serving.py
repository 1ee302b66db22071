"""Load on `kvtier engine`, as clients see it: requests a second, time to first token, time between tokens.

The model is that of `kvtier model` (50 M random weights), in an engine of one compute thread. A prompt is one of
several long prefixes, drawn at random, and a tail that is new. L1 has room for the running requests and no more. With
"cache off" everything is computed. Else what L1 lost comes from host memory (L2), or through a small L2 from the slab
(L3). "cluster" is two such engines, each with its own daemon, behind a router that hears their events: twice the
compute, so its ratios say what the whole is worth. In each round all arms answer the same prompts, in a random order,
each started once and idle while another is asked; clients ask again as soon as they are answered. "of a round" are
medians of ratios to "cache off" of the same round. The answer's usage says where a prompt's KV came from.
"""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from _report import RESULTS, Given, Result, Row, of_pairs, program, progress
from _rig import ServerProcess, free_port, kvtier, posted, random_tokens, scratch

from kvtier.service import Chart, Line, save_png
from kvtier.tiers import KVTierError

OFF: Final = "cache off"
TIERS: Final = {"L1": "in L1", "L2": "in L2", "file": "in file"}
BLOCK_SIZE: Final = 16
BLOCK_BYTES: Final = 400 << 10  # of that model


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    clients: int
    prefixes: int
    prefix_tokens: int
    tail_tokens: int
    answer_tokens: int
    requests: int  # of one arm in one round
    rounds: int

    @property
    def prefix_blocks(self) -> int:
        return self.prefix_tokens // BLOCK_SIZE

    @property
    def l1_blocks(self) -> int:
        return self.clients * ((self.prefix_tokens + self.tail_tokens + self.answer_tokens) // BLOCK_SIZE + 2)

    def mebibytes(self, num_prefixes: float) -> str:
        return f"{max(16, int(num_prefixes * self.prefix_blocks * BLOCK_BYTES) >> 20)}MiB"


class TimedAnswer(NamedTuple):
    first: float  # seconds to the first token
    between: float  # seconds between tokens, the answer's mean
    cached: Mapping[str, float]  # share of its prompt by tier


class ServedArm:
    """One way to serve, and what it took in each round."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.rates: list[float] = []  # requests a second, by round
        self.answers: list[list[TimedAnswer]] = []

    def serve(self, prompts: Sequence[list[int]], load: OfferedLoad) -> list[TimedAnswer]:
        """Ask them all, `clients` at a time."""
        with ThreadPoolExecutor(load.clients) as clients:
            return list(clients.map(lambda prompt: _ask(self.port, prompt, load.answer_tokens), prompts))

    def round(self, prompts: Sequence[list[int]], load: OfferedLoad) -> None:
        begun = time.perf_counter()
        self.answers.append(self.serve(prompts, load))
        self.rates.append(len(prompts) / (time.perf_counter() - begun))

    def firsts(self) -> list[float]:
        return [median(answer.first for answer in each) for each in self.answers]

    def row(self, off: "ServedArm") -> Row:
        answers = [answer for each in self.answers for answer in each]
        p50, p99 = (float(np.percentile([each.first for each in answers], q)) * 1e3 for q in (50, 99))
        row: Row = {"arm": self.name, "requests/s": median(self.rates), "TTFT p50 ms": p50, "TTFT p99 ms": p99}
        row["between tokens p50 ms"] = median(each.between for each in answers) * 1e3
        row |= {name: float(np.mean([each.cached.get(key, 0) for each in answers])) for key, name in TIERS.items()}
        row["requests/s of a round"] = of_pairs(self.rates, off.rates)
        return row | {"off / TTFT of a round": of_pairs(off.firsts(), self.firsts())}


def _ask(port: int, prompt: list[int], num_tokens: int) -> TimedAnswer:
    body: Row = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with closing(HTTPConnection("127.0.0.1", port, timeout=120.0)) as connection:
        connection.connect()
        begun = time.perf_counter()
        came, events = posted(connection, "/v1/completions", body)
    times = [at for at, event in zip(came, events, strict=True) if event.get("choices")]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None:
        raise KVTierError("an answer ended without its usage")
    num_answered = max(2, usage["completion_tokens"])
    cached = {tier: count / len(prompt) for tier, count in usage["prompt_tokens_details"]["kvtier"].items()}
    return TimedAnswer(times[0] - begun, (times[-1] - times[0]) / (num_answered - 1), cached)


class Rig:
    """The processes of all arms, in one directory, ended together."""

    def __init__(self, stack: ExitStack, home: Path, load: OfferedLoad) -> None:
        self._stack, self.home, self._load, self.model = stack, home, load, str(home / "model")
        subprocess.run([sys.executable, *kvtier("model", self.model)], check=True)

    def start(self, name: str, *command: str, **options: str) -> ServedArm:
        """A process of ours that listens, with `options` such as HOST__SIZE, until the rig ends."""
        progress(f"starting {name}")
        chosen = {"CACHE__LOAD_OR_RECOMPUTE": "load", "CACHE__PREFETCH_DEADLINE": "30s"} | options
        port, log = free_port(), self.home / f"{name.replace(' ', '-')}.log"
        self._stack.enter_context(ServerProcess(kvtier(*command, "--http", f"127.0.0.1:{port}"), log, **chosen))
        return ServedArm(name, port)

    def engine(self, name: str, **options: str) -> ServedArm:
        room = {"L1__NUM_BLOCKS": str(self._load.l1_blocks)}
        return self.start(name, "engine", "--model", self.model, "--name", "m", **room, **options)

    def cluster(self, host: str) -> ServedArm:
        """Two engines, each with a daemon, behind a router."""
        replicas: list[str] = []
        for place in range(2):
            socket = str(self.home / f"{place}.sock")
            events, others = ({"EVENTS__PUBLISH": f"tcp://127.0.0.1:{free_port()}"} for _ in range(2))
            self.start(f"daemon {place}", "serve", "--socket", socket, HOST__SIZE=host, **events)
            arm = self.engine(f"replica {place}", SERVICE__SOCKET=socket, **others)
            replicas += ["--replica", f"http://127.0.0.1:{arm.port}"]
        return self.start("cluster", "route", "--model", self.model, *replicas)

    def arms(self) -> list[ServedArm]:
        large, small = self._load.mebibytes(2 * self._load.prefixes), self._load.mebibytes(4)
        slabs = {"FILE__PATH": str(self.home / "slabs"), "FILE__SIZE": self._load.mebibytes(6 * self._load.prefixes)}
        off = self.engine(OFF, L1__ENABLE_PREFIX_CACHING="false", HOST__SIZE="16MiB")
        below = self.engine("L2", HOST__SIZE=large), self.engine("L3", HOST__SIZE=small, **slabs)
        return [off, *below, self.cluster(large)]


def measure(served: Sequence[ServedArm], load: OfferedLoad) -> None:
    """Every prefix once, if it is to be cached; then the rounds."""
    draw = np.random.default_rng(0)
    prefixes = [random_tokens(draw, load.prefix_tokens) for _ in range(load.prefixes)]
    for arm in served:
        progress(f"warming {arm.name}")
        kept = prefixes[: load.clients] if arm.name == OFF else prefixes
        arm.serve([prefix + random_tokens(draw, load.tail_tokens) for prefix in kept], load)
    for number in range(load.rounds):
        picks = draw.integers(0, len(prefixes), load.requests)
        prompts = [prefixes[pick] + random_tokens(draw, load.tail_tokens) for pick in picks]
        for place in draw.permutation(len(served)):
            progress(f"round {number + 1}/{load.rounds}: {served[place].name}")
            served[place].round(prompts, load)


@program()
def main(args: Given) -> Result:
    load = OfferedLoad(2, 8, 128, 16, 4, 8, 1) if args.quick else OfferedLoad(4, 16, 512, 32, 32, 24, 3)
    with ExitStack() as stack:
        served = Rig(stack, Path(stack.enter_context(scratch("serving"))), load).arms()
        measure(served, load)
    rows = [arm.row(served[0]) for arm in served]
    if any(rows[0][name] for name in TIERS.values()):
        raise KVTierError("the arm without a cache had cached tokens: its figures are no reference")
    if args.save:
        shares, lines = np.linspace(0, 100, 101), list[Line]()
        for arm, row in zip(served, rows, strict=True):
            firsts = np.percentile([answer.first * 1e3 for each in arm.answers for answer in each], shares)
            lines.append(Line(f"{arm.name}, {row['requests/s']:.3g} requests/s", firsts.tolist(), shares.tolist()))
        chart = Chart("kvtier engine", "time to first token, ms", "% of requests within", lines, log_x=True)
        save_png(RESULTS / "serving.png", [chart])
    setup = asdict(load) | {"L1 blocks": load.l1_blocks}
    return rows, [], setup
