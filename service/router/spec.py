"""Parses `--replica`: where a replica is, where its events are, and what it must agree with."""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Final
from urllib.parse import urlsplit

from kvtier.tiers import ConfigError
from kvtier.tiers.config import is_endpoint

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
                raise _wrong(text, f'unknown part "{name[:40]}"; {known}')
            if name in given:
                raise _wrong(text, f"{name} is given twice; remove one")
            given[name] = value
        for name in _EVENTS:
            if name in given and (not is_endpoint(given[name]) or given[name].endswith(":0")):
                raise _wrong(text, f"{name} is not an endpoint; write it like ipc:///run/kvtier/events")
        for one, other in (("replay", "events"), ("node_replay", "node")):
            if one in given and other not in given:
                raise _wrong(text, f"{one} without {other}; give both")
        size = given.get("block_size", "1")
        if not (size.isascii() and size.isdecimal() and 1 <= int(size[:9]) <= 4096):
            raise _wrong(text, f'block_size "{size[:40]}" is not a number of tokens from 1 to 4096')
        if given.get("addresses", "all") != "all":
            shown = given["addresses"][:40]
            raise _wrong(text, f'addresses "{shown}" is not all; write addresses=all, or leave it out')
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
    wrong = _wrong(text, f"not http://HOST:PORT or https://HOST:PORT; write it like {_EXAMPLE}")
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


def _wrong(text: str, why: str) -> ConfigError:
    shown = "".join(each if each.isprintable() else "?" for each in text.rpartition("@")[2])  # before: a password
    return ConfigError(f'[router] replicas "{shown if len(shown) <= 80 else shown[:79] + "…"}": {why}')
