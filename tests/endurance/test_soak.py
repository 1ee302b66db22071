"""The soak in short, over real processes; and that each thing it looks for would be found."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import block_client
import figures
import pytest
from block_client import BlockClient, Model
from doubles import BLOCK_SIZE, SLOT_BYTES, payload_of
from doubles import wait_until as until
from endurance import tell
from fork_rig import ENGINE, Forked
from growth import Samples
from node_members import Size
from redis_rig import NO_REDIS
from service_rig import FINGERPRINT, DaemonThread
from soak import WRONG, line_of, soak

from kvtier.tiers.tier import ChainHash

SIZE = 64 * SLOT_BYTES


def by_fork(arguments: Sequence[str], variables: Mapping[str, str], log: IO[bytes]) -> Forked:
    """Start `kvtier ARGUMENTS` without the seconds that torch takes to import."""
    return Forked(["-m", "kvtier.cli", *arguments], ENGINE, env=variables, stdout=log, stderr=log)


@pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or "")
@pytest.mark.exhaustive  # in `make test` tests/faults/test_fault_cluster.py has a fault of each kind
@pytest.mark.timeout(900)
def test_a_node_under_faults_is_right_and_hits_every_tier(home: Path) -> None:
    report = soak(seed=11, minutes=0.3, save=None, home=home, num_talks=12, start=by_fork)
    for what in WRONG:
        assert not report[what], report[what]
    assert report["answers"] > 0
    assert report["blocks_checked"] > 0
    assert sum(report["faults"].values()) >= 3
    assert "nothing wrong" in line_of(report)


def test_a_wrong_byte_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = DaemonThread(home / "kv.sock")
    client = BlockClient(home / "kv.sock", Model(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, SIZE), 1, chains=3, per_second=50)
    until(lambda: client.tally.blocks_checked > 20)
    assert not client.tally.wrong

    # from now on each block ought to have one bit otherwise
    def otherwise(chain_hash: ChainHash, num_bytes: int = SLOT_BYTES) -> bytes:
        right = payload_of(chain_hash, num_bytes)
        return bytes([right[0] ^ 1]) + right[1:]

    monkeypatch.setattr(block_client, "payload_of", otherwise)
    until(lambda: client.tally.wrong)
    client.end()
    assert not client.tally.hangs
    assert not client.tally.errors
    daemon.close()


def lives(*, memory: float = 0.0, descriptors: float = 0.0, threads: float = 0.0) -> list[str]:
    """What is said of a process that grows by so much a minute, for an hour."""
    samples = Samples()
    for minute in range(60):
        size = Size(minute * 60.0, 100 + memory * minute, 20 + int(descriptors * minute), 8 + int(threads * minute))
        samples.add("daemon", 1, size)
    (growth,) = samples.growths()
    assert growth.slope == pytest.approx(60 * memory)
    return growth.leaks


def test_what_grows_is_found() -> None:
    assert not lives()
    assert not lives(memory=0.1)  # what an allocator does
    assert "memory" in lives(memory=2.0)[0]
    assert "descriptors" in lives(descriptors=1.0)[0]
    assert "threads" in lives(threads=1.0)[0]


def test_a_life_too_short_says_nothing() -> None:
    samples = Samples()
    for second in range(5):
        samples.add("engine-b", 1, Size(second, 100.0 * second, 9, 9))
    assert not samples.growths()


@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_was_wrong_is_the_exit_status(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"program": "soak", "seed": 1, "commit": "abc", **{name: [] for name in WRONG}}
    assert tell(report, WRONG, tmp_path / "well.json") == 0
    assert tell(report | {wrong: ["block 7"]}, WRONG, tmp_path / "ill.json") == 1
    assert "block 7" in capsys.readouterr().err
    assert json.loads((tmp_path / "ill.json").read_text())[wrong] == ["block 7"]


# A new result of a long run is put into docs/faults.md.


def test_a_new_result_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a page and results of our own, as after a short run
    page = tmp_path / "faults.md"
    page.write_text(f"before\n{figures.BEGIN}old\n{figures.END}after\n")
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    run = [sys.executable, "tests/endurance/crash_images.py", "--count", "20", "--seed", "5"]
    done = subprocess.run([*run, "--json", str(tmp_path / "x.json")], cwd=figures.ROOT, timeout=110, check=True)
    assert done.returncode == 0
    monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path / "x.json")])
    assert figures.main() == 0
    assert json.loads((tmp_path / "results" / "crash-images.json").read_text())["count"] == 20
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `make crash-images` | 20: " in text
    assert "(seed 5)" in text
