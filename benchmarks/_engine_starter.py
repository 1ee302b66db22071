"""Engines that start fast: one process imports what they need, and every engine is a fork of it.

The benchmark's end is `EngineStarter`, the engine's end is `serve`. Between the two are a socket on which engines are
asked for, and a pipe for each engine: (command, arguments) one way, what came of it the other; None ends it.
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
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_START: Final = 300.0  # seconds: the first import of an engine on a cold disk, or until an engine is ready
_ANSWER: Final = 900.0  # that one command may take
_END: Final = 60.0  # from the end of the commands to the end of the process
_MESSAGE: Final = 1 << 16  # bytes of a set-up at most


class EngineEnded(RuntimeError):
    """An engine, or the process that starts them, ended without an answer."""


class EngineStarter:
    """The process that engines are forked from; ready once this is made. Raises EngineEnded."""

    def __init__(self, python: Path, program: str, log: IO[bytes]) -> None:
        """`program` is a file of this folder that calls `serve` with its first argument, run by the engine's Python."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join(str(ROOT / each) for each in ("", "tests/interop", "benchmarks"))
        with theirs:
            self.process = subprocess.Popen(
                [str(python), str(ROOT / "benchmarks" / program), str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(_START)
        with contextlib.suppress(OSError):
            if self._control.recv(_MESSAGE):
                return
        self.close()
        fix = "run `make test-vllm`: it shows what is wrong"
        raise EngineEnded(f"the process that starts engines ended or hangs; {fix}")

    def start(self, setup: Mapping[str, Any], log: IO[bytes]) -> "ForkedEngine":
        """An engine that is ready; what it says goes to `log`. Raises EngineEnded."""
        ours, theirs = Pipe()
        with theirs:
            try:
                socket.send_fds(self._control, [json.dumps(setup).encode()], [theirs.fileno(), log.fileno()])
            except OSError as error:
                raise EngineEnded(f"no engine can be started any more: {error}") from None
        return ForkedEngine(ours)

    def close(self) -> None:
        """Let it end; it is killed if that takes longer than a minute. Idempotent."""
        self._control.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class ForkedEngine:
    def __init__(self, link: Connection) -> None:
        """Raises EngineEnded if it does not get ready."""
        self._link, self._pid = link, 0
        try:
            self._pid = self._reply(_START)
            self._reply(_START)
        except EngineEnded:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have it `do` something, and wait for the answer. Raises EngineEnded."""
        try:
            self._link.send((do, arguments))
        except OSError as error:
            raise EngineEnded(f"it ended before it was asked to {do}: {error}") from None
        return self._reply(_ANSWER)

    def close(self) -> None:
        """Let it end, and kill it and all that it started if it takes longer than a minute. Idempotent."""
        if self._link.closed:
            return
        with contextlib.suppress(OSError, EOFError):  # it is gone
            self._link.send(None)
            while self._link.poll(_END):
                self._link.recv()
            self._kill()
        self._link.close()

    def _reply(self, timeout: float) -> Any:
        try:
            if self._link.poll(timeout):
                return self._link.recv()
        except (OSError, EOFError):
            raise EngineEnded("it ended") from None
        self._kill()
        raise EngineEnded(f"it did not answer within {timeout:.0f} s, and was killed")

    def _kill(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)


def serve(arguments: Sequence[str], make: Callable[[dict[str, Any]], Any]) -> None:
    """Fork an engine for each that is asked for, until the benchmark's end of the socket is closed.

    Of its set-up `make` makes what has a method for each command, and `end`. Everything an engine imports should be
    imported by now, and no thread may run: a fork has none of them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for an engine
    control = socket.socket(fileno=int(arguments[0]))
    control.send(b"ready")
    while True:
        setup, fds, _, _ = socket.recv_fds(control, _MESSAGE, 2)
        if not setup:
            return
        if not os.fork():
            control.close()
            _be_engine(json.loads(setup), Connection(fds[0]), fds[1], make)
        for fd in fds:
            os.close(fd)


def _be_engine(setup: dict[str, Any], link: Connection, log: int, make: Callable[[dict[str, Any]], Any]) -> None:
    """In the fork: answer commands until they end. Never returns: the pipe is open until then."""
    status = 1
    try:
        os.setsid()  # it is killed with all that it started
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        link.send(os.getpid())
        served = make(setup)
        try:
            link.send("ready")
            while (command := link.recv()) is not None:
                do, options = command
                link.send(getattr(served, do)(**options))
        finally:  # also if whoever asked is gone
            served.end()
        status = 0
    except BaseException:  # top of a process: what it was goes to the log
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)  # whatever else an engine would do at its end is none of the measurement's
