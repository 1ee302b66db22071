"""What `--replica` says of one: where it is, where its events are, and what must agree with what it says itself."""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final
from urllib.parse import urlsplit

from kvtier.tiers.errors import ConfigError

_EVENTS: Final = ("events", "replay", "node", "node_replay")
_KNOWN: Final = (*_EVENTS, "block_size")
_WILDCARD: Final = re.compile(r"^(tcp://)(\*|0\.0\.0\.0|\[::\])(:\d+)$")
_EXAMPLE: Final = "http://127.0.0.1:8000,events=tcp://127.0.0.1:5557"


@dataclass(frozen=True, slots=True)
class Publishers:
    """Where to hear of what a replica has: of its own tiers, and of the daemon it loads from."""

    events: str | None = None
    replay: str | None = None
    node: str | None = None
    node_replay: str | None = None

    def reached_at(self, host: str) -> "Publishers":
        """What the replica binds to everywhere, by the name it is reached at."""
        return Publishers(*(each and _WILDCARD.sub(rf"\g<1>{host}\g<3>", each) for each in astuple(self)))

    def agreed(self, other: "Publishers") -> "Publishers | str":
        """These and what only the other says; or in a line where they contradict each other."""
        values = []
        for part in fields(self):
            mine, its = getattr(self, part.name), getattr(other, part.name)
            if None not in (mine, its) and mine != its:
                return f'{part.name} "{its}", but its --replica says "{mine}"; give what it has'
            values.append(mine if its is None else its)
        return Publishers(*values)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica, as the user names it. What is None is asked of the replica."""

    host: str
    port: int
    publishers: Publishers = Publishers()
    block_size: int | None = None

    @property
    def name(self) -> str:
        """HOST:PORT; no two replicas share it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{self.name}"

    @classmethod
    def parse(cls, text: str) -> "ReplicaSpec":
        """`http://host:port[,events=tcp://…][,replay=…][,node=…][,node_replay=…][,block_size=N]`, else ConfigError."""
        url, *rest = text.split(",")
        host, port = _address(text, url)
        given: dict[str, str] = {}
        for part in rest:
            name, _, value = part.partition("=")
            if name not in _KNOWN:
                raise _wrong(text, f'unknown part "{name[:40]}"; known are {", ".join(_KNOWN)}')
            if name in given:
                raise _wrong(text, f"{name} is given twice; remove one")
            given[name] = value
        for name in _EVENTS:
            if name in given and not given[name].startswith(("tcp://", "ipc://")):
                raise _wrong(text, f"{name} is no endpoint; write it as in tcp://127.0.0.1:5557")
        for one, other in (("replay", "events"), ("node_replay", "node")):
            if one in given and other not in given:
                raise _wrong(text, f"{one} without {other}; give both")
        size = given.get("block_size", "1")
        if not (size.isascii() and size.isdecimal() and 1 <= int(size[:9]) <= 4096):
            raise _wrong(text, f'block_size "{size[:40]}" is no number of tokens from 1 to 4096')
        publishers = Publishers(*(given.get(name) for name in _EVENTS))
        return cls(host, port, publishers, int(size) if "block_size" in given else None)


def parse_replicas(texts: Sequence[str]) -> list[ReplicaSpec]:
    """All of them; raises ConfigError where there is none, or where two can't stand side by side."""
    if not texts:
        raise ConfigError(f"[router] replicas none: there is nobody to ask; give --replica {_EXAMPLE}")
    specs = [ReplicaSpec.parse(text) for text in texts]
    sized = [spec for spec in specs if spec.block_size is not None]
    for before, spec in enumerate(specs):
        if any(spec.name == other.name for other in specs[:before]):
            raise ConfigError(f'[router] replicas "{spec.url}": named twice; remove one')
    for spec in sized[1:]:
        if spec.block_size != sized[0].block_size:
            raise ConfigError(
                f'[router] replicas "{spec.url}": block_size {spec.block_size}, but {sized[0].block_size} of '
                f'"{sized[0].url}"; a prefix has one block size everywhere'
            )
    return specs


def _address(text: str, url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
        parts = urlsplit("")
    is_bare = not (parts.username or parts.password or parts.query or parts.fragment or parts.path.strip("/"))
    if parts.scheme != "http" or not host or not port or not is_bare:
        raise _wrong(text, f"not http://HOST:PORT; write it as in {_EXAMPLE}")
    return host, port


def _wrong(text: str, why: str) -> ConfigError:
    shown = text.rpartition("@")[2]  # what stands before it may be a password
    return ConfigError(f'[router] replicas "{shown if len(shown) <= 80 else shown[:79] + "…"}": {why}')
