"""Processes and threads that benchmarks measure, or measure beside: ready when they say so, ended with the program.

Whoever imports this finds the rigs of the tests, too.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeVar

from _report import ROOT, progress

from kvtier.tiers import KVTierError

sys.path += [str(ROOT / "tests" / each) for each in ("interop", "rigs")]
_START: Final = 120.0  # seconds: a cold import of torch and transformers
_PROCESS_CLOCK: Final = 2  # Linux makes a process's clock of its pid and this: clock_getcpuclockid(3)

V = TypeVar("V")


def beside(engine: str) -> None:
    """Go on in `.venv-ENGINE`, if that is there and has the engine, which this interpreter has not."""
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    if find_spec(engine) is None and python.exists():
        os.execv(python, [str(python), *sys.argv])


def installed(name: str, *wanted: str, python: Path = Path(sys.executable)) -> Path:
    """A folder of the user's cache that has packages, and nothing they depend on; CalledProcessError by pip.

    They are installed by that Python at the first call.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    if not (cache / name).exists():
        progress(f"installing {name} into a folder of its own")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
            pip += ["--target", f"{fresh}/packages", *wanted]
            subprocess.run(pip, capture_output=True, text=True, check=True, timeout=600)
            Path(fresh, "packages").rename(cache / name)
    return cache / name


def wait_until(holds: Callable[[], object], what: str, seconds: float = 120.0, pause: float = 0.01) -> None:
    """RuntimeError if it takes longer."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)


def environment(**options: str) -> dict[str, str]:
    """Of a process that runs this tree's kvtier, with options such as `HOST__SIZE` and no others."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    variables |= {f"KVTIER_{name}": value for name, value in options.items()}
    return variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # two engines' threads would spin in turns


def kvtier(*arguments: str) -> list[str]:
    return ["-m", "kvtier.cli", *arguments]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, of all threads there were."""
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ServerProcess:
    """A process that serves. KVTierError if it does not start."""

    def __init__(
        self, command: Sequence[str], log: Path, *, ready: str = "ready on", options: Mapping[str, str] | None = None
    ) -> None:
        self.log, env = log, environment(**(options or {}))
        with log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, *command], env=env, stdout=file, stderr=file)
        end = time.monotonic() + _START
        while ready not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise KVTierError(f"{' '.join(command[:3])} did not start: {self.last_words()}")
            time.sleep(0.05)

    def last_words(self) -> str:
        return (self.log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1][:300]

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def settle(self) -> None:
        """Wait until it computes nothing: a daemon prefaults its memory for a while. A minute at most."""
        end, before = time.monotonic() + 60.0, -1.0
        while (now := self.cpu_seconds()) - before > 0.005 and time.monotonic() < end:
            before = now
            time.sleep(0.5)

    def anonymous_bytes(self) -> int:
        """Memory of its own: a daemon's region is a shared file's."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def drop_caches(path: Path | None = None) -> None:
    """What the page cache has of all files, or at least of this one, where only root may drop it all."""
    os.sync()
    if path is not None:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        progress("not root: page cache dropped by posix_fadvise alone, where at all")


@contextmanager
def serving(home: str | Path, size: str, verify: str = "never") -> Iterator[tuple[ServerProcess, Path]]:
    """`kvtier serve` with so much host memory, and its socket."""
    path = Path(home) / f"{verify}.sock"
    options = {"HOST__SIZE": size, "HOST__VERIFY": verify, "SERVICE__SOCKET": str(path), "SERVICE__HTTP": "127.0.0.1:0"}
    daemon = ServerProcess(kvtier("serve"), path.with_suffix(".log"), options=options)
    try:
        yield daemon, path
    finally:
        daemon.stop()


@contextmanager
def forked(run: Callable[[int, int], object]) -> Iterator[tuple[str, int, int]]:
    """A child that calls `run` with two descriptors, one to write to and one to read from, until it is killed.

    Yields the first line it writes, where its parent writes what it reads, and its process id.
    """
    (told, tell), (asked, ask) = os.pipe(), os.pipe()
    sys.stdout.flush()
    if not (pid := os.fork()):
        os.close(ask)
        try:
            run(tell, asked)
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(tell)
    try:
        with os.fdopen(told) as lines:
            yield lines.readline().strip(), ask, pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ask)
        os.close(asked)


@contextmanager
def busy_thread() -> Iterator[None]:
    """A pure-Python thread that never gives the GIL up by itself, as an engine's scheduler at its worst."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            for _ in range(1000):
                pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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


def spawned(run: Callable[..., V], *arguments: object) -> V:
    """What it returns in a fresh process: its threads are its own, and no memory of earlier work is used again."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(run, *arguments).result(timeout=1800)


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
