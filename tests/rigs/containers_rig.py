"""The cluster of docker-compose.yml in real containers, beside an engine that `.ci/container-engine` has started."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import httpx2
import yaml
from cluster_rig import PORTS, free_range
from compose_rig import FILE, SECRETS
from crowd_rig import Turn
from node_rig import ROOT

NO_CONTAINERS: Final = os.environ.get("NO_CONTAINERS", "needs a Docker engine; run `make test-compose`")
HAS_CONTAINERS: Final = "DOCKER_HOST" in os.environ and "NO_CONTAINERS" not in os.environ
ENGINES: Final = ("engine-a", "engine-b")
NODES: Final = ("node-a", "node-b")
SERVERS: Final = ("valkey-1", "valkey-2", "valkey-3")
PODS: Final = ("pod-a", "pod-b")
SERVICES: Final = (*SERVERS, *PODS, *NODES, *ENGINES, "router")  # what goes on running
TOKENS: Final = {name: f"{token:x<32}" for name, token in SECRETS.items()}
VARIABLES: Final = {
    **TOKENS,
    "KVTIER_L1__SIZE": "256MiB",
    "KVTIER_HOST__SIZE": "256MiB",
    "KVTIER_FILE__SIZE": "256MiB",
    "VALKEY_MAXMEMORY": "256mb",
}
PATIENCE: Final = 300.0  # seconds until what was waited for is a failure
_COMPOSE: Final = ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")


def wait_for(condition: Callable[[], object]) -> None:
    """What does not answer yet does not fulfil it."""
    end = time.monotonic() + PATIENCE
    while not is_so(condition):
        assert time.monotonic() < end, f"not within {PATIENCE:g} s"
        time.sleep(0.2)


def lasting(wanting: list[str]) -> list[str]:
    """Without what was lost in the last five minutes: a story before may have lost it."""
    return [why for why in wanting if "blocks in the last" not in why]


def is_so(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except (httpx2.TransportError, httpx2.HTTPStatusError):
        return False


def run(*argv: str, stdin: str | None = None, checked: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=600, check=False)
    assert not checked or done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


def docker(*arguments: str, stdin: str | None = None) -> str:
    return run("docker", *arguments, stdin=stdin).stdout.strip()


class Containers:
    """One project of compose, with ports and names of its own."""

    def __init__(self, home: Path, model: Path) -> None:
        """`model` is a checkpoint that others may read."""
        self._home, self._first = home, free_range()
        self.project = "kvtier-story"
        self._version: dict[str, str] = {}  # of each service's image, where it is another
        variables = VARIABLES | {"KVTIER_MODEL_DIR": str(model)}
        (home / "env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))

    def file(self) -> Path:
        """As the project's, on a busy machine: engines of one thread, checks with time, and a small disk of node-b.

        Engines give the same bits however a prompt was had, and read what they could compute.
        """
        text = FILE.read_text().replace("127.0.0.1:74", f"127.0.0.1:{self._first // 100}")
        parsed = yaml.safe_load(text)
        services = parsed["services"]
        for name in ENGINES:
            services[name]["command"].append("--exact")
            services[name]["environment"] |= {"KVTIER_CACHE__LOAD_OR_RECOMPUTE": "load", "OMP_NUM_THREADS": "1"}
        for name in SERVICES:
            services[name]["healthcheck"] |= {"timeout": "60s", "interval": "5s"}
        for name, version in self._version.items():
            services[name]["image"] = services[name]["image"].split(":")[0] + f":{version}"
        services["node-b"]["environment"]["KVTIER_FILE__SIZE"] = "40MiB"
        small = {"type": "tmpfs", "device": "tmpfs", "o": "size=48m,uid=10001,gid=10001,mode=0700"}
        parsed["volumes"]["slabs-b"] = {"driver_opts": small}
        file = self._home / "compose.yml"
        file.write_text(yaml.safe_dump(parsed))
        return file

    def compose(self, *arguments: str, profile: str = "cluster") -> "subprocess.CompletedProcess[str]":
        where = (
            "--project-name",
            self.project,
            "--project-directory",
            str(ROOT),
            "--env-file",
            str(self._home / "env"),
        )
        return run(*_COMPOSE, *where, "--file", str(self.file()), "--profile", profile, *arguments)

    def up(self, *services: str, profile: str = "cluster", version: str | None = None) -> None:
        """Start what is named, else all; with `version`, of that one's image and without what else it stands on."""
        if version is not None:
            self._version |= dict.fromkeys(services, version)
        alone = () if version is None else ("--no-deps",)
        self.compose("up", "--detach", *alone, *services, profile=profile)

    def inspect(self, service: str) -> dict[str, Any]:
        label = f"label=com.docker.compose.service={service}"
        ours = f"label=com.docker.compose.project={self.project}"
        [found, *_] = docker("ps", "--all", "--quiet", "--filter", label, "--filter", ours).splitlines()
        [told] = json.loads(docker("inspect", found))
        state: dict[str, Any] = told
        return state

    def name(self, service: str) -> str:
        return str(self.inspect(service)["Name"]).removeprefix("/")

    def pid(self, service: str) -> int:
        """On this machine."""
        return int(self.inspect(service)["State"]["Pid"])

    def running(self) -> set[str]:
        """Services that have a container which runs."""
        ours = f"label=com.docker.compose.project={self.project}"
        return set(docker("ps", "--filter", ours, "--format", '{{.Label "com.docker.compose.service"}}').split())

    def is_well(self) -> bool:
        """Everything runs, answers, and has what it was configured with."""
        nodes = [self.page(node, "/readyz") for node in NODES]
        return (
            set(SERVICES) <= self.running()
            and all(each["ready"] and not each["degraded"] and not lasting(each["wanting"]) for each in nodes)
            and all(len(self.page(node)["clients"]) == 1 for node in NODES)
            and not any(lasting(self.page(engine, "/readyz")["wanting"]) for engine in ENGINES)
            and [each["state"] for each in self.page("router")["replicas"]] == ["up", "up"]
        )

    def execute(self, service: str, *command: str) -> "subprocess.CompletedProcess[str]":
        return run("docker", "exec", self.name(service), *command, checked=False)

    def crash(self, service: str) -> None:
        """kill -9 of its first process, as the kernel would; `docker kill` counts as stopped by hand."""
        before = self.inspect(service)
        os.kill(before["State"]["Pid"], signal.SIGKILL)
        wait_for(lambda: self.inspect(service)["State"]["Pid"] not in (0, before["State"]["Pid"]))

    def volume(self, name: str) -> Path:
        return Path(docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{self.project}_{name}"))

    def network(self, verb: str, name: str, service: str, *options: str) -> None:
        """`disconnect` or `connect` one container."""
        docker("network", verb, *options, f"{self.project}_{name}", self.name(service))

    # what it says

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self._first + PORTS[service]}"

    @staticmethod
    def bearer(service: str) -> dict[str, str]:
        section = {"router": "ROUTER", "engine": "SERVER", "node": "SERVICE"}[service.split("-")[0]]
        return {"authorization": f"Bearer {TOKENS[f'KVTIER_{section}__TOKEN']}"}

    def get(self, service: str, path: str) -> httpx2.Response:
        return httpx2.get(self.url(service) + path, headers=self.bearer(service), timeout=60, trust_env=False)

    def page(self, service: str, path: str = "/status") -> Any:
        return self.get(service, path).raise_for_status().json()

    def ask(self, service: str, turn: Turn, salt: str) -> tuple[dict[str, Any], str]:
        """The usage of one answer, which must be the right one, and the replica that gave it."""
        url = f"{self.url(service)}/v1/chat/completions"
        answer = httpx2.post(url, json=turn.body(salt=salt), headers=self.bearer(service), timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == turn.answer
        found: dict[str, Any] = answer.json()
        return found, answer.headers.get("x-kvtier-replica", "")

    def cached(self, service: str, turn: Turn, salt: str) -> dict[str, int]:
        """How much of the prompt each tier had."""
        told, _ = self.ask(service, turn, salt)
        tiers: dict[str, int] = told["usage"]["prompt_tokens_details"]["kvtier"]
        return tiers

    def stored(self, node: str, tier: str = "redis") -> int:
        return sum(each["stored"].get(tier, 0) for each in self.page(node)["models"])

    def tell(self, place: str, turn: Turn, salt: str) -> None:
        """Have a turn computed by one engine, cold, and stored down to Valkey."""
        before = self.stored(f"node-{place}")
        told, _ = self.ask(f"engine-{place}", turn, salt)
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] < 64  # all begin alike, inside a block
        blocks = told["usage"]["prompt_tokens"] // 64
        assert blocks
        wait_for(lambda: self.stored(f"node-{place}") >= before + blocks)

    def close(self) -> None:
        self.compose("--profile", "bench", "down", "--volumes", "--timeout", "20")
        docker("image", "prune", "--force")  # what earlier runs have built


def status_of(pid: int) -> dict[str, Sequence[str]]:
    """/proc/PID/status, each line by its name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, rest in (line.split(":", 1) for line in lines)}
