"""An object as docs/format.md describes it, byte by byte; the index that knows where blocks lie."""

import random
import struct

import pytest
import xxhash
from doubles import FakeClock, chain_of, payload_of, record_of

from kvtier.tiers.objects.index import ObjectIndex
from kvtier.tiers.objects.layout import MAX_BLOCKS, TABLE_BYTES, ObjectSpace
from kvtier.tiers.shared.forms import ClearForm, EncryptedForm
from kvtier.tiers.tier import BlockRecord, Outcome

MODEL = bytes(range(32))
CHAIN = chain_of(6)
NAMES = CHAIN.hashes


def space_of(**more: object) -> ObjectSpace:
    return ObjectSpace("kvtier", ClearForm(MODEL, 4096, 4, tier="objects"), 4096, 4)


def test_keys_and_table_are_as_documented() -> None:
    space = space_of()
    assert space.epoch_key == "kvtier/epochs/0001020304050607"
    assert space.key(NAMES[0], 1) == f"kvtier/blocks/0001020304050607/0000000000000001/{NAMES[0].hex()}"
    assert space.probe_key == "kvtier/blocks/0001020304050607/probe"
    before = struct.pack("<8sQQ", b"kvtobj\0\1", 6, space.record_bytes) + b"".join(NAMES).ljust(8192, b"\0")
    table = before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before))
    assert space.table(space.names(NAMES)) == table
    assert len(table) == TABLE_BYTES == 8224
    assert space.named(memoryview(table), NAMES[0]) == NAMES
    # Records lie behind it, back to back.
    assert space.span(0, 6) == (8224, 8224 + 6 * space.record_bytes)
    assert space.span(2, 1) == (8224 + 2 * space.record_bytes, 8224 + 3 * space.record_bytes)


def test_a_table_that_is_none_of_ours_names_nothing() -> None:
    space = space_of()
    table = space.table(NAMES)
    assert space.named(memoryview(table), NAMES[1]) == []  # another object's
    assert space.named(memoryview(table[:-1]), NAMES[0]) == []
    for position in random.Random(1).sample(range(TABLE_BYTES), 200):
        changed = bytearray(table)
        changed[position] ^= 0x40
        assert space.named(memoryview(changed), NAMES[0]) == []
    # With a true checksum, but with numbers that no table has.
    for count, size in ((0, space.record_bytes), (MAX_BLOCKS + 1, space.record_bytes), (6, space.record_bytes + 1)):
        lie = struct.pack("<8sQQ", b"kvtobj\0\1", count, size) + table[24:-8]
        lie += struct.pack("<Q", xxhash.xxh3_64_intdigest(lie))
        assert space.named(memoryview(lie), NAMES[0]) == []


def test_what_is_sealed_for_one_tier_opens_in_no_other() -> None:
    record, payload = record_of(CHAIN, 0), payload_of(NAMES[0])
    forms = [
        (ClearForm(MODEL, 4096, 4, "a secret of both tiers", tier), EncryptedForm(MODEL, 4096, 4, b"k" * 32, tier))
        for tier in ("redis", "objects")
    ]
    for ours, theirs in zip(*forms, strict=True):
        assert ours.name != theirs.name
        head, body = ours.encode(record, memoryview(payload), 1)
        assert theirs.decode(head, memoryview(bytearray(body)), NAMES[0], 1) is Outcome.CHECKSUM
        assert isinstance(ours.decode(head, memoryview(bytearray(body)), NAMES[0], 1), BlockRecord)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_index_knows_blocks_until_they_expire_or_go(clock: FakeClock) -> None:
    index = ObjectIndex(10.0, clock=clock)
    index.learn(b"one", NAMES[:3], 5)
    assert index.leading(NAMES) == 3
    assert index.in_part(NAMES[:3]) == 3  # the object has more behind them
    assert index.in_part(NAMES[:2]) == 2
    index.learn(b"one", NAMES[:5], 5)
    assert (index.leading(NAMES), index.in_part(NAMES[:5])) == (5, 0)
    index.learn(b"two", NAMES[5:], 1)
    assert index.leading(NAMES) == 6
    clock.advance(9)
    places = index.places(NAMES)
    assert places[0] is not None
    assert places[5] is not None
    index.confirm([places[0][0]])
    clock.advance(2)
    assert [place is not None for place in index.places(NAMES)] == [True] * 5 + [False]
    index.check()
    assert index.forget([places[0][0]]) == NAMES[:5]
    assert index.forget([places[0][0]]) == []  # by then nobody knows it
    assert index.leading(NAMES) == 0
    index.check()


def test_another_object_in_its_place_is_learned_anew(clock: FakeClock) -> None:
    index, other = ObjectIndex(10.0, clock=clock), chain_of(2)
    other.extend(list(range(900, 916)))
    index.learn(b"one", NAMES, 6)
    index.learn(b"one", NAMES[:2], 2)  # it ends earlier now
    assert index.leading(NAMES) == 2
    index.learn(b"one", NAMES, 6)
    index.learn(b"one", other.hashes, 6)  # it goes on otherwise now
    assert index.leading(NAMES) == 2
    assert index.leading(other.hashes) == 6
    index.check()


def test_the_index_is_bounded_and_keeps_its_law(clock: FakeClock) -> None:
    index, rng = ObjectIndex(50.0, limit=40, clock=clock), random.Random(7)
    chains = [chain_of(12, first_token=1000 * i) for i in range(12)]
    for _ in range(600):
        chain = rng.choice(chains)
        first = rng.randrange(12)
        last = rng.randint(first + 1, 12)
        held = index.places(chain.hashes)
        action = rng.random()
        if action < 0.6:
            index.learn(chain.hashes[first], chain.hashes[first:last], rng.choice([last - first, 12 - first]))
        elif action < 0.8:
            index.forget([place[0] for place in held if place is not None][:1])
        else:
            index.confirm([place[0] for place in held if place is not None])
        clock.advance(rng.random() * 3)
        index.check()
        assert len(index) <= 40 + 12
    index.clear()
    index.check()
    assert len(index) == 0
