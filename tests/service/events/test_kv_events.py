"""The wire of KV events: vLLM's bytes, both forms of an event, and nothing made for a payload that only claims."""

import random
import tracemalloc
from typing import Any

import msgpack
import msgspec
import pytest
from extent import brief
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.service.events.wire import (
    MAX_PAYLOAD,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExtraKeys,
    KVEvent,
    as_u64,
    decode_batch,
    encode_batch,
    external_hash,
)
from kvtier.tiers.errors import FormatError
from kvtier.tiers.naming.chain import unpack_tokens

GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c"
    "6f72615f6e616d65c0a967726f75705f6964780083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d"
    "656469756da343505581a474797065b0416c6c426c6f636b73436c656172656400"
)
STORED = BlockStored([7], None, [1, 2, 3, 4], 4, None, "GPU", None, group_idx=0)
BATCH = EventBatch(1.5, [STORED, BlockRemoved([7], "CPU"), AllBlocksCleared()], 0)


def same(one: EventBatch, other: EventBatch) -> bool:
    """Whether they say the same, whatever their sequences are made of."""
    return encode_batch(one) == encode_batch(other)


def test_the_golden_payload_byte_for_byte() -> None:
    assert encode_batch(BATCH) == GOLDEN
    assert same(decode_batch(GOLDEN), BATCH)
    assert decode_batch(memoryview(GOLDEN)).dp_rank == 0


def test_positional_arrays_say_the_same() -> None:
    # what engines sent before mid-2026, and the oldest of them without what comes after the tier
    arrays = [
        ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 0],
        ["BlockRemoved", [7], "CPU"],
        ["AllBlocksCleared"],
    ]
    assert same(decode_batch(msgpack.packb([1.5, arrays, 0])), BATCH)
    old = decode_batch(msgpack.packb([1, [["BlockStored", [7], 3, [1, 2], 2, None], ["BlockRemoved", [7]]]]))
    assert old.dp_rank is None
    assert [event.medium for event in old.events if not isinstance(event, AllBlocksCleared)] == [None, None]


def test_who_reads_arrays_alone_gets_them() -> None:
    """llm-d's adapter for vLLM does: positions as of vLLM before mid-2026, what says nothing left out at the end."""
    payload = encode_batch(BATCH, "arrays")
    assert msgpack.unpackb(payload) == [
        1.5,
        [
            ["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU", None, None, 0],
            ["BlockRemoved", [7], "CPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    assert same(decode_batch(payload), BATCH)
    tenants = BlockStored([7], None, [1, 2, 3, 4], 4, None, "GPU", None, (("9f" * 16,),))
    [[_, *told]] = msgpack.unpackb(encode_batch(EventBatch(1.5, [tenants]), "arrays"))[1]
    assert told == [[7], None, [1, 2, 3, 4], 4, None, "GPU", None, [["9f" * 16]]]


def test_unknown_fields_are_skipped() -> None:
    told = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "locality": "LOCAL", "later": [1, {"a": 2}]}
    assert decode_batch(msgpack.packb([1.5, [told], None])).events == [BlockRemoved((7,), "CPU")]


def test_names_come_as_numbers_and_as_digests() -> None:
    digest = bytes(range(32))
    assert external_hash(digest) == as_u64(digest) == int.from_bytes(digest[-8:], "big")
    assert as_u64(-3488128144981237669) == 2**64 - 3488128144981237669  # SGLang's have a sign
    told: list[KVEvent] = [
        BlockStored([digest, -5], 2**64 - 1, [1, 2], 1, None, "GPU", None),
        BlockRemoved([digest], "GPU"),
    ]
    [came, went] = decode_batch(encode_batch(EventBatch(1, told))).events
    assert isinstance(came, BlockStored)
    assert isinstance(went, BlockRemoved)
    assert (came.block_hashes, came.parent_block_hash) == ((digest, -5), 2**64 - 1)
    assert went.block_hashes == (digest,)


names = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=8, max_size=64)
texts = st.none() | st.text(max_size=8)
pairs = st.tuples(st.text(max_size=4), st.integers(0, 9))
keys: st.SearchStrategy[ExtraKeys | None] = st.none() | st.lists(st.text(max_size=4) | pairs, max_size=2).map(tuple)
numbers = st.none() | st.integers(0, 9)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    hashes = draw(st.lists(names, max_size=3))
    size = draw(st.integers(1, 3))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    extra = draw(st.none() | st.lists(keys, min_size=len(hashes), max_size=len(hashes)))
    parent = draw(st.none() | names)
    return BlockStored(
        hashes, parent, tokens, size, draw(numbers), draw(texts), draw(texts), extra, draw(numbers), draw(texts)
    )


removed = st.builds(BlockRemoved, st.lists(names, max_size=3), texts, numbers)
events: st.SearchStrategy[KVEvent] = stored() | removed | st.just(AllBlocksCleared())
batches = st.builds(EventBatch, st.floats(0, 1e10), st.lists(events, max_size=3), numbers)


@given(batches)
def test_what_is_encoded_is_decoded_the_same(batch: EventBatch) -> None:
    assert same(decode_batch(encode_batch(batch)), batch)


@settings(max_examples=brief(60, 400))
@given(st.data())
def test_a_damaged_batch_is_refused_or_is_a_batch(data: st.DataObject) -> None:
    payload = bytearray(encode_batch(data.draw(batches)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        payload = payload or bytearray(b"\x00")
    try:
        batch = decode_batch(bytes(payload))
    except FormatError:
        return
    assert same(decode_batch(encode_batch(batch)), batch)


@given(st.binary(max_size=64))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(FormatError):
        decode_batch(noise)


def peak_of_refusing(payload: bytes) -> int:
    """Bytes of memory at most, while it is found to be no batch."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode_batch(payload)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def packed(**changed: Any) -> bytes:
    fields = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
    }
    payload: bytes = msgpack.packb([1.5, [fields | changed], 0])
    return payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        GOLDEN + b"\x00",  # more behind its end
        GOLDEN[:-1],
        msgpack.packb({"events": []}),
        msgpack.packb(["now", [], 0]),
        msgpack.packb([1.5, [], "0"]),
        msgpack.packb([1.5, [{"type": "BlockMoved"}], 0]),
        msgpack.packb([1.5, [msgpack.ExtType(1, b"x")], 0]),
        packed(block_size=0),
        packed(block_size=1 << 40),
        packed(token_ids=[1, -1]),
        packed(token_ids=[1, 2**32]),
        packed(block_hashes=["7"]),
        packed(block_hashes=[b"short"]),
        packed(lora_name=["x"]),
        packed(extra_keys=[{"a": 1}]),
        packed(type=["BlockStored"]),
    ],
)
def test_bad_batches_are_format_errors(payload: bytes) -> None:
    with pytest.raises(FormatError):
        decode_batch(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x93\xcb" + bytes(8) + b"\xdd\x7f\xff\xff\xff" * 300,  # and arrays of two billion in it
        b"\x93\xcb" + bytes(8) + b"\xdc\xff\xff" * 400_000,
        b"\xc6\xff\xff\xff\xff",  # four gigabytes of bytes
        b"\xdf\xff\xff\xff\xff\x00",
        b"\x91" * 1_000_000,  # as deep as can be
        bytes(1) * (MAX_PAYLOAD + 1),
    ],
    ids=["array", "arrays", "short-arrays", "bytes", "map", "depth", "length"],
)
def test_nothing_is_made_for_what_is_only_claimed(payload: bytes) -> None:
    assert peak_of_refusing(payload) < 4 << 20


ITEMS = [b"\x90", b"\x80", b"\x81\xa1x\x90", b"\xa2zz", b"\xcd\x7f\xff", b"\xc0"]


@pytest.mark.parametrize("item", brief([b"\x81\xa1x\x90", b"\xc0"], ITEMS), ids=repr)  # what costs most, and least
def test_what_is_made_of_a_batch_is_some_twenty_times_its_bytes(item: bytes) -> None:
    size = 2 << 20 if len(item) == 4 else 1 << 20  # as many objects as one batch may have are less than 26 of these
    num_items = size // len(item)
    payload = b"\x93\xcb" + bytes(8) + b"\xdd" + num_items.to_bytes(4, "big") + num_items * item + b"\x00"
    assert peak_of_refusing(payload) < 26 * len(payload)


@pytest.mark.skipif(unpack_tokens(b"\x90") is None, reason="not built: `make compiled`")
def test_token_ids_are_unpacked_as_msgspec_does() -> None:
    rng, wide = random.Random(3), [0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1]
    for number in (0, 1, 15, 16, 300, 70_000):
        ids = [rng.choice(wide) if rng.random() < 0.5 else rng.getrandbits(17) for _ in range(number)]
        packed = msgspec.msgpack.encode(ids)
        found = unpack_tokens(packed)
        assert found is not None
        assert found.tolist() == ids
        # bytes that are cut off, left over or changed are another's affair, or mean just what they mean there
        for _ in range(50):
            at = rng.randrange(len(packed))
            changed = packed[:at] + bytes([rng.getrandbits(8)]) + packed[at + 1 :]
            for torn in (packed[:at], packed + b"\0", changed):
                found = unpack_tokens(torn)
                assert found is None or found.tolist() == msgspec.msgpack.decode(torn)
    for other in ([-1], [2**32], ["a"], [1.5], [None], [[1]], {}, "text", 7):
        assert unpack_tokens(msgspec.msgpack.encode(other)) is None
