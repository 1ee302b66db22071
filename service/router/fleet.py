"""One replica behind the router, and all of them: who joins and leaves, who serves which version, how long it takes."""

import asyncio
import itertools
import json
import logging
import math
import re
import ssl
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from kvtier.service.events import MAX_BLOCK_SIZE
from kvtier.service.observe import statuses
from kvtier.service.router import scores as interpreted
from kvtier.service.router.client import Deadlines, Failure, Headers, ReplicaAnswer, ReplicaClient, ReplicaFailed
from kvtier.service.router.replica_list import Publishers, ReplicaSpec
from kvtier.tiers.compiled import extension

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtier.service.router.scores import Scores


def make_scores(num_replicas: int) -> "Scores":
    """Columns for so many replicas, compiled where that was built."""
    form: Any = extension("kvtier.service.router.scores_compiled") or interpreted
    made: Scores = form.Scores(num_replicas)
    return made


# --- what it says of itself at /v1/models ----------------------------------------------------------------------------

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_NAMESPACE: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ReplicaProfile:
    models: tuple[Mapping[str, Any], ...]
    block_size: int | None  # None if it is not reported
    fingerprint: str | None
    publishers: Publishers
    namespace: str | None = None  # for chains of requests that name no tenant, if those have a salt

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(model["id"]) for model in self.models)

    @property
    def bases(self) -> tuple[str, ...]:
        return tuple(sorted(str(model["id"]) for model in self.models if not isinstance(model.get("parent"), str)))

    @classmethod
    def of(cls, page: object) -> "ReplicaProfile":
        """Parse the page's JSON. Raises ReplicaFailed if it is not an OpenAI server's."""
        entries = page.get("data") if isinstance(page, dict) else None
        models: list[Any] = entries if isinstance(entries, list) else [None]
        if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
            raise ReplicaFailed(Failure.GARBLED, "/v1/models has no list of models")
        ours: dict[str, Any] = next((m["kvtier"] for m in models if isinstance(m.get("kvtier"), dict)), {})
        size, fingerprint, namespace = (ours.get(name) for name in ("block_size", "fingerprint", "namespace"))
        if size is not None and not (type(size) is int and 1 <= size <= MAX_BLOCK_SIZE):
            raise ReplicaFailed(Failure.GARBLED, f"block_size {size!r:.40} is not a number of tokens from 1 to 4096")
        return cls(
            tuple(models),
            size,
            fingerprint if isinstance(fingerprint, str) and _DIGEST.fullmatch(fingerprint) else None,
            Publishers(*_publisher(ours.get("events")), *_publisher(ours.get("node"))),
            namespace if isinstance(namespace, str) and _NAMESPACE.fullmatch(namespace) else None,
        )


def _publisher(value: object) -> tuple[str | None, str | None]:
    found = value if isinstance(value, dict) else {}
    publish, replay = (at if isinstance(at := found.get(name), str) else None for name in ("publish", "replay"))
    return publish, replay if publish is not None else None


class ModelVersion:
    """What replicas must agree on so that one index serves them all. What one does not report, the next may."""

    def __init__(self, number: int, profile: ReplicaProfile, block_size: int | None) -> None:
        self._number, self.block_size = number, block_size
        self.fingerprint = profile.fingerprint
        self.namespace = profile.namespace
        self._bases = profile.bases

    def takes(self, profile: ReplicaProfile, block_size: int | None) -> bool:
        both_known = None not in (profile.fingerprint, self.fingerprint)
        if both_known and (profile.fingerprint, profile.namespace) != (self.fingerprint, self.namespace):
            return False
        if None not in (block_size, self.block_size) and block_size != self.block_size:
            return False
        return both_known or profile.bases == self._bases

    def learn(self, profile: ReplicaProfile, block_size: int | None) -> None:
        self.block_size = self.block_size or block_size
        if self.fingerprint is None and profile.fingerprint is not None:
            self.fingerprint, self.namespace = profile.fingerprint, profile.namespace

    def __str__(self) -> str:
        parts = [
            f"fingerprint {self.fingerprint}" if self.fingerprint else "no fingerprint",
            f"block_size {self.block_size or 'not known'}",
            f"namespace {self.namespace}" if self.namespace else "",
            f"models {', '.join(self._bases)}",
        ]
        return ", ".join(filter(None, parts))

    @property
    def seed(self) -> int:
        """Its own in rankings; the same in every router if the fingerprint is known."""
        return xxhash.xxh3_64_intdigest((self.fingerprint or str(self._number)).encode())


# --- how long its requests wait, by its own metrics ------------------------------------------------------------------

PERIOD: Final = 5.0  # seconds between two reads of a replica's metrics
_KEPT: Final = 13  # reads: figures are of the last minute
_MOST_BOUNDS: Final = 200  # of a histogram's buckets
# Histograms of seconds, by what they measure: kvtier's, vLLM's, SGLang's.
_FAMILIES: Final[Mapping[bytes, str]] = {
    b"kvtier_engine_ttft_seconds": "ttft",
    b"vllm:time_to_first_token_seconds": "ttft",
    b"sglang:time_to_first_token_seconds": "ttft",
    b"kvtier_engine_itl_seconds": "itl",
    b"vllm:inter_token_latency_seconds": "itl",
    b"sglang:inter_token_latency_seconds": "itl",
}
_BUCKET: Final = re.compile(
    rb"^("
    + b"|".join(_FAMILIES)
    + rb')_bucket\{[^}\n]{0,1000}?\ble="([^"\n]{1,32})"[^}\n]{0,1000}\} ([0-9.eE+]{1,32})',
    re.MULTILINE,
)

_Observed = dict[str, dict[float, float]]  # what → upper bound in seconds → observations up to it


class Latencies:
    """Of one replica. Figures are of the observations between the oldest and the newest read that are kept."""

    def __init__(self) -> None:
        self._reads: deque[_Observed] = deque(maxlen=_KEPT)

    def read(self, page: bytes) -> None:
        """Take in a page of metrics in Prometheus' text format. What is no histogram of these is passed over."""
        found: _Observed = {}
        for family, bound, value in _BUCKET.findall(page):
            buckets = found.setdefault(_FAMILIES[family], {})
            try:
                at, count = float(bound), float(value)
            except ValueError:
                continue
            if at in buckets or len(buckets) < _MOST_BOUNDS:
                buckets[at] = buckets.get(at, 0.0) + count  # engines in one process: their sum
        totals = [
            {what: max(each.values(), default=0.0) for what, each in read.items()}
            for read in (found, *list(self._reads)[-1:])
        ]
        if any(totals[0].get(what, 0.0) < before for what, before in totals[-1].items()):
            self._reads.clear()  # it has started anew
        self._reads.append(found)

    def figures(self) -> dict[str, statuses.LatencyFigures]:
        found = {}
        if self._reads:
            first, last = self._reads[0], self._reads[-1]
            for what, buckets in last.items():
                before = first.get(what, {})
                grown = sorted((bound, max(0.0, count - before.get(bound, 0.0))) for bound, count in buckets.items())
                if grown and (total := grown[-1][1]) > 0:
                    p50, p95 = (round(_quantile(grown, share * total), 6) for share in (0.5, 0.95))
                    found[what] = statuses.LatencyFigures(num=int(total), p50_s=p50, p95_s=p95)
        return found


def _quantile(buckets: list[tuple[float, float]], wanted: float) -> float:
    """Below which so many observations lie, as if those in a bucket lay evenly; of the last one, its lower end."""
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


# --- its state and its work ------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_MAX_PAGE: Final = 1 << 20  # bytes of a page of a replica's
_PROBES: Final = ("/readyz", "/healthz", "/health")  # kvtier's, many servers', vLLM's: the first that exists
EVERY: Final = 1.0  # seconds between two reads of a replica's load, and checks whether it hangs
_NO_METRICS: Final = 60.0  # seconds until a replica without metrics is queried for them again
_LOAD_PATIENCE: Final = 5.0  # seconds a read of its load may take: a busy replica may be slow to answer
_LATE: Final = (Failure.SLOW_CONNECT, Failure.SLOW_FIRST_BYTE, Failure.STALLED)
_HOPELESS: Final = 5.0  # seconds a replica must be down before waits for its answers are given up
_MAX_LIVE: Final = 1_000_000  # most requests that a replica's report may claim
_RUNNING: Final = 1.0  # blocks of work in an answer that has begun
_USUAL: Final = 8.0  # blocks of work in a request of unknown size


class ReplicaState(StrEnum):
    JOINING = "joining"  # not probed yet, or not ready yet
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"  # it contradicts its spec, or wants another key
    DRAINING = "draining"  # running, but takes no new requests


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    interval: float  # seconds between two probes
    timeout: float  # seconds a probe may take
    headers: Headers = ()  # sent with every request to a replica
    max_requests: int = 256  # at one replica at a time
    max_late: int = 3  # late probes in a row before the replica counts as down
    tls: ssl.SSLContext | None = None  # verifies the certificates of https replicas


class AssignedWork:
    def __init__(self, replica: "Replica", num_blocks: float) -> None:
        self._replica, self.name = replica, replica.name
        self._blocks = max(num_blocks, _RUNNING)
        self.is_coming = True  # its prompt is being computed, so its blocks are not announced yet
        replica.num_requests += 1
        replica.has_work(self._blocks, 1)

    def begun(self) -> None:
        """The answer's first byte is here, so the prompt is computed."""
        self.is_coming = False
        self._replica.has_work(_RUNNING - self._blocks, 0)
        self._blocks = _RUNNING

    def end(self) -> None:
        self.is_coming = False
        self._replica.has_work(-self._blocks, -1)
        self._blocks = 0.0


class Replica:
    """One replica. `run` keeps its state up to date; all of it belongs to the router's event loop."""

    def __init__(
        self,
        spec: ReplicaSpec,
        terms: ProbeSettings,
        judge: "Callable[[Replica, ReplicaProfile], str | None]",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`judge` takes a replica in, and gives it its version; or it returns why that cannot be.

        `changed` is called after each change of its state, its version or its models.
        """
        self.spec, self.name = spec, spec.name
        tls = terms.tls if spec.is_tls else None
        self.client = ReplicaClient(spec.host, spec.port, self._lost, tls, spec.server_name)
        self.state = ReplicaState.JOINING
        self.why = "not heard of yet"
        self.since = time.monotonic()  # monotonic time of the last change of state
        self.profile: ReplicaProfile | None = None
        self.version: ModelVersion | None = None  # of its model, once it has joined
        self._names = frozenset[str]()  # of the models it serves
        self.in_flight = 0
        self.given = 0.0  # blocks of work of this router's requests
        self.others = 0.0  # estimated blocks of work that others gave it
        self.beside = (0, 0.0)  # requests and blocks of work that other processes of this router gave it
        self.num_requests = 0
        self.errors: Counter[str] = Counter()
        self.latencies = Latencies()
        self._terms, self._judge, self._changed = terms, judge, changed
        self._scores: tuple[Scores, int] | None = None  # where its work stands in columns, and its row there
        self._deadlines = Deadlines(terms.timeout, terms.timeout, terms.timeout)
        self._probe: str | None = None  # the health page that this replica has, once known
        self._is_known = False  # nothing suggests that another process answers there now
        self._num_late = 0  # late probes in a row
        self._alarm = asyncio.Event()  # probe now

    def set_terms(self, terms: ProbeSettings) -> None:
        self._terms, self._deadlines = terms, Deadlines(terms.timeout, terms.timeout, terms.timeout)
        if terms.tls is not None:
            self.client.trust(terms.tls)
        self._stand()
        self._alarm.set()

    def serves(self, model: object) -> bool:
        return not isinstance(model, str) or self.profile is None or model in self._names

    @property
    def load(self) -> float:
        return self.given + self.others + self.beside[1]

    @property
    def num_live(self) -> int:
        """Requests under way from this router, all its processes."""
        return self.in_flight + self.beside[0]

    def has_work(self, more: float, requests: int) -> None:
        """So many blocks of work more than before, and so many requests."""
        self.given += more
        self.in_flight += requests
        self._stand()

    def has_beside(self, requests: int, blocks: float) -> None:
        """What other processes of this router gave it, from now on."""
        self.beside = requests, blocks
        self._stand()

    def stand(self, scores: "Scores | None", row: int = 0) -> None:
        """Keep its load in a row of these columns from now on; None: in none."""
        self._scores = None if scores is None else (scores, row)
        self._stand()

    def _stand(self) -> None:
        if self._scores is not None:
            scores, row = self._scores
            scores.standing(row, self.load, self.limit, self.num_live)

    @property
    def limit(self) -> float:
        """The limit of `load` for the policy: none, until it has `max_requests` requests."""
        return float("inf") if self.num_live < self._terms.max_requests else 0.0

    async def run(self) -> None:
        """Run until cancelled: probe at each interval, or at once after an alarm, and read its load."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_loads())
            tasks.create_task(self._read_latencies())
            while True:
                await self.look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._terms.interval):
                        await self._alarm.wait()
                self._alarm.clear()

    async def look(self) -> None:
        try:
            async with asyncio.timeout(self._terms.timeout):
                is_ready = await self._is_ready()
                if not is_ready:
                    was_up = self.state in (ReplicaState.UP, ReplicaState.DRAINING)
                    self._become(ReplicaState.DRAINING if was_up else ReplicaState.JOINING, "it says it is not ready")
                elif self._is_known and self.state in (ReplicaState.UP, ReplicaState.DRAINING):
                    self._become(ReplicaState.UP, "")
                else:
                    await self._join()
            self._num_late = 0
        except TimeoutError:
            self._late(f"no answer within {self._terms.timeout:g} s")
        except ReplicaFailed as error:
            if error.failure in _LATE:
                self._late(str(error))
            else:  # certain at once, such as a refused connection
                self._become(ReplicaState.DOWN, str(error))
        except Exception as error:  # whatever a replica answers, it is probed again
            _log.exception("replica %s", self.name)
            self._become(ReplicaState.DOWN, f"its answer cannot be read: {error!r:.80}")

    def leave(self) -> None:
        self._become(ReplicaState.DRAINING, "it has left the list")

    def _late(self, why: str) -> None:
        """A probe took too long. A replica in use may only be busy: it is down after several in a row."""
        self._num_late += 1
        if self._num_late >= self._terms.max_late or self.state not in (ReplicaState.UP, ReplicaState.DRAINING):
            self._become(ReplicaState.DOWN, why)

    def failed(self, failure: Failure) -> None:
        """Count a failed request. A broken connection marks it down at once; the next probe, now, may undo that."""
        self.errors[failure] += 1
        if failure in (Failure.UNREACHABLE, Failure.BROKEN, Failure.UNTRUSTED) and self.state is ReplicaState.UP:
            self._become(ReplicaState.DOWN, f"a request failed: {failure}")
        self._alarm.set()

    def _lost(self) -> None:
        """It closed a connection: the next process that listens there may be another."""
        self._is_known = False
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
        raise ReplicaFailed(Failure.GARBLED, f"none of {', '.join(_PROBES)} exists")

    async def _join(self) -> None:
        self._is_known = True
        status, body = await self._page("/v1/models", self._deadlines)
        if status in (401, 403):  # it would answer clients the same way, since they do not know its key
            self._become(ReplicaState.REFUSED, f"/v1/models answers {status}; set [router] replica_token to its key")
            return
        if status != 200:
            raise ReplicaFailed(Failure.GARBLED, f"/v1/models answers {status}")
        try:
            profile = ReplicaProfile.of(json.loads(body))
        except (ValueError, RecursionError):
            raise ReplicaFailed(Failure.GARBLED, "/v1/models is not JSON") from None
        refusal = self._judge(self, profile)
        if refusal is not None:
            self._become(ReplicaState.REFUSED, refusal)
            return
        self.profile, self._names = profile, profile.names
        self._changed()
        self._become(ReplicaState.UP, "")

    async def _read_loads(self) -> None:
        """Run until cancelled: estimate the work it has from others; none if it does not report any."""
        patience = Deadlines(self._terms.timeout, _LOAD_PATIENCE, _LOAD_PATIENCE)
        while True:
            if self.state is ReplicaState.UP and self.profile is not None and self.profile.block_size is not None:
                try:
                    async with asyncio.timeout(_LOAD_PATIENCE):
                        self._take_load(*await self._page("/status", patience))
                except (TimeoutError, ReplicaFailed):  # `look` decides whether it is alive
                    self.others = 0.0
                    self._stand()
                    self.errors["no_status"] += 1
            await asyncio.sleep(EVERY)

    async def _read_latencies(self) -> None:
        """Run until cancelled: read its metrics for people, if it has such a page."""
        patience = Deadlines(self._terms.timeout, _LOAD_PATIENCE, _LOAD_PATIENCE)
        pause = PERIOD
        while True:
            await asyncio.sleep(pause)
            if self.state is ReplicaState.UP:
                with suppress(TimeoutError, ReplicaFailed):  # `look` decides whether it is alive
                    async with asyncio.timeout(_LOAD_PATIENCE):
                        status, body = await self._page("/metrics", patience)
                    self.latencies.read(body if status == 200 else b"")
                    pause = PERIOD if status == 200 else _NO_METRICS

    def _take_load(self, status: int, body: bytes) -> None:
        try:
            page: Any = json.loads(body) if status == 200 else None
            num_requests = min(int(page["requests"]["live"]), _MAX_LIVE)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            num_requests = 0
        usual = self.given / self.in_flight if self.in_flight else _USUAL
        self.others = max(0, num_requests - self.num_live) * usual
        self._stand()

    async def _page(self, path: str, deadlines: Deadlines) -> tuple[int, bytes]:
        answer: ReplicaAnswer = await self.client.ask("GET", path, self._terms.headers, b"", deadlines)
        try:
            return answer.status, await answer.read(_MAX_PAGE)
        finally:
            answer.close()

    def _become(self, state: ReplicaState, why: str) -> None:
        is_news = (state, why) != (self.state, self.why)
        is_same = self.state is state
        if not is_same:
            self.since = time.monotonic()
        self.state, self.why = state, why
        self._changed()
        if not is_news:
            return
        if state is ReplicaState.UP:
            _log.info("replica %s is up", self.name)
        elif state is ReplicaState.REFUSED or not (is_same or state is ReplicaState.JOINING):
            _log.warning("replica %s is %s: %s", self.name, state, why)


# --- all replicas ----------------------------------------------------------------------------------------------------

_REMEMBERED: Final = 1 << 16  # conversations
_PRESENT: Final = (ReplicaState.UP, ReplicaState.DRAINING, ReplicaState.DOWN)


class LivingVersions:
    """The versions that replicas have now. Belongs to the router's event loop.

    A conversation stays with its version while that has a replica up. New ones are shared out by how many replicas a
    version has.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._of_session: OrderedDict[bytes, ModelVersion] = OrderedDict()  # the last used at the end

    def joined(self, replica: Replica, profile: ReplicaProfile, size: int | None, fleet: Sequence[Replica]) -> bool:
        living = self.of(each for each in fleet if each is not replica)
        version = next((each for each in living if each.takes(profile, size)), None)
        is_new = version is None
        replica.version = version = version or ModelVersion(next(self._numbers), profile, size)
        version.learn(profile, size)
        return is_new

    @staticmethod
    def of(replicas: Iterable[Replica]) -> list[ModelVersion]:
        found = Counter(each.version for each in replicas if each.version is not None and each.state in _PRESENT)
        return [version for version, _ in found.most_common()]

    @staticmethod
    def able(replicas: Sequence[Replica]) -> Counter[ModelVersion]:
        """How many replicas that are up each version has; of all replicas, if none is up."""
        able = [each for each in replicas if each.state is ReplicaState.UP] or replicas
        return Counter(each.version for each in able if each.version is not None)

    def choose(self, number: Counter[ModelVersion], session: bytes | None, start: object) -> ModelVersion | None:
        """The version for this conversation, or by `start`, of those that are `able`; None: there is none."""
        if session is None:
            return _drawn(number, start)
        version = self._of_session.pop(session, None)
        if version not in number:
            version = _drawn(number, session)
        if version is not None:
            self._of_session[session] = version
            if len(self._of_session) > _REMEMBERED:
                self._of_session.popitem(last=False)
        return version


def _drawn(number: Counter[ModelVersion], key: object) -> ModelVersion | None:
    """One version, as likely as it has replicas: weighted rendezvous hashing, so that few keys move with a replica."""
    if len(number) <= 1:
        return next(iter(number), None)

    packed = repr(key).encode()

    def rank(version: ModelVersion) -> float:
        share = (xxhash.xxh3_64_intdigest(packed, version.seed) + 0.5) / 2**64
        return -number[version] / math.log(share)

    return max(number, key=rank)


class _View:
    """What all replicas are together, until one changes. What requests ask for is kept: each costs a walk over all."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        profiles = (replica.profile for replica in replicas if replica.profile is not None)
        self.models: dict[str, Mapping[str, Any]] = {m["id"]: m for profile in profiles for m in profile.models}
        self.served = frozenset(self.models)
        self._able: dict[str | None, Counter[ModelVersion]] = {}  # by model
        self._usable: dict[tuple[str | None, ModelVersion | None], NDArray[np.uint8]] = {}

    def able(self, model: object) -> Counter[ModelVersion]:
        key = model if isinstance(model, str) else None
        if key not in self._able:
            if len(self._able) > _MOST_KEPT:
                self._able.clear()
            self._able[key] = LivingVersions.able([each for each in self._replicas if each.serves(model)])
        return self._able[key]

    def usable(self, model: object, version: ModelVersion | None) -> "NDArray[np.uint8]":
        key = model if isinstance(model, str) else None, version
        if key not in self._usable:
            if len(self._usable) > _MOST_KEPT:
                self._usable.clear()
            self._usable[key] = self.usable_without(model, version, frozenset())
        return self._usable[key]

    def usable_without(self, model: object, version: ModelVersion | None, tried: Set[str]) -> "NDArray[np.uint8]":
        left = [each for each in self._replicas if each.name not in tried and each.serves(model)]
        usable = [r for r in left if r.state is ReplicaState.UP] or [r for r in left if r.state is ReplicaState.DOWN]
        wanted = {each.name for each in usable if each.version is version} or {each.name for each in usable}
        return np.array([each.name in wanted for each in self._replicas], np.uint8)


_MOST_KEPT: Final = 256  # requested models
_FIRST: Final = 3.0  # seconds the first look at all of them may take


class Fleet:
    """All replicas. They may have several versions of a model, as in a rolling update, and models of their own."""

    def __init__(
        self,
        specs: Sequence[ReplicaSpec],
        terms: ProbeSettings,
        joined: Callable[[Replica, Publishers], None],
        left: Callable[[str], None],
    ) -> None:
        """`joined` is called with each replica that joins, and its publishers; `left` with the name of each leaver."""
        self._terms, self._joined, self._left = terms, joined, left
        self.replicas: list[Replica] = []
        self.names: Sequence[str] = ()  # of the replicas: another object after each change of the list
        self.scores = make_scores(0)  # a row for each of the replicas
        self._known: _View | None = None
        self._leaving: list[Replica] = []  # removed from the list, with requests under way
        self._by_name: dict[str, Replica] = {}
        self._versions = LivingVersions()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._tending: asyncio.Task[None] | None = None  # while it runs
        self.change(specs)

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    @property
    def leaving(self) -> list[Replica]:
        """Removed replicas that still answer requests; without those whose name is on the list again."""
        return list({each.name: each for each in self._leaving if each.name not in self._by_name}.values())

    @property
    def version(self) -> ModelVersion | None:
        return next(iter(self._versions.of(self.replicas)), None)

    def version_for(self, model: object, session: bytes | None, start: object) -> ModelVersion | None:
        return self._versions.choose(self._view.able(model), session, start)

    def usable(self, model: object, version: ModelVersion | None, tried: Set[str]) -> "NDArray[np.uint8]":
        """1 for each replica that may get a request, in their order.

        Those are replicas that serve the model and are up, else those that seem down; of the version, if it has any.
        """
        return self._view.usable_without(model, version, tried) if tried else self._view.usable(model, version)

    def adapter(self, model: object) -> str | None:
        """The LoRA adapter that this model name stands for; None if the name is a base model."""
        entry = self._view.models.get(model) if isinstance(model, str) else None
        return model if isinstance(model, str) and entry is not None and isinstance(entry.get("parent"), str) else None

    def models(self) -> list[Mapping[str, Any]]:
        return list(self._view.models.values())

    @property
    def served(self) -> frozenset[str]:
        return self._view.served

    @property
    def _view(self) -> _View:
        if self._known is None:
            self._known = _View(self.replicas)
        return self._known

    def _changed(self) -> None:
        self._known = None

    async def start(self) -> None:
        """Probe each replica once in order, after `_FIRST` seconds side by side, then probe on until `stop`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST):
                for replica in list(self.replicas):
                    await replica.look()
        self._tending = asyncio.create_task(self._tend())
        for replica in self.replicas:
            self._tasks[replica] = asyncio.create_task(replica.run())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([] if self._tending is None else [self._tending])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in (*self.replicas, *self._leaving):
            replica.client.close()

    def set_terms(self, terms: ProbeSettings) -> None:
        """Change how replicas are probed, and by which key and certificates they are reached."""
        self._terms = terms
        for replica in self.replicas:
            replica.set_terms(terms)

    def change(self, specs: Sequence[ReplicaSpec]) -> None:
        """Replace the list. A replica that leaves gets nothing new, and goes when its last request has ended."""
        wanted = {spec.name: spec for spec in specs}
        for replica in list(self.replicas):
            if wanted.get(replica.name) != replica.spec:
                self.replicas.remove(replica)
                del self._by_name[replica.name]
                if (task := self._tasks.pop(replica, None)) is not None:
                    task.cancel()
                replica.leave()
                replica.stand(None)
                self._leaving.append(replica)
        for name, spec in wanted.items():
            if name not in self._by_name:
                replica = self._by_name[name] = Replica(spec, self._terms, self._judge, self._changed)
                if self._tending is not None:
                    self._tasks[replica] = asyncio.create_task(replica.run())
        self.replicas, self.names = [self._by_name[name] for name in wanted], tuple(wanted)
        self.scores = make_scores(len(self.replicas))
        for row, replica in enumerate(self.replicas):
            replica.stand(self.scores, row)
        self._changed()

    async def _tend(self) -> None:
        """Run until cancelled: drop idle leaving replicas, and give up answers that hanging replicas have not begun."""
        while True:
            for replica in [each for each in self._leaving if not each.in_flight]:
                self._leaving.remove(replica)
                replica.client.close()
                if replica.name not in self._by_name:
                    self._left(replica.name)
            if any(replica.state is ReplicaState.UP for replica in self.replicas):
                for replica in self.replicas:
                    if replica.state is ReplicaState.DOWN and time.monotonic() - replica.since > _HOPELESS:
                        replica.client.give_up()  # another one should answer instead
            await asyncio.sleep(EVERY)

    def _judge(self, replica: Replica, profile: ReplicaProfile) -> str | None:
        reported, given = profile.block_size, replica.spec.block_size
        if None not in (reported, given) and reported != given:
            return f"block_size {reported}, but its --replica says {given}; give the value the replica has"
        publishers = replica.spec.publishers.agreed(profile.publishers.reached_at(replica.spec.host))
        if isinstance(publishers, str):
            return publishers
        others = self._versions.of(each for each in self.replicas if each is not replica)
        if self._versions.joined(replica, profile, reported or given, self.replicas) and others:
            assert replica.version is not None
            _log.warning(
                "replica %s has %s, where others have %s; conversations stay with one of them", replica.name,
                replica.version, others[0],
            )  # fmt: skip
        self._joined(replica, publishers)
        return None
