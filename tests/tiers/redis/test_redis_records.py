"""A record certifies itself: any other bytes are a miss, and the format is the one docs/format.md describes."""

import hashlib
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.redis_records import VERSION, Namespace, format_epoch, parse_epoch
from kvtier.tiers.tier import BlockRecord, Outcome

MODEL, OTHER = bytes(range(32)), bytes(range(32, 64))
SPACE = Namespace("kvtier", MODEL, 4096, 4)
EPOCH = 0x0005_F00D_0000_0001
HASH, PARENT = hashlib.sha256(b"block").digest(), hashlib.sha256(b"before").digest()
RECORD = BlockRecord(HASH, PARENT, b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0", 0x1122334455667788)


def resealed(head: bytes, **changes: Any) -> bytes:
    """A record of somebody who knows the format and changes what he likes."""
    fields = {**msgpack.unpackb(head[4:]), **changes}
    body = msgpack.packb(fields)
    unsealed = len(body).to_bytes(4, "little") + body[:-8]
    return bytes(unsealed + xxhash.xxh3_64_intdigest(unsealed).to_bytes(8, "little"))


def test_as_documented() -> None:
    """What docs/format.md says, taken apart by other means."""
    head = SPACE.encode(RECORD, EPOCH)
    assert len(head) == SPACE.head_bytes
    assert SPACE.value_bytes == SPACE.head_bytes + 4096
    assert int.from_bytes(head[:4], "little") == len(head) - 4
    fields = msgpack.unpackb(head[4:])
    assert fields == {
        "version": VERSION,
        "codec": "raw",
        "fingerprint": MODEL,
        "epoch": EPOCH.to_bytes(8, "little"),
        "chain_hash": HASH,
        "parent": PARENT,
        "num_tokens": (4).to_bytes(4, "little"),
        "tokens": RECORD.tokens,
        "payload_len": 4096,
        "xxh3": RECORD.checksum.to_bytes(8, "little"),
        "seal": head[-8:],
    }
    assert head[-8:] == xxhash.xxh3_64_intdigest(head[:-8]).to_bytes(8, "little")
    assert SPACE.key(HASH, EPOCH) == b"kvtier:0001020304050607:0005f00d00000001:" + HASH.hex().encode()
    assert SPACE.epoch_key == b"kvtier:0001020304050607:epoch"
    assert hashlib.sha256(head).hexdigest() == GOLDEN


GOLDEN = "5d06bff84b55c8db6639ab10acf85ab4e44ca050548ce22f2ae289e8eaf4467b"


@given(
    tokens=st.binary(max_size=16).map(lambda raw: raw[: len(raw) // 4 * 4]),
    number=st.integers(0, 2**64 - 1),
    epoch=st.integers(1, 2**62 - 1),
)
def test_what_is_written_is_read(tokens: bytes, number: int, epoch: int) -> None:
    record = BlockRecord(HASH, PARENT, tokens, number)
    head = SPACE.encode(record, epoch)
    assert len(head) == SPACE.head_bytes  # whatever is in it
    assert SPACE.decode(head, HASH, epoch) == record
    assert parse_epoch(format_epoch(epoch)) == epoch


def test_every_flipped_bit_shows() -> None:
    head = SPACE.encode(RECORD, EPOCH)
    for position in range(8 * len(head)):
        bad = bytearray(head)
        bad[position // 8] ^= 1 << position % 8
        assert SPACE.decode(bytes(bad), HASH, EPOCH) is Outcome.CHECKSUM, position


def test_another_blocks_record_is_not_this_ones() -> None:
    head = SPACE.encode(RECORD, EPOCH)
    assert SPACE.decode(head, PARENT, EPOCH) is Outcome.KEY_MISMATCH
    assert SPACE.decode(head, HASH, EPOCH + 1) is Outcome.KEY_MISMATCH
    other_model = Namespace("kvtier", OTHER, 4096, 4)
    assert other_model.decode(head, HASH, EPOCH) is Outcome.KEY_MISMATCH
    # the sixteen digits of a key do not stand for a fingerprint
    cousin = Namespace("kvtier", MODEL[:31] + b"?", 4096, 4)
    assert cousin.key(HASH, EPOCH) == SPACE.key(HASH, EPOCH)
    assert cousin.decode(head, HASH, EPOCH) is Outcome.KEY_MISMATCH


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"codec": "zip"},
        {"payload_len": 4095},
        {"payload_len": -1},
        {"chain_hash": HASH[:-1]},
        {"parent": PARENT[:28], "tokens": bytes(20), "num_tokens": (5).to_bytes(4, "little")},  # as long altogether
        {"num_tokens": (5).to_bytes(4, "little")},
        {"num_tokens": 4},
        {"num_tokens": None},
        {"tokens": "text"},
        {"tokens": [1, 2, 3]},
        {"xxh3": bytes(9)},
        {"xxh3": 7},
        {"fingerprint": None},
        {"chain_hash": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_well_sealed_record_of_other_content_is_a_miss(changes: dict[str, Any]) -> None:
    bad = resealed(SPACE.encode(RECORD, EPOCH), **changes)
    assert SPACE.decode(bad, HASH, EPOCH) in (Outcome.KEY_MISMATCH, Outcome.CHECKSUM)


@given(junk=st.binary(max_size=600))
def test_random_bytes_are_no_record(junk: bytes) -> None:
    assert SPACE.decode(junk, HASH, EPOCH) is Outcome.CHECKSUM


PLAIN = st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.sampled_from(["text", "", 0.5, True])
NESTED = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(PLAIN, PLAIN, max_size=3)
FIELDS = [
    "version",
    "codec",
    "fingerprint",
    "epoch",
    "chain_hash",
    "parent",
    "num_tokens",
    "tokens",
    "payload_len",
    "xxh3",
]


@given(field=st.sampled_from(FIELDS), value=NESTED, another=st.sampled_from(FIELDS), more=NESTED)
def test_msgpack_of_any_shape_is_the_block_or_a_miss(field: str, value: Any, another: str, more: Any) -> None:
    bad = resealed(SPACE.encode(RECORD, EPOCH), **{field: value, another: more})
    result = SPACE.decode(bad, HASH, EPOCH)
    if isinstance(result, BlockRecord):
        assert result.chain_hash == HASH
        assert SPACE.encode(result, EPOCH) == bad
    else:
        assert result in (Outcome.KEY_MISMATCH, Outcome.CHECKSUM)


@given(value=st.none() | st.binary(max_size=20) | st.integers() | st.just("0" * 16))
def test_what_is_no_epoch_counts_as_none(value: object) -> None:
    number = parse_epoch(value)
    assert number == 0 or format_epoch(number) == value


def test_an_epoch_that_could_not_be_raised_counts_as_none() -> None:
    assert parse_epoch(b"f" * 16) == 0
    assert parse_epoch(format_epoch(2**62)) == 0
