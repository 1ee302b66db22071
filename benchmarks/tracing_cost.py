"""What tracing costs a request: through a router, an engine of 50 M random weights, its daemon, to a slab and back.

All processes trace, to a collector that is a process of its own. Clients ask in turns with a trace that they record and
with one that they do not: of that no spans are made, as without tracing. A prompt is one of several long prefixes, and
a tail that is new; L1 has room for one of them, so that prefixes come from the daemon. The figures are medians over
rounds of a round's ratio: of the median time of a request, and of the CPU time of all three processes. "Spans alone"
are as many as a request has, made and exported in one process that does nothing else: their CPU time by a request's.
"""

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from _loads import random_tokens, scratch
from _process import ServerProcess, forked, free_port, kvtier
from _races import of_pairs
from _report import Row, Target, parser, progress, report

from kvtier.tiers import tracing

BLOCK_SIZE: Final = 16
PREFIX, TAIL, ANSWER = 512, 32, 8  # tokens
PREFIXES: Final = 6
RECORDED, OTHERS = "recorded", "not recorded"


class Stack:
    """Router, engine and daemon."""

    def __init__(self, stack: ExitStack, home: Path, model: str, **options: str) -> None:
        self.port, at, socket = free_port(), f"127.0.0.1:{free_port()}", str(home / "s")
        home.mkdir()
        slab = {"FILE__PATH": str(home / "slab"), "FILE__SIZE": "1GiB", "HOST__SIZE": "512MiB"}
        room = {"L1__NUM_BLOCKS": str((PREFIX + TAIL + ANSWER) // BLOCK_SIZE + 4), "SERVICE__SOCKET": socket}
        weighs = {"CACHE__LOAD_OR_RECOMPUTE": "load", "CACHE__BLOCK_SIZE": str(BLOCK_SIZE)}
        commands = {
            "serve": (["--socket", socket, "--http", "127.0.0.1:0"], slab),
            "engine": (["--model", model, "--name", "m", "--http", at], room | weighs),
            "route": (["--replica", f"http://{at}", "--http", f"127.0.0.1:{self.port}"], {}),
        }
        self._processes = []
        for verb, (arguments, own) in commands.items():
            process = ServerProcess(kvtier(verb, *arguments), home / verb, options=own | options)
            stack.callback(process.stop)
            self._processes.append(process)

    def cpu_seconds(self) -> tuple[float, float]:
        """Of all three, and of the router."""
        each = [process.cpu_seconds() for process in self._processes]
        return sum(each), each[-1]


@dataclass
class Arm:
    stack: Stack
    traceparent: str
    seconds: list[float] = field(default_factory=list)  # a request's, the median of each round
    cpu: list[float] = field(default_factory=list)  # a request's, of each round
    router: list[float] = field(default_factory=list)  # the router's part of that

    def serve(self, prompts: Sequence[list[int]], *, counts: bool = True) -> None:
        times, before = [], self.stack.cpu_seconds()
        headers = {"content-type": "application/json", "traceparent": self.traceparent}
        with closing(http.client.HTTPConnection("127.0.0.1", self.stack.port, timeout=120)) as connection:
            for prompt in prompts:
                body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0})
                began = time.perf_counter()
                connection.request("POST", "/v1/completions", body, headers)
                answer = connection.getresponse()
                told = answer.read()
                times.append(time.perf_counter() - began)
                assert answer.status == 200, told
        time.sleep(1.5)  # what is exported, and written, is this round's
        if counts:
            self.seconds.append(statistics.median(times))
            spent = [(now - then) / len(prompts) for now, then in zip(self.stack.cpu_seconds(), before, strict=True)]
            self.cpu.append(spent[0])
            self.router.append(spent[1])


def collect(tell: int, asked: int) -> None:
    """A collector: it tells its URL, and from then on for each byte that it is sent how many spans it got."""
    from otlp_rig import Collector

    collector = Collector()
    os.write(tell, f"{collector.url}\n".encode())
    while os.read(asked, 1):
        Path(os.environ["SPANS"]).write_text(str(len(collector.spans)))


def spans_alone(url: str, count: int, requests: int) -> float:
    """CPU seconds of a request's spans."""
    tracing.start("alone", tracing.OtlpTarget(f"{url}/v1/traces"))
    began = time.process_time()
    for _ in range(requests):
        with_it = tracing.begin("POST /v1/completions", f"00-{'c' * 32}-{'d' * 16}-01", "server", {"request_id": "x"})
        assert with_it is not None
        for _ in range(count - 1):
            with_it.record("read file", time.monotonic(), {"blocks": 16, "bytes": 1 << 20})
        with_it.end({"http.response.status_code": 200, "hit_tokens.l2": 512, "missed.never_seen": 2})
        time.sleep(0.001)
    tracing.stop()
    return (time.process_time() - began) / requests


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds, requests = (1, 4) if args.quick else (20, 20)
    with ExitStack() as stack:
        home = Path(stack.enter_context(scratch("tracing")))
        os.environ["SPANS"] = str(home / "spans")
        url, ask, _ = stack.enter_context(forked(collect))
        subprocess.run([sys.executable, *kvtier("model", str(home / "model"))], check=True)
        progress("starting router, engine and daemon")
        traced = Stack(stack, home / "traced", str(home / "model"), TRACING__ENDPOINT=url)
        arms = {name: Arm(traced, f"00-{'a' * 32}-{'b' * 16}-0{flag}") for name, flag in ((RECORDED, 1), (OTHERS, 0))}
        draw = np.random.default_rng(0)
        prefixes = [random_tokens(draw, PREFIX) for _ in range(PREFIXES)]
        arms[OTHERS].serve([prefix + random_tokens(draw, TAIL) for prefix in prefixes], counts=False)
        for number in range(rounds):
            progress(f"round {number + 1}/{rounds}")
            prompts = [prefixes[draw.integers(PREFIXES)] + random_tokens(draw, TAIL) for _ in range(requests)]
            for name in draw.permutation([*arms]):
                arms[name].serve(prompts)
        os.write(ask, b"?")
        time.sleep(1.0)
        num_spans = round(int((home / "spans").read_text()) / (rounds * requests))
        alone = spans_alone(url, num_spans, 100 * requests)
    without = arms[OTHERS]
    cpu = statistics.median(without.cpu)
    rows: list[Row] = [
        {
            "trace": name,
            "spans": num_spans if name == RECORDED else 0,
            "a request, ms": statistics.median(arm.seconds) * 1e3,
            "time ratio": of_pairs(arm.seconds, without.seconds),
            "CPU of a request, ms": statistics.median(arm.cpu) * 1e3,
            "CPU ratio": of_pairs(arm.cpu, without.cpu),
            "router's CPU, ms": statistics.median(arm.router) * 1e3,
        }
        for name, arm in arms.items()
    ]
    rows.append({"trace": "spans alone", "spans": num_spans, "CPU of a request, ms": alone * 1e3})
    targets = [
        Target("a request with a trace that is recorded: time of one without", 1.01, rows[0]["time ratio"]),
        Target("a request with a trace that is recorded: CPU time of one without", 1.01, rows[0]["CPU ratio"]),
        Target("CPU time of a request's spans alone, of the request's", 0.01, alone / cpu),
    ]
    return report("tracing_cost", rows, targets, args.json, args.save, {"rounds": rounds, "requests": requests})


if __name__ == "__main__":
    sys.exit(main())
