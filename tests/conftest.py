"""What tests share: chains of integers, payloads derived from their keys, a directory on a real disk."""

import gc
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import numpy as np
import pytest
from extent import ALL, brief
from numpy.typing import NDArray
from pools import PoolOf

from kvtier.tiers.compiled import extension
from kvtier.tiers.config.environment import COMPILED
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.tier import ChainHash

if TYPE_CHECKING:
    from device_rig import DeviceRig
    from exact_engines import Over
    from fault_rig import Settled
    from kv_tier_rig import Open
    from object_rig import ObjectServer
    from redis_rig import RedisServer
    from scheduler_rig import Begin, Story
    from small_engines import Make

    from kvtier.engine.llm import Engine
    from kvtier.tiers.hierarchy.hierarchy import Hierarchy


pytest_plugins = ["outcomes"]


class Chain(Protocol):
    """`chain(1, 2, 3)`: the hashes of a chain whose blocks hold 1, 2, 3. A common prefix gives common hashes."""

    def __call__(self, *blocks: int) -> list[ChainHash]: ...


class Payload(Protocol):
    """`payload(key, num_bytes)`: the bytes a block of that key must hold. Any mix-up of keys shows."""

    def __call__(self, key: ChainHash, num_bytes: int) -> NDArray[np.uint8]: ...


def _chain(*blocks: int) -> list[ChainHash]:
    hashes: list[ChainHash] = []
    parent = b"root"
    for block in blocks:
        parent = hashlib.sha256(parent + block.to_bytes(8, "little")).digest()
        hashes.append(parent)
    return hashes


def _payload(key: ChainHash, num_bytes: int) -> NDArray[np.uint8]:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.fixture
def at_end() -> Iterator[ExitStack]:
    """`at_end.callback(end, engine)`: what a story opens ends behind it, the last first, whatever became of it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> bytes | None:
    """Every story is told of a slab in the clear and of an encrypted one."""
    chosen: bytes | None = request.param
    return chosen


@pytest.fixture
def chain() -> Chain:
    return _chain


@pytest.fixture
def payload() -> Payload:
    return _payload


@pytest.fixture
def disk_dir() -> Iterator[Path]:
    """An empty directory on a real disk: /tmp may be a tmpfs, which refuses O_DIRECT."""
    home = Path(__file__).resolve().parent.parent
    directory = Path(tempfile.mkdtemp(prefix=".test-disk-", dir=home))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty directory with a short name: a socket's path has some hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """`python` and `kvtier` whose processes are forks; the model that `kvtier model` makes is tiny there."""
    from fork_rig import ENGINE, warm_programs

    with tempfile.TemporaryDirectory(prefix="kvw-") as directory:
        yield warm_programs(Path(directory) / "bin", ENGINE)


@pytest.fixture(autouse=True)
def _no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVTIER_ variable of the developer's shell decides no test, but for the one that turns extension modules off."""
    for name in [name for name in os.environ if name.upper().startswith("KVTIER_")]:
        if name != COMPILED:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ObjectServer"]:
    """One S3 server for all stories that a process runs."""
    from object_rig import NO_OBJECTS, object_server

    if NO_OBJECTS is not None:
        pytest.skip(NO_OBJECTS)
    with object_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def _redis() -> Iterator["RedisServer"]:
    from redis_rig import NO_REDIS, standalone

    if NO_REDIS is not None:
        pytest.skip(NO_REDIS)
    with standalone("--enable-debug-command", "yes") as server:
        yield server


@pytest.fixture
def redis_server(_redis: "RedisServer") -> "RedisServer":
    """One Redis for all stories that a process runs. Each finds it up and empty, with no limit and no client."""
    _redis.renew()
    return _redis


@pytest.fixture
def server(redis_server: "RedisServer") -> "RedisServer":
    """The server of stories that have no other one."""
    return redis_server


@pytest.fixture(params=["Python", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The pool's verbs in one way, then in the other: `pytestmark = pytest.mark.usefixtures("way")` of a file."""
    if request.param == "Python":
        monkeypatch.setenv(COMPILED, "off")
    elif extension("kvtier.tiers.pool.core_compiled") is None:
        pytest.skip("not built: `make compiled`")
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """A new HTTP client reads all authorities of the machine, 20 ms of CPU time; the suite makes a thousand clients."""
    client: Any = sys.modules.get("httpcore2")  # whoever needs it was collected by now
    if client is None:
        yield
        return
    with patch.object(client, "default_ssl_context", cache(client.default_ssl_context)):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test ran once more: with what its first run changed, the second may fail for another reason."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"ran once more: {report.nodeid}")
        terminalreporter.write_line(str(report.longrepr)[-6000:])


def pytest_configure(config: pytest.Config) -> None:
    """Examples have no deadline, and none is too slow to make: a machine may be busy. A fixture may serve many.

    A shell's background job ignores Ctrl-C, and so would every program that a test starts and then interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):  # environments of real engines do without
        from hypothesis import HealthCheck, settings

        lenient = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
        settings.register_profile("busy", max_examples=brief(20, 100), deadline=None, suppress_health_check=lenient)
        settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the soak lasts: `pytest tests/faults/test_fault_cluster.py -k soak --soak 3600`."""
    parser.addoption("--soak", type=float, default=0.0, metavar="SECONDS", help="how long faults go on in the soak")
    parser.addoption("--fork-workers", action="store_true", help="workers of xdist share one import of torch")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Make the workers forks of a process that has the imports behind it, if that was asked for."""
    if config.getoption("--fork-workers"):
        from fork_rig import fork_workers

        folder = tempfile.TemporaryDirectory(prefix="kvw-")
        config.add_cleanup(folder.cleanup)
        fork_workers(specs, Path(folder.name) / "bin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `exhaustive`, unless all runs or a test is named; skip `gpu` without a CUDA device."""
    if not (ALL or any("::" in argument for argument in config.args)):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through it any more, in this process or in a fork."""
    gc.freeze()


def _has_cuda() -> bool:
    import torch  # only where a GPU test was collected

    return torch.cuda.is_available()


@pytest.fixture(params=["lru", "s3fifo", "predicted"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    """Makes pools whose laws are checked when the test is over."""
    pools: list[SlotPool] = []

    def make(slots: int, policy: str = "lru") -> SlotPool:
        pools.append(SlotPool(slots, policy=policy))
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()


@pytest.fixture
def over(at_end: ExitStack) -> "Over":
    """`over(home, 16, …)`: an exact engine over L2 and a slab; at the end its laws are checked and it is closed."""
    from exact_engines import engine_over
    from small_engines import end

    def opened(*arguments: Any, **options: Any) -> "Engine":
        engine = engine_over(*arguments, **options)
        at_end.callback(end, engine)
        return engine

    return opened


@pytest.fixture
def begin() -> "Iterator[Begin]":
    """`begin(16, connector)`: a scheduler's story; at the end its copies end, it is idle, and its laws hold."""
    from scheduler_rig import Story

    stories: list[Story] = []

    def make(*arguments: Any, **options: Any) -> "Story":
        stories.append(Story(*arguments, **options))
        return stories[-1]

    yield make
    for story in stories:
        story.end_copies()
        story.step()
        story.idle()


@pytest.fixture
def settled() -> "Iterator[Settled]":
    """`settled(hierarchy)`: it ends idle, by its laws, and is closed. Ask for it before what a story holds back."""
    from fault_rig import settle

    hierarchies: list[Hierarchy] = []

    def note(hierarchy: "Hierarchy") -> "Hierarchy":
        hierarchies.append(hierarchy)
        return hierarchy

    yield note
    for hierarchy in hierarchies:
        settle(hierarchy)


@pytest.fixture
def open_tier(disk_dir: Path) -> "Iterator[Open]":
    """`open_tier(model, **cache)`: a KVTier over one directory; at the end laws are checked and all is closed."""
    from kv_tier_rig import tiers_over  # takes transformers along

    with tiers_over(disk_dir) as opener:
        yield opener


@pytest.fixture(params=["lazy", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[DeviceRig]":
    """A GPU, and an adversary's CUDA on this CPU in its place."""
    from device_rig import rig_of  # takes torch along

    seed = zlib.crc32(request.node.name.encode())  # every test has an order of its own
    with rig_of(str(request.param), seed, monkeypatch, tmp_path) as device:
        yield device


@pytest.fixture
def make() -> "Iterator[Make]":
    """`make(tiers=True, **options)`: a small engine; at the end every one is closed and its laws are checked."""
    from small_engines import end, small_engine  # takes torch along, which most tests do without

    engines: list[Engine] = []

    def build(*arguments: Any, **options: Any) -> "Engine":
        engines.append(small_engine(*arguments, **options))
        return engines[-1]

    yield build
    for engine in engines:
        end(engine)
