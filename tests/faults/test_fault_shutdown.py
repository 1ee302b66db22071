"""Faults 25 and 35: told to end with copies in flight, the next start is clean; any process finds the same names."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("_tier_child.py")


def start(directory: Path, what: str, hash_seed: str = "random") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(directory), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def found(directory: Path, hash_seed: str = "random") -> list[int]:
    """What a fresh process finds of each of the forty prompts; it checks every byte itself."""
    output, errors = (process := start(directory, "find", hash_seed)).communicate(timeout=60)
    assert process.returncode == 0, errors
    counts: list[int] = ast.literal_eval(output)
    return counts


def run_until_busy(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "busy\n"


@pytest.mark.parametrize("what", ["handler", "serve"])
def test_sigterm_with_copies_in_flight_and_the_next_start_is_clean(tmp_path: Path, what: str) -> None:
    process = start(tmp_path, what)
    run_until_busy(process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)  # it ends: drained up to its deadline, then cancelled
    if what == "handler":  # an engine that closes; the child looks that nothing is leased or half filled
        assert process.returncode == 143, errors
        assert output == "closed\n"
    else:  # one that does not: as kill -9
        assert process.returncode == -signal.SIGTERM
    counts = found(tmp_path)
    assert sum(counts) > 0
    assert found(tmp_path) == counts


def test_other_processes_with_other_hash_seeds_find_the_same_blocks(tmp_path: Path) -> None:
    process = start(tmp_path, "handler", hash_seed="1")
    run_until_busy(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    counts = found(tmp_path, hash_seed="2")
    assert sum(counts) > 0
    assert found(tmp_path, hash_seed="3") == counts
    assert found(tmp_path, hash_seed="0") == counts
