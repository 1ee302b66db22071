"""Spans of requests for OpenTelemetry: what router, engine, daemon and tiers record them with.

Nothing of OpenTelemetry is imported before `start`, and without it no request has a `Trace`. Exporting is a thread's; a
span that finds its queue full, or the collector away, is dropped and counted. Spans have counts, names and times, and
nothing of a prompt.
"""

import atexit
import logging
import re
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from os import getpid
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kvtier.tiers.errors import MissingPackages
from kvtier.tiers.extras import require_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult, SpanProcessor
    from opentelemetry.trace import Span, Tracer
    from requests import Response, Session

    from kvtier.tiers.metrics import Found
    from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

_log = logging.getLogger(__name__)

_MOST_CHILDREN: Final = 256  # spans right below one
_MOST_BLOCKS: Final = 1 << 16  # blocks whose stores are traced until a tier has them
_QUEUE: Final = 4096  # spans that wait to be exported
_BATCH: Final = 512  # of these in one message
_EVERY: Final = 1000.0  # milliseconds between two messages
_EXPORT: Final = 2.0  # seconds for one
_STOP: Final = 2.0  # seconds for the last ones
_LONGEST: Final = 200  # characters of a reason

Kind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int | float]
_NONE: Final[Attributes] = {}


class OtlpTarget(NamedTuple):
    """Where spans go. `why`: what is wrong with that, so that none go."""

    url: str
    why: str | None = None

    @property
    def shown(self) -> str:
        """The URL without what may be secret: user and query."""
        return re.sub("//[^/]*@", "//", self.url).partition("?")[0]


class Trace:
    """A span of a request, and so the place in its trace where others belong. Thread-safe; `end` is idempotent."""

    __slots__ = ("_num_children", "_span", "traceparent")

    def __init__(self, traceparent: str, span: "Span | None" = None) -> None:
        """Without a `span` it is one of another process."""
        self.traceparent = traceparent  # as the W3C's header
        self._span = span
        self._num_children = 0

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def is_open(self) -> bool:
        return self._span is not None

    @property
    def is_recorded(self) -> bool:
        """Whether its trace was sampled. If not, nothing is recorded below it."""
        return self.traceparent.endswith("1")

    def begin(self, name: str, attributes: Attributes, kind: Kind = "internal") -> "Trace | None":
        """A span below this one. None if it would not be recorded."""
        return _process.begin(name, self.traceparent, kind, attributes) if self._takes_one() else None

    def record(self, name: str, began: float, attributes: Attributes) -> None:
        """A span below this one that ends now. It began then on the monotonic clock."""
        if self._takes_one():
            _process.record(name, self.traceparent, time.monotonic() - began, attributes)

    def end(self, attributes: Attributes = _NONE, error: str | None = None) -> None:
        """`error`: why it did not go well. Names of attributes get the prefix `kvtier.`, unless they have one."""
        span, self._span = self._span, None
        if span is not None:
            _process.end(span, error, attributes)

    def _takes_one(self) -> bool:
        self._num_children += 1
        if self._num_children > _MOST_CHILDREN:
            _process.dropped("too_many")
        return self._num_children <= _MOST_CHILDREN and self.is_recorded


ON = False
"""Whether this process records spans: what a hot path looks at. Changed by `start` and `stop`."""


def begin(name: str, traceparent: str | None, kind: Kind, attributes: Attributes) -> Trace | None:
    """A span below one of another process, or a trace of its own. None if tracing is off."""
    return _process.begin(name, traceparent, kind, attributes)


def start(service: str, target: OtlpTarget | None) -> None:
    """Trace this process's requests from now on, under the name of a service unless OTEL_SERVICE_NAME has one.

    None: it stays off. It also does, and `wanting` says why, if the packages of the extra `tracing` are missing, or
    OpenTelemetry cannot read one of its variables.
    """
    global ON
    if target is not None and not ON:
        ON = _process.start(service, target)


def stop() -> None:
    """Export what waits, for at most two seconds; then it is off, and nothing is counted any more. Idempotent."""
    global ON
    ON = False
    _process.stop()


def counts() -> dict[str, int]:
    """Spans by what became of them: `exported`, `queue_full`, `export_failed`, `too_many`. Empty if it is off."""
    return dict(_process.counts)


def wanting() -> dict[str, str]:
    """`tracing` → why spans are not exported as configured."""
    why = _process.why
    return {} if why is None else {"tracing": why}


def found_in(found: "Found | None", causes: Mapping[tuple[str, str], int] | None) -> dict[str, str | int | float]:
    """The attributes of a lookup: blocks by tier, and missing ones by cause and the tier they left."""
    if found is None:
        return {}
    return {**{f"blocks.{tier}": count for tier, count in found.by_tier.items()}, **missed(causes, found.miss)}


def missed(causes: Mapping[tuple[str, str], int] | None, num_missed: int = 0) -> dict[str, str | int | float]:
    """Attributes: blocks that no tier had, by cause and, where one had them, that tier."""
    known = {f"missed.{cause}{tier and '.' + tier}": count for (cause, tier), count in (causes or {}).items()}
    return {**known, **({"blocks.missed": num_missed} if num_missed else {})}


def stored(names: "Sequence[ChainHash]", trace: Trace) -> None:
    """These blocks are being stored for this request: writes of them to lower tiers belong to its trace."""
    _process.stored(names, trace)


def wrote(
    tier: str, records: "Sequence[BlockRecord]", outcomes: "Sequence[Outcome]", num_bytes: int, since: float
) -> None:
    """A tier has written blocks, from `since` on until now: a span for each request that stored some."""
    by_trace: dict[str, tuple[Trace, list[str]]] = {}
    for record, outcome in zip(records, outcomes, strict=True):
        if (trace := _process.blocks.get(record.chain_hash)) is not None:
            by_trace.setdefault(trace.traceparent, (trace, []))[1].append(str(outcome))
    for trace, each in by_trace.values():
        share = num_bytes * len(each) // len(records)
        trace.record(f"write {tier}", since, {"blocks": len(each), "bytes": share, **outcomes_in(each)})


def outcomes_in(outcomes: Sequence[str]) -> dict[str, str | int | float]:
    """Attributes: how many blocks had which outcome, without those that went well."""
    counts = Counter(map(str, outcomes))
    return {f"outcome.{outcome}": count for outcome, count in counts.items() if outcome != "ok"}


current: Final[ContextVar[Trace | None]] = ContextVar("trace", default=None)
"""The span of the HTTP request that this task answers."""


class _Process:
    """What this process traces with. Thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # under the lock
        self.why: str | None = None
        self.blocks: OrderedDict[ChainHash, Trace] = OrderedDict()  # that are being stored; changed under the lock
        self._lock = Lock()
        self._tracer: Tracer | None = None
        self._processor: SpanProcessor | None = None
        self._num_waiting = 0  # spans that wait to be exported

    def start(self, service: str, target: OtlpTarget) -> bool:
        try:
            require_extra("[tracing]", "tracing")
        except MissingPackages as error:
            self._is_wanting(str(error))
            return False
        if target.why is not None:
            self._is_wanting(target.why)
            return False
        try:
            self._open(service, target)
        except Exception as error:  # an OTEL_… variable that cannot be meant: reading it raises, even at an import
            why = " ".join(str(error).split())[:_LONGEST]
            self._is_wanting(f"[tracing] {target.shown}: OpenTelemetry does not start: {why}; fix its OTEL_… variables")
            return False
        self.counts.update(exported=0)
        atexit.register(stop)
        _log.debug("spans of requests go to %s", target.shown)
        return True

    def _open(self, service: str, target: OtlpTarget) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)  # each failed message would be a line
        own: Attributes = {"service.name": service, "host.name": socket.gethostname(), "process.pid": getpid()}
        provider = TracerProvider(resource=Resource(own).merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._processor = _batches(
            OTLPSpanExporter(target.url, timeout=_EXPORT, session=_heads_only()), self, target.shown
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("kvtier")

    def stop(self) -> None:
        processor, self._processor, self._tracer = self._processor, None, None
        if processor is not None:
            last = Thread(target=processor.shutdown, name="kvtier-tracing-stop", daemon=True)
            last.start()
            last.join(_STOP)
        self.why, self._num_waiting = None, 0
        self.counts.clear()
        self.blocks.clear()

    def begin(self, name: str, parent: str | None, kind: Kind, attributes: Attributes) -> Trace | None:
        if (span := self._span(name, parent, kind, attributes, None)) is None:
            return None
        context = span.get_span_context()
        traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"
        return Trace(traceparent, span)

    def record(self, name: str, parent: str, seconds: float, attributes: Attributes) -> None:
        now = time.time_ns()
        if (span := self._span(name, parent, "internal", attributes, now - int(seconds * 1e9))) is not None:
            span.end(now)

    def end(self, span: "Span", error: str | None, attributes: Attributes) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attributes(_named(attributes))
        if error is not None:
            span.set_status(StatusCode.ERROR, error)
        span.end()

    def has_room(self) -> bool:
        """Whether one more span may wait to be exported: then it does."""
        with self._lock:
            if self._num_waiting < _QUEUE:
                self._num_waiting += 1
                return True
            self.counts["queue_full"] += 1
            return False

    def dropped(self, why: str) -> None:
        with self._lock:
            self.counts[why] += 1

    def exported(self, count: int, why: str | None) -> None:
        """So many have left the queue: exported, or not for this reason."""
        with self._lock:
            self._num_waiting -= count
            self.counts["exported" if why is None else "export_failed"] += count
        if why is None and self.why is not None:
            _log.info("spans are exported again")
            self.why = None
        elif why is not None and why != self.why:
            self._is_wanting(why)

    def stored(self, names: "Sequence[ChainHash]", trace: Trace) -> None:
        with self._lock:
            self.blocks.update(dict.fromkeys(names, trace))
            while len(self.blocks) > _MOST_BLOCKS:
                self.blocks.popitem(last=False)

    def _is_wanting(self, why: str) -> None:
        self.why = why
        _log.warning("%s", why)

    def _span(
        self, name: str, parent: str | None, kind: Kind, attributes: Attributes, began: int | None
    ) -> "Span | None":
        if (tracer := self._tracer) is None:
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = Context()  # of its own: an engine in this process may use OpenTelemetry, too
        if parent is not None:
            context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context)
        return tracer.start_span(name, context, SpanKind[kind.upper()], _named(attributes), start_time=began)


def _named(attributes: Attributes) -> dict[str, str | int | float]:
    prefixes = ("http.", "url.", "gen_ai.", "server.")
    return {name if name.startswith(prefixes) else f"kvtier.{name}": value for name, value in attributes.items()}


def _heads_only() -> "Session":
    """A session for the exporter that reads no body: one without an end would fill the memory."""
    from requests import Session

    def leave(response: "Response", *_: object, **__: object) -> None:
        response.close()
        response.raw = None
        if response.is_redirect:  # the exporter would take it for a success
            response.status_code = 400

    session = Session()
    session.stream = True
    session.hooks["response"].append(leave)
    return session


def _batches(exporter: "SpanExporter", process: _Process, shown: str) -> "SpanProcessor":
    """Exports on a thread of its own, and counts what it does not."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    why = f"[tracing] {shown}: the collector takes no spans; look at its address and its log"

    class Counting(SpanExporter):
        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            is_well = False
            try:
                result = exporter.export(spans)
                is_well = result is SpanExportResult.SUCCESS
                return result
            finally:
                process.exported(len(spans), None if is_well else why)

        def shutdown(self) -> None:
            exporter.shutdown()

    class Bounded(BatchSpanProcessor):
        def on_end(self, span: "ReadableSpan") -> None:
            if span.context is not None and span.context.trace_flags.sampled and process.has_room():
                super().on_end(span)

    return Bounded(Counting(), _QUEUE, _EVERY, _BATCH)


_process: Final = _Process()
