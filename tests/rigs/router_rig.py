"""What the router's stories share: replicas that do as they are told, as processes, and a router of this process."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from node_rig import free_port
from service_rig import end_child, environment

from kvtier.service.router_app import serve
from kvtier.tiers.config import Config

CHILD = Path(__file__).parent / "service" / "_replica_child.py"
PATIENCE = 60.0  # seconds for anything to come about on a busy machine
MODEL = {"id": "m", "object": "model", "kvtier": {"block_size": 4, "fingerprint": "ab" * 32}}


def until(condition: Callable[[], object]) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


class ToldReplica:
    """A replica as a process. It keeps its address when it is killed and started again."""

    def __init__(self, nature: Mapping[str, object] = MODEL) -> None:
        self.name = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.name}"
        self.nature = nature
        self.client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if self._process is not None:
            self._process.wait(60)
        command = [sys.executable, str(CHILD), self.name.rpartition(":")[2], json.dumps(self.nature)]
        self._process = subprocess.Popen(command, env=environment(), text=True)
        until(self._is_there)

    def _is_there(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None
        try:
            return self.client.get("/seen").status_code == 200
        except httpx2.TransportError:
            return False

    @property
    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def behave(self, **behaviour: object) -> None:
        self.client.post("/behave", json=behaviour)

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The requests it was given since it started."""
        seen: list[dict[str, Any]] = self.client.get("/seen").json()
        return seen

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        self.client.close()
        if self._process is not None:
            end_child(self._process)


@contextmanager
def replicas(number: int, *natures: Mapping[str, object]) -> Iterator[list[ToldReplica]]:
    """Running replicas, of these natures or all alike."""
    made = [ToldReplica(natures[i] if i < len(natures) else MODEL) for i in range(number)]
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            replica.close()


class RoutedReplicas:
    """A router of this process, before replicas; times are those of a busy machine unless said."""

    def __init__(self, *specs: str, **options: object) -> None:
        patient = {"http": "127.0.0.1:0", "probe_interval": "50ms", "probe_timeout": "20s", "connect_timeout": "20s"}
        self.config = Config.load(router={**patient, "replicas": specs, **options}).router
        self.server = serve(self.config)
        self.server.start()
        token = self.config.token
        headers = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}
        base = f"http://{self.server.address}"
        self.client = httpx2.Client(base_url=base, headers=headers, timeout=PATIENCE, trust_env=False)

    def complete(self, prompt: object = "a prompt", **fields: object) -> httpx2.Response:
        return self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    def status(self) -> Any:
        return self.client.get("/status").json()

    def state(self, replica: ToldReplica) -> str:
        return next(str(each["state"]) for each in self.status()["replicas"] if each["name"] == replica.name)

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@contextmanager
def routed(*specs: str, **options: object) -> Iterator[RoutedReplicas]:
    """A running router."""
    router = RoutedReplicas(*specs, **options)
    try:
        yield router
    finally:
        router.close()
