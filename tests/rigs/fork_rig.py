"""Starts `python ARGUMENTS` as a fork of a process that has the imports behind it: a real process, without its seconds.

torch and transformers take seconds to import, and a story that kills and starts processes would pay them each time.
What a start has of its own: arguments, environment, directory, streams, and all that the process does from then on.
What it shares: the hash seed and PYTHONPATH of the parent. What other programs start is a fork, too, if they start it
by the `python` or `kvtier` of a folder that `warm_programs` has made.
"""

import atexit
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

_TIERS: Final = ("kvtier.tiers.file.store", "kvtier.tiers.file.opening", "kvtier.tiers.redis.store",
                 "kvtier.tiers.redis.opening", "encodings.idna", "stringprep")  # fmt: skip
_PAGES: Final = ("uvicorn.lifespan.on", "uvicorn.loops.asyncio", "anyio._backends._asyncio")
SERVICES: Final = (
    "kvtier.cli.servers_cli",
    "kvtier.service.node.daemon",
    "kvtier.service.admin.http_app",
    "kvtier.service.events.publisher",
    "kvtier.service.router.router",
    "fault_rig",
    "service_rig",
    *_TIERS,
    *_PAGES,
)
"""What `kvtier serve`, `kvtier route` and the stories' own children import."""
ENGINE: Final = (
    "kvtier.cli.servers_cli",
    "kvtier.cli.demo_cli",
    "kvtier.service.engine.server",
    "kvtier.engine.demo.generation",
    "kvtier.engine.demo.rag_worker",
    "kvtier.engine.demo.worker",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_base",
    "small_demo",
    "openai.resources.chat.completions",
    "openai.types.chat",
    *SERVICES,
)
"""What `kvtier engine` and `kvtier demo` import besides, torch and transformers, and what clients of an engine do."""
WORKER: Final = (
    *(name for name in ENGINE if name != "small_demo"),  # a worker is no program
    "hypothesis.stateful",
    "kvtier.connector.transformers.adapter",
    "matplotlib.pyplot",
    "selenium.webdriver",
)
"""What tests import at their top: a worker of pytest-xdist that is a fork has it behind it."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_LONGEST: Final = 0.05  # seconds between two looks at a child
_WORKERS: Final = "TEST_WORKERS_ARE"  # a `worker` of warm_programs: a parent with torch is a fork of what it forks, too
_ROOM: Final = 2048  # bytes for a fork's command line, as `ps` shows it
_parents: "dict[tuple[str, ...], _Parent]" = {}  # by the modules they have imported


def cpu_seconds() -> float:
    """What the parents and those of their forks that were waited for took so far. They are no children of ours."""
    return sum(float(parent.ask({"spent": True})["seconds"]) for parent in _parents.values())


def warm_programs(folder: Path, modules: tuple[str, ...]) -> Path:
    """A new folder with `python`, `kvtier` and `activate`: what they start are forks, as those of `Forked`.

    `worker` is a `python` whose `sys.executable` is the real one: what it starts is no fork. The folder's path is
    short, since a socket lies in it.
    """
    folder.mkdir(parents=True)
    shim = Path(__file__).with_name("_fork_shim.py").read_text(encoding="utf-8")
    for name in ("python", "kvtier", "worker"):
        (folder / name).write_text(f"#!{sys.executable} -IS\n{shim}", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f"export PATH={shlex.quote(str(folder))}:$PATH\n", encoding="utf-8")
    _parent(modules).ask({"listen": str(folder / "socket")})
    return folder


def fork_workers(specs: Sequence[Any], folder: Path) -> None:
    """Let the workers of pytest-xdist be forks: torch, transformers and what else tests import is imported once."""
    os.environ[_WORKERS] = str(warm_programs(folder, WORKER) / "worker")
    for spec in specs:
        spec.python = os.environ[_WORKERS]


class Forked:
    """A started process, with those parts of `subprocess.Popen` that stories use. A pipe of it is text."""

    def __init__(
        self,
        arguments: list[str],
        modules: tuple[str, ...],
        *,
        env: Mapping[str, str],
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """Start `python ARGUMENTS` by a fork of a parent that has imported the modules. Its stdin is empty."""
        self.args = arguments
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        with open(os.devnull, "rb") as empty:
            self.stdout, out = _stream(stdout, 1)
            self.stderr, err = _stream(stderr, 2)
            self._parent = _parent(modules)
            try:
                asked = {"start": arguments, "env": dict(env), "cwd": os.getcwd(), "session": start_new_session}
                self.pid: int = self._parent.ask(asked, [empty.fileno(), out, err])["pid"]
            finally:
                for given, descriptor in ((stdout, out), (stderr, err)):
                    if given == subprocess.PIPE:
                        os.close(descriptor)

    def poll(self) -> int | None:
        """The exit status, minus the signal's number for one that was killed; None while it runs."""
        with self._parent.lock:
            if self.returncode is None:
                told = self._parent.ask({"wait": self.pid})
                if told["status"] is not None:
                    self.returncode = os.waitstatus_to_exitcode(told["status"])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended; subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.001
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return status

    def send_signal(self, number: int) -> None:
        """To the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


class _Parent:
    """The process that forks; one request at a time."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.lock = threading.RLock()
        self._asking, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = os.pathsep.join((str(_ROOT), str(_ROOT / "tests" / "rigs"), os.environ.get("PYTHONPATH", "")))
        warm = os.environ.get(_WORKERS) if "torch" in sys.modules and modules is not SERVICES else None
        program = Path(__file__).with_name("_fork_parent.py")
        with other:
            self._process = subprocess.Popen(
                [warm or sys.executable, str(program), *modules, _ROOM * " "],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        """Its answer."""
        with self.lock:
            socket.send_fds(self._asking, [json.dumps(request).encode()], descriptors or [])
            answer: dict[str, Any] = json.loads(self._asking.recv(1 << 16))
            return answer

    def close(self) -> None:
        self._asking.close()
        self._process.wait(60)


def _parent(modules: tuple[str, ...]) -> _Parent:
    """One for each set of modules, as long as this process lives."""
    if modules not in _parents:
        _parents[modules] = _Parent(modules)
    return _parents[modules]


def _stream(given: int | IO[Any] | None, own: int) -> tuple[IO[str] | None, int]:
    """Our end of a pipe if one is wanted, and the descriptor the child gets."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        return open(reading, encoding="utf-8"), writing
    if given is None:
        return None, own
    return None, given if isinstance(given, int) else given.fileno()
