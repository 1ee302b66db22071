"""Nothing passes by not running: out of time is a failure, and skips are counted by reason, behind everything else."""

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

# Seconds since the epoch, from `.ci/in-time`. (Not KVTIER_…: kvtier refuses a variable of that name that is no option.)
DEADLINE: Final = "TESTS_UNTIL"

_skipped: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which reasons a skip may have: `pytest --allowed-skips=.ci/allowed-skips`."""
    parser.addoption(
        "--allowed-skips", type=Path, metavar="FILE", help="a pattern a line: a skip for any other reason is a failure"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test whose turn comes after the deadline fails by name."""
    if time.time() > float(os.environ.get(DEADLINE, "inf")):
        pytest.fail(f"out of time: its turn came after {DEADLINE}", pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a skipped test."""
    _count(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that is skipped as a whole."""
    _count(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A reason that is not allowed makes the run fail."""
    if _unknown(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the reasons, most frequent first: the last line."""
    if hasattr(config, "workerinput") or not _skipped:
        return
    for reason in _unknown(config):
        print(f"FAILED: skipped for a reason that {config.getoption('--allowed-skips')} does not name: {reason}")
    reasons = "; ".join(f"{count} {reason}" for reason, count in _skipped.most_common())
    print(f"{_skipped.total()} skipped: {reasons}")


def _count(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped[" ".join(why.removeprefix("Skipped: ").split())] += 1


def _unknown(config: pytest.Config) -> list[str]:
    """Reasons that no line of the file matches from beginning to end; none without a file."""
    file: Path | None = config.getoption("--allowed-skips")
    if file is None or hasattr(config, "workerinput"):
        return []
    lines = (line.partition("  #")[0].strip() for line in file.read_text().splitlines())
    allowed = [re.compile(line) for line in lines if line and not line.startswith("#")]
    return [reason for reason in _skipped if not any(pattern.fullmatch(reason) for pattern in allowed)]
