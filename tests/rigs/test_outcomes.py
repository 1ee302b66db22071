"""No check passes by not running: out of time is red and named, and so is a skip whose reason nobody allowed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = """
import pytest

def test_it_runs():
    pass

@pytest.mark.parametrize("what", ["a GPU", "a GPU", "a license"])
def test_it_lacks(what):
    pytest.skip(f"no {what} here")
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "allowed").write_text("# what the machine lacks\nno a [A-Z]+ here  # as most machines\n")
    return tmp_path


def run(tests: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", *arguments]
    alone = {"PYTHONPATH": str(ROOT / "tests" / "rigs"), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **alone, **variables}
    return subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=100)


def test_out_of_time_is_red_by_name(tests: Path) -> None:
    late = run(tests, TESTS_UNTIL="1")
    assert late.returncode == 1
    assert "4 errors" in late.stdout
    assert "ERROR test_some.py::test_it_runs - Failed: out of time" in late.stdout
    in_time = run(tests, TESTS_UNTIL="99999999999")
    assert in_time.returncode == 0
    assert in_time.stdout.splitlines()[-1] == "3 skipped: 2 no a GPU here; 1 no a license here"


def test_a_skip_for_another_reason_than_those_allowed_is_red(tests: Path) -> None:
    assert run(tests, "--allowed-skips", "allowed", "-k", "runs or GPU").returncode == 0
    done = run(tests, "--allowed-skips", "allowed", "-p", "xdist.plugin", "-n", "1")
    assert done.returncode == 1
    assert "FAILED: skipped for a reason that allowed does not name: no a license here" in done.stdout


@pytest.mark.parametrize(
    ("until", "command", "status", "said"),
    [
        ("1", "true", 124, "types: FAILED, out of time: it proves nothing"),
        ("1", "false", 124, "types: FAILED, out of time: it proves nothing"),
        ("99999999999", "true", 0, "types: ok"),
        ("", "false", 1, "types: FAILED with status 1"),
    ],
)
def test_a_part_out_of_time_is_red_by_name(until: str, command: str, status: int, said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TESTS_UNTIL": until, "PARTS": str(tmp_path / "parts")}
    part = [str(ROOT / ".ci" / "in-time"), "types", command]
    done = subprocess.run(part, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert (tmp_path / "parts").read_text() == done.stderr
