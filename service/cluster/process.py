"""Starts, identifies, probes and ends the processes of a cluster, never another's by mistake; shows their logs."""

import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvtier.service import harmless
from kvtier.service.cluster.file import Ready
from kvtier.service.web import disconnect_after
from kvtier.tiers import KVTierError
from kvtier.tiers.config import child_environment

_ANSWER: Final = 2.0  # seconds in which a health check must answer
_KILLED: Final = 10.0  # seconds from SIGKILL to the end: a process of 100 GB needs time to free its memory
_BRIEF: Final = {"KVTIER_SERVER__DRAIN": "20s", "KVTIER_ROUTER__DRAIN": "20s"}  # a person waits for the end
_LOOPBACK: Final = "127.0.0.1"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """A process, by pid and start time: a new process with the same pid is not it."""

    pid: int
    start: str  # boot id, and clock ticks since the boot

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process that has this pid now; None if none runs."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, f"{_BOOT.read_text().strip()}/{fields[19]}")

    @property
    def runs(self) -> bool:
        return Process.of(self.pid) == self

    def stop(self, grace: float) -> bool:
        """Send SIGTERM, and SIGKILL after `grace` seconds. Returns once it has ended: False if SIGKILL was needed.

        Kills what it leaves behind in its session.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return True
        try:
            if not self.runs:  # checked after opening the descriptor: from here on it is this process or none
                return True
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            in_time = _has_ended(fd, grace)
            if not in_time:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                if not _has_ended(fd, _KILLED):
                    raise KVTierError(
                        f"process {self.pid} does not end, {_KILLED:g} s after SIGKILL; it hangs in the kernel"
                    )
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # the number cannot be in use again so soon
            return in_time
        except ProcessLookupError:
            return True
        finally:
            os.close(fd)


def launch(argv: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start it in its own session, out of reach of Ctrl-C; its output is appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            program(argv),
            env=child_environment(env, under=_BRIEF),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def program(argv: Sequence[str]) -> list[str]:
    """The command of a service's argv: `kvtier` is this installation, whatever PATH says."""
    return [sys.executable, "-P", "-m", "kvtier.cli", *argv[1:]] if argv[0] == "kvtier" else list(argv)


def is_installed(name: str) -> bool:
    return name == "kvtier" or shutil.which(name) is not None


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
        return True


def is_well(ready: Ready) -> bool:
    """Whether a running service is healthy. A job that ends by itself never counts as healthy."""
    if ready.http is not None:
        return _answers(ready.http)
    if ready.command is not None:
        try:
            done = subprocess.run(
                program(ready.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ANSWER,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0
    return False


def _has_ended(process: int, timeout: float) -> bool:
    """Whether the process behind a descriptor ends in `timeout` seconds. `select` fails for descriptors past 1023."""
    ends = select.poll()
    ends.register(process, select.POLLIN)
    return bool(ends.poll(timeout * 1000))


def _answers(url: str) -> bool:
    """Whether a URL answers, with a deadline, and without proxy or redirect."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER)
    try:
        connection.connect()
        connected = connection.sock
        with disconnect_after(lambda: connected, _ANSWER) as late:
            connection.request("GET", parts.path or "/")
            return connection.getresponse().status < 400 and not late.is_set()  # a head cut short counts as whole
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# --- their logs ------------------------------------------------------------------------------------------------------

_TAIL_BYTES: Final = 1 << 20  # of a log, searched for its last lines
_LOOK: Final = 0.25  # seconds between two looks at what was added


def show_logs(logs: Sequence[tuple[str, Path]], num_lines: int, tell: Callable[[str], None], *, follow: bool) -> None:
    """Tell the last lines of each log, its service's name before each, and with `follow` those added, until Ctrl-C."""
    width = max((len(name) for name, _ in logs), default=0)
    ends = {name: _show(f"{name:<{width}} | ", path, None, num_lines, tell) for name, path in logs}
    while follow:
        time.sleep(_LOOK)
        for name, path in logs:
            ends[name] = _show(f"{name:<{width}} | ", path, ends[name], None, tell)


def _show(prefix: str, path: Path, start: int | None, num_lines: int | None, tell: Callable[[str], None]) -> int:
    """Tell whole lines from `start`, None for near the end, or the last of them; returns where they end."""
    try:
        with path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            begin = max(0, size - _TAIL_BYTES) if start is None else start if start <= size else 0
            log.seek(begin)
            data = log.read(size - begin)
    except FileNotFoundError:  # it has said nothing yet
        return 0
    whole = data[: data.rfind(b"\n") + 1] if num_lines is None else data
    lines = whole.decode(errors="replace").splitlines()
    for line in lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]:
        tell(harmless(prefix + line))
    return begin + len(whole)
