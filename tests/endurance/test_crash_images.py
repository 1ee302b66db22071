"""Power losses played out in short; and what the program says where a slab is written or read wrongly."""

from collections.abc import Sequence

import crash_images
import pytest
from crash_images import KINDS, WRONG, Recorder, Write

from kvtier.tiers.file import store as file_store
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

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


@pytest.fixture
def gullible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that believes its payloads."""

    def believed(
        codec: Codec, record: BlockRecord, stamp: bytes, chain_hash: ChainHash, payload: memoryview
    ) -> BlockRecord | Outcome:
        codec.show(record, stamp, payload)
        return record

    monkeypatch.setattr(file_store, "verified", believed)


def test_no_image_serves_a_wrong_byte() -> None:
    verdict = crash_images.crash_images(seed=7, count=400)
    for what in WRONG:
        assert not getattr(verdict, what), getattr(verdict, what)[:5]
    # images of every kind, and blocks in them
    assert {name.partition(",")[0] for name in verdict.images} == set(KINDS)
    assert verdict.images.total() == 400
    assert verdict.blocks_served > 1000
    assert verdict.caught > 0  # by a checksum: the disk had reordered what nobody synced


@pytest.mark.usefixtures("gullible")
def test_a_slab_that_believes_its_payloads_is_found() -> None:
    assert crash_images.crash_images(seed=7, count=200).wrong_bytes


@pytest.mark.usefixtures("gullible")
def test_a_writer_that_writes_the_header_first_is_found() -> None:
    # even where the disk reorders nothing, and only the last write is missing
    cut = [each for each in crash_images.crash_images(7, 400, HeaderFirst).wrong_bytes if each.startswith("cut")]
    assert cut
    # a right one has none of these
    right = crash_images.crash_images(7, 400).wrong_bytes
    assert not [each for each in right if each.startswith("cut")]
