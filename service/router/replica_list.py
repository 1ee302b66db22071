"""The list of replicas: parses `--replica`, and follows a file that may change, and names in the DNS."""

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvtier.tiers import ConfigError
from kvtier.tiers.config import is_endpoint
from kvtier.tiers.hierarchy import begun

# --- one replica -----------------------------------------------------------------------------------------------------

_EVENTS: Final = ("events", "replay", "node", "node_replay")
_KNOWN: Final = (*_EVENTS, "block_size", "addresses")
_WILDCARD: Final = re.compile(r"^(tcp://)(\*|0\.0\.0\.0|\[::\])(:\d+)$")
_EXAMPLE: Final = "http://127.0.0.1:8000,events=ipc:///run/kvtier/events"


@dataclass(frozen=True, slots=True)
class Publishers:
    """Endpoints of a replica's KV events: its own, and those of the daemon it loads from."""

    events: str | None = None
    replay: str | None = None
    node: str | None = None
    node_replay: str | None = None

    def reached_at(self, host: str) -> "Publishers":
        """The same endpoints, with wildcard addresses replaced by `host`."""
        return Publishers(*(each and _WILDCARD.sub(rf"\g<1>{host}\g<3>", each) for each in astuple(self)))

    def agreed(self, other: "Publishers") -> "Publishers | str":
        """These endpoints, completed by `other`; or one line that says how they contradict each other."""
        values = []
        for part in fields(self):
            mine, its = getattr(self, part.name), getattr(other, part.name)
            if None not in (mine, its) and mine != its:
                return f'{part.name} "{its}", but its --replica says "{mine}"; give the value the replica has'
            values.append(mine if its is None else its)
        return Publishers(*values)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica, as configured. A field that is None is read from the replica."""

    host: str
    port: int
    publishers: Publishers = Publishers()
    block_size: int | None = None
    is_tls: bool = False
    has_addresses: bool = False  # `host` is a DNS name, and each of its addresses is a replica
    server_name: str | None = None  # the name its certificate must be for, if that is not `host`

    @property
    def name(self) -> str:
        """HOST:PORT. No two replicas share it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http{'s' if self.is_tls else ''}://{self.name}"

    def at(self, address: str) -> "ReplicaSpec":
        """The replica at one address of the name. Event endpoints at the name, or at *, move to that address."""
        events = (each and each.replace(f"//{self.host}:", "//*:") for each in astuple(self.publishers))
        there = Publishers(*events).reached_at(f"[{address}]" if ":" in address else address)
        return replace(self, host=address, publishers=there, has_addresses=False, server_name=self.host)

    @classmethod
    def parse(cls, text: str) -> "ReplicaSpec":
        """`http[s]://host:port[,events=tcp://…][,replay=…][,node=…][,node_replay=…][,block_size=N][,addresses=all]`.

        Raises ConfigError if the text is not such a spec.
        """
        url, *rest = text.split(",")
        host, port, is_tls = _address(text, url)
        given: dict[str, str] = {}
        for part in rest:
            name, _, value = part.partition("=")
            if name not in _KNOWN:
                known = f"known are {', '.join(_KNOWN)}; between replicas write a space"
                raise _bad_spec(text, f'unknown part "{name[:40]}"; {known}')
            if name in given:
                raise _bad_spec(text, f"{name} is given twice; remove one")
            given[name] = value
        for name in _EVENTS:
            if name in given and (not is_endpoint(given[name]) or given[name].endswith(":0")):
                raise _bad_spec(text, f"{name} is not an endpoint; write it like ipc:///run/kvtier/events")
        for one, other in (("replay", "events"), ("node_replay", "node")):
            if one in given and other not in given:
                raise _bad_spec(text, f"{one} without {other}; give both")
        size = given.get("block_size", "1")
        if not (size.isascii() and size.isdecimal() and 1 <= int(size[:9]) <= 4096):
            raise _bad_spec(text, f'block_size "{size[:40]}" is not a number of tokens from 1 to 4096')
        if given.get("addresses", "all") != "all":
            shown = given["addresses"][:40]
            raise _bad_spec(text, f'addresses "{shown}" is not all; write addresses=all, or leave it out')
        publishers = Publishers(*(given.get(name) for name in _EVENTS))
        block_size = int(size) if "block_size" in given else None
        return cls(host, port, publishers, block_size, is_tls, "addresses" in given)


def parse_replicas(texts: Sequence[str]) -> list[ReplicaSpec]:
    """Parse all specs. Raises ConfigError if there is none, or if one is named twice."""
    if not texts:
        raise ConfigError(f"[router] replicas none: no replica is given; give --replica {_EXAMPLE}")
    specs = [ReplicaSpec.parse(text) for text in texts]
    for before, spec in enumerate(specs):
        if any(spec.name == other.name for other in specs[:before]):
            raise ConfigError(f'[router] replicas "{spec.url}": named twice; remove one')
    return specs


def _address(text: str, url: str) -> tuple[str, int, bool]:
    wrong = _bad_spec(text, f"not http://HOST:PORT or https://HOST:PORT; write it like {_EXAMPLE}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    is_bare = not (parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/"))
    is_text = url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not host or not port or not is_bare or not is_text:
        raise wrong
    return host, port, parts.scheme == "https"


def _bad_spec(text: str, why: str) -> ConfigError:
    shown = "".join(each if each.isprintable() else "?" for each in text.rpartition("@")[2])  # before: a password
    return ConfigError(f'[router] replicas "{shown if len(shown) <= 80 else shown[:79] + "…"}": {why}')


# --- the list --------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_EVERY: Final = 1.0  # seconds between two reads of the file; a content read twice alike is complete
_MAX_FILE: Final = 1 << 20  # bytes
_PATIENCE: Final = 10.0  # seconds a read of the file may take before it counts as an error
_MAX_ADDRESSES: Final = 1024  # of a name
_FIRST: Final = 2.0  # seconds the first lookup of names may take


class ReplicaList:
    """The replicas as last known. A failed read or lookup changes nothing: it is logged once, and counted."""

    def __init__(self, texts: Sequence[str], file: Path | None, interval: float) -> None:
        """`interval` is seconds between two lookups of names. Raises ConfigError if a spec or the file is wrong."""
        self.errors: Counter[str] = Counter()
        self.why: str | None = None
        self._texts, self._file, self._interval = texts, file, interval
        self._lines = self._seen = None if file is None else _read(file)
        self._given = parse_replicas([*texts, *(self._lines or ())])
        self._addresses: dict[tuple[str, int], tuple[str, ...]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Task[None]] = {}  # by name; ended, or under way

    def prepare(self, texts: Sequence[str], file: Path | None, interval: float) -> Callable[[], None]:
        """As at the beginning, for a list that is followed; what it returns puts it in force. ConfigError."""
        lines = None if file is None else _read(file)
        given = parse_replicas([*texts, *(lines or ())])

        def commit() -> None:
            self._texts, self._file, self._interval, self._given = texts, file, interval, given
            self._lines = self._seen = lines
            self.why = None

        return commit

    @property
    def specs(self) -> list[ReplicaSpec]:
        """One spec for each replica. A name whose addresses are not known yet yields none."""
        found: dict[str, ReplicaSpec] = {}
        for spec in self._given:
            at = self._addresses.get((spec.host, spec.port), ()) if spec.has_addresses else (None,)
            for each in (spec if address is None else spec.at(address) for address in at):
                found.setdefault(each.name, each)
        return list(found.values())

    async def looked_up(self) -> list[ReplicaSpec]:
        """The specs after a first lookup of names; a lookup that takes too long is used later."""
        self._look_up_all()
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=_FIRST)
        return self.specs

    async def follow(self, changed: Callable[[list[ReplicaSpec]], None]) -> None:
        """Run until cancelled: call `changed` with the specs whenever they change. No disk or resolver delays it."""
        loop, known = asyncio.get_running_loop(), self.specs
        looking: asyncio.Task[None] | None = None
        looking_since = 0.0
        due = loop.time() + self._interval
        while True:
            await asyncio.sleep(min(_EVERY, self._interval))
            if self._file is not None and (looking is None or looking.done()):
                looking, looking_since = asyncio.create_task(self._look_at_file(self._file)), loop.time()
            elif looking is not None and loop.time() - looking_since >= _PATIENCE:
                self._wrong(f'[router] replicas_file "{self._file}": not read within {_PATIENCE:g} s; check its disk')
            if loop.time() >= due:
                due = loop.time() + self._interval
                self._look_up_all()
            if (specs := self.specs) != known:
                known = specs
                changed(specs)

    async def _look_at_file(self, file: Path) -> None:
        """Take in the file's specs, if two reads in a row gave the same."""
        try:
            lines = await asyncio.wrap_future(begun("kvtier-list", partial(_read, file)))
            if lines == self._seen and lines != self._lines:
                self._given, self._lines = parse_replicas([*self._texts, *lines]), lines
                _log.info("%s: %d replicas", file, len(self._given))
            if lines == self._lines:
                self.why = None
            self._seen = lines
        except ConfigError as error:
            self._wrong(str(error))

    def _wrong(self, why: str) -> None:
        if why != self.why:
            self.errors["file"] += 1
            _log.warning("%s; the list of replicas stays as it was", why)
        self.why = why

    def _look_up_all(self) -> None:
        for name in {(spec.host, spec.port) for spec in self._given if spec.has_addresses}:
            if name not in self._lookups or self._lookups[name].done():
                self._lookups[name] = asyncio.create_task(self._look_up(*name))

    async def _look_up(self, host: str, port: int) -> None:
        try:
            asked = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            infos = await asyncio.wrap_future(begun(f"kvtier-resolve-{host}", asked))
            found = sorted({str(info[4][0]) for info in infos})
        except (OSError, ValueError) as error:  # ValueError: not a valid host name
            self.errors["name"] += 1
            if self.errors["name"] == 1:
                _log.warning("replica %s: its addresses cannot be looked up (%s)", host, error)
            return
        self._addresses[host, port] = tuple(found[:_MAX_ADDRESSES])


def _read(file: Path) -> list[str]:
    """The file's specs, without comments. Raises ConfigError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise ValueError(f"more than {_MAX_FILE} bytes")
        lines = [line.partition("#")[0].strip() for line in data.decode().splitlines()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f'[router] replicas_file "{file}": {why}; give a file with one replica per line') from None
    return [line for line in lines if line]
