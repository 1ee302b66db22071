"""An object as docs/format.md describes it, byte by byte; the index that knows where blocks lie."""

import hashlib
import itertools
import random
import struct

import numpy as np
import pytest
import xxhash
from doubles import FakeClock, chain_of, payload_of, record_of
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.compression import BlockCodec
from kvtier.tiers.objects.index import ObjectIndex
from kvtier.tiers.objects.layout import MAX_BLOCKS, TABLE_BYTES, ArrivingRecords, Edges, ObjectSpace
from kvtier.tiers.shared.forms import ClearForm, EncryptedForm
from kvtier.tiers.tier import BlockRecord, Outcome

MODEL = bytes(range(32))
CHAIN = chain_of(6)
NAMES = CHAIN.hashes


EQUAL = ObjectSpace("kvtier", ClearForm(MODEL, 4096, 4, tier="objects"), 4096, 4)
OWN_LENGTHS = ObjectSpace("kvtier", ClearForm(MODEL, 4096, 4, tier="objects", codec=BlockCodec(4096)), 4096, 4)


def lengths_of(space: ObjectSpace) -> list[int]:
    """Of the records of six blocks."""
    head, most = space.form.head_bytes, space.record_bytes
    return [most] * 6 if space is EQUAL else [head + 1000, most, head, head + 7, most - 1, head + 2000]


def edges_of(num_blocks: int) -> Edges:
    """Of an object of so many blocks."""
    return EQUAL.edges([EQUAL.record_bytes] * num_blocks)


def sealed(table: bytes) -> memoryview:
    """With a true checksum behind it."""
    return memoryview(table + struct.pack("<Q", xxhash.xxh3_64_intdigest(table)))


def test_keys_and_table_are_as_documented() -> None:
    space = EQUAL
    assert space.epoch_key == "kvtier/epochs/0001020304050607"
    assert space.key(NAMES[0], 1) == f"kvtier/blocks/0001020304050607/0000000000000001/{NAMES[0].hex()}"
    assert space.probe_key == "kvtier/blocks/0001020304050607/probe"
    size = space.record_bytes
    table = sealed(struct.pack("<8sQQ", b"kvtobj\0\1", 6, size) + b"".join(NAMES).ljust(8192, b"\0"))
    edges = space.edges([size] * 6)
    assert list(edges) == [8224 + n * size for n in range(7)]  # back to back behind the table
    assert space.table(space.names(NAMES), edges) == table
    assert len(table) == TABLE_BYTES == space.table_bytes == 8224
    assert space.parse(table, NAMES[0]) == (NAMES, edges)


def test_a_table_of_compressed_records_is_as_documented() -> None:
    space, lengths = OWN_LENGTHS, lengths_of(OWN_LENGTHS)
    model = hashlib.sha256(b"kvtier objects compressed namespace" + MODEL).hexdigest()[:16]
    assert space.key(NAMES[0], 1) == f"kvtier/blocks/{model}/0000000000000001/{NAMES[0].hex()}"
    start = struct.pack("<8sQQ", b"kvtobj\0\2", 6, space.form.head_bytes + 4096)
    table = sealed(start + b"".join(NAMES).ljust(8192, b"\0") + struct.pack("<6I", *lengths).ljust(1024, b"\0"))
    edges = space.edges(lengths)
    assert list(edges) == [9248 + sum(lengths[:n]) for n in range(7)]
    assert space.table(space.names(NAMES), edges) == table
    assert len(table) == space.table_bytes == 9248
    assert space.parse(table, NAMES[0]) == (NAMES, edges)


@pytest.mark.parametrize("space", [EQUAL, OWN_LENGTHS], ids=["equal", "own lengths"])
def test_a_table_that_is_none_of_ours_names_nothing(space: ObjectSpace) -> None:
    table = space.table(NAMES, space.edges(lengths_of(space)))
    assert space.parse(memoryview(table), NAMES[0]) is not None
    assert space.parse(memoryview(table), NAMES[1]) is None  # another object's
    assert space.parse(memoryview(table[:-1]), NAMES[0]) is None
    for position in random.Random(1).sample(range(len(table)), 200):
        changed = bytearray(table)
        changed[position] ^= 0x40
        assert space.parse(memoryview(changed), NAMES[0]) is None
    # With a true checksum, but with numbers that no table has.
    magic, size = table[:8], space.record_bytes
    for count, most in ((0, size), (MAX_BLOCKS + 1, size), (2**64 - 1, size), (6, size + 1)):
        assert space.parse(sealed(struct.pack("<8sQQ", magic, count, most) + table[24:-8]), NAMES[0]) is None


def test_one_layout_is_none_in_the_other() -> None:
    for ours, theirs in ((EQUAL, OWN_LENGTHS), (OWN_LENGTHS, EQUAL)):
        table = theirs.table(NAMES, theirs.edges(lengths_of(theirs)))
        assert ours.parse(memoryview(table), NAMES[0]) is None
        # cut or filled up to the length of ours, and with a true checksum
        as_long = sealed(table[: ours.table_bytes - 8].ljust(ours.table_bytes - 8, b"\0"))
        assert ours.parse(as_long, NAMES[0]) is None
        assert ours.key(NAMES[0], 1) != theirs.key(NAMES[0], 1)


def test_a_length_that_no_record_has_makes_no_table() -> None:
    space = OWN_LENGTHS
    lengths = lengths_of(space)
    for wrong in (0, 1, space.form.head_bytes - 1, space.record_bytes + 1, 2**31, 2**32 - 1):
        for place in range(6):
            lie = [*lengths[:place], wrong, *lengths[place + 1 :]]
            assert space.parse(memoryview(space.table(NAMES, space.edges(lie))), NAMES[0]) is None
    # Lengths behind the last block count for nothing.
    table = bytearray(space.table(NAMES, space.edges(lengths))[:-8])
    table[-4:] = b"\xff" * 4
    assert space.parse(sealed(bytes(table)), NAMES[0]) == (NAMES, space.edges(lengths))


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
    index.learn(b"one", NAMES[:3], edges_of(5))
    assert index.leading(NAMES) == 3
    assert index.in_part(NAMES[:3]) == 3  # the object has more behind them
    assert index.in_part(NAMES[:2]) == 2
    index.learn(b"one", NAMES[:5], edges_of(5))
    assert (index.leading(NAMES), index.in_part(NAMES[:5])) == (5, 0)
    index.learn(b"two", NAMES[5:], edges_of(1))
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
    index.learn(b"one", NAMES, edges_of(6))
    index.learn(b"one", NAMES[:2], edges_of(2))  # it ends earlier now
    assert index.leading(NAMES) == 2
    index.learn(b"one", NAMES, edges_of(6))
    index.learn(b"one", other.hashes, edges_of(6))  # it goes on otherwise now
    assert index.leading(NAMES) == 2
    assert index.leading(other.hashes) == 6
    # the same blocks, of other lengths
    index.learn(b"one", other.hashes[:2], OWN_LENGTHS.edges(lengths_of(OWN_LENGTHS)))
    assert index.leading(other.hashes) == 2
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
            index.learn(chain.hashes[first], chain.hashes[first:last], edges_of(rng.choice([last - first, 12 - first])))
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


# Records that come in pieces of any size are put together as if they had come at once.


HEAD, SLOT = 7, 20


@given(
    lengths=st.lists(st.integers(HEAD, HEAD + SLOT), max_size=6),
    cuts=st.lists(st.integers(0, 6 * (HEAD + SLOT)), max_size=8),
    came=st.floats(0, 1.5),
)
def test_each_record_is_told_once_when_it_is_whole(lengths: list[int], cuts: list[int], came: float) -> None:
    sent = np.random.default_rng(1).bytes(int(came * sum(lengths)))
    slots = [bytearray(SLOT) for _ in lengths]
    told: list[tuple[int, bytes]] = []
    views = [memoryview(slot) for slot in slots]
    records = ArrivingRecords(lengths, HEAD, views, lambda number, record: told.append((number, record)))
    edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    for start, end in itertools.pairwise(edges):
        records.take(memoryview(sent)[start:end])
    at, expected = 0, []
    for number, length in enumerate(lengths):
        record, at = sent[at : at + length], at + length
        if len(record) < length:
            break
        expected.append((number, record[:HEAD]))
        assert slots[number] == record[HEAD:].ljust(SLOT, b"\0")
    assert told == expected
    assert records.num_whole == len(expected)
