"""Kills in short: each kind of victim; and a writer that says more than is true is found."""

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import kill_victims
import kills
import pytest
from extent import brief
from kills import SHARES, WRONG, SlabStory, Verdict

from kvtier.tiers.file.store import FileStore

pytestmark = [pytest.mark.timeout(600)]


def boast(directory: Path, first: int, tell: Connection) -> None:
    """A writer that acknowledges what it has not written."""
    FileStore.open(directory, b"f" * 32, slot_bytes=4096, block_size=4, size=1 << 20).close()
    tell.send(first + 60)
    time.sleep(600)


def test_each_kind_of_victim_leaves_whole_blocks_and_nothing_else() -> None:
    with kills.stories(seed=3) as (verdict, kinds):
        for kind in (*SHARES, *brief([], SHARES), *["slab writer"] * brief(4, 49)):
            kinds[kind]()
    for what in WRONG:
        assert not getattr(verdict, what), getattr(verdict, what)[:5]
    assert verdict.blocks_right > 100
    assert verdict.archives_whole == brief(1, 2)


def test_a_writer_that_acknowledges_too_soon_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Verdict()
    story = SlabStory(tmp_path / "slab", random.Random(1), verdict)
    story.kill_writer()
    assert not verdict.lost
    monkeypatch.setattr(kill_victims, "write_slab", boast)
    story.kill_writer()
    assert len(verdict.lost) == 1
