"""Load on `kvtier engine`, as clients see it: requests a second, time to first token, time between tokens.

The model is that of `kvtier model` (50 M random weights), in an engine of one compute thread. A prompt is one of
several long prefixes, drawn at random, and a tail that is new. L1 has room for the running requests and no more, as if
many users shared it. With "cache off" everything is computed. Else what L1 lost comes from host memory (L2), or through
a small L2 from the slab (L3). "cluster" is two such engines, each with its own daemon, behind a router that hears their
events. That is twice the compute of the other arms: its ratios say what the whole is worth, not what routing adds.

Each arm is started once and is idle while another is asked. In each round all arms answer the same prompts, in a random
order. The clients ask again as soon as they are answered. "of a round" are medians of ratios to "cache off" of the same
round. The answer's usage says where a prompt's KV came from.
"""

import http.client
import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from _loads import Row, picture, random_tokens, scratch
from _process import ServerProcess, free_port, kvtier
from _report import RESULTS, Target, parser, progress, report

from kvtier.tiers import KVTierError

OFF: Final = "cache off"
ARMS: Final = ("L2", "L3", "cluster")
TIERS: Final = {"L1": "in L1", "L2": "in L2", "file": "in file"}
BLOCK_SIZE: Final = 16
BLOCK_BYTES: Final = 400 << 10  # of that model
TIMEOUT: Final = 120.0


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What is asked of every arm."""

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
        """Room for all that run at once."""
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
        waiting: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for prompt in prompts:
            waiting.put(prompt)

        def work(_: int) -> list[TimedAnswer]:
            answers: list[TimedAnswer] = []
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
            try:
                while True:
                    answers.append(_ask(connection, waiting.get_nowait(), load.answer_tokens))
            except queue.Empty:
                return answers
            finally:
                connection.close()

        with ThreadPoolExecutor(load.clients) as pool:
            return [answer for answers in pool.map(work, range(load.clients)) for answer in answers]

    def round(self, prompts: Sequence[list[int]], load: OfferedLoad) -> None:
        begun = time.perf_counter()
        self.answers.append(self.serve(prompts, load))
        self.rates.append(len(prompts) / (time.perf_counter() - begun))

    def firsts(self, of_round: int) -> float:
        return median(answer.first for answer in self.answers[of_round])

    def row(self, off: "ServedArm") -> Row:
        """Its figures over all rounds, ratios within each."""
        answers = [answer for each in self.answers for answer in each]
        p50, p99 = (float(np.percentile([each.first for each in answers], q)) * 1e3 for q in (50, 99))
        row: Row = {"arm": self.name, "requests/s": median(self.rates), "TTFT p50 ms": p50, "TTFT p99 ms": p99}
        row["between tokens p50 ms"] = median(each.between for each in answers) * 1e3
        row |= {name: float(np.mean([each.cached.get(key, 0) for each in answers])) for key, name in TIERS.items()}
        row["requests/s of a round"] = median(ours / theirs for ours, theirs in zip(self.rates, off.rates, strict=True))
        waits = [off.firsts(number) / self.firsts(number) for number in range(len(self.rates))]
        return row | {"off / TTFT of a round": median(waits)}


def _ask(connection: http.client.HTTPConnection, prompt: list[int], num_tokens: int) -> TimedAnswer:
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise KVTierError(f"an engine answered {response.status}: {response.read()[:300].decode(errors='replace')}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    while line := response.readline():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise KVTierError(f"an answer broke off: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                times.append(time.perf_counter())
    if not usage:
        raise KVTierError("an answer ended without its usage")
    num_answered = max(2, usage["completion_tokens"])
    cached = {tier: count / len(prompt) for tier, count in usage["prompt_tokens_details"]["kvtier"].items()}
    return TimedAnswer(times[0] - begun, (times[-1] - times[0]) / (num_answered - 1), cached)


class Rig:
    """The processes of all arms, in one directory, ended together."""

    def __init__(self, stack: ExitStack, home: Path, model: Path, load: OfferedLoad) -> None:
        self._stack, self.home, self._model, self._load = stack, home, model, load

    def engine(self, name: str, **options: str) -> ServedArm:
        """One engine, with `options` such as HOST__SIZE."""
        port = free_port()
        command = ["engine", "--model", str(self._model), "--name", "m", "--http", f"127.0.0.1:{port}"]
        self.start(name, command, L1__NUM_BLOCKS=str(self._load.l1_blocks), **options)
        return ServedArm(name, port)

    def start(self, name: str, command: Sequence[str], **options: str) -> ServerProcess:
        """A process of ours, until the rig ends."""
        progress(f"starting {name}")
        chosen = {"CACHE__LOAD_OR_RECOMPUTE": "load", "CACHE__PREFETCH_DEADLINE": "30s"} | options
        server = ServerProcess(kvtier(*command), self.home / f"{name.replace(' ', '-')}.log", options=chosen)
        self._stack.callback(server.stop)
        return server

    def cluster(self, number: int) -> ServedArm:
        port, route = free_port(), ["route", "--model", str(self._model)]
        for place in range(number):
            socket = str(self.home / f"{place}.sock")
            published = {"EVENTS__PUBLISH": f"tcp://127.0.0.1:{free_port()}"}
            host = {"HOST__SIZE": self._load.mebibytes(2 * self._load.prefixes)}
            serve = ["serve", "--socket", socket, "--http", f"127.0.0.1:{free_port()}"]
            self.start(f"daemon {place}", serve, **host, **published)
            published = {"EVENTS__PUBLISH": f"tcp://127.0.0.1:{free_port()}"}
            arm = self.engine(f"replica {place}", SERVICE__SOCKET=socket, **published)
            route += ["--replica", f"http://127.0.0.1:{arm.port}"]
        self.start("router", [*route, "--http", f"127.0.0.1:{port}"])
        return ServedArm("cluster", port)


def arms(rig: Rig, load: OfferedLoad, chosen: Sequence[str]) -> list[ServedArm]:
    """The arms asked for, started; "cache off" is always one."""
    large, small = load.mebibytes(2 * load.prefixes), load.mebibytes(4)
    found = [rig.engine(OFF, L1__ENABLE_PREFIX_CACHING="false", HOST__SIZE="16MiB")]
    if "L2" in chosen:
        found.append(rig.engine("L2", HOST__SIZE=large))
    if "L3" in chosen:
        slabs = {"FILE__PATH": str(rig.home / "slabs"), "FILE__SIZE": load.mebibytes(6 * load.prefixes)}
        found.append(rig.engine("L3", HOST__SIZE=small, **slabs))
    if "cluster" in chosen:
        found.append(rig.cluster(2))
    return found


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


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--arms", default=",".join(ARMS), help="beside cache off, separated by commas (all)")
    args = options.parse_args()
    chosen = args.arms.split(",")
    if unknown := set(chosen) - {*ARMS}:
        options.error(f"--arms {', '.join(sorted(unknown))}: choose from {', '.join(ARMS)}")
    load = OfferedLoad(2, 8, 128, 16, 4, 8, 1) if args.quick else OfferedLoad(4, 16, 512, 32, 32, 24, 3)
    try:
        with ExitStack() as stack:
            home = Path(stack.enter_context(scratch("serving")))
            model = home / "model"
            subprocess.run([sys.executable, *kvtier("model", str(model))], check=True)
            served = arms(Rig(stack, home, model, load), load, chosen)
            measure(served, load)
        rows = [arm.row(served[0]) for arm in served]
        if any(rows[0][name] for name in TIERS.values()):
            raise KVTierError("the arm without a cache had cached tokens: its figures are no reference")
    except KVTierError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 1
    goals = {"requests/s over cache off": "requests/s of a round", "TTFT of cache off over it": "off / TTFT of a round"}
    targets = [
        Target(f"{row['arm']}: {what}", 1.0, row[column], False) for what, column in goals.items() for row in rows[1:]
    ]
    if args.save:
        with picture(RESULTS / "serving.png", 1, 3, figsize=(9.5, 2.8)) as (_, axes):
            for axis, column in zip(axes, ("requests/s", "TTFT p50 ms", "TTFT p99 ms"), strict=True):
                bars = axis.bar([row["arm"] for row in rows], [row[column] for row in rows], color="tab:blue")
                axis.bar_label(bars, fmt="%.3g", fontsize=8)
                axis.set_title(column, fontsize=10)
    setup = asdict(load) | {"L1 blocks": load.l1_blocks}
    return report("serving", rows, targets, args.json, args.save, setup)


if __name__ == "__main__":
    sys.exit(main())
