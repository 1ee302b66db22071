"""Engines that start fast: one process imports what they need, and every engine is a fork of it, one at a time.

The benchmark's end is `EngineStarter`, the engine's end is `serve`. Between the two are sockets: one on which engines
are asked for, and one for each engine, with a line of JSON for each command and each reply.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TextIO

from _engine_process import EngineEnded

ROOT: Final = Path(__file__).resolve().parent.parent
_IMPORTS: Final = 300.0  # seconds: the first import of an engine on a cold disk
_START: Final = 300.0  # until an engine says that it is ready
_ANSWER: Final = 900.0  # that one command may take
_END: Final = 60.0  # from the end of the commands to the end of the process
_MESSAGE: Final = 1 << 16  # bytes of a set-up at most

Serve = Callable[[dict[str, Any], TextIO, TextIO], None]
"""Serves one engine: its set-up, the commands and the replies."""


class EngineStarter:
    """The process that engines are forked from; ready once this is made. Raises EngineEnded."""

    def __init__(self, python: Path, program: str, log: IO[bytes]) -> None:
        """`program` is a file of this folder that calls `serve` with its first argument, run by the engine's Python."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [ROOT, ROOT / "tests" / "interop", ROOT / "benchmarks"]
        with theirs:
            self.process = subprocess.Popen(
                [str(python), str(ROOT / "benchmarks" / program), str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        try:
            self.told(_IMPORTS)
        except EngineEnded:
            self.close()
            raise

    def start(self, setup: Mapping[str, Any], log: IO[bytes]) -> "ForkedEngine":
        """An engine that is ready; what it says goes to `log`. The one before it must be closed. Raises EngineEnded."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), log.fileno()]
            try:
                socket.send_fds(self._control, [json.dumps(setup).encode()], fds)
            except OSError as error:
                raise EngineEnded(f"no engine can be started any more: {error}") from None
        return ForkedEngine(self, int(self.told(_END)), ours)

    def told(self, timeout: float) -> bytes:
        """The starter's next message. Raises EngineEnded if there is none by then."""
        self._control.settimeout(timeout)
        with contextlib.suppress(OSError):
            if message := self._control.recv(_MESSAGE):
                return message
        raise EngineEnded(
            "the process that starts engines ended or hangs; run `make test-vllm`: it shows what is wrong"
        )

    def close(self) -> None:
        """Let it end; it is killed if that takes longer than a minute. Idempotent."""
        self._control.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class ForkedEngine:
    """One engine, as the benchmark sees it."""

    def __init__(self, starter: EngineStarter, pid: int, link: socket.socket) -> None:
        """Raises EngineEnded if it does not get ready."""
        self._starter, self._pid, self._link = starter, pid, link
        self._lines = link.makefile("r")
        self._closed = False
        try:
            self._reply(_START)
        except EngineEnded:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it `do` something, and wait for the answer. Raises EngineEnded."""
        try:
            self._link.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as error:
            raise EngineEnded(f"it ended before it was asked to {do}: {error}") from None
        return self._reply(_ANSWER)

    def close(self) -> None:
        """Let it end, and kill it and all that it started if it takes longer than a minute. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._link.close()
        try:
            self._starter.told(_END)
        except EngineEnded:
            self._kill()
            self._starter.told(_END)

    def _reply(self, timeout: float) -> dict[str, Any]:
        self._link.settimeout(timeout)
        try:
            line = self._lines.readline()
        except TimeoutError:
            self._kill()
            raise EngineEnded(f"it did not answer within {timeout:.0f} s, and was killed") from None
        except OSError as error:
            raise EngineEnded(f"its socket failed: {error}") from None
        if not line:
            raise EngineEnded("it ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def serve(arguments: Sequence[str], engine: Serve) -> None:
    """Fork an engine for each that is asked for, until the benchmark's end of the socket is closed.

    Everything an engine imports should be imported by now, and no thread may run: a fork has none of them.
    """
    control = socket.socket(fileno=int(arguments[0]))
    control.send(b"ready")
    while True:
        setup, fds, _, _ = socket.recv_fds(control, _MESSAGE, 2)
        if not setup:
            return
        pid = os.fork()
        if not pid:
            control.close()
            _be_engine(json.loads(setup), fds[0], fds[1], engine)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        control.send(str(os.waitstatus_to_exitcode(status)).encode())


def _be_engine(setup: dict[str, Any], link: int, log: int, engine: Serve) -> None:
    """In the fork: serve until the commands end. Never returns."""
    status = 1
    try:
        os.setsid()  # it is killed with all that it started
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        with socket.socket(fileno=link) as ours, ours.makefile("r") as commands, ours.makefile("w") as replies:
            engine(setup, commands, replies)
        status = 0
    except BaseException:  # top of a process: what it was goes to the log
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)  # whatever else an engine would do at its end is none of the measurement's
