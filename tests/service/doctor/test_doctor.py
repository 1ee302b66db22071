"""`kvtier doctor`: each check against something real that is well, and against what it is there to find."""

import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from command_rig import kvtier
from redis_rig import NO_REDIS, cluster, standalone, wait_for, watched
from service_rig import PATIENT

from kvtier import __version__
from kvtier.cli import checks_cli
from kvtier.service.command_line import Exit
from kvtier.service.doctor import doctor
from kvtier.service.doctor.doctor import (
    check_copies,
    check_engines,
    check_files,
    check_gpu,
    check_hashes,
    check_huge_pages,
    check_lossy,
    check_room,
    check_socket,
    check_tunable,
    read_gpu,
)
from kvtier.tiers.config.config import Config
from kvtier.tiers.config.sections import FileConfig
from kvtier.tiers.copies.copy_ways import ChoiceKey, CopyChoice, KeptChoices
from kvtier.tiers.file import opening as file_tier
from kvtier.tiers.file import slab
from kvtier.tiers.file.about import record_model
from kvtier.tiers.file.opening import DiskRates, check_disk, check_key, check_naming, check_sizes
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.finding import Finding, Status, ok, warning
from kvtier.tiers.host.limits import limits
from kvtier.tiers.redis import opening as redis_tier
from kvtier.tiers.redis.opening import check_redis

OK, WARNING, ERROR = Status.OK, Status.WARNING, Status.ERROR
needs_redis = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))


def run(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """`kvtier ARGUMENTS`, with lines wide enough for a table's."""
    return kvtier(*arguments, columns="200", **options)


def disk(path: Path, size: str) -> FileConfig:
    """[file] path and size."""
    return Config.load(file={"path": path, "size": size}).file


def statuses(findings: list[Finding]) -> dict[str, Status]:
    """Of each check."""
    return {finding.check: finding.status for finding in findings}


# The verb.


def test_kv_with_loss_is_said_and_warned_of_where_no_tier_keeps_it_so() -> None:
    assert check_lossy(Config()) == ok("lossy", "none: every tier keeps KV as it is")
    alone = Config.load(cache={"lossy": "fp8"})
    assert check_lossy(alone).status is Status.WARNING
    assert check_lossy(alone).fix == "leave [cache] lossy out"
    for section in ({"redis": {"url": "redis://h"}}, {"objects": {"bucket": "blocks"}}, {"service": {"socket": "/s"}}):
        found = check_lossy(Config.load(None, **section, cache={"lossy": "fp8"}))
        assert found == ok(
            "lossy", "Redis and object store keep K and V as fp8; exact engines share no block with these"
        )


def test_every_check_has_a_line_and_leaves_nothing_behind(disk_dir: Path) -> None:
    done = run("doctor", "--json", file__path=str(disk_dir), file__size="64MiB", host__size="64MiB")
    lines: list[dict[str, str]] = json.loads(done.stdout)
    assert [line["check"] for line in lines] == [
        "hashes", "compiled", "memory", "memlock", "files", "huge pages", "glibc", "GPU", "copies",
        "free space", "O_DIRECT", "disk rate", "encryption", "peers", "redis", "objects", "lossy", "daemon", "engines",
    ]  # fmt: skip
    assert all(line.keys() == {"check", "status", "found", "fix"} for line in lines)
    found = {line["status"] for line in lines}
    assert done.returncode == (Exit.FAILED if "error" in found else Exit.DEGRADED if "warning" in found else Exit.OK)
    assert all(bool(line["fix"]) == (line["status"] != "ok") for line in lines)
    assert list(disk_dir.iterdir()) == []
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ([ok("a", "fine")], Exit.OK),
        ([ok("a", "fine"), warning("b", "[host] slow", "`fix [file] path`")], Exit.DEGRADED),
        ([Finding("c", ERROR, "broken", "fix"), warning("b", "slow", "fix")], Exit.FAILED),
    ],
)
def test_the_worst_line_is_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: list[Finding], status: Exit
) -> None:
    monkeypatch.setattr("kvtier.service.doctor.examine", lambda config: found)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(typer.Exit) as ended:
        checks_cli.doctor()
    assert ended.value.exit_code == status
    shown = capsys.readouterr().out
    assert all(text in shown for finding in found for text in (finding.found, finding.fix))  # brackets too


# Hashes and engines.


def test_golden_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_hashes() == ok("hashes", f"{len(doctor.GOLDEN)} golden vectors agree")
    # A library that hashes otherwise is named.
    monkeypatch.setattr(doctor, "checksum", lambda payload: 7)
    finding = check_hashes()
    assert finding.status is ERROR
    assert finding.found.startswith("payload: not the golden vectors")


def test_engines_are_found_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "vllm":
            return "0.32.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert check_engines() == ok("engines", "vllm 0.32.0")
    assert not {"vllm", "sglang"} & set(sys.modules)


# Memory.


def test_memory_for_the_host_tier() -> None:
    found = limits()
    assert check_room(Config.load(host={"size": "1MiB"}), found).status is OK
    finding = check_room(Config.load(host={"size": "1PiB"}), found)
    assert (finding.status, finding.fix) == (ERROR, "lower [host] size, or raise the limit")
    assert "[host] size 1PiB" in finding.found
    group = found._replace(most=700 << 20, available=600 << 20, by="control group /pod")
    finding = check_room(Config.load(host={"size": "650MiB"}), group)
    assert (finding.status, finding.fix) == (ERROR, "lower [host] size, or stop what uses the memory")
    assert "600 MiB of control group /pod (700 MiB) available" in finding.found


def test_files_for_all_of_a_daemons_clients() -> None:
    few = limits()._replace(files=1024)
    assert check_files(Config(), few).status is OK
    daemon = Config.load(service={"socket": "/s"})
    assert check_files(daemon, few).status is WARNING
    assert "LimitNOFILE" in check_files(daemon, few).fix
    assert check_files(daemon, few._replace(files=4096)).status is OK


MEMLOCK = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
from kvtier.service.doctor.doctor import check_memlock
from kvtier.tiers.config.config import Config
from kvtier.tiers.host.limits import limits
for size, pin, has_gpu, is_privileged in (
    ("1GiB", True, True, False), ("512KiB", True, True, False), ("1GiB", True, True, True),
    ("1GiB", False, True, False), ("1GiB", True, False, False),
):
    config = Config.load(host={"size": size, "pin": pin})
    finding = check_memlock(config, limits(), has_gpu=has_gpu, is_privileged=is_privileged)
    print(finding.status, finding.found, finding.fix, sep="|")
"""


def test_a_memlock_limit_below_the_region() -> None:
    done = subprocess.run([sys.executable, "-c", MEMLOCK], capture_output=True, text=True, timeout=60, check=True)
    too_low, *well = done.stdout.splitlines()
    assert too_low.startswith("warning|limit 1 MiB, [host] size 1GiB: it may stay pageable")
    assert "ulimit -l unlimited" in too_low
    # Large enough, does not bind, not asked for, nobody to pin for.
    assert [line.split("|")[0] for line in well] == ["ok"] * 4
    assert "CAP_IPC_LOCK" in well[1]
    assert "pin is off" in well[2]
    assert "without a GPU" in well[3]
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != 1 << 20  # only the child's


@pytest.mark.parametrize(
    ("name", "content", "options", "status"),
    [
        ("enabled", "always [madvise] never\n", {}, OK),
        ("enabled", "always madvise [never]\n", {}, WARNING),
        ("enabled", "always madvise [never]\n", {"huge_pages": False}, OK),
        ("shmem_enabled", "always within_size [advise] never deny force\n", {"shared": True}, OK),
        ("shmem_enabled", "always within_size advise [never] deny force\n", {"shared": True}, WARNING),
        ("nothing", "", {}, WARNING),
    ],
)
def test_huge_pages(tmp_path: Path, name: str, content: str, options: dict[str, object], status: Status) -> None:
    (tmp_path / name).write_text(content)
    finding = check_huge_pages(Config.load(host=options), tmp_path)
    assert finding.status is status
    if status is WARNING:
        assert str(tmp_path) in finding.fix


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the tunable is of x86_64")
def test_the_tunable_is_named_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Measured for real: either answer may be true here.
    monkeypatch.setattr(doctor, "_COPY_SECONDS", 100.0)
    assert doctor._copy_rate() > 1e7  # bytes, on however busy a machine
    rates: dict[int, float] = {0: 8e9, 2: 8.5e9}  # without a prefix, and with `env GLIBC_TUNABLES=…`
    monkeypatch.setattr(doctor, "_copy_rate", lambda *prefix: rates[len(prefix)])
    assert check_tunable().status is OK
    rates[2] = 12e9
    finding = check_tunable()
    assert (finding.status, finding.found) == (WARNING, "copies of blocks at 8.0 GB/s, 12.0 with a tunable")
    assert finding.fix.endswith(f"GLIBC_TUNABLES={doctor.TUNABLE}")

    # A machine so busy that a probe takes long is not asked six times.
    runs: list[int] = []

    def slow(*prefix: str) -> float:
        runs.append(len(prefix))
        time.sleep(0.02)
        return 8e9

    monkeypatch.setattr(doctor, "_COPY_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "_copy_rate", slow)
    assert check_tunable() == ok("glibc", "not measured: the machine is too busy, 0.01 s were not enough")
    assert runs == [0, 2]

    def fails(*prefix: str) -> float:
        raise subprocess.TimeoutExpired("python", 10)

    monkeypatch.setattr(doctor, "_copy_rate", fails)
    monkeypatch.setattr(doctor, "_COPY_SECONDS", 100.0)
    assert check_tunable() == ok("glibc", "not measured: the probe failed")


def test_what_the_gpu_probe_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpu({"driver": False}).status is ERROR
    missing = read_gpu({"driver": True, "batches": True, "refused": None, "missing": "No module named 'cupy'"})
    assert missing.status is WARNING
    assert missing.fix.startswith("pip install 'cupy-cuda13x>=14'; if the driver is older than 580, pip install ")
    broken = read_gpu({"driver": True, "batches": True, "refused": None, "broken": "CUDARuntimeError: too old"})
    assert broken.status is WARNING  # everything works
    assert broken.found.endswith("CuPy fails (CUDARuntimeError: too old): small blocks are copied more slowly")
    well: dict[str, object] = {"driver": True, "batches": True, "refused": None, "cupy": "14.0", "names": ["H200"] * 2}
    assert read_gpu({**well, "names": []}).status is WARNING
    refused = read_gpu({**well, "refused": "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"})
    assert (refused.status, "OUT_OF_MEMORY" in refused.found) == (WARNING, True)
    assert read_gpu(well).found == "2 × H200, memory can be pinned, copies in batches, CuPy 14.0"
    assert "driver 570" in read_gpu({**well, "batches": False}).found
    # Its program itself: it runs, fails or hangs in a process of its own.
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    assert check_gpu().check == "GPU"
    monkeypatch.setattr(doctor, "_GPU", "raise RuntimeError('cudaErrorInsufficientDriver')")
    assert check_gpu().found == "the probe fails: RuntimeError: cudaErrorInsufficientDriver"
    monkeypatch.setattr(doctor, "_GPU", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_GPU_SECONDS", 0.2)  # not even to start in
    assert check_gpu().found.startswith("the driver did not answer")


# The disk.


def test_which_way_copies_go(tmp_path: Path) -> None:
    kept, config = KeptChoices(tmp_path), Config()
    nothing = check_copies(config, has_gpu=False, kept=kept)
    assert (nothing.status, nothing.found) == (Status.OK, "not measured: no CUDA device")
    assert check_copies(config, has_gpu=True, kept=kept).found.startswith("not measured yet: an engine's first start")
    key = ChoiceKey("NVIDIA H200", "12.8", "12.8", "14.0", __version__, "own", "batch+kernel+torch")
    reason = "pieces of 64KiB: batch 51.0, kernel 41.0, torch 9.0 GB/s"
    kept.keep(key, CopyChoice(64 << 10, 512 << 10, 16, "measured", reason))
    kept.keep(replace(key, kvtier="0.0.9"), CopyChoice(0, None, 8, "measured", "of another version"))
    shown = check_copies(config, has_gpu=True, kept=kept)
    text = f"NVIDIA H200, kvtier's engine: in batches from 64KiB, kernel of 16 blocks ({reason}; driver 12.8, 20"
    assert (shown.status, shown.found[: len(text)]) == (Status.OK, text)
    decided = Config.load(host={"batch_copies_from": "1MiB", "copy_grid": 8})
    assert check_copies(decided, has_gpu=True, kept=kept).found.endswith(
        "; configured: batches from 1MiB, 8 blocks of threads"
    )
    failed = CopyChoice(reason="not measured: RuntimeError: CUDA error: out of memory")
    kept.keep(replace(key, kind="engine", ways="batch+staging"), failed)
    shown = check_copies(config, has_gpu=True, kept=kept)
    assert shown.status is Status.WARNING
    assert "engines such as vLLM: in batches from 28KiB (not measured: RuntimeError: CUDA error" in shown.found


def test_a_directory_that_is_well_or_not_there_yet(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tier, "_SECONDS", 0.1)
    monkeypatch.setattr(file_tier, "_PATIENCE", 60.0)
    monkeypatch.setattr(file_tier, "_SLOW", 0.0)  # a busy machine is no failure here
    for path in (disk_dir, disk_dir / "made" / "later"):
        findings = check_disk(disk(path, "64MiB"))
        assert statuses(findings) == {"free space": OK, "O_DIRECT": OK, "disk rate": OK}
        assert "GB/s" in findings[2].found
    assert list(disk_dir.iterdir()) == []
    assert check_disk(FileConfig()) == [ok("file tier", "off: no [file] path")]


def test_too_little_room(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tier, "_SECONDS", 0.05)
    (room, *_) = check_disk(disk(disk_dir, "1PiB"))
    assert (room.check, room.status) == ("free space", ERROR)
    assert "[file] size 1PiB" in room.found
    # What slabs take already counts as room.
    store = FileStore.open(disk_dir, bytes(32), slot_bytes=4096, block_size=4, size=32 << 20, mode="buffered")
    store.close()
    assert file_tier._check_room(disk(disk_dir, "32MiB"), 1 << 20).status is OK
    # Where a slab is there already, a start is not refused: it stays as it is.
    assert file_tier._check_room(disk(disk_dir, "64MiB"), 1 << 20).status is WARNING


def test_slabs_of_another_naming_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = disk(tmp_path, "64MiB")
    assert check_naming(config) == []

    def made(fingerprint: bytes) -> str:
        FileStore.open(tmp_path, fingerprint, slot_bytes=4096, block_size=16, size=4 << 20).close()
        return f"{fingerprint.hex()}.slab"

    # before slabs noted how KV was named, and one step ago
    old = set()
    for naming in (0, slab.FORMAT_VERSION - 1):
        monkeypatch.setattr(slab, "FORMAT_VERSION", naming)
        old.add(made(bytes([naming]) * 32))
    monkeypatch.undo()
    made(bytes([9]) * 32)
    (tmp_path / f"{'5' * 64}.slab").write_bytes(b"no slab")  # what opening it reports
    [finding] = check_naming(config)
    assert finding.status is WARNING
    assert re.match(r"2 of \[file\] path, [\d.]+ [KM]iB: .* name of a model's directory", finding.found)
    assert old == set(finding.fix.removeprefix("remove ").split(", "))
    assert finding in file_tier.examine(config=Config.load(file={"path": tmp_path, "size": "64MiB"}))


def test_slabs_for_several_numbers_of_ranks_are_reported(tmp_path: Path) -> None:
    config = disk(tmp_path, "64MiB")
    one = {"model": "m", "revision": "r", "tp_size": "1", "tp_ranks": "0, 1", "pp_size": "1", "dtype": "bfloat16"}
    two = {**one, "tp_size": "2", "tp_ranks": "0, 2", "model": "by another path"}
    for number, (folder, about) in enumerate([("", one), ("", {**one, "dtype": "float16"}), ("tp0-pp0", two)]):
        assert check_sizes(config) == []
        fingerprint, directory = bytes([number]) * 32, tmp_path / folder
        FileStore.open(directory, fingerprint, slot_bytes=4096, block_size=16, size=4 << 20).close()
        record_model(directory, fingerprint, about)
    [finding] = check_sizes(config)
    assert finding.status is WARNING
    assert re.search(r"only with one value: .*, tp_size 1 and 2: \[cache\] share_across_tp$", finding.found)
    assert finding in file_tier.examine(config=Config.load(file={"path": tmp_path, "size": "64MiB"}))


def test_the_key_of_the_slabs(tmp_path: Path) -> None:
    directory, key = tmp_path / "kv", tmp_path / "key"
    config = FileConfig(path=directory)
    assert check_key(config) == ok("encryption", "off: a reader of [file] path can reconstruct prompts")
    keyed = FileConfig(path=directory, key_file=key)
    finding = check_key(keyed)
    assert (finding.status, finding.found) == (ERROR, f'[file] key_file "{key}": No such file or directory')
    assert finding.fix.startswith("write a key there with: (umask 077; openssl rand -hex 32")
    key.write_text(bytes(range(32)).hex())
    key.chmod(0o600)
    assert check_key(keyed).status is OK
    # A slab that takes it, one that is in the clear, and one that is encrypted where no key is set.
    FileStore.open(directory, bytes(32), slot_bytes=4096, block_size=4, size=1 << 20, mode="buffered",
                   key=bytes(range(32))).close()  # fmt: skip
    assert check_key(keyed).status is OK
    finding = check_key(config)
    assert finding.status is ERROR
    assert finding.found.endswith("encrypted, and no [file] key_file is set")
    key.write_text(bytes(range(1, 33)).hex())
    assert "encrypted with key" in check_key(keyed).found
    key.write_text(bytes(range(32)).hex())
    FileStore.open(directory, bytes([1] * 32), slot_bytes=4096, block_size=4, size=2 << 20, mode="buffered").close()
    finding = check_key(keyed)
    assert finding.found.endswith("holds blocks in the clear, and [file] key_file is set")
    assert finding.fix == "delete it, or choose another [file] path"


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        (finding,) = check_disk(FileConfig(path=path))
        assert finding.status is ERROR
        assert "not a directory" in finding.found


def test_a_slow_disk_one_without_direct_io_and_one_that_hangs(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = disk(disk_dir, "64MiB")
    judge = file_tier._judge
    assert statuses(judge(DiskRates(2e9, 1.5e9, True), config)) == {"O_DIRECT": OK, "disk rate": OK}
    assert statuses(judge(DiskRates(2e9, 0.1e9, False), config)) == {"O_DIRECT": WARNING, "disk rate": WARNING}
    assert judge(DiskRates(2e9, 2e9, False), config.model_copy(update={"mode": "buffered"}))[0].status is OK
    # Hung: the doctor waits so long and no longer.
    monkeypatch.setattr(file_tier, "_PATIENCE", 0.1)
    gate = threading.Event()
    monkeypatch.setattr(file_tier, "_measure", lambda directory, span, moved: gate.wait(10))
    findings = check_disk(config)
    gate.set()
    assert findings[-1].status is ERROR
    assert findings[-1].found.startswith("no answer within")

    # One that is slow on a busy machine is waited for as long as it goes on.
    def slow(directory: Path, span: int, moved: Callable[[], None]) -> DiskRates:
        for _ in range(10):
            time.sleep(0.2)
            moved()
        return DiskRates(2e9, 1e8, True)

    monkeypatch.setattr(file_tier, "_PATIENCE", 1.5)
    monkeypatch.setattr(file_tier, "_measure", slow)
    assert check_disk(config)[-1].found == "write 2.00 GB/s, read 0.10 GB/s"


def test_a_disk_that_refuses(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(directory: Path, span: int, moved: Callable[[], None]) -> DiskRates:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(file_tier, "_measure", refuses)
    finding = check_disk(disk(disk_dir, "1MiB"))[-1]
    assert (finding.check, finding.status) == ("disk rate", ERROR)
    assert "Read-only file system" in finding.found


# The daemon's socket.


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[Path, socket.socket]]:
    path = tmp_path / "kvtier.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
        yield path, server


def test_a_socket_that_answers(listener: tuple[Path, socket.socket]) -> None:
    path, server = listener
    service = Config.load(service={"socket": path}).service
    finding = check_socket(service)
    assert finding == ok("daemon", f"{path} answers, owner {os.geteuid()}, mode 0600")
    # It only connects: not a byte was sent.
    connection, _ = server.accept()
    assert connection.recv(1) == b""
    connection.close()
    path.chmod(0o666)
    assert check_socket(service).status is WARNING
    # Its daemon died and left it behind; then it is gone; then something else is there.
    server.close()
    assert check_socket(service).fix == "start `kvtier serve`"
    path.unlink()
    assert "No such file" in check_socket(service).found
    path.write_text("")
    assert "not a socket" in check_socket(service).found


def test_pages_that_answer_byte_by_byte_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def drips() -> None:
        with suppress(OSError), pages.accept()[0] as client:
            client.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
            for number in range(3000):  # half a minute, each piece in time
                time.sleep(0.01)
                client.sendall(b" ")
                sent.append(number)

    monkeypatch.setattr(doctor, "_ANSWER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as pages:
        dripping = threading.Thread(target=drips)
        dripping.start()
        assert doctor._status(f"127.0.0.1:{pages.getsockname()[1]}") is None
        dripping.join(60)
    assert 0 < len(sent) < 3000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_socket_of_another_user(listener: tuple[Path, socket.socket]) -> None:
    os.chown(listener[0], 65534, 65534)
    finding = check_socket(Config.load(service={"socket": listener[0]}).service)
    assert (finding.status, "belongs to user 65534" in finding.found) == (ERROR, True)


# Redis.


def redis_of(url: str, **options: object) -> list[Finding]:
    return check_redis(Config.load(redis={"url": url, **PATIENT["redis"], **options}).redis)


@needs_redis
def test_a_server_set_up_as_a_cache() -> None:
    with standalone(maxmemory="256mb", policy="allkeys-lru") as server:
        (finding,) = redis_of(server.url)
        assert (finding.check, finding.status) == (f"redis 127.0.0.1:{server.port}", OK)
        assert "maxmemory 256 MiB, allkeys-lru" in finding.found
        # Settings a cache does not want, one at a time.
        for name, value, found in (
            ("maxmemory-policy", "noeviction", "refuses blocks once it is full"),
            ("maxmemory", "0", "no maxmemory"),
        ):
            server.cli("CONFIG", "SET", name, value)
            (finding,) = redis_of(server.url)
            assert finding.status is WARNING
            assert found in finding.found
            assert "CONFIG SET" in finding.fix
        # Where expiries are learned, it makes room by them.
        server.cli("CONFIG", "SET", "maxmemory", "256mb")
        for policy, status in (("noeviction", WARNING), ("allkeys-lru", WARNING), ("volatile-ttl", OK)):
            server.cli("CONFIG", "SET", "maxmemory-policy", policy)
            (finding,) = redis_of(server.url, expiry="learned")
            assert finding.status is status
            assert ("maxmemory-policy volatile-ttl" in finding.fix) is (status is WARNING)
        server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.cli("CONFIG", "SET", "maxmemory", "8mb")
        assert "next to nothing" in redis_of(server.url)[0].found
        # It is not what the configuration says.
        (finding,) = redis_of(server.url, mode="cluster")
        assert (finding.found, finding.fix) == (
            'it is standalone, [redis] mode is "cluster"',
            'set [redis] mode = "standalone"',
        )
        with server.frozen():
            (finding,) = redis_of(server.url, connect_timeout="500ms", deadline="500ms")
        assert (finding.status, finding.found) == (ERROR, "no answer in time")
    (finding,) = redis_of(server.url)
    assert finding.status is ERROR
    assert "not reachable" in finding.found


@needs_redis
def test_no_secret_is_ever_shown() -> None:
    with standalone(password="s3cret", maxmemory="256mb", policy="allkeys-lru") as server:
        address = f"127.0.0.1:{server.port}"
        for options in (
            {"url": f"redis://:wr0ng@{address}"},
            {"url": f"redis://{address}", "password": "wr0ng"},
            {"url": f"redis://{address}", "username": "nobody", "password": "wr0ng"},
            {"url": f"redis://{address}"},
        ):
            (finding,) = redis_of(**options)
            assert finding.status is ERROR
            assert "login refused" in finding.found
            assert "[redis] username and password" in finding.fix
            assert "wr0ng" not in str(finding)
        for options in ({"url": f"redis://:s3cret@{address}"}, {"url": f"redis://{address}", "password": "s3cret"}):
            (finding,) = redis_of(**options)
            assert finding.status is OK
            assert "s3cret" not in str(finding)
    # A slip in the address, which Python's own message would quote.
    for url in ("redis://:s3cret@host:s3cret", "http://:s3cret@host", "s3cret"):
        (finding,) = redis_of(url)
        assert finding.status is ERROR
        assert finding.fix.startswith("write it as in redis://HOST:6379/0")
        assert "s3cret" not in str(finding)


@needs_redis
def test_a_user_who_may_not_ask() -> None:
    with standalone(maxmemory="256mb", policy="allkeys-lru") as server:
        server.cli("ACL", "SETUSER", "engine", "on", ">pw", "~*", "+get", "+set")
        (finding,) = redis_of(server.url, username="engine", password="pw")
        assert "no permissions to run the 'info' command" in finding.found
        assert (finding.status, finding.fix) == (WARNING, "give this user +info")


@needs_redis
def test_a_server_behind_tls() -> None:
    with standalone(tls=True, maxmemory="256mb", policy="allkeys-lru") as server:
        assert server.tls is not None
        assert redis_of(server.url, ca=server.tls.authority)[0].status is OK
        (finding,) = redis_of(server.url)  # signed by nobody the system knows
        assert finding.status is ERROR
        assert "certificate verify failed" in finding.found


@needs_redis
def test_a_cluster() -> None:
    with cluster("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru") as nodes:
        findings = redis_of(nodes.url, mode="cluster")
        assert statuses(findings) == {f"redis 127.0.0.1:{port}": OK for port in nodes.ports}
        nodes.masters[1].cli("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        warned = [finding for finding in redis_of(nodes.url, mode="cluster") if finding.status is WARNING]
        assert [finding.check for finding in warned] == [f"redis 127.0.0.1:{nodes.ports[1]}"]
        assert "cluster-require-full-coverage no" in warned[0].fix
        # Its setting is what makes it refuse when another dies; that one is named too.
        nodes.masters[2].kill()
        wait_for(lambda: "cluster_state fail" in str(redis_of(nodes.url, mode="cluster")))
        assert "not reachable" in str(redis_of(nodes.url, mode="cluster"))
        assert redis_of(nodes.masters[0].url)[0].fix == 'set [redis] mode = "cluster"'
        assert "several servers" in redis_of(nodes.url)[0].found


@needs_redis
def test_sentinels_and_their_master() -> None:
    with watched() as group:
        findings = redis_of(group.url, mode="sentinel")
        sentinel, master = f"redis 127.0.0.1:{group.sentinels[0].port}", f"redis master 127.0.0.1:{group.master.port}"
        assert statuses(findings) == {sentinel: OK, master: WARNING}  # the rig's has no maxmemory
        (finding,) = redis_of(group.url, mode="sentinel", sentinel_name="other")
        assert (finding.status, finding.found) == (ERROR, 'it knows no master "other"')
        # A replica is no place for blocks.
        (finding,) = redis_of(group.replica.url)
        assert finding.status is ERROR
        assert "a replica, which refuses writes" in finding.found


def test_a_valkey_is_called_so() -> None:
    class Client:
        def info(self, section: str) -> dict[str, Any]:
            sections: dict[str, dict[str, Any]] = {
                "server": {"redis_version": "7.2.4", "valkey_version": "8.1.0"},
                "memory": {"maxmemory": 8 << 30, "maxmemory_policy": "allkeys-lfu"},
            }
            return sections.get(section, {})

    (finding,) = redis_tier._check_data(Client(), "redis here", by_expiry=False)
    assert finding == ok("redis here", "Valkey 8.1.0, maxmemory 8 GiB, allkeys-lfu")
