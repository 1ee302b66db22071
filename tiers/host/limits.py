"""The limits of this process: memory, by the machine, its control groups and `ulimit`; locked memory; open files.

Shared regions are memfds: the size of /dev/shm does not limit them, and a control group counts them as memory.
"""

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_CAP_IPC_LOCK: Final = 14  # bit of the capability that RLIMIT_MEMLOCK does not limit
# Limit, use, and the lines of memory.stat that the kernel reclaims before it kills: versions 1 and 2 of the interface.
_FILES: Final = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
)
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")  # a blank in a path of mountinfo


class Limits(NamedTuple):
    """In bytes, except `files`."""

    most: int  # memory this process could have if no other used any
    available: int  # memory it may still take: the kernel's estimate, or less by a limit
    by: str  # whose limit `most` is: "the machine", "control group /x", "ulimit -v"
    lockable: int | None  # memory it may lock; None: all
    files: int  # that it may have open, once it raises its own limit


def limits(proc: Path = _PROC) -> Limits:
    """The limits now. Nested control groups of both versions count, with the use of others in them."""
    fields = dict(_numbers(proc / "meminfo"))
    most, by = fields.get("MemTotal", 0), "the machine"
    available = fields.get("MemAvailable", 0)
    for name, limit, used in _groups(proc):
        available = min(available, max(0, limit - used))
        if limit < most:
            most, by = limit, f"control group {name}"
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        available = min(available, max(0, space - dict(_numbers(proc / "self/status")).get("VmSize", 0)))
        if space < most:
            most, by = space, "ulimit -v"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lockable = None if locked == resource.RLIM_INFINITY else locked
    return Limits(most, available, by, lockable, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def available_bytes() -> int:
    """Memory this process may still take."""
    return limits().available


def may_lock_all(proc: Path = _PROC) -> bool:
    """Whether `lockable` does not bind this process (CAP_IPC_LOCK)."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", (proc / "self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The lines of /proc that are in kB, in bytes."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            yield name, int(value[:-3]) * 1024


def _groups(proc: Path) -> Iterator[tuple[str, int, int]]:
    """Path, limit and memory that cannot be reclaimed, of each control group around us that limits memory."""
    mounts = dict(_mounts(proc))
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            is_second = not controllers
            if (is_second or "memory" in controllers.split(",")) and is_second in mounts:
                root, mount = mounts[is_second]
                yield from _around(mount, _below(root, path), _FILES[is_second])


def _mounts(proc: Path) -> Iterator[tuple[bool, tuple[str, Path]]]:
    """Whether it is version 2 → the hierarchy's mounted part, and where. See proc(5) on mountinfo."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text().splitlines():
            ours, _, kind = line.partition(" - ")
            fields, (type_, *_, options) = ours.split(" "), kind.split(" ")
            if type_ == "cgroup2" or (type_ == "cgroup" and "memory" in options.split(",")):
                yield type_ == "cgroup2", (fields[3], Path(_ESCAPED.sub(_character, fields[4])))


def _character(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1], 8))


def _below(root: str, path: str) -> PurePosixPath:
    """Where a group lies below the mount; the mount itself if the group is outside of it."""
    group, at = PurePosixPath(path), PurePosixPath(root)
    return group.relative_to(at) if group.is_relative_to(at) and ".." not in group.parts else PurePosixPath()


def _around(
    mount: Path, group: PurePosixPath, files: tuple[str, str, tuple[str, ...]]
) -> Iterator[tuple[str, int, int]]:
    limit, usage, kept = files
    for each in (group, *group.parents):
        directory = mount / each
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            most = int((directory / limit).read_text())
            lines = (line.split() for line in (directory / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for name, value in lines if name in kept)
            yield f"/{each}".removesuffix("."), most, max(0, int((directory / usage).read_text()) - cached)
