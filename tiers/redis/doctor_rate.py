"""What `kvtier doctor` measures of Redis: the rate of reads, and whether compression would pay at that."""

import secrets
import time
from contextlib import closing, suppress
from importlib.util import find_spec
from typing import Final

import redis
from redis.cluster import RedisCluster

from kvtier.tiers import Finding, KVTierError, compression_finding
from kvtier.tiers.config import RedisConfig
from kvtier.tiers.redis.doctor import UntypedClient
from kvtier.tiers.redis.lanes import command
from kvtier.tiers.redis.options import REDIS_ERRORS, RedisClient, connect, parse
from kvtier.tiers.redis.stream import WireError
from kvtier.tiers.redis.wire import Wire, socket_of

_PROBE_BYTES: Final = 4 << 20
_ROUNDS: Final = 4
_KEPT_MS: Final = 10_000  # the probe is gone by then, whatever happens
_SECONDS: Final = 2.0  # for one command


def check_compression(config: RedisConfig) -> list[Finding]:
    """One line, of servers that answer; none without the package `zstandard`."""
    if config.url is None or find_spec("zstandard") is None:
        return []
    patient = config.model_copy(update={"connect_timeout": _SECONDS, "deadline": _SECONDS})
    with suppress(KVTierError, *REDIS_ERRORS, OSError), closing(connect(patient, parse(patient))) as client:
        if rate := _rate(config, client):
            return [compression_finding("redis", config.compression, rate)]
    return []  # each server's own line says what is wrong


def _rate(config: RedisConfig, client: RedisClient) -> float | None:
    """Bytes a second that one connection brings, as the tier reads: the best of some reads of a value of 4 MiB.

    A cluster's nodes are read side by side, with a thread each: that of one node is told. None of a server that is
    full, slow or gone, or if this user may not write there.
    """
    key = f"{config.prefix}:doctor:{secrets.token_hex(8)}".encode()
    server: UntypedClient = client
    if isinstance(client, RedisCluster):
        server = client.get_redis_connection(client.get_node_from_key(key))
    pool = server.connection_pool
    connection = None
    try:
        server.set(key, bytes(_PROBE_BYTES), px=_KEPT_MS)
        connection = pool.get_connection()
        wire, into = Wire(socket_of(connection)), memoryview(bytearray(_PROBE_BYTES))
        best = 0.0
        for _ in range(_ROUNDS):
            began = time.monotonic()
            wire.begin(began + _SECONDS)
            wire.send([command(b"GET", key)], 1)
            if wire.value(0, into) != b"":
                return None
            best = max(best, _PROBE_BYTES / (time.monotonic() - began))
        server.unlink(key)
        return best
    except (redis.RedisError, WireError, OSError):
        return None
    finally:
        if connection is not None:
            connection.disconnect()
            pool.release(connection)
