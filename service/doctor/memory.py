"""Checks memory for `kvtier doctor`: room, locking, huge pages, speed of copies, and the GPU."""

import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kvtier.tiers import Finding, error, install_command, ok, warning
from kvtier.tiers.config import Config, format_size, show_size
from kvtier.tiers.host import Limits, available_bytes, may_lock_all

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
FILES: Final = 2048  # 256 clients: sockets, processes and regions; HTTP; slabs
TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold=0x10000"
_WORTH: Final = 1.1  # a smaller gain is noise
_COPY_PAIRS: Final = 3
_COPY_BYTES: Final = 128 << 20  # bytes of each side; the probe needs twice that
_COPY_SECONDS: Final = 10.0  # for one run of the probe, and after which no other pair is run
_GPU_SECONDS: Final = 60.0  # seconds; a driver's first use is slow
_LOST: Final = "small blocks are copied more slowly"
_CUPY: Final = (
    f"{install_command('cuda13', 'cupy')}; if the driver is older than 580, {install_command('cuda12', 'cupy')}"
)
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
    """Whether [host] size is there, for this process: control groups and `ulimit -v` count."""
    size = config.host.size
    told = f"{show_size(found.available)} of {found.by} ({show_size(found.most)}) available"
    told = f"{told}, [host] size {format_size(size)}"
    if size > found.most:
        return error("memory", told, "lower [host] size, or raise the limit")
    if size > found.available:
        return error("memory", told, "lower [host] size, or stop what uses the memory")
    return ok("memory", told)


def check_files(config: Config, found: Limits) -> Finding:
    """Whether a daemon may open files for all the clients it takes; an engine needs a few dozen."""
    told = f"{found.files:,} may be open"
    if config.service.socket is not None and found.files < FILES:
        fix = "`ulimit -Hn 4096` before its start (LimitNOFILE=4096 in a systemd unit)"
        return warning("files", f"{told}: a daemon with all its clients opens {FILES:,}", fix)
    return ok("files", told)


def check_memlock(config: Config, found: Limits, *, has_gpu: bool, is_privileged: bool | None = None) -> Finding:
    """Whether a region of [host] size may be locked, as pinning needs. Nothing is pinned without a GPU."""
    limit = found.lockable
    is_privileged = may_lock_all() if is_privileged is None else is_privileged
    told = f"limit {'none' if limit is None else show_size(limit)}"
    if limit is None or limit >= config.host.size:
        return ok("memlock", told)
    if is_privileged:
        return ok("memlock", f"{told}, which does not limit this user (CAP_IPC_LOCK)")
    if not config.host.pin:
        return ok("memlock", f"{told}; [host] pin is off")
    if not has_gpu:
        return ok("memlock", f"{told}; nothing is pinned without a GPU")
    return warning(
        "memlock",
        f"{told}, [host] size {format_size(config.host.size)}: it may stay pageable, which slows copies down",
        "`ulimit -l unlimited` (LimitMEMLOCK=infinity in a systemd unit), or lower [host] size",
    )


def check_huge_pages(config: Config, directory: Path = _HUGE_PAGES) -> Finding:
    """Whether the kernel gives L2 huge pages. Shared memory has its own setting."""
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
    """Whether a glibc tunable, which must be set before a program starts, makes copies of blocks faster."""
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
    """Bytes per second of the probe, run with `prefix` in front."""
    command = [*prefix, sys.executable, "-I", "-c", _COPY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COPY_SECONDS, check=True)
    return float(done.stdout)


def has_gpu() -> bool:
    """Whether the kernel has an NVIDIA device, with or without software for it."""
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
    """What the probe's program answered, for people."""
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
