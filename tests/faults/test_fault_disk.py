"""Faults 5 and 9-15 seen from a hierarchy over a real slab: cut short, full, failing, slow, hung, read-only, other."""

import errno
import itertools
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash
from doubles import chain_of, store, wait_until
from extent import brief
from fault_rig import (
    FINGERPRINT,
    SLAB_BYTES,
    FaultyIO,
    Settled,
    drops,
    fetch,
    forget_l2,
    impatient,
    is_open,
    misses,
    num_descriptors,
    num_threads,
    over_slab,
    rest,
    settle,
)

from kvtier.tiers.errors import FormatError
from kvtier.tiers.file.file_io import Mode
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, PortSettings
from kvtier.tiers.tier import Outcome

MODES: list[Mode] = ["direct", "buffered", "mmap"]
TESTS = Path(__file__).resolve().parents[1]
CHAIN, OTHER = chain_of(8), chain_of(6, first_token=1000)
Open = Callable[..., Hierarchy]


@pytest.fixture
def opened(settled: Settled, disk_dir: Path) -> Open:
    """`opened(io, …)`: a hierarchy over the slab in `disk_dir`."""
    return lambda *io, **options: settled(over_slab(disk_dir, *io, **options))


def slab_of(directory: Path) -> Path:
    return directory / f"{FINGERPRINT.hex()}.slab"


def stored(hierarchy: Hierarchy) -> Hierarchy:
    """CHAIN lies in the slab, and only there."""
    assert store(hierarchy, CHAIN) == 8
    rest(hierarchy)
    forget_l2(hierarchy)
    assert hierarchy.lookup(CHAIN.hashes)["file"] == 8
    return hierarchy


def is_back(hierarchy: Hierarchy) -> bool:
    """Probes are sent by whatever the engine asks; a lookup is enough."""
    return hierarchy.lookup(CHAIN.hashes)["file"] == 8


def ticked(hierarchy: Hierarchy) -> bool:
    hierarchy.tick()
    return True


# 5: cut short.


@pytest.mark.parametrize("length", [*brief([], [4096, 9000]), 0, 1 << 16])
@pytest.mark.parametrize("mode", MODES)
def test_a_slab_cut_short_while_open_detaches_and_returns(
    opened: Open, disk_dir: Path, mode: Mode, length: int
) -> None:
    """No SIGBUS (we would not be here), no wrong byte, no exception; the tier goes and comes without a restart."""
    hierarchy = stored(opened(mode=mode))
    slab = slab_of(disk_dir)
    whole = slab.read_bytes()
    os.truncate(slab, length)
    while is_back(hierarchy):  # until its breaker opens, or the blocks were found bad and are forgotten
        assert fetch(hierarchy, CHAIN) < 8
        forget_l2(hierarchy)
    assert misses(hierarchy, Outcome.IO_ERROR) + misses(hierarchy, Outcome.CHECKSUM) > 0
    store(hierarchy, OTHER)  # stores go on, in L2 at least
    assert fetch(hierarchy, OTHER) == 6
    if is_open(hierarchy, "read"):
        port = hierarchy.ports[0]
        wait_until(lambda: ticked(hierarchy) and port.tier is None)  # its probe finds the file cut short: let go
        slab.write_bytes(whole)
        wait_until(lambda: is_back(hierarchy))
        forget_l2(hierarchy)
        assert fetch(hierarchy, CHAIN) == 8


# 9 and 15: no room, for real. The child runs in a namespace of its own, or under a limit of its own.


def in_child(function: Callable[[Path], None], directory: Path, mount: str = "") -> None:
    """Run `function(directory)` in a fresh process, with a tmpfs of these options on `directory`; it must end well."""
    code = (
        f"import sys; sys.path[:0] = {[str(TESTS.parent), str(TESTS / 'rigs'), str(TESTS / 'faults')]!r}\n"
        f"from pathlib import Path\nfrom {Path(__file__).stem} import {function.__name__}\n"
        f"{function.__name__}(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(directory)]
    if mount:
        if not shutil.which("unshare"):
            pytest.skip("unshare is not installed")
        script = f'mount -t tmpfs -o {mount} tmpfs "{directory}" || exit 77; exec "$@"'
        command = ["unshare", "-Urm", "sh", "-c", script, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if mount and (done.returncode == 77 or done.stderr.startswith("unshare:")):
        pytest.skip(f"no user namespaces here: {done.stderr.strip()[-100:]}")
    assert done.returncode == 0, done.stderr


def stores_again(hierarchy: Hierarchy) -> None:
    late = chain_of(4, first_token=99_000)
    assert store(hierarchy, late) == 4
    rest(hierarchy)
    forget_l2(hierarchy)
    assert fetch(hierarchy, late) == 4
    settle(hierarchy)


def on_a_disk_that_runs_full(directory: Path) -> None:
    hierarchy = stored(over_slab(directory))
    slab = hierarchy.ports[0].tier
    assert slab is not None
    # Somebody cuts off the slab's unused end and takes the room: what was preallocated is gone.
    os.truncate(slab_of(directory), 8192 + 64 * 1024)
    with (directory / "ballast").open("wb", buffering=0) as ballast:
        while os.statvfs(directory).f_bavail:
            ballast.write(bytes(4096))
    chains = [chain_of(8, first_token=10_000 * n) for n in range(1, 5)]
    for chain in chains:
        assert store(hierarchy, chain) == 8  # L2 has it …
        rest(hierarchy)
    assert drops(hierarchy, "file", Outcome.FULL) > 0  # … the disk has not
    assert drops(hierarchy, "file", Outcome.IO_ERROR) == 0
    assert not is_open(hierarchy, "write")
    # The tier stays up: it serves what it has, and stores again as soon as there is room.
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    (directory / "ballast").unlink()
    stores_again(hierarchy)


def test_a_disk_that_is_really_full_drops_stores_and_the_tier_stays_up(tmp_path: Path) -> None:
    in_child(on_a_disk_that_runs_full, tmp_path, mount="size=1200k")


def on_a_disk_that_others_filled(directory: Path) -> None:
    """Told to the end by a restart: the slab has its space, whatever others did to the rest of the disk."""
    log = OneWarning()
    settle(stored(over_slab(directory / "kv")))
    with (directory / "ballast").open("wb", buffering=0) as ballast:
        while os.statvfs(directory).f_bavail:
            ballast.write(bytes(4096))
    hierarchy = over_slab(directory / "kv")
    assert fetch(hierarchy, CHAIN) == 8
    assert store(hierarchy, OTHER) == 6
    rest(hierarchy)
    forget_l2(hierarchy)
    assert fetch(hierarchy, OTHER) == 6
    settle(hierarchy)
    assert log.messages == []
    # With a larger size it is as large as it was, after one warning; with room it grows.
    hierarchy = over_slab(directory / "kv", size=SLAB_BYTES * 2)
    assert fetch(hierarchy, CHAIN) == 8
    settle(hierarchy)
    assert ["do not fit" in line for line in log.messages] == [True]
    (directory / "ballast").unlink()
    hierarchy = over_slab(directory / "kv", size=SLAB_BYTES * 2)
    assert fetch(hierarchy, CHAIN) == 8
    settle(hierarchy)
    assert slab_of(directory / "kv").stat().st_size > SLAB_BYTES * 3 // 2


def test_a_restart_on_a_disk_that_others_filled_finds_everything(tmp_path: Path) -> None:
    in_child(on_a_disk_that_others_filled, tmp_path, mount="size=4m")


def under_a_file_size_limit(directory: Path) -> None:
    hierarchy = stored(over_slab(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))  # CHAIN lies before that
    for n in range(1, 5):
        store(hierarchy, chain_of(8, first_token=10_000 * n))
        rest(hierarchy)
    assert drops(hierarchy, "file", Outcome.FULL) > 0
    assert not is_open(hierarchy, "write")
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    stores_again(hierarchy)


def test_a_file_size_limit_set_while_open_drops_stores_and_kills_nobody(tmp_path: Path) -> None:
    in_child(under_a_file_size_limit, tmp_path)  # SIGXFSZ would


# 10: the N-th call fails.


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("mode", brief(["direct"], MODES))
def test_whichever_call_fails_nothing_wrong_is_served(disk_dir: Path, mode: Mode, key: bytes | None) -> None:
    chains = [chain_of(8, first_token=first) for first in range(0, 5000, 1000)]  # one more than the slab holds

    def story(directory: Path, io: FaultyIO) -> None:
        hierarchy = over_slab(directory, io, mode=mode, size=150_000, key=key)
        for chain in chains:
            store(hierarchy, chain)
            rest(hierarchy)
            forget_l2(hierarchy)
            fetch(hierarchy, chain)  # checks every byte it gets
        settle(hierarchy)
        again = over_slab(directory, io, mode=mode, size=150_000, key=key)
        for chain in chains:
            fetch(again, chain)
        again.reset()
        store(again, CHAIN)
        settle(again)

    counted = FaultyIO()
    story(disk_dir / "plain", counted)
    assert counted.calls > 30
    for n in range(1, counted.calls + 1, brief(4, 1)):
        io = FaultyIO()
        io.fails = lambda name, count, n=n: count == n
        story(disk_dir / str(n), io)
        # The next start is clean.
        hierarchy = over_slab(disk_dir / str(n), mode=mode, size=150_000, key=key)
        assert fetch(stored(hierarchy), CHAIN) == 8
        settle(hierarchy)
        shutil.rmtree(disk_dir / str(n))


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_after_k_errors_the_tier_detaches_and_comes_back_by_itself(opened: Open, mode: Mode) -> None:
    io = FaultyIO()
    hierarchy = stored(opened(io, mode=mode))
    io.fails = lambda name, count: name == "preadv"
    assert fetch(hierarchy, CHAIN) == 0
    assert not is_open(hierarchy, "read")
    assert fetch(hierarchy, CHAIN) == 0  # the second in a row
    assert is_open(hierarchy, "read")
    assert misses(hierarchy, Outcome.IO_ERROR) == 16
    calls = io.calls
    assert hierarchy.lookup(CHAIN.hashes).miss == 8  # left alone, but for probes
    assert store(hierarchy, OTHER) == 6
    assert fetch(hierarchy, OTHER) == 6  # from L2
    assert io.calls < calls + 200
    io.fails = lambda name, count: False
    wait_until(lambda: is_back(hierarchy))
    assert fetch(hierarchy, CHAIN) == 8


# 11: slow, hung.


def test_a_disk_of_three_seconds_per_operation_is_a_miss_at_the_deadline(opened: Open) -> None:
    io = FaultyIO()
    hierarchy = stored(opened(io))
    num_read, io.delay = io.num_read, 3.0
    with impatient(hierarchy):
        assert fetch(hierarchy, CHAIN) == 0
        assert io.num_read == num_read  # the answer came long before the bytes
        assert misses(hierarchy, Outcome.TIMEOUT) >= 8
        assert hierarchy.host.pool.counts().quarantined <= 8  # a window: what the read may still write to
        assert store(hierarchy, OTHER) == 6  # there is room for stores
        assert fetch(hierarchy, OTHER) == 6
        while not is_open(hierarchy, "read"):
            assert fetch(hierarchy, CHAIN) == 0
    io.delay = 0.0
    wait_until(lambda: is_back(hierarchy))
    assert fetch(hierarchy, CHAIN) == 8


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_hung_disk_blocks_nobody_exhausts_nothing_and_is_taken_back(opened: Open, mode: Mode) -> None:
    """While the gate is shut no read or write ends: every call that returns here returned without the disk."""
    io = FaultyIO()
    hierarchy = stored(opened(io, mode=mode))
    io.gate.clear()
    with impatient(hierarchy):
        for _ in range(3):
            assert fetch(hierarchy, CHAIN) == 0
        wait_until(lambda: ticked(hierarchy) and is_open(hierarchy, "read"))
        # Reads in quarantine and writes that wait leave room: L2 takes and serves ten times what it holds.
        chains = [chain_of(8, first_token=5000 + 100 * n) for n in range(40)]
        for chain in chains:
            assert store(hierarchy, chain) == 8
            assert fetch(hierarchy, chain) == 8
        resident = [chain for chain in chains if hierarchy.lookup(chain.hashes)["l2"] == 8]
        assert resident
        counts = hierarchy.host.pool.counts()
        assert 0 < counts.quarantined <= 16  # at most one window for each of the two I/O threads
        assert counts.free + counts.ready - counts.leased >= 8
    io.gate.set()
    wait_until(lambda: is_back(hierarchy))
    wait_until(lambda: hierarchy.host.pool.counts().quarantined == 0)
    for chain in resident:
        assert fetch(hierarchy, chain) == 8  # no late read wrote into slots that others had taken
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8


def test_a_disk_that_hangs_altogether_is_left_alone_till_it_ends(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    io, defaults = FaultyIO(), PortSettings()
    hierarchy = stored(opened(io, patience=defaults, settings=HierarchySettings()))
    io.gate.clear()
    began = time.monotonic()
    assert fetch(hierarchy, CHAIN) == 0  # one thread hangs in its read …
    assert store(hierarchy, OTHER) == 6  # … the other in its write
    wait_until(lambda: ticked(hierarchy) and is_open(hierarchy, "read"))
    assert is_open(hierarchy, "write")
    assert time.monotonic() - began < 30  # busy machines: it takes two deadlines
    assert [line for line in warnings_of(caplog) if "all its 2 threads hang" in line] == warnings_of(caplog)
    assert "all its 2 threads hang" in hierarchy.wanting["file"]
    for _ in range(2):
        claim = hierarchy.submit(CHAIN.hashes, CHAIN.root)
        assert hierarchy.poll(claim) == 0  # at once
        hierarchy.lease(claim).release()
    assert hierarchy.ports[0].queue.idle is False
    io.gate.set()
    wait_until(lambda: is_back(hierarchy))
    wait_until(lambda: ticked(hierarchy) and not hierarchy.wanting)
    assert fetch(hierarchy, CHAIN) == 8
    assert len(warnings_of(caplog)) == 1


# 12: the directory cannot be used.


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class OneWarning(logging.Handler):
    """For children: what pytest's caplog is for us."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("kvtier").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def serves_from_l2_with_one_warning(hierarchy: Hierarchy, log: OneWarning, reason: str) -> None:
    for n in range(5):
        chain = chain_of(8, first_token=1000 * n)
        assert store(hierarchy, chain) == 8
        assert fetch(hierarchy, chain) == 8
        hierarchy.tick()
        rest(hierarchy)
    assert len(log.messages) == 1, log.messages
    assert "off" in log.messages[0]
    assert reason in log.messages[0]


def on_a_read_only_file_system(directory: Path) -> None:
    log = OneWarning()
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    hierarchy = over_slab(directory / "kv")
    serves_from_l2_with_one_warning(hierarchy, log, "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)
    wait_until(lambda: ticked(hierarchy) and hierarchy.ports[0].writable)  # attached without a restart
    assert fetch(stored(hierarchy), CHAIN) == 8
    settle(hierarchy)


def test_a_read_only_file_system_costs_one_warning_and_attaches_when_writable(tmp_path: Path) -> None:
    in_child(on_a_read_only_file_system, tmp_path, mount="size=4m")


def without_permission(directory: Path) -> None:
    os.environ["KVTIER_COMPILED"] = "off"  # nobody may not look into root's cache, which is another warning
    log = OneWarning()
    locked = directory / "locked"
    locked.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may do everything: be nobody
    else:
        locked.chmod(0)
    hierarchy = over_slab(locked / "kv")
    serves_from_l2_with_one_warning(hierarchy, log, "Permission denied")
    if os.getuid() == 0:
        os.seteuid(0)
    locked.chmod(0o777)
    wait_until(lambda: ticked(hierarchy) and hierarchy.ports[0].writable)
    assert fetch(stored(hierarchy), CHAIN) == 8
    settle(hierarchy)


def test_a_directory_without_permission_costs_one_warning_and_attaches_when_allowed(tmp_path: Path) -> None:
    in_child(without_permission, tmp_path)


def test_a_missing_or_deleted_directory_is_made_and_filled(disk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = disk_dir / "not" / "there" / "yet"
    hierarchy = stored(over_slab(home))
    shutil.rmtree(disk_dir / "not")
    assert fetch(hierarchy, CHAIN) == 8  # the open file outlives its name
    store(hierarchy, OTHER)
    settle(hierarchy)
    again = over_slab(home)
    assert fetch(again, CHAIN) == 8  # the first one noticed, and gave the new slab all it had
    settle(again)
    assert not [line for line in warnings_of(caplog) if "off" in line]


@pytest.mark.parametrize("moved", [False, True])
def test_a_slab_removed_while_it_is_open_is_made_anew(
    opened: Open, disk_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, moved: bool
) -> None:
    """Else all that is stored from then on would be gone with the process, and nothing would say so."""
    monkeypatch.setattr("kvtier.tiers.file.store._LOOK", 0.0 if moved else 600.0)
    hierarchy, numbers = stored(opened()), itertools.count(1)
    slab = slab_of(disk_dir)
    slab.rename(disk_dir / "aside") if moved else slab.unlink()

    def is_made() -> bool:
        store(hierarchy, chain_of(2, first_token=50_000 + 100 * next(numbers)))
        return ticked(hierarchy) and slab_of(disk_dir).exists()

    wait_until(is_made)
    assert "it was removed or replaced; a new one is made" in caplog.text
    late = chain_of(4, first_token=99_000)

    def is_stored() -> bool:
        store(hierarchy, late)
        rest(hierarchy)
        forget_l2(hierarchy)
        return ticked(hierarchy) and hierarchy.lookup(late.hashes)["file"] == 4

    wait_until(is_stored)
    assert fetch(hierarchy, late) == 4


def test_a_file_system_turned_read_only_costs_one_warning(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    io = FaultyIO()
    io.code = errno.EROFS
    hierarchy = stored(opened(io))
    io.fails = lambda name, count: name in ("pwritev", "sync", "allocate")
    for n in range(4):
        store(hierarchy, chain_of(2, first_token=3000 + 100 * n))
        rest(hierarchy)
    wait_until(lambda: ticked(hierarchy) and hierarchy.ports[0].tier is None)
    for _ in range(20):
        hierarchy.tick()
        hierarchy.wait_progress(0.005)
        assert store(hierarchy, OTHER) in (0, 6)  # L2 serves on
        assert fetch(hierarchy, OTHER) == 6
    assert len([line for line in warnings_of(caplog) if "is off" in line]) == 1
    io.fails = lambda name, count: False
    wait_until(lambda: is_back(hierarchy))
    assert fetch(hierarchy, CHAIN) == 8


# 14: not ours.


@pytest.mark.parametrize("version", [0, 3, 2**32 - 1])
def test_older_and_newer_formats_are_refused_and_left_untouched(opened: Open, disk_dir: Path, version: int) -> None:
    settle(stored(opened()))
    content = bytearray(slab_of(disk_dir).read_bytes())
    for start in (0, 4096):
        content[start + 8 : start + 12] = version.to_bytes(4, "little")
        digest = xxhash.xxh3_64_intdigest(bytes(content[start : start + 2040]))
        content[start + 2040 : start + 2048] = digest.to_bytes(8, "little")
    slab_of(disk_dir).write_bytes(content)
    with pytest.raises(
        FormatError, match=f"format version {version}, this kvtier reads versions 1 and 2; it was left untouched"
    ):
        opened()
    assert slab_of(disk_dir).read_bytes() == content


# I5: nothing grows.


def test_faults_leak_no_memory_no_descriptor_and_no_thread(disk_dir: Path) -> None:
    def cycle(n: int) -> None:
        io = FaultyIO()
        io.fails = lambda name, count: count % 7 == n % 7  # also as it opens
        hierarchy = over_slab(disk_dir, io, slots=2048, mode=MODES[n % 3])  # 8 MiB of L2
        store(hierarchy, CHAIN)
        rest(hierarchy)
        forget_l2(hierarchy)
        fetch(hierarchy, CHAIN)
        settle(hierarchy)

    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    for n in range(6):
        cycle(n)  # caches warm up
    before: Sequence[int] = (num_descriptors(), num_threads(), address_space())
    for n in range(40):
        cycle(n)
    assert num_descriptors() <= before[0]  # fewer where what another story left behind goes meanwhile
    wait_until(lambda: num_threads() <= before[1])
    assert address_space() - before[2] < 20 * (8 << 20)  # half of what forty leaked regions would take
