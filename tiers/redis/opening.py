"""The Redis tier from the configuration section [redis]: opening it, and the doctor's checks. A `TierModule`."""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from kvtier.tiers import (
    BATCH_BYTES,
    BlockShape,
    ConfigError,
    ConfiguredTier,
    Finding,
    KVTierError,
    compression_finding,
    error,
    load_key,
    ok,
    refusal,
    require_compression,
    warning,
)
from kvtier.tiers.config import Config, RedisConfig, show_size
from kvtier.tiers.redis.lanes import command
from kvtier.tiers.redis.options import REDIS_ERRORS, RedisClient, connect, options_of, own_login, parse, text_of
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.redis.wire import Wire, WireError, socket_of

_ANSWER_SECONDS: Final = 2.0  # for one command; the doctor waits longer than the tier
_SMALL_BYTES: Final = 64 << 20
_KEEP: Final = "and keep it in its configuration file"

UntypedClient = Any
"""A `redis.Redis`: its own types allow an asynchronous one, too."""
Options = dict[str, Any]
"""What redis-py connects with."""


def check_redis(config: RedisConfig) -> list[Finding]:
    """At least one line for each server in [redis] url, and for the masters that Sentinels name."""
    if config.url is None:
        return [ok("redis", "off: no [redis] url")]
    try:
        servers = parse(config)
    except ConfigError as refused:
        found, _, fix = str(refused).rpartition("; ")
        return [error("redis", found, fix)]
    findings: list[Finding] = []
    try:
        if config.key_file is not None:
            load_key(config.key_file, "[redis] key_file")
    except ConfigError as refused:
        findings.append(refusal("redis", refused))
    masters: dict[str, Options] = {}
    shared = options_of(config, servers) | {"socket_timeout": _ANSWER_SECONDS}
    for options in (shared | place for place in servers.places):
        name = f"redis {_place(options)}"
        with _answers(name, findings), redis.Redis(**options) as client:
            findings += _check_server(config, client, name)
            if config.mode == "sentinel" and (master := _master(config, client, options)):
                masters[f"redis master {_place(master)}"] = master
    for name, options in masters.items():
        with _answers(name, findings), redis.Redis(**options) as client:
            findings += _check_data(client, name, by_expiry=config.expiry == "learned")
    return findings


def _place(options: Options) -> str:
    return str(options.get("unix_socket_path") or f"{options['host']}:{options['port']}")


def _check_server(config: RedisConfig, client: UntypedClient, name: str) -> Iterator[Finding]:
    """The findings about one server of [redis] url."""
    mode = client.info("server").get("redis_mode", "standalone")
    if mode != config.mode:
        yield error(name, f'it is {mode}, [redis] mode is "{config.mode}"', f'set [redis] mode = "{mode}"')
        return
    if mode == "sentinel":
        if _master_address(config, client) is None:
            fix = "set [redis] sentinel_name to the name in this Sentinel's configuration"
            yield error(name, f'it knows no master "{config.sentinel_name}"', fix)
        else:
            yield ok(name, f"{_version(client)}, a Sentinel")
        return
    yield from _check_data(client, name, by_expiry=config.expiry == "learned")
    if mode == "cluster":
        yield from _check_cluster(client, name)


def _master(config: RedisConfig, client: UntypedClient, options: Options) -> Options | None:
    """How to reach the master that a Sentinel names."""
    address = _master_address(config, client)
    kept = {name: value for name, value in options.items() if name not in ("username", "password")}
    return kept | own_login(config) | {"host": address[0], "port": address[1]} if address else None


def _master_address(config: RedisConfig, client: UntypedClient) -> tuple[str, int] | None:
    found = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", config.sentinel_name)
    return (text_of(found[0]), int(found[1])) if found else None


def _check_data(client: UntypedClient, name: str, *, by_expiry: bool) -> Iterator[Finding]:
    """Role and memory of a server that holds blocks. `by_expiry`: expiries are learned."""
    version, memory = _version(client), client.info("memory")
    if client.info("replication").get("role") == "slave":
        yield error(name, f"{version}, a replica, which refuses writes", "name its master in [redis] url")
        return
    limit, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", "unknown policy"))
    found, cap = f"{version}, maxmemory {show_size(limit)}, {policy}", f"`CONFIG SET maxmemory 8gb`, {_KEEP}"
    policy_fix = f"`CONFIG SET maxmemory-policy {'volatile-ttl' if by_expiry else 'allkeys-lru'}`, {_KEEP}"
    if not limit:
        yield warning(name, f"{version}, no maxmemory: blocks take all memory until they expire", cap)
    elif policy == "noeviction":
        yield warning(name, f"{found}: it refuses blocks once it is full", policy_fix)
    elif limit < _SMALL_BYTES:
        yield warning(name, f"{found}: that holds next to nothing", cap)
    elif by_expiry and policy != "volatile-ttl":
        yield warning(name, f"{found}: it takes no heed of expiries, which are learned", policy_fix)
    else:
        yield ok(name, found)


def _check_cluster(client: UntypedClient, name: str) -> Iterator[Finding]:
    """State of the cluster as this node sees it, and the effect of one dead node on the others."""
    state = client.execute_command("CLUSTER INFO")
    if state.get("cluster_state") != "ok":
        found = f"cluster_state {state.get('cluster_state')}, {state.get('cluster_slots_ok')} of 16384 slots served"
        yield error(name, found, "start its missing nodes; see `redis-cli --cluster check`")
    try:
        settings = client.config_get("cluster-require-full-coverage")
    except redis.ResponseError:  # hosted services forbid CONFIG
        return
    if settings.get("cluster-require-full-coverage") == "yes":
        found = "cluster-require-full-coverage yes: with one node down, no node answers"
        yield warning(name, found, f"`CONFIG SET cluster-require-full-coverage no`, {_KEEP}")


def _version(client: UntypedClient) -> str:
    server = client.info("server")
    if "valkey_version" in server:
        return f"Valkey {server['valkey_version']}"
    return f"Redis {server.get('redis_version', 'of unknown version')}"


@contextmanager
def _answers(name: str, findings: list[Finding]) -> Iterator[None]:
    """Turn an error into a finding. Messages of servers and redis-py name users and places, never a password."""
    try:
        yield
    except redis.AuthenticationError as refused:
        fix = "set [redis] username and password to the server's, or leave them out if it has none"
        findings.append(error(name, f"login refused: {refused}", fix))
    except redis.exceptions.NoPermissionError as refused:  # the tier works without these commands
        findings.append(warning(name, f"reachable, but {refused}: nothing more is known", "give this user +info"))
    except redis.TimeoutError:
        findings.append(error(name, "no answer in time", "see whether it hangs; raise [redis] connect_timeout"))
    except redis.ConnectionError as refused:
        findings.append(error(name, f"not reachable: {refused}", "start it, or fix [redis] url"))
    except redis.exceptions.InvalidResponse as refused:
        findings.append(error(name, f"no Redis answers there: {refused}", "name a Redis server's port in [redis] url"))
    except (redis.RedisError, OSError) as refused:
        findings.append(error(name, f"{type(refused).__name__}: {refused}", "see the server's log"))


_PROBE_BYTES: Final = 4 << 20
_ROUNDS: Final = 4
_KEPT_MS: Final = 10_000  # the probe expires by then in any case
_SECONDS: Final = 2.0  # for one command


def check_compression(config: RedisConfig) -> list[Finding]:
    """One line, if servers answer; none without the package `zstandard`."""
    if config.url is None or find_spec("zstandard") is None:
        return []
    patient = config.model_copy(update={"connect_timeout": _SECONDS, "deadline": _SECONDS})
    with suppress(KVTierError, *REDIS_ERRORS, OSError), closing(connect(patient, parse(patient))) as client:
        if rate := _rate(config, client):
            return [compression_finding("redis", config.compression, rate)]
    return []  # each server's own line has the reason


def _rate(config: RedisConfig, client: RedisClient) -> float | None:
    """Bytes a second of one connection, read as the tier reads: the best of some reads of a value of 4 MiB.

    A cluster's nodes are read in parallel, with a thread each; the rate is one node's. None if a server is full, slow
    or not reachable, or if this user may not write there.
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


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [redis] names no url."""
    if config.redis.url is None:
        return None

    def reach() -> RedisStore:
        return RedisStore.open(config.redis, fingerprint, slot_bytes=shape.block_bytes, block_size=shape.block_size)

    # the store's own time limit for the largest batch, and for a connection that it may have to open first
    batch = max(BATCH_BYTES, shape.block_bytes) / config.redis.bandwidth
    return ConfiguredTier(reach, config.redis.connect_timeout + config.redis.deadline + batch)


def checked(config: Config) -> str | None:
    """Reads the address and the key, without a connection: a server that is down is found later."""
    if config.redis.url is None:
        return None
    servers = parse(config.redis)
    if config.redis.key_file is not None:
        load_key(config.redis.key_file, "[redis] key_file")
    compressed = ""
    if config.redis.compression != "none":
        require_compression("[redis] compression")
        compressed = f", compressed by {config.redis.compression}"
    return f"[redis] {config.redis.mode} at {servers.label}{compressed}"


def answers(config: Config) -> list[Finding]:
    """Every server in [redis] url, as for the doctor."""
    return [] if config.redis.url is None else check_redis(config.redis)


def examine(config: Config) -> list[Finding]:
    """The servers in [redis] url, and whether compression pays. Each reply has a deadline of seconds."""
    return check_redis(config.redis) + check_compression(config.redis)
