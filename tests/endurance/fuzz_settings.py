"""Parsers of what users and operators write, for fuzz_child.py: a value or one line that says what to fix."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from fuzz_maker import Maker

from kvtier.service.cluster.cluster import KEY, Placeholders, Topology
from kvtier.service.router.replica_list import parse_replicas
from kvtier.tiers.config.config import Config, options
from kvtier.tiers.errors import ConfigError

Target = Callable[[bytes], None]
_SECTIONS: Final[Mapping[str, list[str]]] = {
    section: [name for each, name, _ in options() if each == section] for section in Config.model_fields
}


def config(data: bytes) -> None:
    """Options by the right names, with any values."""
    section, names = list(_SECTIONS.items())[data[0] % len(_SECTIONS)] if data else ("host", [])
    made = Maker(data[1:], names)
    with suppress(ConfigError):
        Config.load(None, **{section: {name: made.value(1) for name in names if made.is_so()} | made.mapping(1)})


def toml(directory: Path) -> Target:
    """A configuration file."""
    path = directory / "config.toml"

    def target(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            Config.load(path)

    return target


def replicas(data: bytes) -> None:
    """What `--replica` says, once or more often."""
    text = data.decode("utf-8", "replace")
    for texts in (text.split("\n"), [f"http://{text}"], [f"http://h:1,{text}"]):
        with suppress(ConfigError):
            for spec in parse_replicas(texts):
                assert 0 < spec.port < 65536, spec


def cluster(directory: Path) -> Target:
    """A compose file with our entries in it."""
    path, places = directory / "compose.yml", Placeholders(directory, directory, directory)
    names = ("argv", "env", "ports", "ready", "after", "profiles", "directories", "kept", "files", "address", "core")

    def target(data: bytes) -> None:
        services = {name: {KEY: Maker(data[i:], names).body(names[:6])} for i, name in enumerate(("a", "b"))}
        for written in (data, json.dumps({"services": services}).encode()):
            path.write_bytes(written)
            with suppress(ConfigError):
                Topology.read(path, places, ["core"])

    return target


TARGETS: Final[dict[str, Callable[[Path], Target]]] = {
    "config": lambda _: config,
    "toml": toml,
    "replicas": lambda _: replicas,
    "cluster": cluster,
}
