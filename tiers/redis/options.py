"""From the [redis] options to redis-py's clients; their errors as one line with a fix, without secrets."""

import logging
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvtier.tiers import ConfigError, KVTierError, StoragePlace, TierUnavailable
from kvtier.tiers.config import RedisConfig

_log = logging.getLogger(__name__)

_SCHEMES: Final = ("redis", "rediss", "unix")
_IN_URL: Final = frozenset({"host", "port", "path", "db", "username", "password", "connection_class"})
# Text that is surely no password if no "@" shows where one ends: a host, a port of few digits, a database.
_PLACE: Final = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]*)(:\d{1,5})?(/\w*)?", re.ASCII)
_SCHEME: Final = re.compile(r"[A-Za-z][\w+.-]{0,19}", re.ASCII)
_NOT_SHOWN: Final = "(not shown, it may hold a password)"
_FORM: Final = "write it as in redis://HOST:6379/0"


def parse_address(url: str, default_port: int) -> dict[str, Any]:
    """A URL as redis-py parses it, with its port. ConfigError with the reason if it is not usable."""
    try:
        if why := _problem(url):
            raise ConfigError(f"[redis] url {_shown(url)}: {why}")
        part: dict[str, Any] = parse_url(url)
    except ValueError:  # its text may show the URL, and with it a password
        raise ConfigError(f"[redis] url {_shown(url)}: not an address; {_FORM}") from None
    if unknown := sorted(part.keys() - _IN_URL):
        raise ConfigError(f"[redis] url: {unknown[0]} behind the ?: not read there; use the options of [redis]")
    part.setdefault("port", default_port)
    return part


def _problem(url: str) -> str:
    """Why it cannot be used, with the fix; empty if it can. ValueError if it is not like a URL at all."""
    scheme, mark, _ = url.partition("://")
    if not mark:
        return f"no scheme; write redis://{url}" if _is_place(url) else f"not an address; {_FORM}"
    if scheme not in _SCHEMES:
        named = f'scheme "{scheme}"' if _SCHEME.fullmatch(scheme) else "its scheme"
        return f"{named} is none of redis, rediss and unix; {_FORM}"
    parts = urlsplit(url)
    if scheme == "unix":
        return "" if parts.path.strip("/") else "no path; write it as in unix:///run/redis.sock"
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return f"its port is no number from 1 to 65535; {_FORM}, and / and # of a password as %2F and %23"
    if not parts.hostname:
        return f"no host; {_FORM}"
    number = parts.path.strip("/")
    if number and not (number.isascii() and number.isdecimal()):
        return f"the database behind the address is no number; {_FORM}"
    return ""


def _shown(url: str) -> str:
    """The URL in quotes, without what may be a login or part of one."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return f'"{url}"' if not url or _is_place(url) else _NOT_SHOWN  # a word alone may be the password
    login, at, place = rest.rpartition("@")
    place = place.partition("?")[0]
    if at and not _PLACE.fullmatch(place):  # login and place may be the wrong way round
        place = re.sub(":.*", ":…", place, flags=re.DOTALL)
    is_known = "?" not in login if at else bool(_PLACE.fullmatch(place)) or (scheme == "unix" and ":" not in place)
    if not is_known or not _SCHEME.fullmatch(scheme) or len(url) > 1000:
        return _NOT_SHOWN
    return f'"{scheme}{mark}{"…@" if at else ""}{place:.100}"'


def _is_place(url: str) -> bool:
    """Whether it is a server's place without a scheme, and no other word."""
    return len(url) <= 1000 and ("." in url or ":" in url or url == "localhost") and bool(_PLACE.fullmatch(url))


RedisClient = redis.Redis | RedisCluster

REDIS_ERRORS: Final = (redis.RedisError, redis.exceptions.RedisClusterException)  # the latter is no RedisError

MAX_VALUE: Final = 512 << 20  # bytes: the default of `proto-max-bulk-len`
_LEAST_RECORDS: Final = 16  # that memory must hold if the server evicts nothing
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "record layer failure")  # TLS's errors for a reply without TLS
_HANGS_UP: Final = ("Connection closed by server", "Connection reset by peer", "\\x15\\x03")  # of a TLS port without it
_PORTS: Final = {"standalone": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are and how to log in to them. Never logged; only `label` is."""

    label: str  # host:port of each
    addresses: tuple[tuple[str, int], ...]
    path: str | None  # of a Unix socket
    login: dict[str, Any]  # as in the URL
    common: dict[str, Any]  # every client's arguments: timeouts, TLS

    @property
    def places(self) -> list[dict[str, Any]]:
        """Where each is, as arguments of redis-py."""
        if self.path is not None:
            return [{"unix_socket_path": self.path}]
        return [{"host": host, "port": port} for host, port in self.addresses]


def parse(config: RedisConfig) -> Servers:
    """The servers `url` names. ConfigError if it cannot be used."""
    assert config.url is not None
    parts = [parse_address(part.strip(), _PORTS[config.mode]) for part in config.url.get_secret_value().split(",")]
    path: str | None = parts[0].get("path")
    login: dict[str, Any] = {}
    addresses = tuple((part["host"], part["port"]) for part in parts if "path" not in part)
    label = path or ", ".join(f"{host}:{port}" for host, port in addresses)
    for part in parts:
        login |= {name: part[name] for name in ("username", "password", "db") if name in part}
    if config.mode != "cluster" and login.get("db") == 0:
        del login["db"]
    if config.mode == "standalone" and len(parts) > 1:
        raise _bad("url", label, 'several servers, but mode is "standalone"; name one, or set mode to what they are')
    if config.mode != "standalone" and path is not None:
        raise _bad("url", label, f'mode "{config.mode}" needs addresses; write redis://HOST:PORT')
    if config.mode == "cluster" and login.pop("db", 0):
        raise _bad("url", label, "a cluster has one database; leave out the number behind the address")
    return Servers(label, addresses, path, login, _common(config, label, parts))


def _common(config: RedisConfig, label: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    common: dict[str, Any] = {
        "socket_connect_timeout": config.connect_timeout,
        "socket_timeout": config.deadline,
        "protocol": 2,  # RESP3 may push unrequested messages between two replies
    }
    secure = {part.get("connection_class") is redis.SSLConnection for part in parts}
    if len(secure) > 1:
        raise _bad("url", label, "redis:// and rediss:// mixed; use one of them for all servers")
    if config.ca is not None and not any(secure):
        raise _bad("ca", str(config.ca), "url is not rediss://, so nothing would be verified; write rediss://")
    if any(secure):
        common["ssl"] = True
        if config.ca is not None:
            try:
                ssl.create_default_context(cafile=config.ca)
            except OSError as error:
                why = error.strerror if not isinstance(error, ssl.SSLError) and error.strerror else "no certificates"
                raise _bad("ca", str(config.ca), f"{why}; name a PEM file of certificates") from None
            common["ssl_ca_certs"] = str(config.ca)
    return common


def own_login(config: RedisConfig) -> dict[str, Any]:
    """[redis] username and password added to a URL's login, or without one: Sentinels' URLs hold their own."""
    given = {"username": config.username, "password": config.password and config.password.get_secret_value()}
    return {name: value for name, value in given.items() if value is not None}


def options_of(config: RedisConfig, servers: Servers) -> dict[str, Any]:
    """redis-py's arguments for any server in `url`, without its place."""
    options = servers.common | {"retry": Retry(NoBackoff(), 0)}
    if config.mode == "sentinel":
        return options | {name: value for name, value in servers.login.items() if name != "db"}
    return options | servers.login | own_login(config)


def connect(config: RedisConfig, servers: Servers) -> RedisClient:
    """A client that has reached them. ConfigError for mistakes to fix, TierUnavailable if they don't answer."""
    shared = options_of(config, servers)
    with _explained(config, servers):
        if config.mode == "cluster":
            nodes = [ClusterNode(host, port) for host, port in servers.addresses]
            cluster = RedisCluster(startup_nodes=nodes, **shared)
            return cluster
        if config.mode == "sentinel":
            number = {name: value for name, value in servers.login.items() if name == "db"}
            addresses = list(servers.addresses)
            sentinels = Sentinel(addresses, sentinel_kwargs=shared, **servers.common, **number, **own_login(config))
            _require_name(sentinels, config.sentinel_name)
            client: redis.Redis = sentinels.master_for(config.sentinel_name, retry=shared["retry"])
        else:
            client = redis.Redis(**shared, **servers.places[0])
        client.ping()
        _require_mode(client, config.mode, servers.label)
        return client


def _require_name(sentinels: Sentinel, name: str) -> None:
    known: list[str] = []
    for sentinel in sentinels.sentinels:
        with suppress(redis.RedisError):
            known += [text_of(master) for master in sentinel.sentinel_masters()]
    if known and name not in known:
        raise _bad("sentinel_name", name, f"the Sentinels know {', '.join(sorted(set(known)))}; write one of these")


def _require_mode(client: redis.Redis, mode: str, label: str) -> None:
    try:
        info: dict[str, Any] = client.info("server")
    except redis.ResponseError:  # forbidden on managed servers
        return
    actual = info.get("redis_mode") or info.get("server_mode")
    if actual == "cluster" or (actual == "sentinel" and mode == "standalone"):
        raise _bad("mode", mode, f'{label} is a {actual}; set mode to "{actual}"')


@contextmanager
def _explained(config: RedisConfig, servers: Servers) -> Iterator[None]:
    """Translate redis-py's errors into ours."""
    try:
        yield
    except KVTierError:
        raise
    except (*REDIS_ERRORS, OSError) as error:
        raise _explanation(config, servers, error) from None


def _explanation(config: RedisConfig, servers: Servers, error: Exception) -> KVTierError:
    causes = list(_causes(error))
    text = " ".join(" ".join(str(cause) for cause in causes).split())
    where = servers.label
    if any(isinstance(cause, redis.AuthenticationError) for cause in causes) or "NOAUTH" in text:
        given = config.password is not None or "password" in servers.login
        why = f"{where} refuses it; set the right one" if given else f"{where} requires one; set it"
        return ConfigError(f"[redis] password (not shown): {why}, and username if the server has users")
    if any(isinstance(cause, redis.exceptions.NoPermissionError) for cause in causes):
        return _denied(servers, text)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return _untrusted(where, text)
    if any(each in text for each in _NO_TLS):
        return TierUnavailable(f"[redis] url: {where} does not speak TLS there; write redis://, or its TLS port")
    if "cluster mode is not enabled" in text.lower():
        return _bad("mode", "cluster", f'{where} is no cluster; set mode to "standalone"')
    if any(isinstance(cause, redis.exceptions.InvalidResponse) for cause in causes):
        return TierUnavailable(f"[redis] url: no Redis answers at {where}; name a Redis server's port")
    if "DB index" in text or "Invalid Database" in text:
        return _bad("url", where, "no database of that number; write a lower one")
    hint = ""
    if servers.common.get("ssl"):
        hint = " (if it does not speak TLS there, write redis://)" if "Timeout" in text else ""
    elif any(each in text for each in _HANGS_UP):
        hint = " (if it speaks TLS there, write rediss://)"
    return TierUnavailable(f"[redis] {where}: {str(error)[:200]}; the Redis tier is off{hint}")


def _untrusted(where: str, text: str) -> KVTierError:
    """Why a server's certificate is not valid. One that has expired can be renewed while this runs."""
    if "has expired" in text or "not yet valid" in text:
        when = "has expired; renew it" if "has expired" in text else "is not valid yet; set this machine's clock"
        return TierUnavailable(f"[redis] {where}: its certificate {when}")
    if "mismatch" in text or "doesn't match" in text:
        return ConfigError(f"[redis] url: the certificate of {where} is for another name; write one that it has")
    return ConfigError(f"[redis] ca: the certificate of {where} is not signed by it; name the right file")


def no_epoch(servers: Servers, why: str) -> KVTierError:
    """The error if servers were reached but did not return or accept the namespace's epoch."""
    if why.startswith("NOPERM"):
        return _denied(servers, why)
    return TierUnavailable(f"[redis] {servers.label}: no epoch ({why[:200]}); the Redis tier is off")


def _denied(servers: Servers, text: str) -> ConfigError:
    return ConfigError(f"[redis] username: {servers.label} denies it a command ({text[:120]}); grant it")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A server's settings that matter for the tier. None: it does not report them."""

    max_value: int = MAX_VALUE  # bytes
    max_memory: int | None = None  # bytes; 0 for no bound
    policy: str | None = None
    full_coverage: bool | None = None


def read_settings(client: redis.Redis) -> ServerSettings:
    """Read one server's settings. Managed servers forbid it: then nothing is known, and no warning follows."""
    text: dict[str, str] = {}
    for pattern in ("maxmemory*", "proto-max-bulk-len", "cluster-require-full-coverage"):
        with suppress(*REDIS_ERRORS, OSError):
            text |= {text_of(name): text_of(value) for name, value in client.config_get(pattern).items()}
    max_value, max_memory = text.get("proto-max-bulk-len", ""), text.get("maxmemory", "")
    return ServerSettings(
        int(max_value) if max_value.isdigit() else MAX_VALUE,
        int(max_memory) if max_memory.isdigit() else None,
        text.get("maxmemory-policy"),
        {"yes": True, "no": False}.get(text.get("cluster-require-full-coverage", "")),
    )


def judge(found: ServerSettings, where: str, value_bytes: int, *, cluster: bool, by_expiry: bool = False) -> list[str]:
    """The warnings. ConfigError if no block would ever be kept. `by_expiry`: expiries are learned."""
    warnings = []
    best = "volatile-ttl" if by_expiry else "allkeys-lru"
    memory, policy = found.max_memory, found.policy
    if memory and policy == "noeviction":
        if memory < _LEAST_RECORDS * value_bytes:
            raise ConfigError(
                f'[redis] url: {where} has maxmemory {memory}, a block takes {value_bytes} bytes and "noeviction" '
                f"never makes room; raise maxmemory, or set maxmemory-policy {best}"
            )
        warnings.append(f'maxmemory-policy "noeviction" refuses writes once memory is full; set {best}')
    elif memory and memory < _LEAST_RECORDS * value_bytes:
        warnings.append(
            f"maxmemory {memory} is room for {memory // value_bytes} blocks of {value_bytes} bytes; raise it"
        )
    if memory == 0:
        fix = f"set it, and maxmemory-policy {best}"
        warnings.append(f"no maxmemory: blocks take all of the server's memory until they expire; {fix}")
    if by_expiry and memory and policy not in ("noeviction", "volatile-ttl", None):
        warnings.append(f'maxmemory-policy "{policy}" takes no heed of expiries, which are learned; set {best}')
    elif not by_expiry and policy in ("allkeys-random", "volatile-random", "volatile-ttl") and memory:
        warnings.append(f'maxmemory-policy "{policy}" takes no heed of what is used; set allkeys-lru')
    if cluster and found.full_coverage:
        warnings.append("one dead master would make every key unavailable; set cluster-require-full-coverage no")
    if value_bytes > found.max_value:
        warnings.append(
            f"proto-max-bulk-len {found.max_value} is less than a block's {value_bytes} bytes: none is stored"
        )
    return warnings


def text_of(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _bad(option: str, value: str, why: str) -> ConfigError:
    return ConfigError(f'[redis] {option} "{value}": {why}')


def servers_room(clients: Sequence[tuple[str, redis.Redis]]) -> Iterator[StoragePlace]:
    """Memory of each server that reports it. Waits for all of them, as long as their timeouts allow."""
    for name, client in clients:
        with suppress(*REDIS_ERRORS, OSError, LookupError, ValueError):
            memory: dict[str, Any] = client.info("memory")
            yield StoragePlace(name, int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None)
