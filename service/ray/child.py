"""EngineChild: the engine of one replica, a child process that always ends with the replica."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from kvtier.service.web import get_page
from kvtier.tiers import KVTierError
from kvtier.tiers.config import child_environment

_LOOK: Final = 0.2  # seconds between two checks that it is ready
_ANSWER: Final = 5.0  # seconds for a page
_PAGES: Final = ("/readyz", "/health")  # kvtier's; vLLM's and many others'
_LOOPBACK: Final = "127.0.0.1"
# `PID COMMAND…`: becomes the command, which the kernel kills with the parent of this pid; the order outlives execve(2).
_DIE_WITH_PARENT: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl")
if os.getppid() != int(sys.argv[1]):  # it ended before the order was given
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Free ports, reserved until the block ends; servers with SO_REUSEADDR can bind them meanwhile."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))  # without the option: two of them never get one port
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [each.getsockname()[1] for each in sockets]


def _its_lines() -> str:
    return f"read why in Ray's log worker-*-{os.getpid()}.err of this node"


class EngineChild:
    """Starts the engine at once. The kernel kills it with its replica, whose successor needs the GPU."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int) -> None:
        """`port`: of loopback, where it answers. KVTierError if the program cannot be started."""
        self._address = f"{_LOOPBACK}:{port}"
        wrapper = [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid())]
        try:
            self._process = subprocess.Popen([*wrapper, *command], env=child_environment(env), stdin=subprocess.DEVNULL)
        except OSError as error:
            raise KVTierError(f"{command[0]}: {error.strerror}") from error

    def wait_ready(self, timeout: float) -> Any:
        """Wait until it answers requests; returns its page `/v1/models`. KVTierError if it does not become ready."""
        until = time.monotonic() + timeout
        while not self.is_healthy():
            if (status := self._process.poll()) is not None:
                raise KVTierError(f"the engine ended with status {status} before it was ready; {_its_lines()}")
            if time.monotonic() > until:
                self.stop(0.0)
                raise KVTierError(
                    f"the engine was not ready after {timeout:g} s; raise start_timeout, or {_its_lines()}"
                )
            time.sleep(_LOOK)
        status, body = get_page(self._address, "/v1/models", _ANSWER)
        if status != http.client.OK:
            raise KVTierError(f"the engine's /v1/models answers {status}; it has to answer without a key")
        return json.loads(body)

    def is_healthy(self) -> bool:
        if self._process.poll() is not None:
            return False
        try:
            statuses = (get_page(self._address, path, _ANSWER)[0] for path in _PAGES)
            return next((each for each in statuses if each != http.client.NOT_FOUND), 0) == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def stop(self, grace: float) -> None:
        """Let it finish its answers, and kill it after `grace` seconds. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if grace > 0 else signal.SIGKILL)
            try:
                self._process.wait(grace if grace > 0 else None)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
