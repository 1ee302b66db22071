"""What Kubernetes does with the workloads of deploy/kubernetes/base, as far as processes go. There is no cluster here.

A pod is a process with an address of its own (127.0.9.N), the arguments and variables of its container, and the files
its volumes would bring. Probes, headless names, rolling updates and endings follow kubernetes.io/docs: a pod that is to
go leaves its service at once, then comes `preStop`, SIGTERM, and SIGKILL after the grace period. Periods are a tenth.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx2
import yaml
from node_rig import ROOT
from server_rig import wait_for
from zmq.auth import create_certificates

BASE: Final = ROOT / "deploy" / "kubernetes" / "base"
NODE: Final = "127.0.9.1"  # of the only node; pods have the addresses behind it
TOKEN: Final = "t" * 40
SCALE: Final = 0.1  # of the periods that the files name
PATIENCE: Final = 120.0  # seconds until what was waited for is a failure
SMALL: Final = {
    "KVTIER_HOST__SIZE": "64MiB",
    "KVTIER_FILE__SIZE": "64MiB",
    "KVTIER_L1__SIZE": "8MiB",
    "KVTIER_CACHE__LOAD_OR_RECOMPUTE": "load",  # of so small a model computing is always faster
}
_LEFT_OUT: Final = ("KVTIER_REDIS__",)  # no Valkey here
_IN_OWN_HOSTS: Final = 'mount --bind "$0" /etc/hosts && exec "$@"'


class Version:
    """What a container's image and its model stand for: a tree of kvtier, and a checkpoint."""

    def __init__(self, tree: Path, model: Path, **variables: str) -> None:
        self.tree, self.model, self.variables = tree, model, variables


class Pod:
    """One pod, of one workload."""

    def __init__(
        self, name: str, version: Version, address: str, process: "subprocess.Popen[bytes]", log: Path
    ) -> None:
        self.name, self.version, self.address, self.process, self.log = name, version, address, process, log
        self.is_ready = self.is_going = False


class Pods:
    """The pods of some workloads, by their names. `roll` brings another version as the workload's strategy says."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._hosts = home / "hosts"
        self._hosts.write_text(Path("/etc/hosts").read_text())
        self._names = self._hosts.read_text()
        self._number = 1
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.pods: dict[str, list[Pod]] = {}
        for folder in ("keys", "run", "slabs"):
            (home / folder).mkdir(mode=0o700)
        for name in ("publisher", "router"):
            create_certificates(home / "keys", name)
        (home / "keys" / "publisher.key_secret").chmod(0o400)
        (home / "keys" / "router.key_secret").chmod(0o400)
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in [pod for pods in self.pods.values() for pod in pods]:
            self._end(pod)
        self._stopped.set()
        self._looking.join()

    def start(self, name: str, version: Version) -> None:
        """All replicas of a workload, until they are ready."""
        kind, spec = self._workload(name)
        count = 1 if kind == "DaemonSet" else spec["replicas"]
        self.pods[name] = [self._started(name, version) for _ in range(count)]
        self._until_ready(self.pods[name])

    def roll(self, name: str, version: Version) -> None:
        """Replace each pod by one of this version; no more above or below the number than the strategy allows."""
        kind, spec = self._workload(name)
        strategy = spec["updateStrategy" if kind == "DaemonSet" else "strategy"]
        assert strategy["type"] == "RollingUpdate"
        surge = strategy["rollingUpdate"].get("maxSurge", 0)
        assert surge + strategy["rollingUpdate"]["maxUnavailable"] == 1
        for old in list(self.pods[name]):
            if not surge:
                self._end(old)
            new = self._started(name, version)
            self.pods[name].append(new)
            self._until_ready([new])
            if surge:
                self._end(old)

    def urls(self, name: str, port: int) -> list[str]:
        """Where the ready pods of a workload's service answer."""
        return [f"http://{pod.address}:{port}" for pod in list(self.pods[name]) if pod.is_ready and not pod.is_going]

    def logs(self, name: str) -> str:
        """Of all pods that a workload has had."""
        return "\n".join(path.read_text() for path in sorted(self._home.glob(f"{name}-*.log")))

    def _workload(self, name: str) -> tuple[str, dict[str, Any]]:
        for each in yaml.safe_load_all((BASE / f"{name}.yaml").read_text()):
            if each["kind"] in ("Deployment", "DaemonSet") and each["metadata"]["name"] == name:
                return each["kind"], each["spec"]
        raise LookupError(name)

    def _container(self, name: str) -> dict[str, Any]:
        (container,) = self._workload(name)[1]["template"]["spec"]["containers"]
        return dict(container)

    def _started(self, name: str, version: Version) -> Pod:
        with self._lock:
            self._number += 1
            number = self._number
        address = NODE if name == "node" else f"127.0.9.{number}"  # its ports are host ports
        container, log = self._container(name), self._home / f"{name}-{number:02}.log"
        variables = {"NODE_IP": NODE}
        for each in container["env"]:
            value = each.get("value") or (NODE if "fieldRef" in each["valueFrom"] else TOKEN)
            variables[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], value)
        variables = {key: value for key, value in variables.items() if not key.startswith(_LEFT_OUT)}
        told = {**variables, **{key: value for key, value in SMALL.items() if key in variables or "CACHE" in key}}
        told = {key: self._here(value, address, version) for key, value in told.items()} | version.variables
        arguments = [self._here(each, address, version) for each in container["args"]]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KVTIER_")}
        command = [sys.executable, "-m", "kvtier.cli", *arguments]
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _IN_OWN_HOSTS, str(self._hosts), *command],
                env={**kept, **told, "PYTHONPATH": str(version.tree), "OMP_NUM_THREADS": "1"},
                cwd=version.tree,
                stdout=out,
                stderr=out,
            )
        return Pod(name, version, address, process, log)

    def _here(self, value: str, address: str, version: Version) -> str:
        """A container's path or address as it is on this machine."""
        for there, here in (
            ("/data/model", str(version.model)),
            ("/data/run/", f"{self._home}/run/"),
            ("/data/slabs", f"{self._home}/slabs"),
            ("/keys/", f"{self._home}/keys/"),
            ("0.0.0.0", address),
            ("tcp://*", f"tcp://{address}"),
        ):
            value = value.replace(there, here)
        return value

    def _end(self, pod: Pod) -> None:
        """As the kubelet ends a pod. It has to end in order within its grace period."""
        pod.is_going = True
        self._publish()
        spec = self._workload(pod.name)[1]["template"]["spec"]
        sleep = self._container(pod.name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        time.sleep(sleep * SCALE)
        pod.process.send_signal(signal.SIGTERM)
        try:
            assert pod.process.wait(min(PATIENCE, spec["terminationGracePeriodSeconds"])) == 0, pod.log.read_text()
        finally:
            pod.process.kill()
            with self._lock:
                self.pods[pod.name].remove(pod)

    def _until_ready(self, pods: list[Pod]) -> None:
        wait_for(lambda: all(pod.is_ready or pod.process.poll() is not None for pod in pods), PATIENCE)
        for pod in pods:
            assert pod.process.poll() is None, pod.log.read_text()

    def _look(self) -> None:
        while not self._stopped.wait(0.05):
            with self._lock:
                pods = [pod for each in self.pods.values() for pod in each]
            for pod in pods:
                probe = self._container(pod.name)["readinessProbe"]
                pod.is_ready = self._answers(pod, probe)
            self._publish()
            self._stopped.wait(5 * SCALE)

    def _answers(self, pod: Pod, probe: Mapping[str, Any]) -> bool:
        ports = {port["name"]: port["containerPort"] for port in self._container(pod.name)["ports"]}
        url = f"http://{pod.address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        try:
            return httpx2.get(url, timeout=probe["timeoutSeconds"], trust_env=False).status_code == 200
        except httpx2.TransportError:
            return False

    def _publish(self) -> None:
        """The headless services' names: the addresses of what is ready and not going."""
        with self._lock:
            lines = [
                f"{pod.address} {name}"
                for name, pods in self.pods.items()
                for pod in pods
                if pod.is_ready and not pod.is_going
            ]
            text = "\n".join([self._names, *lines, ""])
            if text != self._hosts.read_text():
                with self._hosts.open("r+") as hosts:  # in place: it is mounted
                    hosts.write(text)
                    hosts.truncate()


class Clients:
    """Conversations that ask the same question again and again, each of a router of its choice; what they were told."""

    def __init__(self, pods: Pods, count: int) -> None:
        self._pods = pods
        self._stopped = threading.Event()
        self.failures: list[str] = []
        self.answers: list[list[str]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]

    @contextmanager
    def asking(self) -> Iterator[Self]:
        """All of them ask meanwhile."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join(PATIENCE)

    def _ask(self, number: int) -> None:
        turn = number
        while not self._stopped.is_set():
            urls = self._pods.urls("router", 8080)
            turn += 1
            try:
                text, _ = ask(urls[turn % len(urls)], number)
                self.answers[number].append(text)
            except (httpx2.HTTPError, AssertionError, ZeroDivisionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._stopped.wait(0.05)


def ask(url: str, number: int, timeout: float = 60.0) -> tuple[str, int]:
    """A client's question: the answer's text, and how many tokens of the prompt were cached."""
    body = {"model": "tiny", "prompt": [5 + number, *range(6, 105)], "max_tokens": 8, "temperature": 0}
    answer = httpx2.post(
        f"{url}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {TOKEN}"},
        timeout=timeout,
        trust_env=False,
    )
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    said = answer.json()
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]
