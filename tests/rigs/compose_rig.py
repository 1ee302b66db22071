"""docker-compose.yml as tests read it: services with every variable at its default, and the processes beside them."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import yaml
from node_rig import ROOT

FILE: Final = ROOT / "docker-compose.yml"
SECRETS: Final = {  # what example.env leaves empty
    **{f"KVTIER_{section}__TOKEN": section.lower() * 8 for section in ("ROUTER", "SERVER", "SERVICE")},
    "GRAFANA_PASSWORD": "g" * 32,
}
VARIABLE: Final = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@cache
def raw() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return parsed


@cache
def services() -> dict[str, dict[str, Any]]:
    """Every service, variables at their defaults."""

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return VARIABLE.sub(lambda found: found[3] if found[2] == "-" else SECRETS[found[1]], value)
        if isinstance(value, dict):
            return {key: fill(each) for key, each in value.items()}
        return [fill(each) for each in value] if isinstance(value, list) else value

    found: dict[str, dict[str, Any]] = fill(raw()["services"])
    return found


def processes() -> dict[str, dict[str, Any]]:
    """The `x-kvtier` of every service that has one."""
    return {name: each["x-kvtier"] for name, each in services().items() if "x-kvtier" in each}


def command_of(service: Mapping[str, Any]) -> list[str]:
    """What runs in the container: `kvtier` is our image's entry point."""
    entrypoint = service.get("entrypoint", ["kvtier"] if service["image"].startswith("kvtier") else [])
    return [*entrypoint, *service.get("command", [])]


def variables(service: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in service.get("environment", {}).items() if name.startswith("KVTIER_")}
