"""The replicas behind the router: whether each is there, what it says it is, and what it has been given to do."""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvtier.connector.events import MAX_BLOCK_SIZE
from kvtier.service.router_client import Answer, Deadlines, Failure, Headers, ReplicaClient, ReplicaFailed
from kvtier.service.router_spec import Publishers, ReplicaSpec

_log = logging.getLogger(__name__)

_MAX_PAGE: Final = 1 << 20  # bytes of a page of a replica's
_PROBES: Final = ("/readyz", "/healthz", "/health")  # ours, many a server's, vLLM's: the first that is there
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_NAMESPACE: Final = re.compile("[0-9a-f]{32}")
_EVERY: Final = 1.0  # seconds between looks at what a replica has to do, and whether it hangs
_LOAD_PATIENCE: Final = 5.0  # seconds it may take over one: who has much to do may be slow to say so
_HOPELESS: Final = 5.0  # seconds one must be down until answers that have not begun are no longer waited for
_MAX_LIVE: Final = 1_000_000  # requests it may say it has
_RUNNING: Final = 1.0  # blocks of work in an answer that has begun
_USUAL: Final = 8.0  # blocks of work in a request the router knows nothing of


class State(StrEnum):
    """Where a replica stands."""

    JOINING = "joining"  # not heard of yet, or not ready yet
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"  # of another block size or model, or wants another key
    DRAINING = "draining"  # there, and takes nothing new


@dataclass(frozen=True, slots=True)
class Nature:
    """What a replica says it is, by its `/v1/models`."""

    models: tuple[Mapping[str, Any], ...]
    block_size: int | None  # None where it does not say
    fingerprint: str | None
    publishers: Publishers
    namespace: str | None = None  # of the chains of requests that name no tenant, where those have a salt

    @property
    def names(self) -> list[str]:
        """Of its models."""
        return sorted(str(model["id"]) for model in self.models)

    @classmethod
    def of(cls, page: object) -> "Nature":
        """Of the page's JSON. ReplicaFailed where it is none of an OpenAI server's."""
        entries = page.get("data") if isinstance(page, dict) else None
        models: list[Any] = entries if isinstance(entries, list) else [None]
        if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
            raise ReplicaFailed(Failure.GARBLED, "/v1/models is no list of models")
        ours: dict[str, Any] = next((m["kvtier"] for m in models if isinstance(m.get("kvtier"), dict)), {})
        size, fingerprint, namespace = (ours.get(name) for name in ("block_size", "fingerprint", "namespace"))
        if size is not None and not (type(size) is int and 1 <= size <= MAX_BLOCK_SIZE):
            raise ReplicaFailed(Failure.GARBLED, f"block_size {size!r:.40} is no number of tokens from 1 to 4096")
        return cls(
            tuple(models),
            size,
            fingerprint if isinstance(fingerprint, str) and _DIGEST.fullmatch(fingerprint) else None,
            Publishers(*_publisher(ours.get("events")), *_publisher(ours.get("node"))),
            namespace if isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace) else None,
        )


def _publisher(value: object) -> tuple[str | None, str | None]:
    """Where it publishes, and where it replays."""
    found = value if isinstance(value, dict) else {}
    publish, replay = (at if isinstance(at := found.get(name), str) else None for name in ("publish", "replay"))
    return publish, replay if publish is not None else None


@dataclass(frozen=True, slots=True)
class Terms:
    """What replicas are held to."""

    interval: float  # seconds between two looks
    timeout: float  # seconds a look may take
    headers: Headers = ()  # what every request to a replica carries
    max_requests: int = 256  # at one replica at a time


class Work:
    """A request's share of a replica's load, from `begin` to `end`."""

    def __init__(self, replica: "Replica", num_blocks: float) -> None:
        self._replica = replica
        self._blocks = max(num_blocks, _RUNNING)
        replica.num_requests += 1
        replica.in_flight += 1
        replica.given += self._blocks

    def begun(self) -> None:
        """Its first byte is here: the prompt is computed."""
        self._become(_RUNNING)

    def end(self) -> None:
        """Its answer is at its end, however. Once."""
        self._become(0.0)
        self._replica.in_flight -= 1

    def _become(self, blocks: float) -> None:
        self._replica.given += blocks - self._blocks
        self._blocks = blocks


class Replica:
    """One replica. `run` keeps its state true; all of it belongs to the router's event loop."""

    def __init__(self, spec: ReplicaSpec, terms: Terms, judge: "Callable[[Replica, Nature], str | None]") -> None:
        """`judge` says why a replica of that nature can't be taken in, or takes it in."""
        self.spec = spec
        self.client = ReplicaClient(spec.host, spec.port, self._lost)
        self.state = State.JOINING
        self.why = "not heard of yet"
        self._since = time.monotonic()  # in that state
        self.nature: Nature | None = None
        self.in_flight = 0
        self.given = 0.0  # blocks of work of our own requests
        self.others = 0.0  # blocks of work it has of somebody else, estimated
        self.num_requests = 0
        self.errors: Counter[str] = Counter()
        self._terms, self._judge = terms, judge
        self._deadlines = Deadlines(terms.timeout, terms.timeout, terms.timeout)
        self._probe: str | None = None  # the page that says whether it is well, once it is known which
        self._is_known = False  # nothing says that it may be another one than was taken in
        self._alarm = asyncio.Event()

    @property
    def name(self) -> str:
        """HOST:PORT, as everywhere."""
        return self.spec.name

    @property
    def load(self) -> float:
        """Blocks of work it has been given and not finished, by us and by others."""
        return self.given + self.others

    @property
    def is_hopeless(self) -> bool:
        """Whether it has been down for so long that an answer it has not begun should be had of another."""
        return self.state is State.DOWN and time.monotonic() - self._since > _HOPELESS

    @property
    def limit(self) -> float:
        """Of `load`, for the policy: none, until it has all the requests it may have."""
        return float("inf") if self.in_flight < self._terms.max_requests else 0.0

    async def run(self) -> None:
        """Look, for ever, at once where something speaks for it; and beside that, at what it has to do."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._see_loads())
            while True:
                await self.look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._terms.interval):
                        await self._alarm.wait()
                self._alarm.clear()

    async def look(self) -> None:
        """One look: its state is what was seen."""
        try:
            async with asyncio.timeout(self._terms.timeout):
                is_ready = await self._is_ready()
                if not is_ready:
                    was_up = self.state in (State.UP, State.DRAINING)
                    self._become(State.DRAINING if was_up else State.JOINING, "it says it is not ready")
                elif self._is_known and self.state in (State.UP, State.DRAINING):
                    self._become(State.UP, "")
                else:
                    await self._join()
        except TimeoutError:
            self._become(State.DOWN, f"no answer within {self._terms.timeout:g} s")
        except ReplicaFailed as error:
            self._become(State.DOWN, str(error))
        except Exception as error:  # whatever it says, it is looked at again
            _log.exception("replica %s", self.name)
            self._become(State.DOWN, f"what it says cannot be read: {error!r:.80}")

    def failed(self, failure: Failure) -> None:
        """A request found it failing. A broken connection counts at once; the next look, now, may take that back."""
        self.errors[failure] += 1
        if failure in (Failure.UNREACHABLE, Failure.BROKEN, Failure.SLOW_CONNECT) and self.state is State.UP:
            self._become(State.DOWN, f"a request found it {failure}")
        self._look_now()

    def _lost(self) -> None:
        """It hung up: who listens there next may be another."""
        self._is_known = False
        self._look_now()

    def _look_now(self) -> None:
        self._alarm.set()

    async def _is_ready(self) -> bool:
        for path in _PROBES if self._probe is None else (self._probe,):
            status, _ = await self._page(path, self._deadlines)
            if status == 404:
                self._probe = None
                continue
            self._probe = path
            if status == 503 and path == _PROBES[0]:
                return False
            if status != 200:
                raise ReplicaFailed(Failure.GARBLED, f"{path} answers {status}")
            return True
        raise ReplicaFailed(Failure.GARBLED, f"none of {', '.join(_PROBES)} is there")

    async def _join(self) -> None:
        self._is_known = True
        status, body = await self._page("/v1/models", self._deadlines)
        if status in (401, 403):  # and so it would answer our clients, who know of no key of its
            self._become(State.REFUSED, f"/v1/models answers {status}; set [router] replica_token to its key")
            return
        if status != 200:
            raise ReplicaFailed(Failure.GARBLED, f"/v1/models answers {status}")
        try:
            nature = Nature.of(json.loads(body))
        except (ValueError, RecursionError):
            raise ReplicaFailed(Failure.GARBLED, "/v1/models is no JSON") from None
        refusal = self._judge(self, nature)
        if refusal is not None:
            self._become(State.REFUSED, refusal)
            return
        self.nature = nature
        self._become(State.UP, "")

    async def _see_loads(self) -> None:
        """For ever: what it has to do beyond our requests; nothing where it does not say."""
        patience = Deadlines(self._terms.timeout, _LOAD_PATIENCE, _LOAD_PATIENCE)
        while True:
            if self.state is State.UP and self.nature is not None and self.nature.block_size is not None:
                try:
                    async with asyncio.timeout(_LOAD_PATIENCE):
                        self._take_load(*await self._page("/status", patience))
                except (TimeoutError, ReplicaFailed):  # whether it lives, `look` says
                    self.others = 0.0
                    self.errors["no_status"] += 1
            await asyncio.sleep(_EVERY)

    def _take_load(self, status: int, body: bytes) -> None:
        try:
            page: Any = json.loads(body) if status == 200 else None
            num_requests = min(int(page["requests"]["live"]), _MAX_LIVE)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            num_requests = 0
        usual = self.given / self.in_flight if self.in_flight else _USUAL
        self.others = max(0, num_requests - self.in_flight) * usual

    async def _page(self, path: str, deadlines: Deadlines) -> tuple[int, bytes]:
        answer: Answer = await self.client.ask("GET", path, self._terms.headers, b"", deadlines)
        try:
            return answer.status, await answer.read(_MAX_PAGE)
        finally:
            answer.close()

    def _become(self, state: State, why: str) -> None:
        is_news = (state, why) != (self.state, self.why)
        is_same = self.state is state
        if not is_same:
            self._since = time.monotonic()
        self.state, self.why = state, why
        if not is_news:
            return
        if state is State.UP:
            _log.info("replica %s is up", self.name)
        elif state is State.REFUSED or not (is_same or state is State.JOINING):
            _log.warning("replica %s is %s: %s", self.name, state, why)


class Fleet:
    """All replicas, and what they must agree upon: the first that is taken in says what that is."""

    def __init__(
        self, specs: Sequence[ReplicaSpec], terms: Terms, joined: Callable[[Replica, Publishers], None]
    ) -> None:
        """`joined` is told of each that is taken in, and where it publishes."""
        self._joined = joined
        self.replicas = [Replica(spec, terms, self._judge) for spec in specs]
        self._by_name = {replica.name: replica for replica in self.replicas}
        self._first: tuple[str, Nature] | None = None
        self._sized: tuple[str, int] | None = None  # the first that has said its block size
        self._tasks: list[asyncio.Task[None]] = []

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    @property
    def block_size(self) -> int | None:
        """Tokens in a block of all of them; None until one has said it."""
        return None if self._sized is None else self._sized[1]

    @property
    def fingerprint(self) -> str | None:
        """Of their model, in hexadecimal; None where nobody has said it."""
        return None if self._first is None else self._first[1].fingerprint

    @property
    def namespace(self) -> str | None:
        """Of the chains of requests that name no tenant; None where they have none."""
        return None if self._first is None else self._first[1].namespace

    def adapter(self, model: object) -> str | None:
        """The name of the adapter that is asked for by this name of a model; None where it is a model itself."""
        parents = {entry["id"]: entry.get("parent") for entry in self.models()}
        return model if isinstance(model, str) and isinstance(parents.get(model), str) else None

    def models(self) -> list[Mapping[str, Any]]:
        """What they serve, each model once."""
        found = {m["id"]: m for replica in self.replicas if replica.nature is not None for m in replica.nature.models}
        return list(found.values())

    async def start(self) -> None:
        """Look at all of them once, in the order they were named, then go on until `stop`."""
        for replica in self.replicas:
            await replica.look()
        self._tasks = [asyncio.create_task(replica.run()) for replica in self.replicas]
        self._tasks.append(asyncio.create_task(self._move_on()))

    async def stop(self) -> None:
        """Look no more, and hang up everywhere."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.client.close()

    async def _move_on(self) -> None:
        """For ever: where one is up, have nobody wait for an answer to begin at one that hangs."""
        while True:
            if any(replica.state is State.UP for replica in self.replicas):
                for replica in self.replicas:
                    if replica.is_hopeless:
                        replica.client.give_up()
            await asyncio.sleep(_EVERY)

    def _judge(self, replica: Replica, nature: Nature) -> str | None:
        told, given = nature.block_size, replica.spec.block_size
        if None not in (told, given) and told != given:
            return f"block_size {told}, but its --replica says {given}; give what it has"
        size = told or given
        if size is not None and self._sized is not None and size != self._sized[1]:
            return f'block_size {size}, but {self._sized[1]} of "{self._sized[0]}"'
        publishers = replica.spec.publishers.agreed(nature.publishers.reached_at(replica.spec.host))
        refusal = publishers if isinstance(publishers, str) else self._other_model(nature)
        if refusal is not None or isinstance(publishers, str):
            return refusal
        self._first = self._first or (replica.name, nature)
        self._sized = self._sized or (None if size is None else (replica.name, size))
        self._joined(replica, publishers)
        return None

    def _other_model(self, nature: Nature) -> str | None:
        if self._first is None:
            return None
        first, known = self._first
        if nature.names != known.names:
            return f'model {_quoted(nature.names)}, but {_quoted(known.names)} of "{first}"'
        if None not in (nature.fingerprint, known.fingerprint) and nature.fingerprint != known.fingerprint:
            return f'fingerprint {nature.fingerprint}, but {known.fingerprint} of "{first}"'
        if nature.fingerprint is not None and nature.namespace != known.namespace and known.fingerprint is not None:
            told, first_told = (each or "none" for each in (nature.namespace, known.namespace))
            return f'namespace {told}, but {first_told} of "{first}"; give both one [cache] cache_salt'
        return None


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"
