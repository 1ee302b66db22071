"""Power losses played out in short; and what the program says where a slab is written or read wrongly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import crash_images
import pytest
from crash_images import KINDS, WRONG, Recorder, Write
from extent import brief

from kvtier.tiers.file import store as file_store
from kvtier.tiers.file.slab import Codec, SlabEntry
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

COUNT, BLIND = brief((100, 60), (400, 200))  # images
ROW = 1024  # bytes: a row of the table has fewer, a payload more


class HeaderFirst(Recorder):
    """A writer whose entries reach the disk before the payloads they speak of."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """A payload is written down behind the next small write."""
        moved = super().pwritev(fd, buffers, offset)
        now, before = self.events[-1], self.events[-2] if len(self.events) > 1 else None
        if isinstance(now, Write) and isinstance(before, Write) and len(now.data) < ROW < len(before.data):
            self.events[-2:] = [now, before]
        return moved


@contextmanager
def gullible() -> Iterator[None]:
    """A slab that believes its payloads."""

    def believed(codec: Codec, entry: SlabEntry, chain_hash: ChainHash, payload: memoryview) -> BlockRecord | Outcome:
        record, stamp = entry
        codec.show(record, stamp, payload)
        return record

    with patch.object(file_store, "verified", believed):
        yield


@pytest.fixture(scope="module")
def believed() -> Sequence[str]:
    """The wrong bytes of a slab that believes its payloads, whose writer is right."""
    with gullible():
        return crash_images.crash_images(seed=7, count=BLIND).wrong_bytes


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "encrypted"])
def test_no_image_serves_a_wrong_byte(key: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_images.child, "KEY", key)
    verdict = crash_images.crash_images(seed=7, count=COUNT)
    for what in WRONG:
        assert not getattr(verdict, what), getattr(verdict, what)[:5]
    # images of every kind, and blocks in them
    assert {name.partition(",")[0] for name in verdict.images} == set(KINDS)
    assert verdict.images.total() == COUNT
    assert verdict.blocks_served > 1000
    assert verdict.caught > 0  # by a checksum: the disk had reordered what nobody synced


def test_a_slab_that_believes_its_payloads_is_found(believed: Sequence[str]) -> None:
    assert believed


def test_a_writer_that_writes_the_header_first_is_found(believed: Sequence[str]) -> None:
    # even where the disk reorders nothing, and only the last write is missing
    with gullible():
        wrong = crash_images.crash_images(7, BLIND, HeaderFirst).wrong_bytes
    assert [each for each in wrong if each.startswith("cut")]
    # a right one has none of these
    assert not [each for each in believed if each.startswith("cut")]
