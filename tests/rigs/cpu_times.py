"""`pytest -p cpu_times`: which test files take the CPU time, that of the processes they start included."""

import os
import sys
from collections import defaultdict
from collections.abc import Generator
from typing import Final

import pytest

COLUMNS: Final = {"cpu_seconds": 2, "cpu_seconds_of_children": 3}  # property of a report: column below
NUM_SHOWN: Final = 25
_BEFORE: Final = pytest.StashKey[os.times_result]()
_FORKS: Final = pytest.StashKey[float]()

_files: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)  # tests, wall, own CPU, children's CPU


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note where a test begins."""
    item.stash[_BEFORE], item.stash[_FORKS] = os.times(), _of_forks()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what this phase took on its report, which xdist carries to the process that prints.

    A child's time counts once the child has been waited for; so does that of a fork of fork_rig's. What a child leaves
    running when it ends counts nowhere.
    """
    report = yield
    before, now = item.stash[_BEFORE], os.times()
    forks_before, forks_now = item.stash[_FORKS], _of_forks()
    item.stash[_FORKS] = forks_now
    item.stash[_BEFORE] = now
    own = now.user + now.system - before.user - before.system
    children = now.children_user + now.children_system - before.children_user - before.children_system
    children += forks_now - forks_before
    report.user_properties = [*report.user_properties, *zip(COLUMNS, (own, children), strict=True)]
    return report


def _of_forks() -> float:
    """What forks of fork_rig's and their parents took, if a test has any; they are no children of this process."""
    rig = sys.modules.get("fork_rig")
    return 0.0 if rig is None else float(rig.cpu_seconds())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a phase to its file's figures."""
    figures = _files[report.nodeid.partition("::")[0]]
    figures[0] += report.when == "call"
    figures[1] += report.duration
    for name, seconds in report.user_properties:
        if name in COLUMNS:
            figures[COLUMNS[name]] += float(str(seconds))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files by CPU time; all of them with `-v`."""
    terminalreporter.section("CPU time by file")
    terminalreporter.write_line("    CPU s   own s  children s  wall s  tests  file")
    rows = sorted(_files.items(), key=lambda row: -row[1][2] - row[1][3])
    total = ("all files", [sum(figures[i] for figures in _files.values()) for i in range(4)])
    shown = rows if terminalreporter.verbosity > 0 else rows[:NUM_SHOWN]
    for name, (tests, wall, own, children) in [total, *shown]:
        terminalreporter.write_line(
            f"{own + children:9.1f} {own:7.1f} {children:11.1f} {wall:7.1f} {tests:6.0f}  {name}"
        )
