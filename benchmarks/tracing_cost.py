"""What tracing costs a request: through a router, an engine of 50 M random weights, its daemon, to a slab and back.

Three arms answer the same prompts in turns: without tracing; with every request traced, to a collector that is a
process of its own; and with tracing on, for clients that do not record their trace. A prompt is one of several long
prefixes, and a tail that is new; L1 has room for one of them, so that prefixes come from the daemon. The figures are
medians over rounds of a round's ratio to the arm without tracing: of the median time of a request, and of the CPU time
of all three processes. "spans" is how many the collector got for each traced request.
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

BLOCK_SIZE: Final = 16
PREFIX, TAIL, ANSWER = 512, 32, 8  # tokens
PREFIXES: Final = 6
OFF, ON, UNRECORDED = "off", "on", "on, client's trace not recorded"


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

    def cpu_seconds(self) -> float:
        return sum(process.cpu_seconds() for process in self._processes)


@dataclass
class Arm:
    name: str
    stack: Stack
    traceparent: str | None = None
    seconds: list[float] = field(default_factory=list)  # a request's, the median of each round
    cpu: list[float] = field(default_factory=list)  # a request's, of each round

    def serve(self, prompts: Sequence[list[int]], *, counts: bool = True) -> None:
        times, before = [], self.stack.cpu_seconds()
        headers = {"content-type": "application/json"} | ({"traceparent": self.traceparent} if self.traceparent else {})
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
            self.cpu.append((self.stack.cpu_seconds() - before) / len(prompts))


def collect(tell: int, asked: int) -> None:
    """A collector: it tells its URL, and from then on for each byte that it is sent how many spans it got."""
    from otlp_rig import Collector

    collector = Collector()
    os.write(tell, f"{collector.url}\n".encode())
    while os.read(asked, 1):
        Path(os.environ["SPANS"]).write_text(str(len(collector.spans)))


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds, requests = (1, 4) if args.quick else (15, 20)
    with ExitStack() as stack:
        home = Path(stack.enter_context(scratch("tracing")))
        os.environ["SPANS"] = str(home / "spans")
        url, ask, _ = stack.enter_context(forked(collect))
        subprocess.run([sys.executable, *kvtier("model", str(home / "model"))], check=True)
        progress("starting two of each process")
        plain, traced = (
            Stack(stack, home / name, str(home / "model"), **options)
            for name, options in ((OFF, {}), (ON, {"TRACING__ENDPOINT": url}))
        )
        arms = [Arm(OFF, plain), Arm(ON, traced), Arm(UNRECORDED, traced, f"00-{'a' * 32}-{'b' * 16}-00")]
        draw = np.random.default_rng(0)
        prefixes = [random_tokens(draw, PREFIX) for _ in range(PREFIXES)]
        for arm in arms[:2]:
            arm.serve([prefix + random_tokens(draw, TAIL) for prefix in prefixes], counts=False)
        for number in range(rounds):
            progress(f"round {number + 1}/{rounds}")
            prompts = [prefixes[draw.integers(PREFIXES)] + random_tokens(draw, TAIL) for _ in range(requests)]
            for place in draw.permutation(len(arms)):
                arms[place].serve(prompts)
        os.write(ask, b"?")
        time.sleep(1.0)
        num_spans = int((home / "spans").read_text()) / (rounds * requests + PREFIXES)
    off = arms[0]
    rows: list[Row] = [
        {
            "tracing": arm.name,
            "a request, ms": statistics.median(arm.seconds) * 1e3,
            "of off": of_pairs(arm.seconds, off.seconds),
            "CPU of a request, ms": statistics.median(arm.cpu) * 1e3,
            "CPU of off": of_pairs(arm.cpu, off.cpu),
            "spans": num_spans if arm.name == ON else 0.0,
        }
        for arm in arms
    ]
    targets = [
        Target(f"tracing {row['tracing']}: {what} of a request, of off", 1.01, row[column])
        for row in rows[1:]
        for what, column in (("time", "of off"), ("CPU time", "CPU of off"))
    ]
    return report("tracing_cost", rows, targets, args.json, args.save, {"rounds": rounds, "requests": requests})


if __name__ == "__main__":
    sys.exit(main())
