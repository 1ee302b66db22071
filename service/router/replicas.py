"""One replica behind the router: probes whether it is up, reads what it serves, and accounts for its work."""

import asyncio
import json
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvtier.service.router.client import Deadlines, Failure, Headers, ReplicaAnswer, ReplicaClient, ReplicaFailed
from kvtier.service.router.latencies import PERIOD, Latencies
from kvtier.service.router.replica_profile import ModelVersion, ReplicaProfile
from kvtier.service.router.spec import ReplicaSpec

_log = logging.getLogger(__name__)

_MAX_PAGE: Final = 1 << 20  # bytes of a page of a replica's
_PROBES: Final = ("/readyz", "/healthz", "/health")  # kvtier's, many servers', vLLM's: the first that exists
EVERY: Final = 1.0  # seconds between two reads of a replica's load, and checks whether it hangs
_NO_METRICS: Final = 60.0  # seconds until a replica without metrics is asked for them again
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
    """How replicas are probed, and what they may be given."""

    interval: float  # seconds between two probes
    timeout: float  # seconds a probe may take
    headers: Headers = ()  # sent with every request to a replica
    max_requests: int = 256  # at one replica at a time
    max_late: int = 3  # late probes in a row before the replica counts as down
    tls: ssl.SSLContext | None = None  # verifies the certificates of https replicas


class AssignedWork:
    """A request's share of a replica's load, until `end`."""

    def __init__(self, replica: "Replica", num_blocks: float) -> None:
        self._replica = replica
        self._blocks = max(num_blocks, _RUNNING)
        replica.num_requests += 1
        replica.in_flight += 1
        replica.given += self._blocks

    def begun(self) -> None:
        """The answer's first byte is here, so the prompt is computed."""
        self._become(_RUNNING)

    def end(self) -> None:
        """The request has ended, in whatever way. Call it exactly once."""
        self._become(0.0)
        self._replica.in_flight -= 1

    def _become(self, blocks: float) -> None:
        self._replica.given += blocks - self._blocks
        self._blocks = blocks


class Replica:
    """One replica. `run` keeps its state up to date; all of it belongs to the router's event loop."""

    def __init__(
        self, spec: ReplicaSpec, terms: ProbeSettings, judge: "Callable[[Replica, ReplicaProfile], str | None]"
    ) -> None:
        """`judge` takes a replica in, and gives it its version; or it returns why that cannot be."""
        self.spec = spec
        tls = terms.tls if spec.is_tls else None
        self.client = ReplicaClient(spec.host, spec.port, self._lost, tls, spec.server_name)
        self.state = ReplicaState.JOINING
        self.why = "not heard of yet"
        self._since = time.monotonic()  # monotonic time of the last change of state
        self.profile: ReplicaProfile | None = None
        self.version: ModelVersion | None = None  # of its model, once it has joined
        self._names = frozenset[str]()  # of the models it serves
        self.in_flight = 0
        self.given = 0.0  # blocks of work of this router's requests
        self.others = 0.0  # estimated blocks of work that others gave it
        self.num_requests = 0
        self.errors: Counter[str] = Counter()
        self.latencies = Latencies()
        self._terms, self._judge = terms, judge
        self._deadlines = Deadlines(terms.timeout, terms.timeout, terms.timeout)
        self._probe: str | None = None  # the health page that this replica has, once known
        self._is_known = False  # nothing suggests that another process answers there now
        self._num_late = 0  # late probes in a row
        self._alarm = asyncio.Event()  # probe now

    @property
    def name(self) -> str:
        """HOST:PORT."""
        return self.spec.name

    def serves(self, model: object) -> bool:
        """Whether it lists a model of this name. No name: whatever it has."""
        return not isinstance(model, str) or self.profile is None or model in self._names

    @property
    def load(self) -> float:
        """Blocks of work given to it and not finished, by this router and others."""
        return self.given + self.others

    @property
    def is_hopeless(self) -> bool:
        """Whether it has been down so long that another replica should answer instead."""
        return self.state is ReplicaState.DOWN and time.monotonic() - self._since > _HOPELESS

    @property
    def limit(self) -> float:
        """The limit of `load` for the policy: none, until it has `max_requests` requests."""
        return float("inf") if self.in_flight < self._terms.max_requests else 0.0

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
        """Probe it once, and set its state by the result."""
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
        """It has left the list: it gets nothing new, and requests under way may end."""
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
        self.others = max(0, num_requests - self.in_flight) * usual

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
            self._since = time.monotonic()
        self.state, self.why = state, why
        if not is_news:
            return
        if state is ReplicaState.UP:
            _log.info("replica %s is up", self.name)
        elif state is ReplicaState.REFUSED or not (is_same or state is ReplicaState.JOINING):
            _log.warning("replica %s is %s: %s", self.name, state, why)
