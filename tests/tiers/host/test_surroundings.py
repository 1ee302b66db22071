"""Limits of the surroundings: control groups of both versions, nested, and what is in use there already."""

from pathlib import Path

import pytest

from kvtier.tiers.host.limits import limits, may_lock_all

MIB = 1 << 20
GIB = 1 << 30


class Machine:
    """A /proc and control groups made of files: 8 GiB, of which 6 may be taken."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "groups"
        write(self.proc / "meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
        write(self.proc / "self/status", "VmSize: 1024 kB\nCapEff:\t0000000000004000\n")

    def mounted(self, cgroup: str, *mounts: str) -> None:
        """`mounts`: root, place and kind of each, as in "/ v1 cgroup memory"."""
        write(self.proc / "self/cgroup", cgroup)
        lines = (each.split() for each in mounts)
        mountinfo = (
            f"30 20 0:28 {root} {self.groups / place} rw - {kind} {kind} rw,{options}"
            for root, place, kind, options in lines
        )
        write(self.proc / "self/mountinfo", "\n".join(mountinfo))

    def second(self, group: str, limit: object, used: int, cached: int = 0) -> None:
        """A group of version 2."""
        self._group(
            self.groups / "v2" / group, ("memory.max", limit), ("memory.current", used), "inactive_file", cached
        )

    def first(self, group: str, limit: int, used: int, cached: int = 0) -> None:
        names = ("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", used)
        self._group(self.groups / "v1" / group, *names, "total_inactive_file", cached)

    def _group(self, at: Path, limit: tuple[str, object], used: tuple[str, int], kept: str, cached: int) -> None:
        write(at / limit[0], str(limit[1]))
        write(at / used[0], str(used[1]))
        write(at / "memory.stat", f"anon 5\nrss 5\n{kept} {cached}\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups_it_is_what_the_kernel_estimates(machine: Machine) -> None:
    found = limits(machine.proc)
    assert (found.most, found.available, found.by) == (8 * GIB, 6 * GIB, "the machine")
    machine.mounted("0::/\n", "/ v2 cgroup2 nsdelegate")  # groups without limits
    machine.second("", "max", 0)
    assert limits(machine.proc) == found
    assert may_lock_all(machine.proc)


def test_nested_groups_of_both_versions_and_what_others_use(machine: Machine) -> None:
    both = "/ v2 cgroup2 nsdelegate", "/ v1 cgroup memory"
    machine.mounted("9:name=systemd:/\n4:cpu,memory:/pods/one\n0::/slice/unit\n", *both)
    machine.second("slice", 2 * GIB, 1500 * MIB, cached=500 * MIB)
    machine.second("slice/unit", "max", 10 * MIB)
    found = limits(machine.proc)
    assert (found.most, found.available, found.by) == (2 * GIB, 2 * GIB - 1000 * MIB, "control group /slice")
    machine.first("pods", 9223372036854771712, 5 * GIB)  # how version 1 writes that there is none
    machine.first("pods/one", 700 * MIB, 100 * MIB, cached=40 * MIB)
    found = limits(machine.proc)
    assert (found.most, found.available, found.by) == (700 * MIB, 640 * MIB, "control group /pods/one")


def test_a_container_sees_its_own_group_as_the_root(machine: Machine) -> None:
    # Version 1 without a namespace of its own: the path is the host's, and the mount begins there.
    machine.mounted("4:memory:/docker/abc\n", "/docker/abc v1 cgroup memory")
    machine.first("", 512 * MIB, 12 * MIB)
    assert limits(machine.proc)[:3] == (512 * MIB, 500 * MIB, "control group /")
    # A process that came from outside sees a path that is above what is mounted.
    machine.mounted("0::/../../other\n", "/ v2 cgroup2 nsdelegate")
    machine.second("", 256 * MIB, 300 * MIB)
    assert limits(machine.proc)[:3] == (256 * MIB, 0, "control group /")
