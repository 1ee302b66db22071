"""What benchmarks measure and measure beside: processes, blocks and stores of them, engines over a slab.

It also finds the rigs of the tests for what imports it. A process is ready when it says so, and ends with the program.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
from _report import ROOT, Race, Row, progress

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, KVTierError, Outcome, checksum
from kvtier.tiers.config import Config
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import TokenChain
from kvtier.tiers.pool import Reservation, SlotPool

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


def settle_cpu(cpu_seconds: Callable[[], float], seconds: float) -> None:
    """Wait until hardly anything is computed any more, so long at most."""
    end, before = time.monotonic() + seconds, -1.0
    while (now := cpu_seconds()) - before > 0.01 and time.monotonic() < end:
        before = now
        time.sleep(0.4)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End it, and kill it if that takes longer than twenty seconds. Idempotent."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


class ServerProcess:
    """A process that serves, until its context ends. KVTierError if it does not start."""

    def __init__(self, command: Sequence[str], log: Path, *, ready: str = "ready on", **options: str) -> None:
        self.log, env = log, environment(**options)
        with log.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, *command], env=env, stdout=file, stderr=file)
        end = time.monotonic() + _START
        while ready not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise KVTierError(f"{' '.join(command[:3])} did not start: {self.last_words()}")
            time.sleep(0.05)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def last_words(self) -> str:
        return (self.log.read_text(errors="replace").splitlines() or ["it said nothing"])[-1][:300]

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid)

    def anonymous_bytes(self) -> int:
        """Memory of its own: a daemon's region is a shared file's."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def stop(self) -> None:
        stop(self.process)


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
def serving(home: str | Path, size: str, **options: str) -> Iterator[tuple[ServerProcess, Path]]:
    """`kvtier serve` with so much host memory, and its socket."""
    path = Path(home) / f"{len(options)}.sock"  # daemons in one home differ in their options
    options |= {"HOST__SIZE": size, "SERVICE__SOCKET": str(path), "SERVICE__HTTP": "127.0.0.1:0"}
    with ServerProcess(kvtier("serve"), path.with_suffix(".log"), **options) as daemon:
        yield daemon, path


def posted(connection: HTTPConnection, path: str, body: Row, **headers: str) -> tuple[list[float], list[Row]]:
    """When each event of a stream came, and the events; of another answer, it alone. KVTierError for what is no answer.

    The connection is kept, if the server keeps it.
    """
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
    answer, times, events = connection.getresponse(), list[float](), list[Row]()
    while line := answer.readline():
        if line.startswith((b"data: {", b"{")):
            times.append(time.perf_counter())
            events.append(json.loads(line.removeprefix(b"data: ")))
    answer.read()  # nothing is left, and the connection is free
    if answer.status != 200 or any("error" in event for event in events):
        raise KVTierError(f"{path}: status {answer.status}: {events[-1:]}")
    return times, events


@contextmanager
def child(run: Callable[..., object], *arguments: object) -> Iterator[tuple[Connection, int]]:
    """A process that calls `run` with these and one end of a pipe, until the context ends; our end, and its id."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield ours, process.pid
    finally:
        process.kill()
        process.join(10)


def received(pipe: Connection, seconds: float = 120.0) -> Any:
    """RuntimeError if nothing comes, EOFError if nothing can."""
    if not pipe.poll(seconds):
        raise RuntimeError(f"a child said nothing within {seconds:g} s")
    return pipe.recv()


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


# blocks: names, records, payloads, host slots; and a race of stores of them with bare clients

NO_PARENT = bytes(32)  # the parent of a chain's first block
TOKENS = b"\1\0\0\0" * 16
OURS: Final = "ours"


class Shape(NamedTuple):
    """Of blocks that nobody has. Implements `BlockShape`."""

    block_size: int
    block_bytes: int


@dataclass
class AskedRequest:
    """Implements the connector's `Request`."""

    request_id: str
    chain: TokenChain
    num_tokens: int


def random_names(rng: np.random.Generator, count: int) -> list[ChainHash]:
    """They are hashes, as indexes expect of names; each time other objects."""
    joined = rng.bytes(32 * count)
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


def records_of(
    names: Sequence[ChainHash], checksums: Iterable[int], root: ChainHash = NO_PARENT, tokens: bytes = TOKENS
) -> list[BlockRecord]:
    parents = [root, *names]
    return [BlockRecord(name, parents[i], tokens, each) for i, (name, each) in enumerate(zip(names, checksums))]  # noqa: B905


def reserved(pool: SlotPool, names: Sequence[ChainHash], parent: ChainHash | None = None) -> Reservation:
    reservation = pool.reserve(names, parent)
    if reservation is None:
        raise RuntimeError("the pool has no room, although nothing else is leased")
    return reservation


def key_file(directory: str | Path) -> Path:
    """A file with a key, for [redis], [objects] and [peers]."""
    path = Path(directory) / "key"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return path


class Slots:
    """Host slots: sources with bytes of their own, and as many targets as a batch of the hierarchy has blocks."""

    def __init__(self, block_bytes: int, num_batches: int = 1) -> None:
        self.block_bytes = block_bytes
        self.per_batch = max(1, BATCH_BYTES // block_bytes)
        self.batch_bytes = self.per_batch * block_bytes
        rng = np.random.default_rng(1)
        self.sources = self.more(num_batches * self.per_batch)
        for source in self.sources:
            source[:] = rng.bytes(block_bytes)
        self.checksums = [checksum(source) for source in self.sources]
        self.targets = self.more(self.per_batch)

    def more(self, count: int) -> list[memoryview]:
        region = HostRegion.allocate(count, self.block_bytes)
        assert region.wait_prefaulted(None)
        return [region.slot(i) for i in range(count)]


class StoreRace(Race):
    """Stores of blocks of one size, by the names of their sides. A speed is of a verb and a side."""

    def __init__(self, slots: Slots, num_bytes: int, stores: Mapping[str, Any]) -> None:
        super().__init__()
        self.slots, self.stores, self.num_batches = slots, stores, max(1, num_bytes // slots.batch_bytes)

    def chain(self, name: object) -> list[list[BlockRecord]]:
        """Batches of records; block i of each is source i."""
        count, sums = self.slots.per_batch, self.slots.checksums
        names = [[f"{name}/{batch}/{i}".encode() for i in range(count)] for batch in range(self.num_batches)]
        return [records_of([hashlib.sha256(one).digest() for one in batch], sums) for batch in names]

    def write(self, side: str, batch: list[BlockRecord]) -> None:
        outcomes = self.stores[side].write(batch, self.slots.sources)
        assert set(outcomes) == {Outcome.OK}, f"a write failed: {set(outcomes)}"

    def read(self, side: str, batch: list[BlockRecord]) -> None:
        results = self.stores[side].read([record.chain_hash for record in batch], self.slots.targets)
        assert not [r for r in results if isinstance(r, Outcome)], f"a read failed: {results}"

    def discard(self, side: str, batch: list[BlockRecord]) -> None:
        self.stores[side].discard([record.chain_hash for record in batch])

    def forget(self) -> None:
        for target in self.slots.targets:
            target[:8] = bytes(8)

    def check(self) -> None:
        """The last batch read holds the bytes written."""
        same = [np.array_equal(a, b) for a, b in zip(self.slots.sources, self.slots.targets, strict=True)]
        assert all(same), "read other bytes than written"


# engines


class EngineEnded(RuntimeError):
    """An engine ended without an answer, or was killed since none came in time."""


class EngineProcess:
    """An engine by another Python, ready once this is made: a program of this folder that calls `be_engine`."""

    def __init__(self, python: Path, program: str, setup: Mapping[str, Any], log: IO[bytes] | int) -> None:
        """What it says goes to `log`. Raises EngineEnded."""
        self._link, theirs = Pipe()
        paths = os.pathsep.join(str(ROOT / each) for each in ("", "tests/interop", "benchmarks"))
        with theirs:
            self._process = subprocess.Popen(
                [str(python), str(ROOT / "benchmarks" / program), str(theirs.fileno()), json.dumps(setup)],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        try:
            self._reply(300.0)  # the first import of an engine on a cold disk
        except EngineEnded:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have it `do` something, and wait for the answer. Raises EngineEnded."""
        with suppress(OSError):
            self._link.send((do, arguments))
        return self._reply(900.0)

    def close(self) -> None:
        """Let it end, and kill it and all that it started if it takes longer than a minute. Idempotent."""
        self._link.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _reply(self, timeout: float) -> Any:
        with suppress(OSError, EOFError):
            if self._link.poll(timeout):
                return self._link.recv()
            os.killpg(self._process.pid, signal.SIGKILL)
            raise EngineEnded(f"it did not answer within {timeout:.0f} s, and was killed")
        raise EngineEnded("it ended")


def be_engine(make: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Of its set-up `make` makes what has a method for each command, and `end`. Never returns."""
    link, status = Connection(int(sys.argv[1])), 1
    try:
        served = make(json.loads(sys.argv[2]))
        try:
            link.send("ready")
            while True:
                do, options = link.recv()
                link.send(getattr(served, do)(**options))
        except EOFError:
            status = 0
        finally:
            served.end()
    except BaseException:  # top of a process: what it was goes to the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # whatever else an engine would do at its end is none of the measurement's


VLLM: Final = ROOT / ".venv-vllm" / "bin" / "python"
VOCABULARY: Final = 8192
_SETTLE: Final = 120.0  # seconds for everything stored to reach the slab


def random_tokens(draw: np.random.Generator, count: int, first: int = 3, end: int = VOCABULARY) -> list[int]:
    tokens: list[int] = draw.integers(first, end, count).tolist()
    return tokens


def llama(size: int, layers: int, *, heads: int, kv_heads: int, **options: Any) -> Any:
    from transformers import LlamaConfig  # takes torch along

    sizes: Row = {"hidden_size": size, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": size * 8 // 3}
    return LlamaConfig(**sizes | {"max_position_embeddings": VOCABULARY} | options)


def saved_llama(path: Path, size: int, layers: int, **options: Any) -> Path:
    """A checkpoint of random weights."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(llama(size, layers, **options)).save_pretrained(path)
    return path


def scratch(name: str) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=f".{name}-", dir=ROOT / "benchmarks")


def over_slab(home: Path | str, host: str, size: str, **cache: Any) -> Config:
    """Tiers over a slab; what is held is waited for and loaded, however long that takes."""
    file = {"path": str(home), "size": size, "deadline": "60s"}
    cache = {"load_or_recompute": "load", "prefetch_deadline": "120s", **cache}
    return Config.load(host={"size": host}, file=file, cache=cache)


def settle(engine: Any) -> None:
    """Every copy has ended, in every tier. SystemExit if that takes two minutes."""
    if not engine.drain(_SETTLE) or not engine.connector.hierarchy.drain(_SETTLE):
        raise SystemExit(f"what was stored has not reached the slab in {_SETTLE:.0f} s: the disk is too slow for this")


def leave_only(engine: Any, tier: str, *, page_cache: bool = False) -> None:
    """Empty the tiers above this one: "l1", "l2", or "file", with or without what the page cache has of it."""
    if tier != "l1":
        engine.pool.reset()
    if tier == "file":
        engine.connector.hierarchy.host.pool.reset()
        if not page_cache:
            drop_caches()
