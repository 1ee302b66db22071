"""Which server holds a key, and its payload connections: standalone, behind Sentinels, or a cluster's masters."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import Any, Final

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import AbstractConnection
from redis.crc import key_slot

from kvtier.tiers import Breaker, Outcome
from kvtier.tiers.redis.options import REDIS_ERRORS
from kvtier.tiers.redis.wire import Wire, WireError, socket_of

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 2  # payload connections per server: one for each of the port's threads
_SHARD_FAILURES: Final = 2  # in a row; fewer than the port's, so that one bad shard does not detach them all
_SHARD_RETRY: Final = 1.0  # seconds until a shard is tried again after its breaker opened, doubling
_REFRESH_EVERY: Final = 1.0  # seconds at least between two reads of a cluster's topology


@dataclass(eq=False, slots=True)
class _PooledConnection:
    """A connection of redis-py, and our end of its socket while it is connected."""

    connection: AbstractConnection
    wire: Wire | None = None

    def drop(self) -> None:
        self.wire = None
        with suppress(Exception):  # in any case the socket is closed
            self.connection.disconnect()


class Endpoint:
    """One server and its payload connections, at most MAX_CONNECTIONS. Thread-safe.

    A connection with unread bytes is closed, never used again. With a breaker (each shard of a cluster has one), a
    server that failed is not used until a ping succeeds.
    """

    def __init__(
        self, name: str, make: Callable[[], AbstractConnection], connect_timeout: float, breaker: Breaker | None
    ) -> None:
        self.name = name
        self.breaker = breaker
        self._make = make
        self._connect_timeout = connect_timeout
        self._lock = Condition()
        self._idle: list[_PooledConnection] = []
        self._num_connections = 0
        self._generation = 0
        self._closed = False

    @property
    def usable(self) -> bool:
        return self.breaker is None or self.breaker.closed

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Wire]:
        """A connection for one batch until `deadline` (time.monotonic). WireError from here or inside."""
        self._require_closed_breaker()
        pooled, generation = self._take(deadline)
        try:
            with self._leased(pooled, generation, deadline) as wire:
                yield wire
        except WireError as error:
            self._count_failure(error.outcome)
            raise
        if self.breaker is not None:
            self.breaker.success()

    def ping(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            with self._leased(*self._take(deadline), deadline) as wire:
                wire.send([b"*1\r\n$4\r\nPING\r\n"], 1)
                return wire.reply() == b"PONG"
        except WireError:
            return False

    def drop_idle(self) -> None:
        """Close idle connections: another server may have the address by now."""
        with self._lock:
            self._generation += 1
            idle = list(self._idle)
            for pooled in idle:
                pooled.drop()

    def close(self) -> None:
        """Connections in use are closed afterwards. Idempotent."""
        with self._lock:
            self._closed = True
            for pooled in self._idle:
                pooled.drop()
            self._lock.notify_all()

    def check(self) -> None:
        """At idle: every connection is here, and none has a partly read reply."""
        with self._lock:
            assert len(self._idle) <= self._num_connections <= MAX_CONNECTIONS, f"{self.name}: {self._num_connections}"
            assert all(pooled.wire is None or pooled.wire.is_clean for pooled in self._idle), f"{self.name}: half read"

    def _require_closed_breaker(self) -> None:
        if self.breaker is None or self.breaker.closed:
            return
        if self.breaker.take_probe():
            self.breaker.probed(self.ping(self._connect_timeout))
        if not self.breaker.closed:
            raise WireError(Outcome.BREAKER_OPEN, f"{self.name} is not used for now")

    def _count_failure(self, outcome: Outcome) -> None:
        if self.breaker is not None and outcome in (Outcome.IO_ERROR, Outcome.TIMEOUT):
            self.breaker.failure()
            if not self.breaker.closed:
                _log.warning("[redis] %s: %s; its blocks are misses for now", self.name, outcome)

    def _take(self, deadline: float) -> tuple[_PooledConnection, int]:
        with self._lock:
            while True:
                if self._closed:
                    raise WireError(Outcome.CLOSED, "closed")
                if self._idle:
                    return self._idle.pop(), self._generation
                if self._num_connections < MAX_CONNECTIONS:
                    pooled = _PooledConnection(self._make())
                    self._num_connections += 1
                    return pooled, self._generation
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WireError(Outcome.TIMEOUT, f"{self.name}: every connection is in use")
                self._lock.wait(left)

    @contextmanager
    def _leased(self, pooled: _PooledConnection, generation: int, deadline: float) -> Iterator[Wire]:
        """The connection, connected, until the block ends; closed if the block fails."""
        try:
            wire = self._connected(pooled, deadline)
            wire.begin(deadline)
            yield wire
        except BaseException:
            pooled.drop()
            raise
        finally:
            self._put_back(pooled, generation)

    def _put_back(self, pooled: _PooledConnection, generation: int) -> None:
        if pooled.wire is not None and not pooled.wire.is_clean:
            pooled.drop()
        with self._lock:
            if self._closed or generation != self._generation:
                pooled.drop()
            self._idle.append(pooled)
            self._lock.notify()

    def _connected(self, pooled: _PooledConnection, deadline: float) -> Wire:
        if pooled.wire is not None:
            if pooled.wire.is_quiet():
                return pooled.wire
            pooled.drop()  # closed by the server while idle, or unexpected bytes arrived
        left = deadline - time.monotonic()
        if left <= 0:
            raise WireError(Outcome.TIMEOUT, "the deadline passed")
        connection: Any = pooled.connection
        connection.socket_connect_timeout = min(self._connect_timeout, left)
        connection.socket_timeout = left
        try:
            connection.connect()
        except (redis.TimeoutError, TimeoutError):
            raise WireError(Outcome.TIMEOUT, f"{self.name}: no connection in time") from None
        except (*REDIS_ERRORS, OSError, UnicodeError) as error:
            raise WireError(Outcome.IO_ERROR, f"{self.name}: {error}") from None
        pooled.wire = Wire(socket_of(pooled.connection))
        return pooled.wire


def _maker(client: redis.Redis) -> Callable[[], AbstractConnection]:
    """Connections as the client's pool would make them, for us alone."""
    pool = client.connection_pool
    return lambda: pool.connection_class(**pool.connection_kwargs)


class Nodes:
    """Which server holds which key: one server, or the master that Sentinels name. Thread-safe; no method does I/O."""

    def __init__(self, client: redis.Redis, label: str, connect_timeout: float) -> None:
        self._client = client
        self._endpoint = Endpoint(label, _maker(client), connect_timeout, None)

    def endpoint(self, key: bytes) -> Endpoint | None:
        """The server that holds a key; None if it is not known."""
        return self._endpoint

    def endpoints(self) -> list[Endpoint]:
        """All of them, at least one."""
        return [self._endpoint]

    def clients(self) -> list[tuple[str, redis.Redis]]:
        """redis-py's client of each server, for commands without payload."""
        return [(self._endpoint.name, self._client)]

    def refresh(self) -> None:
        """The topology may have changed: read it again, in the background."""
        self._endpoint.drop_idle()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._endpoint.close()
        self._client.close()


class ClusterNodes(Nodes):
    """A cluster's masters. redis-py has the map of slots; a thread of ours refreshes it, so that no caller waits."""

    def __init__(self, client: RedisCluster, connect_timeout: float) -> None:
        self._cluster = client
        self._connect_timeout = connect_timeout
        self._lock = Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._refreshing = False
        self._refreshed_at = time.monotonic()
        self._closed = False
        self._follow()

    def endpoint(self, key: bytes) -> Endpoint | None:
        try:
            node = self._cluster.nodes_manager.get_node_from_slot(key_slot(key))
        except (*REDIS_ERRORS, LookupError):  # a slot without a server
            return None
        with self._lock:
            return self._endpoints.get(node.name) or self._add(node)

    def endpoints(self) -> list[Endpoint]:
        with self._lock:
            return list(self._endpoints.values())

    def clients(self) -> list[tuple[str, redis.Redis]]:
        return [(node.name, self._cluster.get_redis_connection(node)) for node in self._cluster.get_primaries()]

    def refresh(self) -> None:
        with self._lock:
            due = time.monotonic() - self._refreshed_at >= _REFRESH_EVERY
            if self._closed or self._refreshing or not due:
                return
            self._refreshing = True
        Thread(target=self._refresh, name="kvtier-redis-topology", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            endpoints = list(self._endpoints.values())
        for endpoint in endpoints:
            endpoint.close()
        self._cluster.close()

    def _refresh(self) -> None:
        try:
            self._cluster.nodes_manager.initialize()
        except (*REDIS_ERRORS, OSError, LookupError, ValueError) as error:
            _log.debug("[redis] the cluster's topology: %s", error)
        finally:
            with self._lock:
                self._refreshing = False
                self._refreshed_at = time.monotonic()
        self._follow()

    def _follow(self) -> None:
        """Keep an endpoint for each of today's masters, and close the others."""
        masters = {node.name: node for node in self._cluster.get_primaries()}
        with self._lock:
            for name in masters.keys() - self._endpoints.keys():
                self._add(masters[name])
            removed = [self._endpoints.pop(name) for name in self._endpoints.keys() - masters.keys()]
        for endpoint in removed:
            endpoint.close()

    def _add(self, node: ClusterNode) -> Endpoint:
        breaker = Breaker(_SHARD_FAILURES, _SHARD_RETRY, time.monotonic)
        make = _maker(self._cluster.get_redis_connection(node))
        endpoint = self._endpoints[node.name] = Endpoint(node.name, make, self._connect_timeout, breaker)
        if self._closed:
            endpoint.close()
        return endpoint
