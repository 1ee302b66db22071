"""Reads the compose file for `kvtier cluster`: only the `x-kvtier` beside each service."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.service import first_error
from kvtier.tiers import ConfigError

BESIDE_US: Final = Path(__file__).parents[2] / "docker-compose.yml"  # this path holds in a checkout and in a wheel
FIRST_PORT: Final = 7400
NUM_PORTS: Final = 100  # ports from the first one on; a cluster uses no others


KEY: Final = "x-kvtier"

_PLACE: Final = re.compile(r"\{(\w+)(?::(\d+))?\}")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=False)


class Ready(_Entry):
    """How to tell that a service is ready, and still is: one of three ways."""

    http: str | None = None  # this URL answers with a status below 400
    command: list[str] | None = None  # this command ends with status 0
    exits: bool = False  # the service itself ends with status 0

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.http is not None) + (self.command is not None) + self.exits != 1:
            raise ValueError("not one of http, command, exits; give one")
        return self


class ServiceFile(_Entry):
    source: str
    target: str
    replace: dict[str, str] = {}

    def write(self) -> None:
        text = Path(self.source).read_text(encoding="utf-8")
        for container, process in self.replace.items():
            text = text.replace(container, process)
        Path(self.target).parent.mkdir(parents=True, exist_ok=True)
        Path(self.target).write_text(text, encoding="utf-8")


class Service(_Entry):
    """One `x-kvtier`. In a `Topology` its placeholders are filled in."""

    argv: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}
    ports: list[int] = []  # ports it listens on; counted from the cluster's first one until they are resolved
    ready: Ready
    after: list[str] = []  # services that must be ready or done first
    profiles: Annotated[list[str], Field(min_length=1)]
    directories: list[str] = []  # directories made for it, removed with the cluster
    kept: list[str] = []  # directories made for it, and kept
    files: list[ServiceFile] = []  # files written before it starts, in its directories
    address: str | None = None  # its address for users
    optional: bool = False  # if it fails, the others start without it


@dataclass(frozen=True, slots=True)
class Placeholders:
    state: Path
    deploy: Path
    model: Path
    first_port: int = FIRST_PORT

    def fill(self, text: str) -> str:
        """The text with `{state}`, `{deploy}`, `{model}` and `{port:N}` filled in. Raises ValueError for any other."""

        def value(found: re.Match[str]) -> str:
            name, number = found.groups()
            if name == "port" and number is not None and int(number) < NUM_PORTS:
                return str(self.first_port + int(number))
            if name in ("state", "deploy", "model") and number is None:
                return str(getattr(self, name))
            known = "{state}, {deploy}, {model} and {port:0}"
            raise ValueError(f"{found[0]} is not a placeholder; known are {known}")

        return _PLACE.sub(value, text)


@dataclass(frozen=True, slots=True)
class Topology:
    """Services by name, each after those it depends on, with placeholders filled in."""

    services: Mapping[str, Service]

    @classmethod
    def read(cls, file: Path, places: Placeholders, profiles: Sequence[str]) -> "Topology":
        """Read the services of these profiles. Raises ConfigError, which names service, entry, error and fix."""
        entries = {name: _service(f"{file}: {name}", data, places) for name, data in _entries(file).items()}
        known = sorted({profile for service in entries.values() for profile in service.profiles})
        for profile in profiles:
            if profile not in known:
                raise ConfigError(f'--profile "{profile}": not in {file}; known are {", ".join(known)}')
        chosen = {name: each for name, each in entries.items() if not set(profiles).isdisjoint(each.profiles)}
        for name, service in chosen.items():
            for other in service.after:
                if other not in chosen:
                    is_known = other in entries
                    fix = f"add --profile {entries[other].profiles[-1]}" if is_known else "no such service exists"
                    raise ConfigError(f'{file}: {name}: after "{other}": that service is not selected; {fix}')
        return cls({name: chosen[name] for name in _in_order(file, chosen)})

    def without(self, names: Sequence[str]) -> "Topology":
        left: dict[str, Service] = {}
        for name, service in self.services.items():
            if name not in names and left.keys() >= set(service.after):
                left[name] = service
        return Topology(left)


def _entries(file: Path) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f'--file "{file}": {error.strerror}; name a compose file with {KEY} in it') from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'--file "{file}": not YAML, {" ".join(str(error).split())}; fix that line') from None
    services = parsed.get("services") if isinstance(parsed, dict) else None
    services = services if isinstance(services, dict) else {}
    found = {name: data[KEY] for name, data in services.items() if isinstance(data, dict) and KEY in data}
    if not found:
        raise ConfigError(f'--file "{file}": no service in it has {KEY}; name kvtier\'s docker-compose.yml')
    return found


def _service(place: str, data: object, places: Placeholders) -> Service:
    try:
        raw = Service.model_validate(data)
        values = _filled(raw.model_dump(), places.fill)
        values["ports"] = [places.first_port + port for port in raw.ports]
        return Service.model_validate(values)
    except ValidationError as error:
        entry, why, *_ = first_error(error)
        raise ConfigError(f"{place}: {entry or KEY}: {why}; fix {KEY} there") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _filled(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, list):
        return [_filled(each, fill) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, fill) for key, each in value.items()}
    return value


def _in_order(file: Path, services: Mapping[str, Service]) -> Iterator[str]:
    try:
        yield from TopologicalSorter({name: each.after for name, each in services.items()}).static_order()
    except CycleError as error:
        circle = " after ".join(error.args[1])
        raise ConfigError(f"{file}: {circle}: they depend on each other; remove one dependency") from None
