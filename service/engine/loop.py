"""The thread that steps a server's engine: admits requests, and hands each step's output to the event loop."""

import asyncio
import logging
import re
import threading
import time
from array import array
from collections import Counter, abc
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from prometheus_client import Histogram

from kvtier.connector import LocalConnector
from kvtier.connector.segments import Repair, Segment
from kvtier.engine import Engine, FinishReason, NamedPrompt, Output, SamplingParams, Sequence, TokenLogprobs
from kvtier.service import Reloads
from kvtier.service.events import TierFeed
from kvtier.service.explain import UNSALTED, LoggedRequest, Recent, RequestLog, client_of, tenant_of
from kvtier.service.openai import OpenAIError, busy, stopping_error
from kvtier.tiers import TIERS, ChainHash, RequestError, tracing

# --- unknown request fields ------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

OTHER: Final = "other"  # the label of the rest
_MOST: Final = 32  # names counted one by one: clients choose them, and a metric keeps them for ever
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)


class IgnoredFields:
    """Requests by the unknown field they had. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def record(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in sorted({name if _NAME.fullmatch(name) else OTHER for name in names}):
                if name not in self._counts and len(self._counts) >= _MOST:
                    name = OTHER
                if name not in self._counts:
                    _log.warning("request field %s: unknown here, so it is ignored; this is logged once", name)
                self._counts[name] += 1

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


# --- requests that ended ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    tokens: "array[int]"
    root: ChainHash  # of its tenant's chains

    def __len__(self) -> int:
        return len(self.tokens)


class FinishedSequences:
    """Records each sequence that has ended. `record` on the engine's thread, the rest on any."""

    def __init__(self, engine: Engine, log: RequestLog | None) -> None:
        self.recent: Recent[FinishedPrompt] = Recent()
        self.traces: dict[str, tracing.Trace] = {}  # of those that have not ended, by id
        self.log = log
        self._names_blocks = engine.config.enable_prefix_caching
        self._engine = engine

    def trace(self, sequence: Sequence, under: tracing.Trace) -> None:
        """A sequence was taken in that belongs to this span."""
        name, model = sequence.request_id, self._engine.identity.fingerprint().hex()[:16]
        if (trace := under.begin("generate", {"request_id": name, "fingerprint": model})) is not None:
            self.traces[name] = self._engine.connector.scheduler.traces[name] = trace

    def record(self, sequence: Sequence, end: str) -> None:
        client = None
        if self.traces and (trace := self.traces.pop(sequence.request_id, None)) is not None:
            trace.end(_outcome(sequence, end))
        if self._names_blocks:
            root = sequence.chain.root
            client = client_of(root)
            prompt = array("I", sequence.token_ids[: sequence.num_prompt_tokens])
            self.recent.record(client, sequence.request_id, FinishedPrompt(prompt, root))
        if self.log is not None:
            self.log.write(
                LoggedRequest(
                    id=sequence.request_id,
                    tenant=UNSALTED if client is None else tenant_of(client, self._engine.identity.fingerprint()),
                    prompt_tokens=sequence.num_prompt_tokens,
                    tokens={name: sequence.cached_tokens[kind.label] for name, kind in TIERS.items()},
                    missed=sequence.causes,
                    output_tokens=sequence.num_generated,
                    ttft=sequence.ttft,
                    seconds=time.monotonic() - sequence.arrived,
                    end=str(end),
                )
            )


def _outcome(sequence: Sequence, end: str) -> tracing.Attributes:
    """The attributes of a sequence's span: where its prompt's KV came from, and why the rest was nowhere."""
    cached = {} if sequence.ttft is None else sequence.cached_tokens
    hits = {name: num_tokens for name, kind in TIERS.items() if (num_tokens := cached.get(kind.label))}
    return {
        "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sequence.num_generated,
        **({} if sequence.ttft is None else {"gen_ai.latency.time_to_first_token": sequence.ttft}),
        **{f"hit_tokens.{tier}": num_tokens for tier, num_tokens in hits.items()},
        **tracing.missed(sequence.causes),
        **({"preempted": sequence.num_preempted} if sequence.num_preempted else {}),
        "end": str(end),
    }


# --- the loop --------------------------------------------------------------------------------------------------------

_IDLE: Final = 0.25  # seconds between two idle turns, in which lower tiers report what they have stored
_SOON: Final = 0.005  # the same, in seconds, while events still wait to be published
_STUCK: Final = 60.0  # seconds a step may take before the server counts as unhealthy
_BETWEEN: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_AILING: Final = 30.0  # seconds a server stays unhealthy after failed steps
_PATIENCE: Final = 2  # failed steps in a row: after the first the engine tries again, after more the requests fail


@dataclass(frozen=True, slots=True)
class SequenceInput:
    prompt: NamedPrompt  # one object, shared by all choices of a prompt
    params: SamplingParams
    segments: abc.Sequence[Segment] | None = ()  # None: those that the engine finds
    repair: Repair | None = None
    in_pieces: bool = False  # its segments are computed alone, too, if they are found without marks


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where a prompt's KV came from: tokens found cached, by tier; tokens of segments, and of these recomputed ones."""

    cached: Mapping[str, int]
    num_segment: int
    num_repaired: int
    scores: Mapping[int, TokenLogprobs] | None = None  # of the prompt's tokens by position, if requested


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    index: int
    token_id: int
    finish_reason: FinishReason | None
    source: PromptSource | None  # only with the first token
    logprobs: TokenLogprobs | None = None  # if requested


class LiveRequest:
    """The sequences of one request, and their updates. All but `push` is called on the event loop that made it."""

    def __init__(self, inputs: abc.Sequence[SequenceInput], name: str, deadline: float) -> None:
        """`deadline`: of each update, on the event loop's clock."""
        self.inputs, self.name, self._deadline = inputs, name, deadline
        self.trace = tracing.current.get()
        self.request_ids: list[str | None] = [None] * len(inputs)  # written and read by the engine's thread
        self.unfinished = set(range(len(inputs)))  # the same
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[SequenceUpdate | OpenAIError] = asyncio.Queue()  # bounded by the tokens requested

    def push(self, updates: abc.Sequence[SequenceUpdate | OpenAIError]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, updates)
        except RuntimeError:  # the loop is closed: no client waits
            return

    async def next(self) -> SequenceUpdate:
        """Wait for the next update. Raises OpenAIError if it is late, or the request ended without an answer."""
        try:
            async with asyncio.timeout_at(self._deadline):
                item = await self._updates.get()
        except TimeoutError:
            raise late() from None
        if isinstance(item, OpenAIError):
            raise item
        return item

    def _take(self, updates: abc.Sequence[SequenceUpdate | OpenAIError]) -> None:
        for item in updates:
            self._updates.put_nowait(item)


@dataclass(slots=True)
class _LiveSequence:
    request: LiveRequest
    index: int
    sequence: Sequence
    has_sent: bool = False  # its first token was sent
    sent_at: float = 0.0  # when the last token was sent, by time.monotonic


@dataclass(slots=True)
class _Abort:
    request: LiveRequest
    indices: abc.Sequence[int]
    outcome: str


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)  # of sequences
    cached: Counter[str] = field(default_factory=Counter)  # prompt tokens by the tier they came from
    failed_steps: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # requests refused, by status; written on the event loop
    ignored: IgnoredFields = field(default_factory=IgnoredFields)  # written on the threads that read bodies
    ttft: Histogram = field(
        default_factory=lambda: Histogram(
            "kvtier_engine_ttft_seconds", "From arrival to the first token", buckets=_SECONDS, registry=None
        )
    )
    itl: Histogram = field(
        default_factory=lambda: Histogram(
            "kvtier_engine_itl_seconds", "Between two tokens of a sequence", buckets=_BETWEEN, registry=None
        )
    )


class EngineLoop:
    """One thread steps the engine; others submit and abort. One lock, not held in a step. Bounded by `capacity`."""

    def __init__(
        self,
        engine: Engine,
        max_waiting: int,
        reloads: Reloads,
        feed: TierFeed | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self.engine = engine
        self.reloads = reloads
        self.fingerprint = engine.identity.fingerprint().hex()
        self.ended = FinishedSequences(engine, log)
        self._feed = feed
        self._is_fed = True  # the feed has published everything
        self.capacity = engine.config.max_num_seqs + max_waiting
        self.room = min(engine.max_model_len, engine.fits_l1)
        self.tally = Tally()
        self.stats: Mapping[str, int] = engine.stats  # as of the last turn
        self._changed = threading.Condition()
        # Bounded: requests by the capacity, each aborted at most once; one reset, whose future has the new fingerprint.
        self._inbox: list[LiveRequest | _Abort | Future[str]] = []
        self.num_live = 0  # sequences waiting or running
        self.stop_at: float | None = None
        self._sequences: dict[str, _LiveSequence] = {}
        self._num_failures = 0  # in a row
        self._failed_at = 0.0
        self._turned = time.monotonic()

    # called on any thread

    def require_room(self, num_sequences: int) -> None:
        """Raise OpenAIError if there is no room, or the server stops. Callers check before they prepare a request."""
        if self.stop_at is not None:
            raise stopping_error()
        if self.num_live + num_sequences > self.capacity:
            raise busy(f"{self.num_live} requests run or wait here, so there is no room; try again later")

    def submit(self, request: LiveRequest) -> None:
        """Submit a request. Raises OpenAIError if there is no room, or the server stops."""
        with self._changed:
            self.require_room(len(request.inputs))
            self.num_live += len(request.inputs)
            self._inbox.append(request)
            self._changed.notify()

    def abort(self, request: LiveRequest, indices: abc.Sequence[int], outcome: str = "aborted") -> None:
        with self._changed:
            self._inbox.append(_Abort(request, indices, outcome))
            self._changed.notify()

    def reset(self) -> Future[str]:
        """Forget every block, and name new ones after the current weights. The fingerprint, or OpenAIError."""
        done: Future[str] = Future()
        with self._changed:
            self.require_room(0)
            if any(isinstance(item, Future) for item in self._inbox):
                raise busy("another reset is under way; try again later")
            self._inbox.append(done)
            self._changed.notify()
        return done

    def stop(self, patience: float) -> None:
        """Refuse new requests. `run` returns once live sequences have ended, at most `patience` seconds from now."""
        with self._changed:
            self.stop_at = time.monotonic() + patience
            self._changed.notify()

    @property
    def ailment(self) -> str | None:
        if self._num_failures >= _PATIENCE and time.monotonic() - self._failed_at < _AILING:
            return f"the last {self._num_failures} steps failed; see the log"
        if (seconds := time.monotonic() - self._turned) > _STUCK:
            return f"the engine has not finished a step for {seconds:.0f} s"
        return None

    @property
    def wanting(self) -> dict[str, str]:
        """Tiers missing as configured (`TierUpkeep.wanting`), or too small (`Losses`): the engine runs without them."""
        connector, own = self.engine.connector, {**tracing.wanting(), **self.reloads.wanting}
        if not isinstance(connector, LocalConnector):
            return own
        return {**connector.tiers.wanting, **connector.tiers.metrics.wanting, **own}

    # called on the engine's thread

    def run(self) -> None:
        try:
            while self._goes_on():
                self._turn()
        finally:
            self.stop_at = time.monotonic()
            self._give_up(stopping_error())

    def _goes_on(self) -> bool:
        stop_at = self.stop_at
        return stop_at is None or (self.num_live > 0 and time.monotonic() < stop_at)

    def _turn(self) -> None:
        self._turned = time.monotonic()
        engine = self.engine
        is_busy = engine.has_unfinished or engine.scheduler.has_copies
        with self._changed:
            if not is_busy and not self._inbox and self._goes_on():
                self._changed.wait(_IDLE if self._is_fed else _SOON)
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, _Abort):
                self._abort(item)
            elif isinstance(item, Future):
                self._reset(item)
            else:
                self._admit(item)
        if is_busy or inbox:
            self._step()
        elif isinstance(engine.connector, LocalConnector):
            engine.connector.tiers.tick()  # only this call notices a daemon that stops or returns
        self.stats = engine.stats
        if self._feed is not None:
            self._is_fed = not self._feed.pump()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            _log.exception("a step failed: %s", error)
            self.tally.failed_steps += 1
            if self.engine.is_torn:  # the server ends, and another process can begin anew
                raise
            # else the engine stays usable; its requests are scheduled again
            self._num_failures += 1
            self._failed_at = time.monotonic()
            if self._num_failures >= _PATIENCE:
                self._give_up(_engine_error())
            return
        if any(output.token_id is not None for output in outputs):  # a step with nothing to compute proves nothing
            self._num_failures = 0
        self._pass_on(outputs)

    def _admit(self, request: LiveRequest) -> None:
        try:
            for index, wanted in enumerate(request.inputs):
                request_id = self.engine.add_request(
                    wanted.prompt,
                    wanted.params,
                    request_id=request.name if len(request.inputs) == 1 else f"{request.name}-{index}",
                    segments=wanted.segments,
                    repair=wanted.repair,
                )
                if wanted.in_pieces and self.engine.segments is not None:
                    self.engine.segments.queue_pieces(self.engine.request(request_id))
                request.request_ids[index] = request_id
                live = self._sequences[request_id] = _LiveSequence(request, index, self.engine.request(request_id))
                if request.trace is not None:
                    self.ended.trace(live.sequence, request.trace)
                if self._feed is not None and self.engine.config.enable_prefix_caching:
                    self._feed.begin_at(live.sequence.chain.parent(0))
        except RequestError as error:
            self._refuse(request, OpenAIError(400, str(error), code="invalid_value"))
        except Exception as error:  # only this request fails
            _log.exception("a request could not be admitted: %s", error)
            self._refuse(request, _engine_error())

    def _reset(self, done: Future[str]) -> None:
        if not done.set_running_or_notify_cancel():  # the client has left
            return
        try:
            self.engine.reset_cache()
        except RequestError as error:
            done.set_exception(OpenAIError(409, str(error), code="conflict"))
        except Exception as error:
            _log.exception("a reset failed: %s", error)
            done.set_exception(_engine_error())
        else:
            fingerprint = self.engine.identity.fingerprint()
            if self._feed is not None:
                self._feed.follow(fingerprint)
            self.fingerprint = fingerprint.hex()
            done.set_result(self.fingerprint)

    def _refuse(self, request: LiveRequest, error: OpenAIError) -> None:
        self._abort(_Abort(request, range(len(request.inputs)), "failed"))
        request.push([error])

    def _abort(self, abort: _Abort) -> None:
        request = abort.request
        for index in request.unfinished.intersection(abort.indices):
            if (request_id := request.request_ids[index]) is not None:
                if (live := self._sequences.pop(request_id, None)) is not None:
                    self.ended.record(live.sequence, abort.outcome)
                self.engine.abort(request_id)
            self._end(request, index, abort.outcome)

    def _end(self, request: LiveRequest, index: int, outcome: str) -> None:
        request.unfinished.discard(index)
        self.stats = self.engine.stats  # before the client learns of the end
        self.tally.outcomes[outcome] += 1
        with self._changed:
            self.num_live -= 1

    def _give_up(self, error: OpenAIError) -> None:
        with self._changed:
            inbox, self._inbox = self._inbox, []
        stepped = [live.request for live in self._sequences.values()]
        for request in dict.fromkeys([*stepped, *(item for item in inbox if isinstance(item, LiveRequest))]):
            self._refuse(request, error)
        for item in inbox:
            if isinstance(item, Future) and item.set_running_or_notify_cancel():
                item.set_exception(error)

    def _pass_on(self, outputs: abc.Sequence[Output]) -> None:
        updates: dict[LiveRequest, list[SequenceUpdate | OpenAIError]] = {}
        for output in outputs:
            live = self._sequences.get(output.request_id)
            if live is None or output.token_id is None:  # aborted: no client waits
                continue
            source = self._source(live)
            update = SequenceUpdate(live.index, output.token_id, output.finish_reason, source, output.logprobs)
            updates.setdefault(live.request, []).append(update)
            if output.finish_reason is not None:
                del self._sequences[output.request_id]
                self.ended.record(live.sequence, output.finish_reason)
                self._end(live.request, live.index, output.finish_reason)
        for request, items in updates.items():
            request.push(items)

    def _source(self, live: _LiveSequence) -> PromptSource | None:
        """Count how long this token took. Returns where the prompt came from at the first token; else None."""
        before, live.sent_at = live.sent_at, time.monotonic()
        if live.has_sent:
            self.tally.itl.observe(live.sent_at - before)
            return None
        live.has_sent, sequence, reuse = True, live.sequence, live.sequence.reuse
        self.tally.cached.update(sequence.cached_tokens)
        if sequence.ttft is not None:
            self.tally.ttft.observe(sequence.ttft)
        reused = (0, 0) if reuse is None else (reuse.num_reused, reuse.num_repaired)
        return PromptSource(sequence.cached_tokens, *reused, sequence.sampling.scores)


def late() -> OpenAIError:
    message = "the answer was not there in time; ask for less, or raise [server] request_timeout"
    return OpenAIError(504, message, code="timeout", headers={"x-should-retry": "false"})


def _engine_error() -> OpenAIError:
    return OpenAIError(500, "the engine failed; see the server's log", code="engine_error")
