"""A collector in this process: it takes OTLP by HTTP, and shows the spans of one trace as a tree."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class SeenSpan:
    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str  # empty: a root
    start: int  # nanoseconds since 1970
    end: int
    is_error: bool
    attributes: Mapping[str, Any]


class Collector:
    """Listens from the start. `status` is what it answers."""

    def __init__(self) -> None:
        self.status = 200
        self.before: Callable[[], object] = lambda: None  # what it does before it answers
        self.spans: list[SeenSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.before()
                if self.path == "/v1/traces" and collector.status == 200:
                    collector.spans += spans_in(ExportTraceServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def trace(self, trace_id: str) -> list[SeenSpan]:
        """By their start."""
        return sorted((each for each in self.spans if each.trace == trace_id), key=lambda each: each.start)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


_LONG = ("url.path", "fingerprint", "replica", "latency.time_to_first_token")  # what a line of `drawn` leaves out


def spans_in(request: ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for of_process in request.resource_spans:
        service = _attributes(of_process.resource.attributes)["service.name"]
        for span in (span for scope in of_process.scope_spans for span in scope.spans):
            yield SeenSpan(
                service,
                span.name,
                Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                span.status.code == 2,
                _attributes(span.attributes),
            )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


def tree(spans: Sequence[SeenSpan], client: str = "") -> list[tuple[int, SeenSpan]]:
    """Each with its depth, below its parent, by their start. AssertionError if one's parent is not there.

    `client`: the span of a client that they all are below.
    """
    names = {each.id for each in spans} | {client}
    orphans = [each.name for each in spans if each.parent not in names]
    assert not orphans, f"without their parents: {orphans}"

    def below(parent: str, depth: int) -> Iterator[tuple[int, SeenSpan]]:
        for each in spans:
            if each.parent == parent:
                yield depth, each
                yield from below(each.id, depth + 1)

    return list(below(client, 0))


def drawn(spans: Sequence[SeenSpan], client: str = "") -> list[str]:
    """The tree as text: when each began and how long it took, in milliseconds, and what it says."""
    first, lines = min(each.start for each in spans), []
    for depth, each in tree(spans, client):
        shown = {
            name.rpartition("gen_ai.")[2].removeprefix("kvtier."): value for name, value in each.attributes.items()
        }
        about = " ".join(f"{name}={value}" for name, value in shown.items() if name not in _LONG)
        at, took = (each.start - first) / 1e6, (each.end - each.start) / 1e6
        lines.append(
            f"{at:8.1f} {took:8.1f}  {'  ' * depth}{each.service.removeprefix('kvtier-')}: {each.name}  {about}"
        )
    return lines
