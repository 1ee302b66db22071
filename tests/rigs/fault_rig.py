"""What the fault stories share: system calls that fail, hang or dawdle, and a hierarchy over a real slab."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from doubles import BLOCK_SIZE, SLOT_BYTES, payload_of

from kvtier.tiers.file.file_io import FileIO, Mode
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.cache_tiers import Claim, Pending
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings, Rates, TierPort
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import Outcome

FINGERPRINT = b"a model of the fault stories".ljust(32, b".")
SLAB_BYTES = 1 << 20


class FaultyIO(FileIO):
    """Real system calls; those that `fails(name, count)` picks raise `code`, and with the gate shut transfers hang."""

    def __init__(self, code: int = errno.EIO) -> None:
        self.code = code
        self.calls = 0
        self.fails: Callable[[str, int], bool] = lambda name, count: False
        self.short = False  # transfers move half of their first buffer
        self.interrupt = False  # every other transfer raises EINTR
        self.delay = 0.0  # seconds per read or write
        self.gate = threading.Event()
        self.gate.set()
        self.num_read = 0  # payload and table reads that have ended

    def open(self, path: Path, flags: int) -> int:
        self._maybe_fail("open")
        return super().open(path, flags)

    def size(self, fd: int) -> int:
        self._maybe_fail("size")
        return super().size(fd)

    def lock(self, fd: int) -> bool:
        self._maybe_fail("lock")
        return super().lock(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._maybe_fail("allocate")
        super().allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._maybe_fail("truncate")
        super().truncate(fd, length)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync")
        super().sync(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("preadv")
        self._linger()
        moved = super().preadv(fd, self._some(buffers), offset)
        self.num_read += 1
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("pwritev")
        self._linger()
        return super().pwritev(fd, self._some(buffers), offset)

    def _some(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if self.interrupt and self.calls % 2:
            raise InterruptedError
        return [buffers[0][: max(1, buffers[0].nbytes // 2)]] if self.short else buffers

    def _maybe_fail(self, name: str) -> None:
        self.calls += 1
        if self.fails(name, self.calls):
            raise OSError(self.code, os.strerror(self.code))

    def _linger(self) -> None:
        if self.delay:
            time.sleep(self.delay)
        assert self.gate.wait(60), "the test never opened the gate"


class DyingIO(FileIO):
    """Dies by SIGKILL in the n-th call that changes the file: before it, after half of it, or after all of it."""

    def __init__(self, n: int, when: str, *, armed: bool = True) -> None:
        self.left, self.when, self.armed = n, when, armed

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self._dies():
            return super().pwritev(fd, buffers, offset)
        whole = b"".join(buffers)
        if self.when != "before":
            super().pwritev(fd, [memoryview(whole[: len(whole) // (2 if self.when == "half" else 1)])], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def truncate(self, fd: int, length: int) -> None:
        is_last = self._dies()
        if not is_last or self.when != "before":
            super().truncate(fd, length)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    def _dies(self) -> bool:
        self.left -= self.armed
        return self.armed and not self.left


def killed(job: Callable[[FileIO], object], io: FileIO) -> bool:
    """Do the job in a process that `io` kills; False once there are too few writes for that."""
    pid = os.fork()
    if pid == 0:
        try:
            job(io)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the job itself failed"
    return os.WIFSIGNALED(status)


def over_slab(
    directory: Path,
    io: FileIO | None = None,
    *,
    slots: int = 32,
    mode: Mode = "buffered",
    patience: PortSettings | None = None,
    settings: HierarchySettings | None = None,
    clock: Callable[[], float] = time.monotonic,
    fingerprint: bytes = FINGERPRINT,
    size: int = SLAB_BYTES,
    key: bytes | None = None,
) -> Hierarchy:
    """A hierarchy over a real slab in `directory`, every system call of which goes through `io`."""

    def open_store() -> FileStore:
        return FileStore.open(
            directory, fingerprint, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=size, mode=mode, key=key, io=io
        )

    metrics, rates = Metrics(), Rates("load")
    patience = patience or PortSettings(deadline=60.0, failures=2, retry_after=0.01)
    host = HostTier(HostRegion.allocate(slots, SLOT_BYTES, huge_pages=False, prefault=False))
    port = TierPort("file", open_store, patience, metrics, rates, clock)
    return Hierarchy(host, [port], settings or HierarchySettings(prefetch_deadline=60.0), metrics, rates, clock)


def fetch(hierarchy: Hierarchy, chain: TokenChain, num_blocks: int | None = None) -> int:
    """Load a chain as a request does; returns how many blocks it got. Every byte must be its key's (I1)."""
    hashes = chain.hashes[:num_blocks]
    prefetch = hierarchy.submit(hashes, chain.root)
    while isinstance(answer := hierarchy.poll(prefetch), Pending):
        hierarchy.wait_progress(0.01)
    with hierarchy.lease(prefetch) as lease:
        assert len(lease) == answer, "not what was promised"
        assert lease.hashes == hashes[: len(lease)]
        for slot, chain_hash in zip(lease.slots, lease.hashes, strict=True):
            assert bytes(hierarchy.host.region.slot(slot)) == payload_of(chain_hash), "another block's bytes"
    return answer


def ask(hierarchy: Hierarchy, chain: TokenChain) -> Claim:
    """A request's claim on a chain."""
    return hierarchy.submit(chain.hashes, chain.root)


@contextmanager
def impatient(hierarchy: Hierarchy) -> Iterator[None]:
    """An operation of the tier below has 200 ms, a request a second: for as long as the story keeps the disk slow."""
    (port,) = hierarchy.ports
    patience, settings = port.settings, hierarchy.settings
    port.settings = replace(patience, deadline=0.2)
    hierarchy.settings = replace(settings, prefetch_deadline=1.0)
    try:
        yield
    finally:
        port.settings, hierarchy.settings = patience, settings


def forget_l2(hierarchy: Hierarchy) -> None:
    """L2 loses what it holds, so that the next request has to ask the tiers below."""
    hierarchy.host.pool.reset()


def rest(hierarchy: Hierarchy, timeout: float = 0.5) -> None:
    """Nothing is queued any more. What a tier that fails, or is away, did not take stays in line."""
    if not hierarchy.drain(timeout):
        assert hierarchy.drain(60, below=False)
        assert all(port.queue.drain(60) for port in hierarchy.ports)


Settled = Callable[[Hierarchy], Hierarchy]  # the fixture: what it is given ends by the laws


def settle(hierarchy: Hierarchy) -> None:
    """Idle, by the laws: nothing leased, filling or quarantined, nobody forgot a lease (I3). Then closed."""
    rest(hierarchy)
    deadline = time.monotonic() + 60
    while not hierarchy.promoter.idle and time.monotonic() < deadline:
        hierarchy.wait_progress(0.01)
    hierarchy.check()
    counts = hierarchy.host.pool.counts()
    assert (counts.leased, counts.filling, counts.quarantined) == (0, 0, 0)
    assert hierarchy.host.pool.num_leaked == 0
    hierarchy.close()


def misses(hierarchy: Hierarchy, reason: Outcome) -> float:
    return hierarchy.stats().get(f'kvtier_miss_total{{reason="{reason}"}}', 0)


def drops(hierarchy: Hierarchy, tier: str, reason: Outcome) -> float:
    return hierarchy.stats().get(f'kvtier_store_dropped_total{{tier="{tier}",reason="{reason}"}}', 0)


def is_open(hierarchy: Hierarchy, direction: str) -> bool:
    """Whether the file tier's breaker is open."""
    return hierarchy.stats()[f'kvtier_breaker_open{{tier="file",direction="{direction}"}}'] == 1


def num_threads() -> int:
    return threading.active_count()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
