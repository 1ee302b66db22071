"""A node for tests: `kvtier serve` as a process of its own, to be asked, killed and started again."""

import json
import os
import random
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fork_rig import SERVICES, Forked

ROOT: Final = Path(__file__).resolve().parents[2]
_CLAIM: Final = 50  # ports claimed at once
_START: Final = 100.0  # seconds: a cold import of everything on a busy machine
_ports: list[int] = []  # claimed, and not handed out yet


class Node:
    """One daemon in a directory, with its slab there; `options` are variables such as `HOST__SIZE`."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.directory = directory
        self.socket = directory / "kv.sock"
        self.log = directory / "log"
        port = free_port()
        chosen = {
            "HOST__SIZE": "32MiB",
            "FILE__PATH": str(directory / "slabs"),
            "FILE__SIZE": "64MiB",
            "SERVICE__SOCKET": str(self.socket),
            "SERVICE__HTTP": f"127.0.0.1:{port}",
            "CACHE__PREFETCH_DEADLINE": "60s",  # it need not be the test that keeps the machine busy
            "FILE__DEADLINE": "60s",
            "REDIS__CONNECT_TIMEOUT": "20s",
            "REDIS__DEADLINE": "20s",
            **options,
        }
        self.http = f"http://{chosen['SERVICE__HTTP']}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")},
            **{f"KVTIER_{name}": value for name, value in chosen.items()},
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._process: Forked | None = None

    @property
    def section(self) -> Mapping[str, str]:
        """What an engine's configuration says of it; on a busy test machine a daemon may answer late."""
        return {"socket": str(self.socket), "deadline": "30s"}

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._process is not None
        return self._process.pid

    @property
    def num_written(self) -> int:
        """Blocks its slabs have taken since it started."""
        models = json.loads(self._status())["models"]
        return sum(model["stored"].get("file", 0) for model in models)

    def told(self) -> str:
        """Its status and the end of its log: for a story that finds something wrong."""
        return f"{self._status()}\n{self.log.read_text()[-4000:]}"

    def start(self) -> None:
        """Start it and wait until it is ready."""
        with self.log.open("ab") as log:
            offset = log.tell()
            command = ["-m", "kvtier.cli", "serve"]
            self._process = Forked(command, SERVICES, env=self._environment, stderr=log, stdout=log)
        end = time.monotonic() + _START
        while "ready on" not in self.log.read_bytes()[offset:].decode():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"not ready: {self.log.read_text()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9: nothing is flushed, nobody is told."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def close(self) -> None:
        """Stop it if it runs; it must end well."""
        if self._process is not None and self._process.poll() is None:
            assert self.stop() == 0, self.log.read_text()

    def _status(self) -> str:
        with urllib.request.urlopen(f"{self.http}/status", timeout=_START) as answer:
            status: str = answer.read().decode()
        return status


@contextmanager
def node(**options: str) -> Iterator[Node]:
    """A running daemon, in a directory with a short name: a socket's path has some hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir=_disk()) as directory:
        made = Node(Path(directory), **options)
        made.start()
        try:
            yield made
        finally:
            made.close()


def event_ports() -> dict[str, str]:
    """Addresses of a publisher of KV events."""
    return {name: f"tcp://127.0.0.1:{free_port()}" for name in ("publish", "replay")}


def free_port() -> int:
    """A loopback port nobody listens on: below those the kernel hands out, and no other test's as long as we live."""
    while True:
        if not _ports:
            _ports.extend(_claimed_ports())
        port = _ports.pop()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _claimed_ports() -> range:
    """Ports no other process of tests hands out, until this one has ended; a file for many, since files are few."""
    while True:
        first = random.randrange(20_000, 32_000, _CLAIM)  # cluster_rig's are below
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtier test ports {first}")  # abstract: no file, and gone with this process
        except OSError:
            claim.close()
            continue
        claim.detach()
        return range(first, min(first + _CLAIM, 32_000))


def _disk() -> str | None:
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
