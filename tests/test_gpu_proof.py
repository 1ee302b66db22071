"""`make gpu`, whose parts are told to a stand-in for Python: which are run, what is kept, what a failure costs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = """#!/usr/bin/env bash
[[ $1 == -c ]] && exit {sees}
echo "asked: $*"
[[ $* != *{fails}* ]]
"""


def proof(folder: Path, *parts: str, sees: bool = True, fails: str = "nothing") -> "subprocess.CompletedProcess[str]":
    """Run the script with a Python that notes what it is asked."""
    python = folder / "python"
    python.write_text(STAND_IN.format(sees=0 if sees else 1, fails=fails))
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci" / "gpu-proof", *parts],
        env=os.environ | {"PYTHON": str(python), "OUT": str(folder / "out")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_part_is_run_within_its_bound(tmp_path: Path) -> None:
    done = proof(tmp_path)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log == done.stdout
    asked = [line for line in log.splitlines() if line.startswith("asked:") and "gpu" in line]
    assert "pytest" in asked[0]
    assert asked[0].endswith("-k not lazy tests/gpu")
    for line, name in zip(asked[-3:], ("bandwidth", "decode", "ttft"), strict=True):
        assert line == f"asked: benchmarks/gpu_{name}.py --save"
    bounds = [int(line.split()[2]) for line in log.splitlines() if line.endswith("s at the most")]
    assert len(bounds) >= 4
    assert sum(bounds) <= 25 * 60
    assert max(bounds) < 600


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path: Path) -> None:
    done = proof(tmp_path, "bandwidth", "decode", fails="bandwidth")
    assert done.returncode == 1
    assert "failed: bandwidth" in done.stderr
    assert "== decode: status 0" in done.stdout
    assert "ttft" not in done.stdout


@pytest.mark.parametrize(
    ("part", "sees", "told"), [("everything", True, "no part everything"), ("tests", False, "PYTHON=")]
)
def test_what_it_cannot_do_it_says(tmp_path: Path, part: str, sees: bool, told: str) -> None:
    done = proof(tmp_path, part, sees=sees)
    assert done.returncode == 2
    assert told in done.stderr


def test_the_bundle_has_what_kvtier_needs_and_no_torch() -> None:
    listed = subprocess.run(
        [ROOT / ".ci" / "gpu-bundle", "--list"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    names = {line.partition("==")[0] for line in listed}
    assert {"pydantic-core", "pydantic-settings", "redis", "hiredis", "pytest", "pytest-timeout", "msgpack"} <= names
    assert not {"torch", "numpy", "kvtier", "transformers", "tokenizers", "huggingface-hub"} & names
    assert all("==" in line for line in listed)
