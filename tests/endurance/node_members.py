"""A node for the soak: engines, daemon, Redis and router as processes that keep their addresses, whoever kills them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import httpx2
from block_client import Model
from fork_rig import Forked
from node_rig import free_port
from redis_rig import RedisServer
from service_rig import environment, patient_options
from toxic_proxy import ToxicProxy

START: Final = 180.0  # seconds until a process answers, on a busy machine
_STOP: Final = 90.0
BLOCK: Final = 16  # tokens. What follows counts blocks of that size: larger ones leave L1 alone with all that is asked
L2_BYTES: Final = 1 << 20  # some 85 blocks of the engines' model: what they hold at once, and less than they compute
FILE: Final = "4MiB"  # some 340
L1_BLOCKS: Final = 64
_COMMON: Final = {
    **patient_options(),
    "service__deadline": "20s",  # a busy machine is no fault
    "cache__load_or_recompute": "load",  # computing so small a model is always faster
    "breaker__retry_after": "200ms",
}


@dataclass(frozen=True)
class Size:
    """What one process held at one moment."""

    seconds: float  # since the run began
    rss: float  # MiB
    descriptors: int
    threads: int


Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], "subprocess.Popen[bytes] | Forked"]


def by_python(arguments: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start `kvtier ARGUMENTS`."""
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", *arguments]
    return subprocess.Popen(command, env=variables, stdout=log, stderr=log)


class Member:
    """One process with one address, started again after it was killed; `life` counts its starts."""

    def __init__(
        self, start: Start, name: str, command: Sequence[str], log: Path, ready: Callable[[], bool], **options: str
    ) -> None:
        self.name, self.log, self.life = name, log, 0
        self._start, self._command, self._ready, self._options = start, command, ready, options
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """Of the running process; None while it is dead."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start it and wait until it is ready or a fault has killed it; RuntimeError for any other end."""
        variables = {"OMP_NUM_THREADS": "1", **environment(**self._options)}
        self._is_killed = False
        with self.log.open("ab") as log:
            self._process = self._start(self._command, variables, log)
        self.life += 1
        end = time.monotonic() + START
        while not self._ready():
            if self._process.poll() is not None:
                if self._is_killed:
                    return  # by a fault, while it started: it is dead, as others are that a fault has killed
                raise RuntimeError(f"{self.name} ended with status {self._process.returncode}, see {self.log}")
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name} was not ready within {START:g} s, see {self.log}")
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        """To the running process; a dead one hears nothing."""
        if self.pid is not None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait."""
        if self._process is not None:
            self._is_killed = True
            self._process.kill()
            self._process.wait(_STOP)

    def stop(self) -> int | None:
        """SIGTERM; the exit status, or None when it did not end in time (it is killed then)."""
        if self._process is None or self._process.poll() is not None:
            return self._process.returncode if self._process is not None else 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self.kill()
            return None


class NodeUnderTest:
    """A daemon, two engines over it, Redis behind a proxy, and a router that reaches one of the engines by a proxy."""

    def __init__(self, home: Path, model: Path, start: Start = by_python) -> None:
        self.home, self.socket, self.slabs = home, home / "kv.sock", home / "slabs"
        self._start = start
        self.redis = RedisServer(_made(home / "redis"), ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru"))
        self.redis.start()
        self.line_to_redis = ToxicProxy(self.redis.port)
        self._http = {name: f"127.0.0.1:{free_port()}" for name in ("daemon", "engine-a", "engine-b", "router")}
        self.line_to_engine = ToxicProxy(int(self._http["engine-b"].rpartition(":")[2]))
        self.members: dict[str, Member] = {}
        self._add("daemon", ["serve", "--socket", str(self.socket)], service__http=self._http["daemon"],
                  file__path=str(self.slabs), file__size=FILE, host__size=str(L2_BYTES),
                  redis__url=f"redis://127.0.0.1:{self.line_to_redis.port}")  # fmt: skip
        specs = []
        for name in ("engine-a", "engine-b"):
            publish, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            self._add(name, ["engine", "--model", str(model), "--exact"], server__http=self._http[name],
                      service__socket=str(self.socket), host__size=str(L2_BYTES), l1__num_blocks=str(L1_BLOCKS),
                      cache__block_size=str(BLOCK),
                      events__publish=publish, events__replay=replay)  # fmt: skip
            port = self.line_to_engine.port if name == "engine-b" else self._http[name].rpartition(":")[2]
            specs.append(f"http://127.0.0.1:{port},events={publish},replay={replay}")
        replicas = [argument for spec in specs for argument in ("--replica", spec)]
        self._add("router", ["route", "--model", str(model), "--http", self._http["router"], *replicas],
                  router__probe_timeout="10s", router__connect_timeout="10s")  # fmt: skip

    def _add(self, name: str, command: Sequence[str], **options: str) -> None:
        common = {} if name == "router" else _COMMON
        log = self.home / f"{name}.log"
        ready = partial(self._answers, name)
        self.members[name] = Member(self._start, name, command, log, ready, **{**common, **options})

    def start(self) -> None:
        """All of it, each as soon as the one before is ready."""
        for member in self.members.values():
            member.start()
        about = self.page("engine-a", "/v1/models")["data"][0]["kvtier"]
        [model] = self.page("daemon")["models"]
        self.model = Model(bytes.fromhex(about["fingerprint"]), about["block_size"], model["block_bytes"], L2_BYTES)

    def url(self, name: str) -> str:
        return f"http://{self._http[name]}"

    def page(self, name: str, path: str = "/status") -> Any:
        """A page of one process, as JSON; httpx2.HTTPError when it does not answer."""
        return httpx2.get(self.url(name) + path, timeout=60, trust_env=False).json()

    def counters(self, name: str) -> dict[str, float]:
        """The metrics of one process; empty when it does not answer."""
        with suppress(httpx2.HTTPError):
            text = httpx2.get(self.url(name) + "/metrics", timeout=60, trust_env=False).text
            lines = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
            return {key: float(value) for key, _, value in lines}
        return {}

    def pids(self) -> dict[str, tuple[int, int]]:
        """Each running process's pid and life."""
        return {name: (member.pid, member.life) for name, member in self.members.items() if member.pid is not None}

    def tracebacks(self) -> dict[str, str]:
        """The end of every log with a traceback in it."""
        texts = {name: member.log.read_text(errors="replace") for name, member in self.members.items()}
        return {name: text[text.rindex("Traceback") :][:2000] for name, text in texts.items() if "Traceback" in text}

    def close(self) -> dict[str, int | None]:
        """Stop all of it, the last started first; each one's exit status."""
        ended = {name: member.stop() for name, member in reversed(self.members.items())}
        self.line_to_redis.close()
        self.line_to_engine.close()
        self.redis.kill()
        return ended

    def _answers(self, name: str) -> bool:
        try:
            return httpx2.get(self.url(name) + "/healthz", timeout=60, trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False


class Reviver:
    """Starts dead members again, one at a time, on a thread of its own; what does not start is told in `failures`."""

    def __init__(self, node: NodeUnderTest) -> None:
        self.failures: list[str] = []
        self._node, self._ending = node, threading.Event()
        self._thread = threading.Thread(target=self._run, name="reviver")
        self._thread.start()

    def end(self) -> None:
        """Once all that was dead runs again."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(0.2) or self._dead():
            for name in self._dead():
                try:
                    self._node.members[name].start()
                except RuntimeError as error:
                    self.failures.append(str(error))
                    if len(self.failures) > 20:
                        return

    def _dead(self) -> list[str]:
        return [name for name, member in self._node.members.items() if member.pid is None]


def size_of(pid: int, seconds: float) -> Size | None:
    """What a process holds now; None when it has just ended."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return Size(seconds, int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")),
                    int(status["Threads"]))  # fmt: skip
    except (OSError, KeyError):
        return None


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
