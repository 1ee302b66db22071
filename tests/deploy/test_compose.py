"""docker-compose.yml without a container engine: careful, and the same cluster as its `x-kvtier` beside it.

`make lint` asks whether it is valid. That containers made of it run, nothing here can show; docs/operate.md says so.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from command_rig import kvtier
from compose_rig import FILE, SECRETS, VARIABLE, command_of, processes, raw, services, variables
from node_rig import ROOT

from kvtier.cli import servers_cli
from kvtier.cli.program import load
from kvtier.service.cluster.cluster import _BRIEF, GRACE, Placeholders, Service, Topology
from kvtier.service.cluster.defaults import FIRST_PORT
from kvtier.service.web import http_server
from kvtier.service.web.http_server import HostNames
from kvtier.tiers.config.config import Config

EXAMPLE: Final = ROOT / "deploy" / "example.env"
PROFILES: Final = ("core", "cluster", "observability", "bench")
OTHER_NAMES: Final = {"valkey-server": "redis-server", "valkey-cli": "redis-cli"}
ONLY_CONTAINERS: Final = {"pod-a", "pod-b"}  # of no use to processes that share a pid namespace anyway

_REMOTE: Final = re.compile(
    r"KVTIER_\w+__(ALLOW_REMOTE|ALLOWED_HOSTS|TOKEN|REPLICA_TOKEN)"
)  # a container's address is not loopback
_OUR_ADDRESS: Final = re.compile(r"127\.0\.0\.1:\{port:(\d+)\}|^\{port:(\d+)\}$")


def hosts() -> dict[str, str]:
    """Every name or number that one container reaches another by → its service."""
    numbers = {
        network["ipv4_address"]: name
        for name, each in services().items()
        if isinstance(each.get("networks"), dict)
        for network in each["networks"].values()
    }
    return {name: name for name in services()} | numbers


class Twins:
    """Compares texts of a container with those of its process; remembers which address stands for which port."""

    def __init__(self) -> None:
        self.ports: dict[tuple[str, int], int] = {}  # service and port in its container → port of a process

    def assert_same(self, name: str, container: str, process: str) -> None:
        for place, path in self._places(name):
            process = re.sub(rf"{re.escape(place)}(?=/|$)", path, process)
        ours = [int(a or b) for a, b in _OUR_ADDRESS.findall(process)]
        theirs: list[tuple[str, int]] = []
        if process.startswith("{port:"):  # a port alone
            theirs.append((name, int(container)))
            container = "@"
        else:
            known = {**hosts(), "0.0.0.0": name, "127.0.0.1": name}
            for host, port in re.findall(r"([A-Za-z0-9][\w.-]*):(\d+)", container):
                assert host in known, f"{name}: {host} is no service"
                theirs.append((known[host], int(port)))
            container = re.sub(r"[A-Za-z0-9][\w.-]*:\d+", "@", container).replace("0.0.0.0", "127.0.0.1")
        container = OTHER_NAMES.get(container, container)
        assert container == _OUR_ADDRESS.sub("@", process), name
        for address, port in zip(theirs, ours, strict=True):
            assert self.ports.setdefault(address, port) == port, f"{address} is {self.ports[address]} elsewhere"

    def _places(self, name: str) -> Iterator[tuple[str, str]]:
        """A directory of the process → where the container has it."""
        for file in processes()[name].get("files", []):  # a copy stands for what it was made from
            copied, source = Path(file["target"]), Path(file["source"])
            while copied.name == source.name:
                copied, source = copied.parent, source.parent
            yield str(copied), str(source)
        for volume in services()[name].get("volumes", []):
            source, target, *_ = volume.split(":")
            if source.startswith("./deploy/"):
                yield "{deploy}/" + source.removeprefix("./deploy/"), target
            else:
                yield "{model}" if source == "model" else f"{{state}}/{source}", target


@cache
def compared() -> Twins:
    """Every command line, variable and check of the containers is that of its process."""
    twins = Twins()
    for name, ours in processes().items():
        theirs = services()[name]
        command = command_of(theirs)
        assert len(command) == len(ours["argv"]), f"{name}: {command} is not {ours['argv']}"
        for container, process in zip(command, ours["argv"], strict=True):
            twins.assert_same(name, container, process)
        for variable, value in ours.get("env", {}).items():
            twins.assert_same(name, theirs["environment"][variable], value)
        ready = ours["ready"]
        if "http" in ready:
            assert theirs["healthcheck"]["test"][:2] in (["CMD", "is-well"], ["CMD", "wget"]), name
            twins.assert_same(name, theirs["healthcheck"]["test"][-1], ready["http"])
        for file in ours.get("files", []):
            for container, process in file.get("replace", {}).items():
                twins.assert_same(name, container, process)
        for container, process in zip(
            theirs.get("healthcheck", {"test": []})["test"][1:], ready.get("command", []), strict="command" in ready
        ):
            twins.assert_same(name, container, process)
    return twins


# careful


def test_nothing_is_published_but_on_loopback() -> None:
    published = [port for each in services().values() for port in each.get("ports", [])]
    assert published
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


def test_every_image_is_pinned() -> None:
    for name, each in services().items():
        image, _, tag = each["image"].partition(":")
        assert image == "kvtier" or re.match(r"v?\d+\.\d+\.\d+", tag), f"{name}: {each['image']}"


def test_no_secret_stands_in_it() -> None:
    for each in raw()["services"].values():
        for name, value in each.get("environment", {}).items():
            if re.search("token|password|secret", name, re.IGNORECASE):
                assert VARIABLE.fullmatch(value), name
                assert ":?" in value, f"{name}: without it nothing may start"
    given = dict(line.split("=", 1) for line in EXAMPLE.read_text().splitlines() if re.match(r"\w", line))
    assert {name for name, value in given.items() if not value} == SECRETS.keys()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in ignored


def test_every_service_is_restrained_and_watched() -> None:
    assert "version" not in raw()
    for name, each in services().items():
        assert each["read_only"] is True, name
        assert each["cap_drop"] == ["ALL"], name
        assert each["security_opt"] == ["no-new-privileges:true"], name
        assert each.get("user") not in (None, "root", "0", "0:0"), name
        assert set(each["profiles"]) <= set(PROFILES), name
        is_job = processes().get(name, {}).get("ready", {}).get("exits", False)
        assert is_job == ("healthcheck" not in each), name
        assert each["restart"] == ("no" if is_job else "unless-stopped"), name


def test_whoever_is_stopped_has_the_time_it_takes() -> None:
    from kvtier.service.engine import server as server_process  # takes torch along

    last_bytes = server_process._GRACE + http_server._STOPPED
    stores = last_bytes + server_process._STORES
    engine, router = Config().server.patience + stores, Config().router.patience + last_bytes
    for name in processes():
        if services()[name]["image"].startswith("kvtier"):
            needed = {"engine-a": engine, "engine-b": engine, "router": router}.get(name, servers_cli._DRAIN)
            assert needed < float(services()[name]["stop_grace_period"].removesuffix("s")), name
    brief = Config.load(None, server={"drain": _BRIEF["KVTIER_SERVER__DRAIN"]}).server.patience
    assert brief + stores < GRACE  # `kvtier cluster` waits as long
    assert servers_cli._DRAIN < GRACE


def test_every_mounted_path_is_in_the_tree() -> None:
    declared = raw()["volumes"].keys()
    used = set()
    for name, each in services().items():
        for volume in each.get("volumes", []):
            source, _, *mode = volume.split(":")
            if source.startswith("."):
                assert (ROOT / source).exists(), f"{name}: {source}"
                assert mode == ["ro"], f"{name}: {source} could be written to"
            else:
                used.add(source)
    assert used == declared


def test_a_daemon_sees_the_processes_of_its_engines() -> None:
    for side in "ab":
        sharing = [services()[name] for name in (f"node-{side}", f"engine-{side}") if name in services()]
        assert {each["pid"] for each in sharing} == {f"service:pod-{side}"}
        assert len({each["user"] for each in sharing}) == 1


def test_memory_is_locked_only_where_a_gpu_copies_from_it() -> None:
    # Where a host refuses the limit no container starts: without a GPU none may ask for it.
    assert not [name for name, each in services().items() if "memlock" in each.get("ulimits", {})]
    on_gpus = yaml.safe_load((ROOT / "deploy/gpu.yml").read_text())["services"]
    assert {name: each["ulimits"]["memlock"] for name, each in on_gpus.items()} == {"engine-a": -1, "engine-b": -1}


def test_who_hears_events_shares_a_directory_with_who_tells_them_and_nobody_else_does() -> None:
    for side in "ab":
        sharing = {
            name: volume
            for name, each in services().items()
            for volume in each.get("volumes", [])
            if volume.startswith(f"events-{side}:")
        }
        mount = f"events-{side}:/data/events-{side}"
        assert sharing == {f"node-{side}": mount, f"engine-{side}": mount, "router": f"{mount}:ro"}
        # one path everywhere, since an engine says where its events are
        for name in (f"node-{side}", f"engine-{side}"):
            environment = services()[name]["environment"]
            for option in ("PUBLISH", "REPLAY"):
                address = environment[f"KVTIER_EVENTS__{option}"]
                assert address.startswith(f"ipc:///data/events-{side}/")
                assert f"={address}" in ",".join(services()["router"]["command"]).replace(",", "\n")
            assert "KVTIER_EVENTS__ALLOW_REMOTE" not in environment


def test_every_job_is_awaited() -> None:
    # `docker compose up --wait` takes a job that has ended well for a failure, unless a service waits for that
    for name, ours in processes().items():
        if ours["ready"].get("exits") and name != "bench":  # which is for `run`
            waiting = [each for each in services().values() if name in each.get("depends_on", {})]
            assert set(ours["profiles"]) <= {profile for each in waiting for profile in each["profiles"]}, name


# the same cluster


def test_containers_and_processes_run_the_same_commands() -> None:
    assert services().keys() - processes().keys() == ONLY_CONTAINERS
    ports = compared().ports
    assert len(set(ports.values())) == len(ports), "one port for two addresses"
    for name, each in services().items():
        for published in each.get("ports", []):
            _, outside, inside = published.split(":")
            assert int(outside) - FIRST_PORT == ports[name, int(inside)], name
    for name, ours in processes().items():
        own = {port for (service, _), port in ports.items() if service == name}
        assert own == set(ours.get("ports", [])), name


def test_containers_and_processes_start_in_the_same_order() -> None:
    for name, ours in processes().items():
        theirs = services()[name]
        awaited = theirs.get("depends_on", {})
        assert awaited.keys() - ONLY_CONTAINERS == set(ours.get("after", [])), name
        assert theirs["profiles"] == ours["profiles"], name
        for other, how in awaited.items():
            theirs_too = processes().get(other, {})
            ends, is_optional = theirs_too.get("ready", {}).get("exits", False), theirs_too.get("optional", False)
            # whoever may be missing is not waited for until it is well
            expected = "service_started" if is_optional else "service_healthy"
            assert how["condition"] == ("service_completed_successfully" if ends else expected), name


def test_what_prometheus_scrapes_answers_under_the_names_it_uses() -> None:
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for each in job["static_configs"] for target in each["targets"]]
    assert len(targets) == 5
    for target in targets:
        name = target.rpartition(":")[0]
        (names,) = [value for key, value in variables(services()[name]).items() if key.endswith("__ALLOWED_HOSTS")]
        assert not HostNames("0.0.0.0:1").admits("/metrics", target.encode())
        assert HostNames("0.0.0.0:1", names.split()).admits("/metrics", target.encode())


def test_containers_and_processes_have_the_same_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Config().model_dump(mode="json")
    for name, ours in processes().items():
        theirs = variables(services()[name])
        for variable in theirs.keys() - ours.get("env", {}).keys():
            if _REMOTE.fullmatch(variable):
                continue
            section, option = variable.removeprefix("KVTIER_").lower().split("__")
            assert theirs[variable] == defaults[section][option], f"{name}: {variable}"
        with monkeypatch.context() as patch:
            for variable, value in theirs.items():
                patch.setenv(variable, value)
            Config.load()  # every one known, every value possible


def test_containers_and_processes_have_the_same_directories() -> None:
    made = [path for ours in processes().values() for path in (*ours.get("directories", []), *ours.get("kept", []))]
    assert len(set(made)) == len(made), "two services make it"
    copies = [file["target"] for ours in processes().values() for file in ours.get("files", [])]
    homes = {home for home in made for target in copies if target.startswith(f"{home}/")}
    assert all(any(target.startswith(f"{home}/") for home in homes) for target in copies)
    volumes = {"{model}" if volume == "model" else f"{{state}}/{volume}" for volume in raw()["volumes"]}
    assert set(made) - homes == volumes


def test_a_copied_file_names_no_container_any_more() -> None:
    copies = [file for ours in processes().values() for file in ours.get("files", [])]
    assert copies
    for file in copies:
        text = (ROOT / file["source"].replace("{deploy}", "deploy")).read_text()
        for container, process in file.get("replace", {}).items():
            assert container in text
            text = text.replace(container, process)
        assert not re.search(rf"\b({'|'.join(services())}):\d|/etc/", re.sub(r"^#.*", "", text, flags=re.MULTILINE))


def test_our_command_line_takes_every_command() -> None:
    places = Placeholders(Path("/s"), Path("/d"), Path("/m"))
    topology = Topology.read(FILE, places, PROFILES)
    assert topology.services.keys() == processes().keys()
    num_ours = 0
    for name, service in topology.services.items():
        if service.argv[0] == "kvtier":
            num_ours += 1
            assert parsed(service).keys() == parsed(services()[name]).keys(), name
    assert num_ours == 7


def parsed(service: Service | Mapping[str, Any]) -> dict[str, Any]:
    """The options that a command line gives; click's own error where it cannot be parsed."""
    _, verb, *arguments = service.argv if isinstance(service, Service) else command_of(service)
    context = load(verb).make_context(verb, arguments)
    return {name: value for name, value in context.params.items() if value is not None}


# what its profile `bench` runs


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Missing argument"),
        (["127.0.0.1:7400"], "kvtier: URL '127.0.0.1:7400': write it as in http://127.0.0.1:8000"),
        (["http://127.0.0.1:x"], "kvtier: URL 'http://127.0.0.1:x': write it as in http://127.0.0.1:8000"),
        (["http://127.0.0.1:1", "--requests", "0"], "kvtier: --requests 0: use a whole number from 1 to 1048576"),
        (["http://127.0.0.1:1"], "kvtier: http://127.0.0.1:1: All connection attempts failed; is the server up?"),
    ],
)
def test_a_load_that_cannot_be_is_a_line(arguments: list[str], complaint: str) -> None:
    ended = kvtier("bench", *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert complaint in ended.stderr.splitlines()[-1]
