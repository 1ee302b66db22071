"""Objects over a real S3 server, compressed and plain: shorter, shared, side by side; what is damaged is a miss."""

import hashlib
import logging
import struct
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import doubles
import fault_rig
import object_rig
import pytest
import redis_stories
import service_rig
import xxhash
import zstandard
from doubles import SLOT_BYTES, chain_of, store, wait_until
from extent import brief
from fault_rig import fetch, forget_l2, settle
from http_rig import ServedDaemon
from object_rig import (
    BUCKET,
    ObjectServer,
    flipped,
    object_of,
    open_store,
    opened,
    options,
    over_objects,
    protection,
    read,
    requests,
    written,
)
from redis_stories import kv_of
from service_rig import attach

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.objects.opening import checked
from kvtier.tiers.objects.store import ObjectStore
from kvtier.tiers.tier import Outcome

CHAIN = chain_of(8)
FORMS = ("compressed", *brief((), ("compressed sealed",)), "compressed encrypted")
BAD = (Outcome.CHECKSUM, Outcome.KEY_MISMATCH)

every_form = pytest.mark.parametrize("form", FORMS)
every_layout = pytest.mark.parametrize("form", ["sealed", *brief((), ("clear", "encrypted")), *FORMS])


def noise_of(chain_hash: bytes, num_bytes: int = SLOT_BYTES) -> bytes:
    """What no codec makes shorter."""
    return hashlib.shake_128(chain_hash).digest(num_bytes)


def mixed(chain_hash: bytes, num_bytes: int = SLOT_BYTES) -> bytes:
    """By the block's name, what shrinks and what does not."""
    return kv_of(chain_hash, num_bytes) if chain_hash[0] % 2 else noise_of(chain_hash, num_bytes)


@pytest.fixture(autouse=True)
def kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that can be compressed, and a codec that looks at each anew."""
    for module in (doubles, redis_stories, object_rig, fault_rig):
        monkeypatch.setattr(module, "payload_of", mixed)
    monkeypatch.setattr("kvtier.tiers.compression._AGAIN", 0)


def lengths_in(store: ObjectStore, content: bytes) -> list[int]:
    """Of an object's records, by its table."""
    table = store.space.parse(memoryview(content)[: store.space.table_bytes], content[24:56])
    assert table is not None
    assert table.edges[-1] == len(content)
    return [end - start for start, end in pairwise(table.edges)]


@every_form
def test_what_one_node_stores_another_finds_shorter_and_the_same(
    server: ObjectServer, form: str, tmp_path: Path
) -> None:
    chain = chain_of(40)
    with opened(server.endpoint, **protection(form, tmp_path)) as writer:
        assert requests(writer, lambda: written(writer, chain)) == {"put": 1}
        assert read(writer, chain) == [Outcome.OK] * 40
        (key,) = server.keys()
        lengths = lengths_in(writer, server.content(key))
        saved = 40 * writer.space.record_bytes - sum(lengths)
        assert (writer.stats()["saved_sent"], writer.stats()["saved_received"]) == (saved, saved)
        head = writer.space.form.head_bytes
        for name, length in zip(chain.hashes, lengths, strict=True):
            assert (length < head + SLOT_BYTES) == (name[0] % 2)
        if form == "compressed encrypted":  # lengths tell next to nothing
            assert {(length - head) % (SLOT_BYTES // 16) for length in lengths} == {0}
            assert len(set(lengths)) <= 3
        else:
            assert len(set(lengths)) > 10
    with opened(server.endpoint, **protection(form, tmp_path)) as reader:
        assert requests(reader, lambda: reader.locate(chain.hashes)) == {"get": 1}
        assert read(reader, chain) == [Outcome.OK] * 40
        assert read(reader, chain, [chain.hashes[i] for i in (17, 3, 4, 0, 39)]) == [Outcome.OK] * 5
        # In parts, each of which begins in the middle of an object.
    with opened(server.endpoint, part_size="64KiB", **protection(form, tmp_path)) as reader:
        assert reader.locate(chain.hashes) == 40
        assert requests(reader, lambda: read(reader, chain))["get"] >= 3
        assert reader.stats()["read_ok"] == 40


@pytest.mark.parametrize("form", ["clear", "sealed", "encrypted", *FORMS])
def test_blocks_are_found_after_every_node_is_gone(server: ObjectServer, form: str, tmp_path: Path) -> None:
    first = over_objects(server.endpoint, **protection(form, tmp_path))
    assert store(first, CHAIN) == 8
    assert first.drain(60)
    settle(first)
    # Nothing of it is left but the bucket: no memory, no disk, no index.
    second = over_objects(server.endpoint, **protection(form, tmp_path))
    assert second.lookup(CHAIN.hashes)["objects"] == 0
    assert second.locate(CHAIN.hashes, 20.0)["objects"] == 8
    assert fetch(second, CHAIN) == 8  # compares every byte
    forget_l2(second)
    assert fetch(second, CHAIN) == 8
    assert second.stats()['kvtier_bytes_total{tier="objects",direction="read"}'] == 16 * SLOT_BYTES
    saved = second.stats().get('kvtier_compression_saved_bytes_total{tier="objects",way="received"}', 0)
    assert (saved > SLOT_BYTES) == (form in FORMS)
    settle(second)


@pytest.fixture
def served(server: ObjectServer, home: Path) -> Iterator[ServedDaemon]:
    objects = {"bucket": BUCKET, "endpoint": server.endpoint, "access_key_id": "a", "secret_access_key": "b"}
    daemon = ServedDaemon(
        home / "s",
        host={"size": 1 << 20},
        service={"socket": str(home / "s")},
        objects={**objects, "compression": "zstd", "connect_timeout": "20s", "deadline": "20s"},
    )
    yield daemon
    daemon.check()
    daemon.close()


def test_a_daemon_tells_what_it_saved(served: ServedDaemon, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_rig, "payload_of", mixed)
    tiers = attach(home / "s")
    assert service_rig.store(tiers, CHAIN) == 8

    def told() -> Any:
        (model,) = served.client.get("/status").json()["models"]
        return model["tiers"]["objects"].get("saved")

    wait_until(told)
    assert told()["sent"] > SLOT_BYTES
    assert "; compression saved sent " in served.client.get("/summary").text
    metrics = served.client.get("/metrics").text.splitlines()
    assert [line for line in metrics if line.startswith("kvtier_compression_saved_bytes_total{") and "objects" in line]
    tiers.close()


def test_readers_of_every_setting_find_their_own_and_delete_nothing(server: ObjectServer, tmp_path: Path) -> None:
    settings = [protection(form, tmp_path) for form in ("clear", "sealed", "encrypted", *FORMS)]
    settings += [protection(form, tmp_path, "!") for form in ("sealed", "encrypted")]
    settings += [{"prefix": "another/team"}, {"fingerprint": b"another model".ljust(32, b".")}]
    for own in settings:
        with opened(server.endpoint, **own) as one:
            before = server.keys()
            assert one.locate(CHAIN.hashes) == 0
            assert set(read(one, CHAIN)) == {Outcome.ABSENT}
            assert server.keys() == before
            written(one, CHAIN)
    assert len(server.keys()) == len(settings)
    for own in settings:  # side by side they stay
        with opened(server.endpoint, **own) as one:
            assert one.locate(CHAIN.hashes) == 8
            assert read(one, CHAIN) == [Outcome.OK] * 8


def test_an_object_of_the_other_layout_in_ones_place_is_a_miss(server: ObjectServer) -> None:
    with opened(server.endpoint) as plain, opened(server.endpoint, compression="zstd") as shorter:
        written(plain, CHAIN)
        written(shorter, CHAIN)
        keys = [object_of(each, CHAIN.hashes[0]) for each in (plain, shorter)]
        contents = [server.content(key) for key in keys]
    settings: tuple[dict[str, Any], ...] = ({}, {"compression": "zstd"})
    for key, content, more in zip(keys, contents[::-1], settings, strict=True):
        server.put(key, content)
        with opened(server.endpoint, **more) as reader:
            assert reader.locate(CHAIN.hashes) is Outcome.CHECKSUM
            assert set(read(reader, CHAIN)) == {Outcome.ABSENT}
            written(reader, CHAIN)
            assert read(reader, CHAIN) == [Outcome.OK] * 8


@every_layout
def test_every_flipped_bit_is_found(server: ObjectServer, form: str, tmp_path: Path) -> None:
    with opened(server.endpoint, **protection(form, tmp_path)) as store:
        written(store, CHAIN)
        (key,) = server.keys()
        content, lengths = server.content(key), lengths_in(store, server.content(key))
        head, table = store.space.form.head_bytes, store.space.table_bytes
    begin, size = table + sum(lengths[:2]), lengths[2]
    places = [0, 7, 9, 17, 40, 24 + 8192, table - 1]
    places += [begin + i for i in (0, 5, head - 40, head - 1, head, head + 3, head + 999, size - 1)]
    for place in places:
        server.put(key, flipped(content, place))
        with opened(server.endpoint, **protection(form, tmp_path)) as reader:
            found = reader.locate(CHAIN.hashes)
            results = read(reader, CHAIN)
            if place < table:
                assert found is Outcome.CHECKSUM
                assert set(results) == {Outcome.ABSENT}
                continue
            # Its block alone is lost; the damaged object is deleted.
            assert found == 8
            assert results[2] in BAD
            assert results[:2] + results[3:] == [Outcome.OK] * 7
            assert reader.lookup(CHAIN.hashes) == 0
            assert server.keys() == []


@every_layout
def test_an_object_cut_short_anywhere_gives_whole_blocks_or_misses(
    server: ObjectServer, form: str, tmp_path: Path
) -> None:
    with opened(server.endpoint, **protection(form, tmp_path)) as store:
        written(store, CHAIN)
        (key,) = server.keys()
        content, lengths = server.content(key), lengths_in(store, server.content(key))
        head, table = store.space.form.head_bytes, store.space.table_bytes
    ends = [table + sum(lengths[: i + 1]) for i in range(8)]
    for length in (0, 1, table - 1, table, table + 1, ends[2] + 7, ends[2] + head, ends[4] - 1, len(content) - 1):
        server.put(key, content[:length])
        with opened(server.endpoint, **protection(form, tmp_path)) as reader:
            found = reader.locate(CHAIN.hashes)
            assert found == (8 if length >= table else Outcome.CHECKSUM), length
            whole = sum(end <= length for end in ends)
            bad = Outcome.CHECKSUM if found == 8 else Outcome.ABSENT
            assert read(reader, CHAIN) == [Outcome.OK] * whole + [bad] * (8 - whole)
            written(reader, CHAIN)
            assert read(reader, CHAIN) == [Outcome.OK] * 8


def lying(store: ObjectStore, content: bytes, lengths: list[int]) -> bytes:
    """An object of somebody who knows the layout, with these lengths and a true checksum."""
    before = content[: 24 + 8192] + struct.pack(f"<{len(lengths)}I", *lengths).ljust(1024, b"\0")
    return before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before)) + content[store.space.table_bytes :]


@every_form
def test_a_table_that_lies_yields_misses_and_never_other_bytes(server: ObjectServer, form: str, tmp_path: Path) -> None:
    with opened(server.endpoint, **protection(form, tmp_path)) as store:
        written(store, CHAIN)
        (key,) = server.keys()
        content, lengths = server.content(key), lengths_in(store, server.content(key))
        head, most = store.space.form.head_bytes, store.space.record_bytes
        huge = lying(store, content, [2**32 - 1] * 8)
        plausible = {
            "one byte to the next": [lengths[0] + 1, lengths[1] - 1, *lengths[2:]],
            "all as long as can be": [most] * 8,
            "nothing but heads": [head] * 8,
            "the first two are one": [min(most, lengths[0] + lengths[1]), head, *lengths[2:]],
            "the other way round": lengths[::-1],
        }
        lies = {what: lying(store, content, told) for what, told in plausible.items()}
    server.put(key, huge)  # no record of ours is so long
    with opened(server.endpoint, **protection(form, tmp_path)) as reader:
        assert reader.locate(CHAIN.hashes) is Outcome.CHECKSUM
        assert reader.stats()["bytes_received"] <= reader.space.table_bytes
    for what, lie in lies.items():
        server.put(key, lie)
        with opened(server.endpoint, **protection(form, tmp_path)) as reader:
            assert reader.locate(CHAIN.hashes) == 8
            results = read(reader, CHAIN)  # judges every byte of what is OK
            assert set(results) <= {Outcome.OK, *BAD}, what
            assert set(results) & set(BAD), what
            # It asked for no more than such records can have.
            assert reader.stats()["bytes_received"] <= reader.space.table_bytes * 2 + 8 * most
            assert server.keys() == []  # what lies is deleted …
            written(reader, CHAIN)  # … and stored anew
            assert read(reader, CHAIN) == [Outcome.OK] * 8


def test_a_record_that_lies_is_a_miss_and_takes_no_memory(server: ObjectServer) -> None:
    """Without a secret whoever may write the bucket can seal heads; what he says is not believed."""
    with opened(server.endpoint, compression="zstd") as store:
        written(store, CHAIN)
        (key,) = server.keys()
        content, lengths = server.content(key), lengths_in(store, server.content(key))
        form, begin = store.space.form, store.space.table_bytes
        head = content[begin : begin + form.head_bytes]
        bomb = zstandard.compress(bytes(1 << 28), 1)[: SLOT_BYTES // 4]
        stored = struct.pack("<I", len(bomb)) + bomb
        split_at, length_at = head.index(b"\xa5split") + 8, head.index(b"\xaastored_len") + 13
        forged = bytearray(head[:-8])
        forged[split_at] = 1
        forged[length_at : length_at + 4] = struct.pack("<I", len(stored))
        record = bytes(sealed_head(forged)) + stored
        told = struct.pack("<8I", len(record), *lengths[1:]).ljust(1024, b"\0")
        before = content[: 24 + 8192] + told
        bombed = before + struct.pack("<Q", xxhash.xxh3_64_intdigest(before)) + record + content[begin + lengths[0] :]
        server.put(key, bombed)
    with opened(server.endpoint, compression="zstd") as reader:
        assert reader.locate(CHAIN.hashes) == 8
        assert read(reader, CHAIN) == [Outcome.CHECKSUM] + [Outcome.OK] * 7


def sealed_head(unsealed: bytes | bytearray) -> bytes:
    return bytes(unsealed) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(unsealed)))


def test_stored_anew_in_other_lengths_nothing_is_damaged(server: ObjectServer) -> None:
    """An object expires, and another node stores the same blocks in another way, so they lie elsewhere."""
    with opened(server.endpoint, compression="zstd") as one, opened(server.endpoint, compression="zstd") as other:
        written(one, CHAIN)
        (key,) = server.keys()
        before = server.content(key)
        server.empty()
        other.space.form._codec._widths = [1]  # type: ignore[attr-defined]
        written(other, CHAIN)
        assert server.content(key) != before
        assert set(read(one, CHAIN)) <= {Outcome.EVICTED, Outcome.OK}
        assert server.keys() == [key]  # what the other one stored stays
        assert one.locate(CHAIN.hashes) == 8
        assert read(one, CHAIN) == [Outcome.OK] * 8


@pytest.mark.parametrize("form", ["sealed", "compressed sealed", "compressed encrypted"])
def test_records_forged_without_the_secret_or_key_are_misses(server: ObjectServer, form: str, tmp_path: Path) -> None:
    mine, theirs = protection(form, tmp_path), protection(form, tmp_path, "!")
    with opened(server.endpoint, **mine) as store, opened(server.endpoint, **theirs) as forger:
        written(forger, CHAIN)
        content = bytearray(server.content(object_of(forger, CHAIN.hashes[0])))
        # He even has our names: those of sealed records are no secret.
        content[24 : 24 + 8 * 32] = b"".join(store.space.names(CHAIN.hashes))
        table = content[: store.space.table_bytes - 8]
        content[len(table) : len(table) + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(table)))
        server.put(object_of(store, CHAIN.hashes[0]), bytes(content))
        assert store.locate(CHAIN.hashes) == 8
        assert set(read(store, CHAIN)) == {Outcome.CHECKSUM}
        written(store, CHAIN)
        assert read(store, CHAIN) == [Outcome.OK] * 8


@pytest.mark.parametrize("form", ["encrypted", "compressed encrypted"])
def test_an_encrypted_bucket_holds_no_token_no_byte_and_no_name(
    server: ObjectServer, form: str, tmp_path: Path
) -> None:
    with opened(server.endpoint, **protection(form, tmp_path)) as store:
        written(store, CHAIN)
    (key,) = server.keys()
    content = server.content(key)
    for i, name in enumerate(CHAIN.hashes):
        assert name.hex() not in key
        for secret in (name, CHAIN.block_tokens(i), mixed(name)[:32], mixed(name)[::2][:32], b"\x28\xb5\x2f\xfd"):
            assert secret not in content


def test_the_start_says_what_is_used_and_bad_options_are_one_line(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    open_store(server.endpoint).close()
    assert "zstd" not in caplog.text
    shown = checked(Config(objects=options(server.endpoint, compression="zstd")))
    assert shown == f"[objects] bucket {BUCKET} at {server.endpoint}, compressed by zstd"
    with pytest.raises(ConfigError, match=r'\[objects\] compression "gzip"'):
        Config.load(objects={"bucket": "mine", "compression": "gzip"})
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"\[objects\] compression .*pip install 'zstandard>=0\.23'"):
        checked(Config(objects=options(server.endpoint, compression="zstd")))
    with pytest.raises(ConfigError, match=r"\[objects\] compression .*pip install 'zstandard>=0\.23'"):
        open_store(server.endpoint, compression="zstd")
    open_store(server.endpoint).close()  # whoever does not ask for it needs no package
