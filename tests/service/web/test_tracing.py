"""One request's spans, through router, engine, daemon and tiers, as a collector gets them; and what is off costs."""

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import httpx2
import pytest
from doubles import wait_until
from fork_rig import SERVICES, Forked
from node_rig import free_port
from otlp_rig import Collector, SeenSpan, collecting, drawn, tree
from router_rig import replicas, routed
from server_rig import BLOCK, MODEL, ServerProcess, serving
from service_rig import DaemonProcess, DaemonThread, end_child, environment
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvtier.service.command_line import JsonLine
from kvtier.service.node.status import wanting_parts
from kvtier.service.web import HttpServer, HttpSocket
from kvtier.tiers import extras, tracing
from kvtier.tiers.config.config import Config
from kvtier.tiers.config.environment import otlp_target

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
PROMPT = "A prompt of several blocks, of which the slab has some once the daemon was started anew. " * 3


@contextmanager
def router(replica: str, **variables: str) -> Iterator[str]:
    """`kvtier route` before one replica; its URL."""
    http = f"127.0.0.1:{free_port()}"
    command = ["-m", "kvtier.cli", "route", "--replica", replica, "--http", http]
    process = Forked(command, SERVICES, env={**environment(), **variables})
    try:
        wait_until(lambda: _answers(f"http://{http}/readyz"))
        yield f"http://{http}"
    finally:
        end_child(process)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def ask(url: str, trace: str, prompt: str = PROMPT) -> httpx2.Response:
    """As a client that is traced asks."""
    headers = {"traceparent": f"00-{trace}-{CLIENT}-01", "x-request-id": "slow-one"}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def seen(collector: Collector, trace: str, *names: str) -> list[SeenSpan]:
    """The spans of a trace once these names are among them, and every one's parent."""

    def is_whole() -> bool:
        spans = collector.trace(trace)
        ids = {each.id for each in spans} | {CLIENT}
        return {*names} <= {each.name for each in spans} and all(each.parent in ids for each in spans)

    wait_until(is_whole)
    return collector.trace(trace)


def test_a_request_is_one_tree_from_the_router_to_the_slab(home: Path, model: Path) -> None:
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(*next(iter(variables.items())))
        tiers = {"file__path": str(home / "kv"), "file__size": "64MiB", "host__size": "32MiB"}
        daemon = DaemonProcess(home / "s", **tiers)
        engine = ServerProcess(model, service__socket=str(home / "s"), host__size="8MiB")
        stack.callback(lambda: engine.process.poll() is None and engine.end(15))
        url = stack.enter_context(router(engine.url, **variables))

        # Computed, and written to the slab: its first block is in no tier, and nothing of it was ever there.
        ask(url, TRACE)
        cold = seen(collector, TRACE, "POST /v1/completions", "replica", "generate", "lookup", "write file")
        assert [(depth, each.service, each.name, each.kind) for depth, each in tree(cold, CLIENT)][:6] == [
            (0, "kvtier-router", "POST /v1/completions", "server"),
            (1, "kvtier-router", "replica", "client"),
            (2, "kvtier-engine", "POST /v1/completions", "server"),
            (3, "kvtier-engine", "generate", "internal"),
            (4, "kvtier-engine", "lookup", "client"),
            (5, "kvtier-daemon", "lookup", "server"),
        ]
        by_name = {(each.service, each.name): each.attributes for each in cold}
        assert by_name["kvtier-router", "POST /v1/completions"]["kvtier.request_id"] == "slow-one"
        assert by_name["kvtier-engine", "POST /v1/completions"]["kvtier.request_id"] == "slow-one"
        assert by_name["kvtier-router", "POST /v1/completions"]["http.response.status_code"] == 200
        assert by_name["kvtier-router", "replica"]["kvtier.replica"] == engine.url.removeprefix("http://")
        generated = by_name["kvtier-engine", "generate"]
        num_blocks = (generated["gen_ai.usage.input_tokens"] - 1) // BLOCK
        assert generated["kvtier.missed.absent"] == num_blocks
        assert not [name for name in generated if name.startswith("kvtier.hit_tokens")]
        assert generated["gen_ai.usage.output_tokens"] == 3
        looked = by_name["kvtier-daemon", "lookup"]
        assert looked["kvtier.blocks.missed"] == looked["kvtier.blocks"] == num_blocks
        assert looked["kvtier.missed.never_seen"] == num_blocks  # the daemon knows why
        assert by_name["kvtier-daemon", "write file"]["kvtier.blocks"] >= num_blocks

        # The daemon's memory and the engine's are gone; the slab has the blocks, and the tree says what was read of it.
        assert engine.end(15) == 0
        end_child(daemon.process)
        daemon = DaemonProcess(home / "s", **tiers)
        stack.callback(lambda: end_child(daemon.process))
        engine = ServerProcess(
            model, service__socket=str(home / "s"), host__size="8MiB", server__http=engine.url.removeprefix("http://")
        )
        wait_until(lambda: _answers(f"{url}/readyz"))
        again = TRACE[::-1]
        ask(url, again)
        warm = seen(collector, again, "generate", "lookup", "read file", "load")
        print(*drawn(warm, CLIENT), sep="\n")
        by_name = {(each.service, each.name): each.attributes for each in warm}
        generated = by_name["kvtier-engine", "generate"]
        assert generated["kvtier.hit_tokens.file"] == num_blocks * BLOCK
        assert "kvtier.missed.absent" not in generated
        assert by_name["kvtier-daemon", "lookup"]["kvtier.blocks.file"] == num_blocks
        reads = [each for each in warm if each.name == "read file"]
        assert sum(each.attributes["kvtier.blocks"] for each in reads) == num_blocks
        (looked_up,) = (each for each in warm if (each.service, each.name) == ("kvtier-daemon", "lookup"))
        assert {each.parent for each in reads} == {looked_up.id}
        assert all(looked_up.start <= each.start <= each.end <= looked_up.end for each in reads)
        assert by_name["kvtier-engine", "load"]["kvtier.blocks"] == num_blocks

        # No span says anything of the prompt.
        assert not any(PROMPT[:8] in str(value) for each in collector.spans for value in each.attributes.values())


@contextmanager
def tracing_to(url: str) -> Iterator[None]:
    """This process's requests are traced."""
    tracing.start("here", tracing.OtlpTarget(f"{url}/v1/traces"))
    assert tracing.ON
    try:
        yield
    finally:
        tracing.stop()


def test_a_replica_that_fails_is_a_span_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector, replicas(2) as (bad, good):
        with routed(bad.url, good.url) as router:  # off: the client's header goes on as it came
            given = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
            router.client.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=given)
            (asked,) = [*bad.seen, *good.seen]
            assert asked["headers"]["traceparent"] == given["traceparent"]
        assert not collector.spans

        # One replica is broken, the other answers: two spans below the router's, and each replica gets its own.
        bad.behave(status=500)
        with tracing_to(collector.url), routed(bad.url, good.url) as router:
            for number in range(2):  # they take turns
                trace = f"{number:032x}".replace("0", "a")
                given = {"traceparent": f"00-{trace}-{CLIENT}-01"}
                answer = router.client.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=given)
                assert answer.status_code == 200
            failed = next(each for each in _eventually(collector) if each.is_error)
            ways = [each for _, each in tree(collector.trace(failed.trace), CLIENT)]
            assert [each.name for each in ways] == ["POST /v1/completions", "replica", "replica"]
            assert [each.is_error for each in ways] == [False, True, False]
            assert [each.attributes["kvtier.replica"] for each in ways[1:]] == [bad.name, good.name]
            (of_replica,) = [each for each in good.seen if failed.trace in each["headers"].get("traceparent", "")]
            assert of_replica["headers"]["traceparent"] == f"00-{failed.trace}-{ways[2].id}-01"

            # Of a trace that the client does not record, nobody records anything, and the replica is told so.
            before = len(collector.spans)
            unwanted = {"traceparent": f"00-{'e' * 32}-{CLIENT}-00"}
            router.client.post("/v1/completions", json={"model": "m", "prompt": "a"}, headers=unwanted)
            told = next(each for each in good.seen if "e" * 32 in each["headers"].get("traceparent", ""))
            assert told["headers"]["traceparent"].endswith("-00")
            metrics = router.metrics()
        assert metrics['kvtier_trace_spans_total{outcome="exported"}'] > 0
        assert not [each for each in collector.spans[before:] if each.trace == "e" * 32]


def _eventually(collector: Collector) -> list[SeenSpan]:
    wait_until(lambda: any(each.is_error for each in collector.spans))
    return collector.spans


def test_a_collector_that_is_away_fails_no_request(model: Path) -> None:
    with collecting() as collector, tracing_to(collector.url), serving(model) as server:
        collector.status = 400
        ask(server.url, TRACE)
        wait_until(lambda: [each["part"] for each in server.status()["wanting"]] == ["tracing"])
        assert server.status()["status"] == "degraded"
        assert (
            f"[tracing] {collector.url}/v1/traces: the collector takes no spans" in server.status()["wanting"][0]["why"]
        )
        assert (server.http.get("/healthz").status_code, server.http.get("/readyz").status_code) == (200, 200)
        metrics = server.http.get("/metrics").text
        assert 'kvtier_trace_spans_total{outcome="export_failed"}' in metrics
        assert 'kvtier_wanting{part="tracing"} 1.0' in metrics

        # It is back: so are the spans, and the note is gone.
        collector.status = 200
        ask(server.url, TRACE)
        seen(collector, TRACE, "POST /v1/completions", "generate", "lookup")
        wait_until(lambda: server.status()["wanting"] == [])


@pytest.mark.parametrize(
    ("head", "body", "outcome"),
    [
        ("200 OK\r\ntransfer-encoding: chunked", b"10000\r\n" + bytes(65536) + b"\r\n", "exported"),
        ("302 Found\r\nlocation: http://127.0.0.1:1/", b"", "export_failed"),
        ("500 Oops\r\nretry-after: never", b"garbage", "export_failed"),
        ("nonsense", b"", "export_failed"),
    ],
)
def test_what_a_collector_answers_is_not_read_beyond_its_head(head: str, body: bytes, outcome: str) -> None:
    """It may have no end, and would fill the memory."""
    sent: list[int] = []

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as client, suppress(OSError):
            client.recv(1 << 16)
            client.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode())
            while body:
                client.sendall(body)
                sent.append(len(body))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = Thread(target=answer, args=[listener])
        answering.start()
        with tracing_to(f"http://127.0.0.1:{listener.getsockname()[1]}"):
            trace = tracing.begin("one", None, "server", {})
            assert trace is not None
            trace.end()
            wait_until(lambda: tracing.counts().get(outcome) == 1)
            answering.join(60)
            assert not answering.is_alive()
    assert sum(sent) < 64 << 20  # what the kernel took before it was closed


def test_spans_that_find_no_room_are_dropped_and_counted() -> None:
    hanging = threading.Event()
    with collecting() as collector:
        collector.before = hanging.wait
        with tracing_to(collector.url):
            trace = tracing.begin("all", None, "server", {})
            assert trace is not None
            many = 10_000
            for _ in range(many // 100):
                one = trace.begin("one", {})
                assert one is not None
                for _ in range(99):
                    one.record("each", 0.0, {})
                one.end()
            counts = tracing.counts()
            assert counts["queue_full"] > 0
            hanging.set()
            wait_until(lambda: sum(tracing.counts().values()) == many)
            assert (
                len(collector.spans) + tracing.counts()["queue_full"] + tracing.counts().get("export_failed", 0) >= many
            )
            # One span has a bounded number right below it.
            for _ in range(300):
                trace.record("each", 0.0, {})
            assert tracing.counts()["too_many"] == 300 + many // 100 - 256


def test_log_lines_name_the_trace_of_their_request() -> None:
    record = logging.LogRecord("kvtier.here", logging.WARNING, "", 0, "it took long", (), None)
    with collecting() as collector, tracing_to(collector.url):
        named = tracing.current.set(tracing.begin("slow", f"00-{TRACE}-{CLIENT}-01", "server", {}))
        assert json.loads(JsonLine().format(record))["trace_id"] == TRACE
        tracing.current.reset(named)
    assert "trace_id" not in json.loads(JsonLine().format(record))


def test_without_its_packages_a_daemon_starts_and_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str) -> ModuleSpec | None:
        return None if name.startswith("opentelemetry") else find_spec(name)

    monkeypatch.setattr(extras, "find_spec", gone)
    tracing.start("kvtier-daemon", tracing.OtlpTarget("http://127.0.0.1:1/v1/traces"))
    assert not tracing.ON
    served = DaemonThread(home / "s", host={"size": 1 << 20})
    try:
        (part,) = wanting_parts(served.daemon, [])
        assert part.part == "tracing"
        assert "pip install 'opentelemetry-sdk>=1.30' 'opentelemetry-exporter-otlp-proto-http>=1.30'" in part.why
        assert not part.is_needed
    finally:
        served.close()
        tracing.stop()
        assert not tracing.wanting()


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in"}, "https://c/in"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({"KVTIER_TRACING__ENDPOINT": "http://d:1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, "http://d:1/v1/traces"),
    ],
)
def test_it_is_on_where_a_collector_is_named(
    variables: dict[str, str], url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    target = otlp_target(Config.load().tracing.endpoint)
    assert (None if target is None else target.url) == url


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_collector_by_grpc_is_refused_with_the_fix(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@c:4317")
    monkeypatch.setenv(variable, "grpc")
    target = otlp_target(None)
    assert target is not None
    fix = "spans go by http/protobuf; set [tracing] endpoint to a port for that"
    assert target.why == f"[tracing] http://c:4317/v1/traces by grpc: {fix}"


@pytest.mark.parametrize("variable", ["OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])  # by an import
def test_a_variable_that_cannot_be_meant_costs_the_spans_and_no_start(variable: str) -> None:
    program = (
        "from kvtier.tiers import tracing; from kvtier.tiers.config import otlp_target;"
        "tracing.start('here', otlp_target('http://127.0.0.1:1'));"
        "print(tracing.ON, tracing.begin('one', None, 'server', {}), tracing.wanting()['tracing'])"
    )
    variables = {**environment(), variable: "many"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False None [tracing] http://127.0.0.1:1/v1/traces: OpenTelemetry does not start: ")
    assert "many" in done.stdout
    assert done.stdout.endswith("; fix its OTEL_… variables\n")


def test_a_pipelined_request_has_no_trace_of_the_one_before_it() -> None:
    seen: list[str | None] = []

    async def page(request: Request) -> Response:
        trace = tracing.current.get()
        seen.append(None if trace is None else trace.trace_id)
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/v1/completions", page, methods=["POST"]), Route("/page", page)])
    with collecting() as collector, tracing_to(collector.url):
        server = HttpServer(app, HttpSocket("127.0.0.1:0"))
        server.start()
        try:
            host, _, port = server.address.rpartition(":")
            first = (
                f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ntraceparent: 00-{TRACE}-{CLIENT}-01"
            )
            with socket.create_connection((host, int(port)), timeout=60) as client:
                client.sendall(
                    f"{first}\r\n\r\nGET /page HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
                )
                while client.recv(4096):
                    pass
        finally:
            server.stop()
    assert seen == [TRACE, None]


def test_a_collectors_password_is_in_no_reason() -> None:
    url = "http://me:secret@127.0.0.1:1/v1/traces?key=secret"
    tracing.start("here", tracing.OtlpTarget(url))
    try:
        trace = tracing.begin("one", None, "server", {})
        assert trace is not None
        trace.end()
        wait_until(tracing.wanting)
        assert tracing.wanting()["tracing"].startswith("[tracing] http://127.0.0.1:1/v1/traces: the collector takes no")
    finally:
        tracing.stop()


def test_off_it_imports_nothing() -> None:
    modules = (
        "kvtier.service.router.router, kvtier.service.node.daemon, kvtier.connector.scheduler, kvtier.tiers.tracing"
    )
    program = f"import sys, {modules}; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
