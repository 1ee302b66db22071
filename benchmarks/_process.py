"""Processes that benchmarks measure: started as a user would, ready when they say so, ended with the program."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtier.tiers import KVTierError

ROOT: Final = Path(__file__).resolve().parent.parent
_START: Final = 120.0  # seconds: a cold import of torch and transformers


class ServerProcess:
    """A process that serves; `options` are variables such as `HOST__SIZE`. KVTierError if it does not start."""

    def __init__(
        self, command: Sequence[str], log: Path, *, ready: str = "ready on", options: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        environment |= {f"KVTIER_{name}": value for name, value in (options or {}).items()}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # two engines' threads would spin in turns
        with log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, *command], env=environment, stdout=file, stderr=file)
        end = time.monotonic() + _START
        while ready not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
                raise KVTierError(f"{' '.join(command[:3])} did not start: {lines[-1]}")
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """User and system time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """SIGTERM, and after ten seconds SIGKILL. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def kvtier(*arguments: str) -> list[str]:
    """The command line of `kvtier ARGUMENTS`."""
    return ["-m", "kvtier.cli", *arguments]


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
