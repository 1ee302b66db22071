"""A daemon under load, for service_overhead.py: its process, the least a round trip can cost, many clients at once."""

import json
import os
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvtier.tiers import KVTierError

ROOT: Final = Path(__file__).resolve().parent.parent
_CLIENT: Final = Path(__file__).with_name("_service_client.py")
_PROCESS_CLOCK: Final = 2  # Linux makes a process's clock of its pid and this: clock_getcpuclockid(3)
_ECHO: Final = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile d:=s.recv(4096): s.send(d)"


def environment(**settings: str) -> dict[str, str]:
    """Of a process that runs this tree's kvtier, with these options and no others."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return variables | {f"KVTIER_{name}": value for name, value in settings.items()} | {"PYTHONPATH": str(ROOT)}


class DaemonUnderTest:
    """`kvtier serve` as a process of its own."""

    def __init__(self, directory: Path, size: str, verify: str = "never") -> None:
        self.socket = directory / f"{verify}.sock"
        variables = environment(
            HOST__SIZE=size, HOST__VERIFY=verify, SERVICE__SOCKET=str(self.socket), SERVICE__HTTP="127.0.0.1:0"
        )
        self.process = subprocess.Popen([sys.executable, "-m", "kvtier.cli", "serve"], env=variables)
        end = time.monotonic() + 60
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise KVTierError("the daemon did not start")
            time.sleep(0.05)

    def cpu_seconds(self) -> float:
        """CPU time so far, of all threads there were."""
        return time.clock_gettime(~self.process.pid << 3 | _PROCESS_CLOCK)

    def anonymous_bytes(self) -> int:
        """Memory of its own: the region is a shared file's."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def stop(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def busy() -> None:
    """Compute for a fifth of a millisecond: a processor that slept takes as long to wake up as a step waits."""
    end = time.perf_counter() + 0.0002
    while time.perf_counter() < end:
        pass


def idle() -> None:
    """Sleep for a millisecond, as an engine that waits for its device."""
    time.sleep(0.001)


def time_echo(rounds: int, pause: Callable[[], object]) -> list[float]:
    """Seconds of a round trip to a process that only sends back what it is sent: what any daemon in Python costs."""
    ours, theirs = sockets.socketpair()
    command = [sys.executable, "-c", _ECHO, str(theirs.fileno())]
    echo = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    times = []
    for number in range(rounds + 10):
        pause()
        start = time.perf_counter()
        ours.send(bytes(64))
        ours.recv(4096)
        if number >= 10:  # before that it may be starting
            times.append(time.perf_counter() - start)
    ours.close()
    echo.wait(30)
    return times


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without a pause."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def many_clients(daemon: DaemonUnderTest, count: int, num_steps: int) -> list[dict[str, Any]]:
    """What clients told that were all started at once, with the default deadline."""
    command = [sys.executable, str(_CLIENT), str(daemon.socket), str(num_steps)]
    clients = [subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) for _ in range(count)]
    told = []
    for client in clients:
        said, _ = client.communicate(timeout=600)
        if client.returncode:
            raise KVTierError(f"a client of the daemon ended with status {client.returncode}")
        told.append(json.loads(said))
    return told
