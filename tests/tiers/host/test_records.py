"""BlockRecords: rows of an array tell what a dict of records would, and hold no object a block."""

import struct
import threading
from array import array
from collections.abc import Iterator

import numpy as np
import pytest
from extent import brief
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.compiled import extension
from kvtier.tiers.host.host import BlockRecords, HostRegion, HostTier
from kvtier.tiers.tier import BlockRecord, ChainHash

BLOCK_SIZE, NUM_SLOTS = 8, 24
ROOT = b"\7" * 32


def tier_of(num_slots: int, block_size: int = BLOCK_SIZE) -> HostTier:
    region = HostRegion.allocate(num_slots, 64, huge_pages=False, prefault=False)
    return HostTier(region, block_size=block_size)


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = tier_of(NUM_SLOTS)
    yield tier
    tier.pool.check()
    tier.check()
    tier.close()


def record_of(name: ChainHash, parent: ChainHash, dice: np.random.Generator, num_tokens: int) -> BlockRecord:
    return BlockRecord(name, parent, dice.bytes(4 * num_tokens), int(dice.integers(0, 1 << 64, dtype=np.uint64)))


def put(tier: HostTier, records: list[BlockRecord], parent: ChainHash | None) -> bool:
    """What the hierarchy does when blocks were computed or read."""
    reservation = tier.pool.reserve([record.chain_hash for record in records], parent)
    if reservation is None:
        return False
    tier.describe(reservation.slots, [records[i] for i in reservation.indices])
    reservation.is_partial = bool(records) and len(records[0].tokens) < 4 * BLOCK_SIZE
    tier.pool.seal(reservation).release()
    return True


@pytest.mark.parametrize("seed", range(brief(1, 4)))
def test_rows_tell_what_a_dict_would_whatever_comes_and_goes(tier: HostTier, seed: int) -> None:
    dice = np.random.default_rng(seed)
    model: dict[ChainHash, BlockRecord] = {}  # all there ever were: a name stands for one record
    for turn in range(250):
        parents = [name for name in model if dice.random() < 0.3] or [ROOT]
        parent = parents[int(dice.integers(len(parents)))]
        chain: list[BlockRecord] = []
        is_partial = dice.random() < 0.3
        for _ in range(1 if is_partial else int(dice.integers(1, 20))):
            num_tokens = int(dice.integers(0, BLOCK_SIZE)) if is_partial else BLOCK_SIZE
            before = chain[-1].chain_hash if chain else parent
            chain.append(record_of(dice.bytes(32), before, dice, num_tokens))
        if put(tier, chain, parent):
            model |= {record.chain_hash: record for record in chain}
        if turn % 7 == 3:  # dropped by force, children or not
            tier.pool.evict([name for name in model if dice.random() < 0.2])
        if turn % 50 == 49:
            tier.pool.reset()
        held = [name for name in model if tier.pool.holds([name])[0]]
        for name in held:
            with tier.pool.lease([name]) as lease:
                assert tier.records[lease.slots[0]] == model[name]
            assert tier.parent_of(name) == model[name].parent
        # what is told of slots whose block has left is still of one block
        assert all(record == model[record.chain_hash] for record in tier.records if record is not None)
        assert dict(tier.lineage().pairs()) == {name: model[name].parent for name in held}
        unfinished = {name for name in held if len(model[name].tokens) < 4 * BLOCK_SIZE}
        assert dict(tier.lineage(partial=False).pairs()) == {
            name: model[name].parent for name in held if name not in unfinished
        }
        told = tier.children(parent, 8)
        assert {(child.chain_hash, child.tokens) for child in told} <= {
            (name, model[name].tokens) for name in held if model[name].parent == parent and model[name].tokens
        }


def test_a_slot_taken_again_has_no_record_until_it_is_described(tier: HostTier) -> None:
    dice = np.random.default_rng(1)
    old = [record_of(dice.bytes(32), ROOT, dice, BLOCK_SIZE) for _ in range(NUM_SLOTS)]
    assert put(tier, old, ROOT)
    assert all(record is not None for record in tier.records)
    tier.pool.evict([record.chain_hash for record in old])
    assert set(tier.records) == set(old)  # what they held last
    new = record_of(dice.bytes(32), ROOT, dice, BLOCK_SIZE)
    reservation = tier.pool.reserve([new.chain_hash], ROOT)
    assert reservation is not None
    [slot] = reservation.slots
    assert tier.records[slot] is None  # neither the old block's record nor a mix
    tier.describe([slot], [new])
    assert tier.records[slot] == new
    tier.pool.abandon(reservation)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (BlockRecord(b"\1" * 32, ROOT, b"\0" * 4 * (BLOCK_SIZE + 1), 0), "at most 8"),
        (BlockRecord(b"\1" * 32, ROOT + b"\0", b"", 0), "parent of 33 bytes"),
        (BlockRecord(b"\2" * 32, ROOT, b"", 0), "named for another block"),
    ],
)
def test_a_record_that_is_not_its_slots_is_refused(tier: HostTier, changed: BlockRecord, message: str) -> None:
    with tier.pool.reserve([b"\1" * 32]) as reservation:  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=message):
            tier.describe(reservation.slots, [changed])
        assert tier.records[reservation.slots[0]] is None


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_there_is_a_row_for_every_slot_and_no_other(tier: HostTier, slot: int) -> None:
    assert len(tier.records) == NUM_SLOTS
    with pytest.raises(IndexError, match="there are 24"):
        tier.records[slot]


def test_a_reader_beside_a_writer_sees_whole_rows() -> None:
    """Tokens, parent and checksum of one block are of one number; a row of two blocks would show."""
    names, generations = memoryview(bytearray(32)), memoryview(np.ones(1, np.int64))
    records = BlockRecords(names, generations, 4096)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number = number % 200 + 1
            records[0] = BlockRecord(bytes(32), bytes([number]) * 32, bytes([number]) * 16384, number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(brief(500, 3000)):
            if (record := records[0]) is not None:
                assert set(record.parent) | set(record.tokens) == {record.checksum}
                seen.add(record.checksum)
    finally:
        stop.set()
        writer.join()
    assert seen


@pytest.mark.skipif(extension("kvtier.tiers.host.records_compiled") is None, reason="not built: `make compiled`")
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4, st.integers(-1, 1 << 64)), max_size=6), st.booleans())
def test_the_compiled_way_writes_the_same_rows(rows: list[tuple[int, int, int, int, int]], is_short: bool) -> None:
    """Right records, records of other blocks, tokens and parents of any length, columns that are not of one length."""
    names, generations = bytearray(b"".join(bytes([n]) * 32 for n in range(3))), array("q", [1, 5 << 32 | 7, 9, 0])
    twins = [BlockRecords(memoryview(names), memoryview(generations), BLOCK_SIZE) for _ in range(2)]
    twins[1]._packs = None
    slots = [slot % 3 for slot, *_ in rows]
    names_told = [bytes([(slot if same else same) % 3]) * 32 for (_, same, *_), slot in zip(rows, slots, strict=True)]
    parents = [bytes(range(40))[: (0, 32, 32, 33)[n]] for _, _, n, _, _ in rows]
    tokens = [bytes(range(100))[: (0, 4, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 4)[n]] for *_, n, _ in rows]
    sums = [checksum for *_, checksum in rows][: len(rows) - is_short]
    outcomes = []
    for each in twins:
        try:
            each.put_columns(slots, names_told, parents, tokens, sums)
            outcomes.append("")
        except (ValueError, struct.error, OverflowError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert bytes(twins[0]._rows) == bytes(twins[1]._rows)
    assert list(twins[0]) == list(twins[1])
