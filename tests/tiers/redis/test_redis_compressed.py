"""Compressed records: as documented, shorter on a server, and beside those of nodes that do not compress."""

import hashlib
import hmac
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import doubles
import fault_rig
import msgpack
import numpy as np
import pytest
import redis_stories
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from doubles import SLOT_BYTES, chain_of, store
from fault_rig import fetch, forget_l2, settle
from redis_rig import NO_REDIS, RedisServer, cluster
from redis_stories import (
    CHAIN,
    FINGERPRINT,
    SECRET,
    key_of,
    kv_of,
    open_store,
    opened,
    over_redis,
    protection,
    read,
    whole,
    written,
)

from kvtier.tiers import compression
from kvtier.tiers.checksum import checksum
from kvtier.tiers.compression import AS_IS, BlockCodec, CodecRates, made_up_kv, rates_of
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.redis import opening
from kvtier.tiers.redis.opening import check_compression
from kvtier.tiers.shared.forms import ClearForm, EncryptedForm, RecordForm
from kvtier.tiers.tier import BlockRecord, Outcome

on_a_server = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

EPOCH = 0x0005_F00D_0000_0001
HASH, PARENT = hashlib.sha256(b"block").digest(), hashlib.sha256(b"before").digest()
PAYLOAD = kv_of(HASH)
RECORD = BlockRecord(HASH, PARENT, b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0", checksum(memoryview(PAYLOAD)))
KEY = bytes(range(100, 132))
HIDDEN = EncryptedForm(FINGERPRINT, SLOT_BYTES, 4, KEY, codec=BlockCodec(SLOT_BYTES))
FORMS: dict[str, RecordForm] = {
    "in the clear": ClearForm(FINGERPRINT, SLOT_BYTES, 4, codec=BlockCodec(SLOT_BYTES)),
    "sealed": ClearForm(FINGERPRINT, SLOT_BYTES, 4, SECRET, codec=BlockCodec(SLOT_BYTES)),
    "encrypted": HIDDEN,
}

noise_of = doubles.payload_of

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def put(form: RecordForm, payload: bytes = PAYLOAD) -> bytes:
    """A whole value, as a server holds it."""
    head, stored = form.encode(replace(RECORD, checksum=checksum(memoryview(payload))), memoryview(payload), EPOCH)
    assert form.stored_bytes is not None
    assert (len(head), form.stored_bytes(head)) == (form.head_bytes, stored.nbytes)
    return head + bytes(stored)


def taken(form: RecordForm, value: bytes, chain_hash: bytes = HASH, epoch: int = EPOCH) -> BlockRecord | Outcome:
    """What a reader makes of a value; if it is a block, the slot then has its bytes."""
    slot = memoryview(bytearray(value[form.head_bytes :].ljust(SLOT_BYTES, b"\xee")[:SLOT_BYTES]))
    result = form.decode(value[: form.head_bytes], slot, chain_hash, epoch)
    assert isinstance(result, Outcome) or checksum(slot) == result.checksum
    return result


@every_form
def test_a_block_comes_back_and_no_other(form: RecordForm) -> None:
    value = put(form)
    assert len(value) < form.head_bytes + SLOT_BYTES * 0.9
    assert taken(form, value) == RECORD
    assert taken(form, value, PARENT) in {Outcome.KEY_MISMATCH, Outcome.CHECKSUM}
    noise = noise_of(HASH)
    stored_as_it_is = put(form, noise)
    assert form is HIDDEN or stored_as_it_is[form.head_bytes :] == noise
    assert len(stored_as_it_is) == form.head_bytes + SLOT_BYTES
    assert taken(form, stored_as_it_is) == replace(RECORD, checksum=checksum(memoryview(noise)))


def test_a_record_is_as_documented() -> None:
    """What docs/format.md says, taken apart by other means."""
    form = FORMS["in the clear"]
    value = put(form)
    head, stored = value[: form.head_bytes], value[form.head_bytes :]
    fields = msgpack.unpackb(head[4:])
    assert fields == {
        "version": 2,
        "codec": "zstd",
        "fingerprint": FINGERPRINT,
        "epoch": EPOCH.to_bytes(8, "little"),
        "chain_hash": HASH,
        "parent": PARENT,
        "num_tokens": (4).to_bytes(4, "little"),
        "tokens": RECORD.tokens,
        "payload_len": SLOT_BYTES,
        "split": b"\2",
        "stored_len": len(stored).to_bytes(4, "little"),
        "xxh3": RECORD.checksum.to_bytes(8, "little"),
        "seal": head[-8:],
    }
    assert list(fields)[-4:] == ["split", "stored_len", "xxh3", "seal"]
    assert head[-8:] == xxhash.xxh3_64_intdigest(head[:-8]).to_bytes(8, "little")
    low, high = np.frombuffer(stored[:8], "<u4").tolist()
    assert low == SLOT_BYTES // 2  # noise: as it is
    planes = stored[8 : 8 + low], zstandard.decompress(stored[8 + low : 8 + low + high])
    assert bytes(np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1)) == PAYLOAD
    assert form.name == hashlib.sha256(b"kvtier redis compressed namespace" + FINGERPRINT).hexdigest()[:16]


def test_a_sealed_record_is_as_documented() -> None:
    form = FORMS["sealed"]
    value = put(form)
    key = hmac.digest(SECRET.encode(), b"kvtier redis compressed record", "sha256")
    head, stored = value[: form.head_bytes], value[form.head_bytes :]
    assert msgpack.unpackb(head[4:])["codec"] == "zstd+hmac-sha256"
    assert head[-32:] == hmac.digest(key, head[:-32] + stored, "sha256")
    name = hmac.digest(SECRET.encode(), b"kvtier redis compressed namespace" + FINGERPRINT, "sha256")
    assert form.name == name[:8].hex()


def resealed(value: bytes, stored: bytes, **changes: Any) -> bytes:
    """A record of somebody who knows the format and changes what he likes, but has no secret."""
    form = FORMS["in the clear"]
    body = msgpack.packb({**msgpack.unpackb(value[4 : form.head_bytes]), **changes})
    unsealed = len(body).to_bytes(4, "little") + body[:-8]
    return bytes(unsealed + xxhash.xxh3_64_intdigest(unsealed).to_bytes(8, "little") + stored)


def test_who_forges_a_head_gets_no_memory_and_no_block() -> None:
    form = FORMS["in the clear"]
    value = put(form)
    stored = value[form.head_bytes :]
    assert taken(form, resealed(value, stored)) == RECORD
    bomb = zstandard.compress(bytes(1 << 28), 1)
    planes = np.array([SLOT_BYTES // 2, len(bomb)], "<u4").tobytes() + stored[8 : 8 + SLOT_BYTES // 2] + bomb
    planes = planes[: SLOT_BYTES - 1] if len(planes) >= SLOT_BYTES else planes
    wrong = {
        "longer than a slot": resealed(value, stored, stored_len=(1 << 31).to_bytes(4, "little")),
        "shorter than it is": resealed(value, stored, stored_len=(len(stored) - 1).to_bytes(4, "little")),
        "a bomb": resealed(value, planes, stored_len=len(planes).to_bytes(4, "little")),
        "said to be as it is": resealed(value, stored, split=bytes([AS_IS])),
        "another split": resealed(value, stored, split=b"\4"),
        "another block's bytes": resealed(value, put(form, kv_of(PARENT))[form.head_bytes :]),
    }
    assert {what: taken(form, each) for what, each in wrong.items()} == dict.fromkeys(wrong, Outcome.CHECKSUM)
    for changes in ({"payload_len": SLOT_BYTES - 1}, {"version": 1}, {"codec": "raw "}, {"epoch": bytes(8)}):
        with_it = resealed(value, stored, **changes)
        assert taken(form, with_it[: form.head_bytes] + stored) in {Outcome.KEY_MISMATCH, Outcome.CHECKSUM}, changes


def test_of_a_sealed_record_nothing_is_decompressed_that_nobody_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS["sealed"]
    value = bytearray(put(form))
    value[form.head_bytes + 3000 % (len(value) - form.head_bytes)] ^= 1
    monkeypatch.setattr(form._codec, "restore", lambda *_: pytest.fail("before the seal was looked at"))
    assert taken(form, bytes(value)) is Outcome.CHECKSUM


# Encrypted, too.

PART = SLOT_BYTES // 16


def test_an_encrypted_record_is_compressed_before_and_as_documented() -> None:
    """Opened with nothing of ours."""
    value = put(HIDDEN)
    head, body = value[: HIDDEN.head_bytes], value[HIDDEN.head_bytes :]
    fields = msgpack.unpackb(head[4:])
    hidden, stamp = fields["hidden"], fields["stamp"]
    assert list(fields.items()) == [
        ("version", 2),
        ("codec", "zstd+aes-256-gcm"),
        ("payload_len", SLOT_BYTES),
        ("stored_len", len(body).to_bytes(4, "little")),
        ("hidden", hidden),
        ("stamp", stamp),
    ]

    def digest(key: bytes, data: bytes, person: bytes = b"", size: int = 32) -> bytes:
        return hashlib.blake2b(data, key=key, person=person, digest_size=size).digest()

    named = EPOCH.to_bytes(8, "little") + HASH
    context = digest(KEY, b"kvtier redis compressed record" + FINGERPRINT, b"kvtier-context")
    associated = b"head\0\0\0\0" + named
    opened = AESGCM(digest(context, associated, b"kvtier-record")).decrypt(hidden[:12], hidden[12:], associated)
    before = PARENT + (4).to_bytes(4, "little") + RECORD.tokens + RECORD.checksum.to_bytes(8, "little")
    assert opened[: len(before)] == before
    split, length = opened[len(before)], int.from_bytes(opened[len(before) + 1 :], "little")
    associated = b"payload\0" + named + hidden
    padded = AESGCM(digest(context, associated, b"kvtier-record")).decrypt(stamp[:12], body + stamp[12:], associated)
    assert len(padded) == -(-length // PART) * PART < SLOT_BYTES
    assert not any(padded[length:])
    restored = memoryview(bytearray(SLOT_BYTES))
    assert BlockCodec(SLOT_BYTES).restore(split, memoryview(padded)[:length], restored)
    assert restored == PAYLOAD
    name_key = digest(KEY, b"kvtier redis compressed name" + FINGERPRINT, b"kvtier-context")
    assert HIDDEN.name == digest(name_key, b"", size=8).hex()
    assert HIDDEN.names([HASH]) == [digest(name_key, HASH).hex().encode()]


def test_an_encrypted_record_comes_back_and_no_other() -> None:
    value = put(HIDDEN)
    assert taken(HIDDEN, value, PARENT) is Outcome.CHECKSUM
    assert taken(HIDDEN, value, epoch=EPOCH + 1) is Outcome.CHECKSUM
    # Any changed bit is found, and so is any other length.
    for position in (*range(HIDDEN.head_bytes), *range(HIDDEN.head_bytes, len(value), 97)):
        changed = bytearray(value)
        changed[position] ^= 1
        assert isinstance(taken(HIDDEN, bytes(changed)), Outcome)
    at = value.index(b"stored_len") + 12
    for told in (0, len(value) - HIDDEN.head_bytes - PART, SLOT_BYTES, SLOT_BYTES + PART, 2**32 - 1):
        assert taken(HIDDEN, value[:at] + told.to_bytes(4, "little") + value[at + 4 :]) is Outcome.CHECKSUM
    # The head of one and what is stored of another are no record.
    assert taken(HIDDEN, value[: HIDDEN.head_bytes] + put(HIDDEN)[HIDDEN.head_bytes :]) is Outcome.CHECKSUM


# Over a server.


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that can be compressed."""
    for module in (doubles, redis_stories):
        monkeypatch.setattr(module, "payload_of", kv_of)


@on_a_server
@pytest.mark.parametrize("form", ["compressed", "compressed sealed", "compressed encrypted"])
@pytest.mark.usefixtures("kv")
def test_nodes_share_blocks_that_are_shorter_on_the_server(server: RedisServer, form: str, tmp_path: Path) -> None:
    more = protection(form, tmp_path)
    with opened(server.url, **more) as one, opened(server.url, **more) as two:
        written(one, CHAIN)
        assert whole(read(one, CHAIN))
        assert two.locate(CHAIN.hashes) == len(CHAIN.hashes)
        assert whole(read(two, CHAIN))
        sizes = [len(server.value_of(key_of(one, name))) - one.space.head_bytes for name in CHAIN.hashes]
        assert max(sizes) < 0.85 * SLOT_BYTES
        saved = len(sizes) * SLOT_BYTES - sum(sizes)
        assert (one.stats()["saved_sent"], one.stats()["saved_received"]) == (saved, saved)
        assert (two.stats()["saved_sent"], two.stats()["saved_received"]) == (0, saved)


@on_a_server
@pytest.mark.usefixtures("kv")
def test_what_it_saved_is_told_to_prometheus(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_rig, "payload_of", kv_of)
    hierarchy = over_redis(server.url, compression="zstd")
    assert store(hierarchy, CHAIN) == len(CHAIN.hashes)
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == len(CHAIN.hashes)
    stats = hierarchy.stats()
    series = 'kvtier_compression_saved_bytes_total{{tier="redis",way="{}"}}'
    sent, received = (stats[series.format(way)] for way in ("sent", "received"))
    assert sent == received > 0.1 * len(CHAIN.hashes) * SLOT_BYTES
    settle(hierarchy)
    plain = over_redis(server.url)
    assert not [name for name in plain.stats() if name.startswith("kvtier_compression")]
    settle(plain)


@on_a_server
def test_short_and_long_values_of_one_keyspace_are_read_in_one_batch(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(chain_hash: bytes, num_bytes: int = SLOT_BYTES) -> bytes:
        return kv_of(chain_hash, num_bytes) if chain_hash[0] % 2 else noise_of(chain_hash, num_bytes)

    for module in (doubles, redis_stories):
        monkeypatch.setattr(module, "payload_of", mixed)
    monkeypatch.setattr("kvtier.tiers.compression._AGAIN", 0)
    chain = chain_of(64)
    assert len({name[0] % 2 for name in chain.hashes}) == 2
    with opened(server.url, compression="zstd") as store:
        written(store, chain)
        assert whole(read(store, chain))
        lengths = {len(server.value_of(key_of(store, name))) for name in chain.hashes}
        assert store.space.value_bytes in lengths
        assert len(lengths) > 10
        # one that is gone and one that is longer than any cost themselves alone
        server.cli("DEL", key_of(store, chain.hashes[5]))
        server.cli("SET", key_of(store, chain.hashes[9]), stdin=bytes(3 * SLOT_BYTES))
        outcomes = read(store, chain)
        assert (outcomes[5], outcomes[9]) == (Outcome.EVICTED, Outcome.CHECKSUM)
        assert whole(outcomes[:5] + outcomes[6:9] + outcomes[10:])


@on_a_server
def test_a_purge_that_no_server_heard_says_so(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    with opened(server.url, compression="zstd") as store:
        written(store, CHAIN)
        store.discard(CHAIN.hashes[:1])
        assert "there still" not in caplog.text
        server.kill()
        store.discard(CHAIN.hashes[1:])
        store.close()
        store.discard(CHAIN.hashes)
    told = f"[redis] {len(CHAIN.hashes) - 1} blocks may be there still: no server confirmed that it deleted them"
    assert [record.message for record in caplog.records if "there still" in record.message] == [told]


def test_the_start_says_what_is_used(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.redis.store._warned", set())  # of this server, in another story
    caplog.set_level(logging.INFO)
    open_store(server.url).close()
    assert "zstd" not in caplog.text
    open_store(server.url, compression="zstd").close()
    assert "[redis] compression: zstd" in caplog.text
    shown = opening.checked(Config.load(redis={"url": server.url, "compression": "zstd"}))
    assert shown is not None
    assert shown.endswith(", compressed by zstd")


@on_a_server
def test_the_doctor_says_whether_it_would_pay_and_leaves_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restore, told in ((1e12, "compression would pay: "), (1.0, "compression would not pay: ")):
        monkeypatch.setattr(compression, "rates_of", lambda _, restore=restore: CodecRates(1.5, 1e9, restore))
        (finding,) = check_compression(Config.load(redis={"url": server.url}).redis)
        assert finding.check == "redis compression"
        assert finding.found.startswith(told)
        assert finding.found.endswith("[redis] compression is none")
        assert server.all_keys() == []
    # a server that refuses the probe has no line of its own here
    server.cli("CONFIG", "SET", "maxmemory", "1mb")
    assert check_compression(Config.load(redis={"url": server.url}).redis) == []
    server.kill()
    assert check_compression(Config.load(redis={"url": server.url, "connect_timeout": "500ms"}).redis) == []
    assert check_compression(Config.load().redis) == []


@on_a_server
def test_the_doctor_says_it_of_a_cluster_too_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "rates_of", lambda _: CodecRates(1.5, 1e9, 1e12))
    with cluster() as nodes:
        (finding,) = check_compression(Config.load(redis={"url": nodes.url, "mode": "cluster"}).redis)
        assert finding.found.startswith("compression would pay: ")
        assert not [key for server in nodes.masters for key in server.all_keys()]
        for server in nodes.masters:
            server.kill()
        assert check_compression(Config.load(redis={"url": nodes.url, "mode": "cluster"}).redis) == []


def test_what_is_below_the_limit_is_faster_compressed() -> None:
    """By the times themselves: of 1 GB, with and without."""
    rates = CodecRates(ratio=1.5, shrink=0.4e9, restore=1.2e9)
    assert rates.reads_pay_below() == pytest.approx(0.4e9)
    assert rates.writes_pay_below() == pytest.approx(0.4e9 / 3)
    for rate in (0.39e9, 0.41e9):
        without, with_it = 1e9 / rate, 1e9 / 1.5 / rate + 1e9 / 1.2e9
        assert (with_it < without) == (rate < rates.reads_pay_below())
    sample = made_up_kv(1 << 20)
    measured = rates_of(sample)
    assert 1.3 < measured.ratio < 1.7
    assert min(measured.shrink, measured.restore) > 0


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"\[redis\] compression .*needs zstandard; pip install 'zstandard"):
        opening.checked(Config.load(redis={"url": "redis://127.0.0.1", "compression": "zstd"}))
