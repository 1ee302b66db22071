"""Forked children, as of gunicorn --preload: they are told in one line, and harm neither themselves nor a parent."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fork_rig import ENGINE, Forked
from service_rig import DaemonProcess, environment

from kvtier.tiers.file import slab
from kvtier.tiers.file.store import FileStore

CHILD = Path(__file__).with_name("_forking_child.py")


def start(*arguments: str) -> Forked:
    pipe = subprocess.PIPE
    return Forked([str(CHILD), *arguments], ENGINE, env=environment(), stdout=pipe, stderr=pipe)


def told(process: Forked) -> tuple[Any, str]:
    """What the process printed, and its log."""
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        said, log = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 0, log
    return json.loads(said), log


@pytest.fixture(params=["slab", "daemon"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Arguments of the child: over a slab of its own, or over a daemon's tiers."""
    if request.param == "slab":
        yield (str(tmp_path),)
        return
    daemon = DaemonProcess(tmp_path / "s", host__size="64MiB")
    yield str(tmp_path), str(tmp_path / "s")
    assert daemon.end(signal.SIGTERM) == 0


def test_an_engine_refuses_its_forks_and_works_on(place: tuple[str, ...]) -> None:
    said, log = told(start("engine", *place))
    assert said["status"] == 0, log
    assert set(said["refused"]) == {"generate", "stream", "add_request", "step", "abort", "drain", "reset_cache"}
    [line] = set(said["refused"].values())
    assert line.startswith("this engine is process ")
    assert line.endswith("make one in each worker, behind the fork (gunicorn: in post_fork, or without --preload)")
    # an engine of the child's own works; a daemon's client finds what the parent stored
    assert said["own"]
    assert said["found"] == (96 if len(place) > 1 else 0)
    # and the parent has lost nothing: its stream, what it stored, its place in the store
    assert said["rest"] == 3
    assert said["after"] == [True, 96]


def test_a_wrapped_model_generates_in_its_forks_without_tiers_and_says_so_once(place: tuple[str, ...]) -> None:
    said, log = told(start("transformers", *place))
    assert said["status"] == 0, log
    assert (said["text"], said["cached"], said["loaded"]) == (True, 0, [0, True])
    assert log.count("nothing is loaded or kept: this KVTier is process ") == 1
    assert said["own"] == [True, 96]
    assert said["after"] == [True, 96]


def test_a_fork_that_outlives_its_parent_keeps_no_lock(tmp_path: Path) -> None:
    with start("stays", str(tmp_path)) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.kill()
        process.wait(60)
        try:
            [path] = tmp_path.glob("*.slab")
            made = slab.decode(path.read_bytes()[: slab.HEADER_BYTES], path.name)
            found = FileStore.open(
                tmp_path, made.fingerprint, slot_bytes=made.slot_bytes, block_size=made.block_size, size=64 << 20
            )
            assert found.num_recovered == 6
            found.close()
        finally:
            os.kill(fork, signal.SIGKILL)
