"""Faults 25 and 35: told to end with copies in flight, the next start is clean; any process finds the same names."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fork_rig import SERVICES, Forked

CHILD = Path(__file__).with_name("_tier_child.py")


def start(directory: Path, what: str) -> Forked:
    return Forked([str(CHILD), str(directory), what], SERVICES, env=os.environ, stdout=subprocess.PIPE)


def start_anew(directory: Path, what: str, hash_seed: str) -> subprocess.Popen[str]:
    """With a hash seed of its own, which only a start of Python takes."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(directory), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def found(process: Forked | subprocess.Popen[str]) -> list[int]:
    """What a process finds of each of the forty prompts; it checks every byte itself."""
    with process:
        assert process.stdout is not None
        counts: list[int] = ast.literal_eval(process.stdout.read())
        assert process.wait(60) == 0
    return counts


def run_until_busy(process: Forked | subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "busy\n"


@pytest.mark.parametrize("what", ["handler", "serve"])
def test_sigterm_with_copies_in_flight_and_the_next_start_is_clean(tmp_path: Path, what: str) -> None:
    with start(tmp_path, what) as process:
        run_until_busy(process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        output = process.stdout.read()
        status = process.wait(60)  # it ends: drained up to its deadline, then cancelled
    if what == "handler":  # an engine that closes; the child looks that nothing is leased or half filled
        assert (status, output) == (143, "closed\n")
    else:  # one that does not: as kill -9
        assert status == -signal.SIGTERM
    counts = found(start(tmp_path, "find"))
    assert sum(counts) > 0
    assert found(start(tmp_path, "find")) == counts


def test_other_processes_with_other_hash_seeds_find_the_same_blocks(tmp_path: Path) -> None:
    with start_anew(tmp_path, "handler", hash_seed="1") as process:
        run_until_busy(process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    counts = found(start_anew(tmp_path, "find", hash_seed="2"))
    assert sum(counts) > 0
    assert found(start_anew(tmp_path, "find", hash_seed="0")) == counts
