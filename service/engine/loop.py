"""The engine behind a server: its loop, who may get in, and the news of each step carried to another thread's queue."""

import asyncio
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from prometheus_client import Histogram

from kvtier.engine.llm import Engine
from kvtier.engine.sequence import FinishReason, Output, Prompt, RequestError, SamplingParams
from kvtier.engine.sequence import Sequence as Request
from kvtier.service.openai_errors import OpenAIError, busy
from kvtier.tiers.tier import ChainHash

_log = logging.getLogger(__name__)

_IDLE: Final = 0.25  # seconds between two turns with nothing to do: tiers below tell then what they have stored
_SOON: Final = 0.005  # seconds, where events could not all be told
_STUCK: Final = 60.0  # seconds a step may take before the server is not well
_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_AILING: Final = 30.0  # seconds until a server whose steps failed asks to be tried again
_PATIENCE: Final = 2  # steps in a row that fail: one is tried again, requests behind more of them are given up


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to be computed."""

    prompt: Prompt  # one object for all that have it
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class News:
    """What became of one sequence of a flight: a token, its end, or both."""

    index: int
    token_id: int
    finish_reason: FinishReason | None
    cached: Mapping[str, int] | None  # with the first token: prompt tokens by the tier they came from


class Feed(Protocol):
    """Tells others what the engine's tiers hold; `service.events.TierFeed` is the real one. Never waits."""

    def begin_at(self, root: ChainHash) -> None:
        """Chains begin at this root."""

    def pump(self) -> bool:
        """Tell what is new. True where some is left."""


class Flight:
    """The sequences of one request, and their news. All but `tell` is called on the event loop that made it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.request_ids: list[str | None] = [None] * len(jobs)  # the engine's thread writes and reads them
        self.unfinished = set(range(len(jobs)))  # the same
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News | OpenAIError] = asyncio.Queue()  # bounded by the tokens asked for

    def tell(self, news: Sequence[News | OpenAIError]) -> None:
        """From the engine's thread: pass the news on."""
        try:
            self._loop.call_soon_threadsafe(self._take, news)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    async def next(self) -> News:
        """What comes to pass next. OpenAIError where the request ended without an answer."""
        item = await self._news.get()
        if isinstance(item, OpenAIError):
            raise item
        return item

    def _take(self, news: Sequence[News | OpenAIError]) -> None:
        for item in news:
            self._news.put_nowait(item)


@dataclass(slots=True)
class _Seat:
    """A sequence the engine knows."""

    flight: Flight
    index: int
    request: Request
    is_told: bool = False  # whether its first token was passed on


@dataclass(slots=True)
class _Abort:
    """Sequences nobody waits for any more, and how that counts."""

    flight: Flight
    indices: Sequence[int]
    outcome: str


@dataclass(slots=True)
class Tally:
    """Counts since the start. Written on the engine's thread."""

    outcomes: Counter[str] = field(default_factory=Counter)  # of sequences
    cached: Counter[str] = field(default_factory=Counter)  # prompt tokens by the tier they came from
    failed_steps: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # requests told why not, by status; on the event loop
    ttft: Histogram = field(
        default_factory=lambda: Histogram(
            "kvtier_engine_ttft_seconds", "From arrival to the first token", buckets=_SECONDS, registry=None
        )
    )


class EngineLoop:
    """One thread steps the engine; others submit and abort. One lock, held for moments, never across a step.

    At most `max_num_seqs + max_waiting` sequences are live; what would be more is refused.
    """

    def __init__(self, engine: Engine, max_waiting: int, feed: Feed | None = None) -> None:
        self.engine = engine
        self.fingerprint = engine.identity.fingerprint().hex()
        self._feed = feed
        self._is_fed = True  # the feed has told everything
        self.capacity = engine.config.max_num_seqs + max_waiting
        self.room = min(engine.max_model_len, engine.pool.num_blocks * engine.config.block_size)
        self.tally = Tally()
        self.stats: Mapping[str, int] = engine.stats  # as it was after the last turn
        self._changed = threading.Condition()
        self._inbox: list[Flight | _Abort] = []  # bounded: flights by the capacity, each aborted at most once
        self._num_live = 0
        self._stop_at: float | None = None
        self._seats: dict[str, _Seat] = {}
        self._ids = map(str, itertools.count())
        self._num_failures = 0  # in a row
        self._failed_at = 0.0
        self._turned = time.monotonic()

    # on any thread

    def require_room(self, num_sequences: int) -> None:
        """OpenAIError where there is none now, or not any more: a request need not be prepared to hear that."""
        if self._stop_at is not None:
            raise stopping()
        if self._num_live + num_sequences > self.capacity:
            raise busy(f"{self._num_live} requests are computed or wait here, there is no room; come again later")

    def submit(self, flight: Flight) -> None:
        """Have it computed. OpenAIError where there is no room now, or not any more."""
        with self._changed:
            self.require_room(len(flight.jobs))
            self._num_live += len(flight.jobs)
            self._inbox.append(flight)
            self._changed.notify()

    def abort(self, flight: Flight, indices: Sequence[int], outcome: str = "aborted") -> None:
        """Nobody waits for these sequences of a flight any more. What has ended is left alone."""
        with self._changed:
            self._inbox.append(_Abort(flight, indices, outcome))
            self._changed.notify()

    def stop(self, patience: float) -> None:
        """Take nothing more; `run` returns once what is live has ended, at most `patience` seconds from now."""
        with self._changed:
            self._stop_at = time.monotonic() + patience
            self._changed.notify()

    @property
    def num_live(self) -> int:
        """Sequences that wait or are computed."""
        return self._num_live

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is taken."""
        return self._stop_at is not None

    @property
    def ailment(self) -> str | None:
        """Why the server is not well; None where it is."""
        if self._num_failures >= _PATIENCE and time.monotonic() - self._failed_at < _AILING:
            return f"the last {self._num_failures} steps failed; the log has why"
        if (seconds := time.monotonic() - self._turned) > _STUCK:
            return f"the engine has not answered for {seconds:.0f} s"
        return None

    # on the engine's thread

    def run(self) -> None:
        """Step until stopped; then whatever is still live is told so."""
        try:
            while self._goes_on():
                self._turn()
        finally:
            self._stop_at = time.monotonic()
            self._give_up(stopping())

    def _goes_on(self) -> bool:
        stop_at = self._stop_at
        return stop_at is None or (self._num_live > 0 and time.monotonic() < stop_at)

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
            else:
                self._admit(item)
        if is_busy or inbox:
            self._step()
        self.stats = engine.stats
        if self._feed is not None:
            self._is_fed = not self._feed.pump()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # the engine stays whole; its requests wait again
            _log.exception("a step failed: %s", error)
            self.tally.failed_steps += 1
            self._num_failures += 1
            self._failed_at = time.monotonic()
            if self._num_failures >= _PATIENCE:
                self._give_up(_engine_error())
            return
        if any(output.token_id is not None for output in outputs):  # one with nothing to compute proves nothing
            self._num_failures = 0
        self._pass_on(outputs)

    def _admit(self, flight: Flight) -> None:
        try:
            for index, job in enumerate(flight.jobs):
                request_id = self.engine.add_request(job.prompt, job.params, request_id=next(self._ids))
                flight.request_ids[index] = request_id
                seat = self._seats[request_id] = _Seat(flight, index, self.engine.request(request_id))
                if self._feed is not None and self.engine.config.enable_prefix_caching:
                    self._feed.begin_at(seat.request.chain.parent(0))
        except RequestError as error:
            self._refuse(flight, OpenAIError(400, str(error), code="invalid_value"))
        except Exception as error:  # it is this flight's alone: the others go on
            _log.exception("a request could not be taken in: %s", error)
            self._refuse(flight, _engine_error())

    def _refuse(self, flight: Flight, error: OpenAIError) -> None:
        """End all that is left of a flight; its client is told why."""
        self._abort(_Abort(flight, range(len(flight.jobs)), "failed"))
        flight.tell([error])

    def _abort(self, abort: _Abort) -> None:
        flight = abort.flight
        for index in flight.unfinished.intersection(abort.indices):
            if (request_id := flight.request_ids[index]) is not None:
                self._seats.pop(request_id, None)
                self.engine.abort(request_id)
            self._end(flight, index, abort.outcome)

    def _end(self, flight: Flight, index: int, outcome: str) -> None:
        flight.unfinished.discard(index)
        self.stats = self.engine.stats  # who hears of this end finds it in the figures
        self.tally.outcomes[outcome] += 1
        with self._changed:
            self._num_live -= 1

    def _give_up(self, error: OpenAIError) -> None:
        with self._changed:
            inbox, self._inbox = self._inbox, []
        seated = [seat.flight for seat in self._seats.values()]
        for flight in dict.fromkeys([*seated, *(item for item in inbox if isinstance(item, Flight))]):
            self._refuse(flight, error)

    def _pass_on(self, outputs: Sequence[Output]) -> None:
        told: dict[Flight, list[News | OpenAIError]] = {}
        for output in outputs:
            seat = self._seats.get(output.request_id)
            if seat is None or output.token_id is None:  # aborted: nobody waits
                continue
            cached = None if seat.is_told else self._first_token(seat)
            news = News(seat.index, output.token_id, output.finish_reason, cached)
            told.setdefault(seat.flight, []).append(news)
            if output.finish_reason is not None:
                del self._seats[output.request_id]
                self._end(seat.flight, seat.index, output.finish_reason)
        for flight, items in told.items():
            flight.tell(items)

    def _first_token(self, seat: _Seat) -> Mapping[str, int]:
        seat.is_told = True
        cached = seat.request.cached_tokens
        self.tally.cached.update(cached)
        if seat.request.ttft is not None:
            self.tally.ttft.observe(seat.request.ttft)
        return cached


def _engine_error() -> OpenAIError:
    return OpenAIError(500, "an error of the engine's; its log has it", code="engine_error")


def stopping() -> OpenAIError:
    """The server ends."""
    return OpenAIError(503, "the server is stopping; ask another", code="stopping")
