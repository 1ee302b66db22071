"""What tracing costs a request: through a router, an engine of 50 M random weights, its daemon, to a slab and back.

All processes trace, to a collector that is a process of its own. Pairs of requests, one after another in either order:
one with a trace that its client records, one with a trace that it does not, of which no spans are made. A prompt is one
of several long prefixes, and a tail that is new; L1 has room for one of them, so that prefixes come from the daemon.
"time ratio" is the median over pairs. "Spans alone" are as many as a request has, made and exported in one process that
does nothing else: their CPU time, and what it is of the CPU time that all three processes take for a request.
"""

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
from _report import Given, Result, Row, Target, of_pairs, program, progress, took
from _rig import ServerProcess, child, free_port, kvtier, posted, random_tokens, received, scratch

from kvtier.tiers import tracing

BLOCK_SIZE: Final = 16
PREFIX, TAIL, ANSWER = 512, 32, 8  # tokens
PREFIXES: Final = 6


def started(stack: ExitStack, home: Path, model: str, **options: str) -> tuple[int, list[ServerProcess]]:
    """Daemon, engine and router, and the router's port."""
    port, at, socket = free_port(), f"127.0.0.1:{free_port()}", str(home / "s")
    home.mkdir()
    slab = {"FILE__PATH": str(home / "slab"), "FILE__SIZE": "1GiB", "HOST__SIZE": "512MiB"}
    room = {"L1__NUM_BLOCKS": str((PREFIX + TAIL + ANSWER) // BLOCK_SIZE + 4), "SERVICE__SOCKET": socket}
    weighs = {"CACHE__LOAD_OR_RECOMPUTE": "load", "CACHE__BLOCK_SIZE": str(BLOCK_SIZE)}
    commands = {
        "serve": (["--socket", socket, "--http", "127.0.0.1:0"], slab),
        "engine": (["--model", model, "--name", "m", "--http", at], room | weighs),
        "route": (["--replica", f"http://{at}", "--http", f"127.0.0.1:{port}"], {}),
    }
    return port, [
        stack.enter_context(ServerProcess(kvtier(verb, *arguments), home / verb, **own | options))
        for verb, (arguments, own) in commands.items()
    ]


def ask(connection: HTTPConnection, prompt: list[int], flag: int) -> float:
    """Seconds of a request. `flag`: whether the client records its trace."""
    body: Row = {"model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    trace = f"00-{'a' * 32}-{'b' * 16}-0{flag}"
    return took(lambda: posted(connection, "/v1/completions", body, traceparent=trace))


def collect(pipe: Connection) -> None:
    """A collector: it sends its URL, and how many spans it got as often as something comes."""
    from otlp_rig import Collector

    collector = Collector()
    pipe.send(collector.url)
    while pipe.recv():
        pipe.send(len(collector.spans))


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


@program()
def main(args: Given) -> Result:
    num_pairs = 6 if args.quick else 300
    times: dict[int, list[float]] = {0: [], 1: []}
    with ExitStack() as stack:
        home = Path(stack.enter_context(scratch("tracing")))
        pipe, _ = stack.enter_context(child(collect))
        url = received(pipe)
        subprocess.run([sys.executable, *kvtier("model", str(home / "model"))], check=True)
        progress("starting router, engine and daemon")
        port, processes = started(stack, home / "traced", str(home / "model"), TRACING__ENDPOINT=url)
        draw = np.random.default_rng(0)
        prefixes = [random_tokens(draw, PREFIX) for _ in range(PREFIXES)]
        connection = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=120)))
        for prefix in prefixes:
            ask(connection, prefix + random_tokens(draw, TAIL), 0)
        before, number = sum(each.cpu_seconds() for each in processes), 0
        for pair in range(num_pairs):
            if pair % 50 == 0:
                progress(f"pair {pair}/{num_pairs}")
            for flag in draw.permutation(2).tolist():
                prompt = prefixes[number % PREFIXES] + random_tokens(draw, TAIL)
                times[flag].append(ask(connection, prompt, flag))
                number += 1
        cpu = (sum(each.cpu_seconds() for each in processes) - before) / number
        time.sleep(2.0)  # for the last spans
        pipe.send("how many?")
        num_spans = round(received(pipe) / num_pairs)
        alone = spans_alone(url, num_spans, 2000)
    rows: list[Row] = [
        {"client's trace": "recorded", "spans": num_spans, "a request, ms": statistics.median(times[1]) * 1e3},
        {"client's trace": "not recorded", "spans": 0, "a request, ms": statistics.median(times[0]) * 1e3},
        {"client's trace": "spans alone", "spans": num_spans, "CPU ms": alone * 1e3},
        {"client's trace": "either", "CPU ms": cpu * 1e3},
    ]
    targets = [
        Target("time of a request with a trace that is recorded, of one without", 1.01, of_pairs(times[1], times[0])),
        Target("CPU time of a request's spans, of the request's", 0.01, alone / cpu),
    ]
    return rows, targets, {"pairs": num_pairs}
