"""What `kvtier doctor` measures of a Redis server: the rate of reads, and whether compression would pay at that."""

import secrets
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

import redis

from kvtier.tiers import ConfigError, Finding, made_up_kv, ok, rates_of, verdict
from kvtier.tiers.config import RedisConfig
from kvtier.tiers.redis.lanes import command
from kvtier.tiers.redis.options import options_of, parse
from kvtier.tiers.redis.stream import WireError
from kvtier.tiers.redis.wire import Wire, socket_of

_PROBE_BYTES: Final = 4 << 20
_ROUNDS: Final = 4
_KEPT_MS: Final = 10_000  # the probe is gone by then, whatever happens
_SECONDS: Final = 2.0  # for one command


def check_compression(config: RedisConfig) -> list[Finding]:
    """One line, of a single server that answers; none without the package `zstandard`."""
    if config.url is None or config.mode != "standalone" or config.key_file is not None:
        return []
    if find_spec("zstandard") is None:
        return []
    with suppress(ConfigError):  # told by the server's own line
        servers = parse(config)
        with redis.Redis(**options_of(config, servers) | servers.places[0] | {"socket_timeout": _SECONDS}) as client:
            if rate := _rate(config, client):
                found = f"{verdict(rate, rates_of(made_up_kv()))}; [redis] compression is {config.compression}"
                return [ok("redis compression", found)]
    return []


def _rate(config: RedisConfig, client: Any) -> float | None:
    """Bytes a second that one connection brings, as the tier reads: the best of some reads of a value of 4 MiB.

    None of a server that is full, slow or gone, or if this user may not write there.
    """
    key = f"{config.prefix}:doctor:{secrets.token_hex(8)}".encode()
    pool = client.connection_pool
    connection = None
    try:
        client.set(key, bytes(_PROBE_BYTES), px=_KEPT_MS)
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
        client.unlink(key)
        return best
    except (redis.RedisError, WireError, OSError):  # the server's own line says what is wrong
        return None
    finally:
        if connection is not None:
            connection.disconnect()
            pool.release(connection)
