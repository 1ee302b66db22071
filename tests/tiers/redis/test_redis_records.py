"""A record certifies itself: any other bytes are a miss, and the format is the one docs/format.md describes."""

import hashlib
import hmac
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.checksum import checksum
from kvtier.tiers.redis.names import Keyspace
from kvtier.tiers.shared.forms import ClearForm, EncryptedForm, RecordForm, format_epoch, parse_epoch
from kvtier.tiers.tier import BlockRecord, Outcome

MODEL, OTHER = bytes(range(32)), bytes(range(32, 64))
SECRET, KEY = "correct horse battery", bytes(range(100, 132))
PAYLOAD = hashlib.shake_128(b"block").digest(4096)
EPOCH = 0x0005_F00D_0000_0001
HASH, PARENT = hashlib.sha256(b"block").digest(), hashlib.sha256(b"before").digest()
TOKENS = b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0"
RECORD = BlockRecord(HASH, PARENT, TOKENS, checksum(memoryview(PAYLOAD)))

CLEAR = ClearForm(MODEL, 4096, 4)
SEALED = ClearForm(MODEL, 4096, 4, SECRET)
HIDDEN = EncryptedForm(MODEL, 4096, 4, KEY)
FORMS: dict[str, RecordForm] = {"clear": CLEAR, "sealed": SEALED, "encrypted": HIDDEN}

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def written(form: RecordForm, record: BlockRecord = RECORD, epoch: int = EPOCH, payload: bytes = PAYLOAD) -> bytes:
    """A whole value, as a server holds it."""
    head, body = form.encode(record, memoryview(payload), epoch)
    assert len(head) == form.head_bytes  # whatever is in it
    assert body.nbytes == len(payload)
    return head + bytes(body)


def taken(form: RecordForm, value: bytes, chain_hash: bytes = HASH, epoch: int = EPOCH) -> BlockRecord | Outcome:
    """What a reader makes of a value, whose bytes must then be the block's."""
    body = bytearray(value[form.head_bytes :])
    result = form.decode(value[: form.head_bytes], memoryview(body), chain_hash, epoch)
    assert isinstance(result, Outcome) or checksum(memoryview(body)) == result.checksum
    return result


def resealed(value: bytes, **changes: Any) -> bytes:
    """A record of somebody who knows the format and changes what he likes, but has no secret."""
    head = value[: CLEAR.head_bytes]
    body = msgpack.packb({**msgpack.unpackb(head[4:]), **changes})
    unsealed = len(body).to_bytes(4, "little") + body[:-8]
    return bytes(unsealed + xxhash.xxh3_64_intdigest(unsealed).to_bytes(8, "little") + value[CLEAR.head_bytes :])


def test_in_the_clear_as_documented() -> None:
    """What docs/format.md says, taken apart by other means."""
    record = replace(RECORD, checksum=0x1122334455667788)
    head = written(CLEAR, record)[: CLEAR.head_bytes]
    assert written(CLEAR, record)[CLEAR.head_bytes :] == PAYLOAD
    assert int.from_bytes(head[:4], "little") == len(head) - 4
    fields = msgpack.unpackb(head[4:])
    assert fields == {
        "version": 1,
        "codec": "raw",
        "fingerprint": MODEL,
        "epoch": EPOCH.to_bytes(8, "little"),
        "chain_hash": HASH,
        "parent": PARENT,
        "num_tokens": (4).to_bytes(4, "little"),
        "tokens": TOKENS,
        "payload_len": 4096,
        "xxh3": record.checksum.to_bytes(8, "little"),
        "seal": head[-8:],
    }
    assert head[-8:] == xxhash.xxh3_64_intdigest(head[:-8]).to_bytes(8, "little")
    space = Keyspace("kvtier", CLEAR, 4096, 4)
    assert space.value_bytes == len(head) + 4096
    assert space.keys([HASH], EPOCH) == [b"kvtier:0001020304050607:0005f00d00000001:" + HASH.hex().encode()]
    assert space.epoch_key == b"kvtier:0001020304050607:epoch"
    assert hashlib.sha256(head).hexdigest() == "5d06bff84b55c8db6639ab10acf85ab4e44ca050548ce22f2ae289e8eaf4467b"


def test_sealed_by_a_secret_as_documented() -> None:
    value = written(SEALED)
    head = value[: SEALED.head_bytes]
    fields = msgpack.unpackb(head[4:])
    assert fields == {
        **msgpack.unpackb(written(CLEAR)[4 : CLEAR.head_bytes]),
        "codec": "raw+hmac-sha256",
        "seal": head[-32:],
    }
    key = hmac.digest(SECRET.encode(), b"kvtier redis record", "sha256")
    assert head[-32:] == hmac.digest(key, head[:-32] + PAYLOAD, "sha256")
    assert value[SEALED.head_bytes :] == PAYLOAD
    name = hmac.digest(SECRET.encode(), b"kvtier redis namespace" + MODEL, "sha256")[:8].hex()
    space = Keyspace("kvtier", SEALED, 4096, 4)
    assert space.keys([HASH], EPOCH) == [f"kvtier:{name}:0005f00d00000001:{HASH.hex()}".encode()]
    assert space.epoch_key == f"kvtier:{name}:epoch".encode()
    assert hashlib.sha256(head).hexdigest() == "74864344d38971fe3edc6002293dd22ebe72f9148e8bb3b09b0762de478de83a"


def test_encrypted_as_documented() -> None:
    """Opened with nothing of ours."""
    value = written(HIDDEN)
    head, body = value[: HIDDEN.head_bytes], value[HIDDEN.head_bytes :]
    fields = msgpack.unpackb(head[4:])
    hidden, stamp = fields["hidden"], fields["stamp"]
    assert fields == {
        "version": 1,
        "codec": "aes-256-gcm",
        "payload_len": 4096,
        "hidden": head[-36 - len(hidden) : -36],
        "stamp": head[-28:],
    }
    assert len(stamp) == 28
    named = EPOCH.to_bytes(8, "little") + HASH

    def digest(key: bytes, data: bytes, person: bytes = b"", size: int = 32) -> bytes:
        return hashlib.blake2b(data, key=key, person=person, digest_size=size).digest()

    context = digest(KEY, b"kvtier redis record" + MODEL, b"kvtier-context")
    associated = b"head\0\0\0\0" + named
    opened = AESGCM(digest(context, associated, b"kvtier-record")).decrypt(hidden[:12], hidden[12:], associated)
    assert opened == PARENT + (4).to_bytes(4, "little") + TOKENS + RECORD.checksum.to_bytes(8, "little")
    associated = b"payload\0" + named + hidden
    payload = AESGCM(digest(context, associated, b"kvtier-record")).decrypt(stamp[:12], body + stamp[12:], associated)
    assert payload == PAYLOAD
    name_key = digest(KEY, b"kvtier redis name" + MODEL, b"kvtier-context")
    space = Keyspace("kvtier", HIDDEN, 4096, 4)
    stem = f"kvtier:{digest(name_key, b'', size=8).hex()}:"
    assert space.keys([HASH], EPOCH) == [f"{stem}0005f00d00000001:{digest(name_key, HASH).hex()}".encode()]
    assert space.epoch_key == f"{stem}epoch".encode()


@every_form
@given(tokens=st.binary(max_size=16).map(lambda raw: raw[: len(raw) // 4 * 4]), epoch=st.integers(1, 2**62 - 1))
def test_what_is_written_is_read(form: RecordForm, tokens: bytes, epoch: int) -> None:
    record = replace(RECORD, tokens=tokens)
    assert taken(form, written(form, record, epoch), epoch=epoch) == record
    assert parse_epoch(format_epoch(epoch)) == epoch


@every_form
def test_every_flipped_bit_of_a_head_and_some_of_a_payload_show(form: RecordForm) -> None:
    value = written(form)
    for position in (*range(8 * form.head_bytes), *range(8 * form.head_bytes, 8 * len(value), 97)):
        bad = bytearray(value)
        bad[position // 8] ^= 1 << position % 8
        assert taken(form, bytes(bad)) is Outcome.CHECKSUM, position


@every_form
def test_the_head_of_one_store_and_the_payload_of_another_are_no_record(form: RecordForm) -> None:
    """Both whole, of one block: stored twice, as by two engines whose numbers differ in the last bits."""
    again = hashlib.shake_128(b"block, computed elsewhere").digest(4096)
    first, second = written(form), written(form, replace(RECORD, checksum=checksum(memoryview(again))), payload=again)
    assert isinstance(taken(form, first), BlockRecord)
    assert isinstance(taken(form, second), BlockRecord)
    assert taken(form, first[: form.head_bytes] + second[form.head_bytes :]) is Outcome.CHECKSUM


def test_a_payload_is_encrypted_beside_and_decrypted_in_its_place() -> None:
    """The slot of a store may be read by others at that moment; that of a load belongs to nobody else yet."""
    slot = bytearray(PAYLOAD)
    head, body = HIDDEN.encode(RECORD, memoryview(slot), EPOCH)
    assert slot == PAYLOAD
    arrived = bytearray(body)
    assert HIDDEN.decode(head, memoryview(arrived), HASH, EPOCH) == RECORD
    assert arrived == PAYLOAD
    # Nothing tells that two stores are of one block.
    assert sum(a == b for a, b in zip(body, written(HIDDEN)[-4096:], strict=True)) < 100  # by chance 16


def test_forms_show_neither_secret_nor_key() -> None:
    for form in (SEALED, HIDDEN):
        shown = repr(form) + str(form) + repr(Keyspace("kvtier", form, 4096, 4))
        assert SECRET not in shown
        assert repr(KEY) not in shown
        assert KEY.hex() not in shown


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"codec": "zip"},
        {"codec": "raw+hmac-sha256"},
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
    bad = resealed(written(CLEAR), **changes)
    assert taken(CLEAR, bad) in (Outcome.KEY_MISMATCH, Outcome.CHECKSUM)
    assert taken(SEALED, bad) is Outcome.CHECKSUM


@every_form
@given(junk=st.binary(max_size=600))
def test_random_bytes_are_no_record(form: RecordForm, junk: bytes) -> None:
    assert taken(form, junk) is Outcome.CHECKSUM


PLAIN = st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.sampled_from(["text", "", 0.5, True])
NESTED = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(PLAIN, PLAIN, max_size=3)
FIELDS = [
    "version", "codec", "fingerprint", "epoch", "chain_hash", "parent", "num_tokens", "tokens", "payload_len", "xxh3",
]  # fmt: skip


@given(field=st.sampled_from(FIELDS), value=NESTED, another=st.sampled_from(FIELDS), more=NESTED)
def test_msgpack_of_any_shape_is_the_block_or_a_miss(field: str, value: Any, another: str, more: Any) -> None:
    bad = resealed(written(CLEAR), **{field: value, another: more})
    result = taken(CLEAR, bad)
    if isinstance(result, BlockRecord):
        assert result.chain_hash == HASH
        assert written(CLEAR, result) == bad
    else:
        assert result in (Outcome.KEY_MISMATCH, Outcome.CHECKSUM)


@given(value=st.none() | st.binary(max_size=20) | st.integers() | st.just("0" * 16))
def test_what_is_no_epoch_counts_as_none(value: object) -> None:
    number = parse_epoch(value)
    assert number == 0 or format_epoch(number) == value


def test_an_epoch_that_could_not_be_raised_counts_as_none() -> None:
    assert parse_epoch(b"f" * 16) == 0
    assert parse_epoch(format_epoch(2**62)) == 0
