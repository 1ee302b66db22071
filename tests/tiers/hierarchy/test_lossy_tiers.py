"""`[cache] lossy` over real servers: shorter values, the same numbers on every node, never an exact engine's."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import reserve, wait_until
from extent import brief
from object_rig import BUCKET, NO_OBJECTS, ObjectServer
from redis_rig import NO_REDIS, RedisServer
from redis_stories import protection

from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.fp8 import Fp8Codec, fp8_form
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import BlockRecord, ChainHash

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=4, dtype="bfloat16")
FORM = fp8_form(SHAPE.dtype, SHAPE.head_dim)
CODEC = Fp8Codec.of(FORM, SHAPE.block_bytes)
LOSSY, EXACT = b"lossy".ljust(32, b"."), b"exact".ljust(32, b".")
PATIENCE = {"connect_timeout": "20s", "deadline": "20s"}

on_redis = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
on_objects = pytest.mark.skipif(NO_OBJECTS is not None, reason=str(NO_OBJECTS))


def kv_of(name: ChainHash) -> bytes:
    """The KV of a block."""
    numbers = np.random.default_rng(int.from_bytes(name[:8], "little")).normal(0, 1, SHAPE.block_bytes // 2)
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def lossy_kv_of(name: ChainHash) -> bytes:
    """The same, as it comes back."""
    packed, target = CODEC.pack(memoryview(kv_of(name))), bytearray(SHAPE.block_bytes)
    assert packed is not None
    assert CODEC.unpack(packed, memoryview(target))
    return bytes(target)


def chain_of(num_blocks: int, fingerprint: bytes = LOSSY) -> TokenChain:
    chain = TokenChain(root_hash(fingerprint), SHAPE.block_size)
    chain.extend(range(SHAPE.block_size * num_blocks))
    return chain


def node(fingerprint: bytes = LOSSY, lossy: str | None = FORM, **sections: dict[str, Any]) -> Hierarchy:
    host = {"size": 64 * SHAPE.block_bytes, "pin": False, "huge_pages": False}
    cache = {"load_or_recompute": "load", "prefetch_deadline": "60s"}
    config = Config.load(None, host=host, cache=cache, **sections)
    return open_hierarchy(config, fingerprint, SHAPE, lossy=lossy)


def put(hierarchy: Hierarchy, chain: TokenChain, payloads: Sequence[bytes]) -> None:
    """Store the chain as an engine does, all the way down."""
    reservation = reserve(hierarchy, chain.hashes, chain.root)
    assert reservation is not None
    for slot, payload in zip(reservation.slots, payloads, strict=True):
        hierarchy.host.region.slot(slot)[:] = payload
    records = [BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in reservation.indices]
    hierarchy.seal(reservation, records, hierarchy.epoch)
    assert hierarchy.drain(60)


def loaded(hierarchy: Hierarchy, chain: TokenChain) -> list[bytes]:
    """What a request is given of the chain; each block verified against the checksum that it is told with."""
    claim = hierarchy.submit(chain.hashes, chain.root, block_size=SHAPE.block_size)
    wait_until(lambda: isinstance(hierarchy.poll(claim), int))
    with hierarchy.lease(claim) as lease:
        found = []
        for slot in lease.slots:
            record = hierarchy.host.records[slot]
            payload = hierarchy.host.region.slot(slot)
            assert record is not None
            assert record.checksum == checksum(payload)
            found.append(bytes(payload))
        return found


def end(*nodes: Hierarchy) -> None:
    for each in nodes:
        assert each.drain(60)
        each.check()
        each.close()


def redis(server: RedisServer, **more: Any) -> dict[str, Any]:
    return {"redis": {"url": server.url, "prefix": "lossy", **PATIENCE, **more}}


@on_redis
@pytest.mark.parametrize("form", [*brief([], ["sealed", "compressed"]), "clear", "encrypted", "compressed sealed"])
def test_every_form_of_record_brings_the_same_numbers(
    form: str, server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, chain = protection(form, tmp_path), chain_of(6)
    with caplog.at_level(logging.INFO):
        first = node(**redis(server, **options))
    assert f"[cache] lossy: Redis keeps K and V as {FORM}" in caplog.text
    put(first, chain, list(map(kv_of, chain.hashes)))
    # Who computed the blocks has them as they were; who loads them has them as every other node does.
    assert loaded(first, chain) == list(map(kv_of, chain.hashes))
    values = [server.value_of(key) for key in server.all_keys() if len(key) > 64]
    assert len(values) == 6
    head = 700  # more than any head has
    assert all(len(value) < CODEC.packed_bytes + head < SHAPE.block_bytes for value in values)
    other = node(**redis(server, **options))
    assert loaded(other, chain) == list(map(lossy_kv_of, chain.hashes))
    # A block that came from there, forgotten and stored anew, is the same once more.
    server.cli("FLUSHALL")
    third = node(**redis(server, **options))
    put(third, chain, list(map(lossy_kv_of, chain.hashes)))
    fourth = node(**redis(server, **options))
    assert loaded(fourth, chain) == list(map(lossy_kv_of, chain.hashes))
    end(first, other, third, fourth)


@on_redis
@pytest.mark.parametrize("form", ["clear", *brief([], ["sealed"]), "compressed"])
def test_an_exact_engine_finds_nothing_and_neither_does_a_lossy_one(
    form: str, server: RedisServer, tmp_path: Path
) -> None:
    """By its fingerprint; and if that were the same by mistake, a record still says what it is."""
    options = protection(form, tmp_path)
    for stored, asked in ((FORM, None), (None, FORM)):
        server.cli("FLUSHALL")
        writer = node(LOSSY if stored else EXACT, stored, **redis(server, **options))
        chain = chain_of(4, LOSSY if stored else EXACT)
        put(writer, chain, list(map(kv_of, chain.hashes)))
        another = chain_of(4, LOSSY if asked else EXACT)
        reader = node(LOSSY if asked else EXACT, asked, **redis(server, **options))
        assert loaded(reader, another) == []
        mistaken = node(LOSSY if stored else EXACT, asked, **redis(server, **options))
        assert loaded(mistaken, chain) == []
        end(writer, reader, mistaken)


@on_redis
def test_a_block_with_a_number_that_is_not_finite_stays_here(server: RedisServer) -> None:
    hierarchy, chain = node(**redis(server)), chain_of(4)
    payloads = list(map(kv_of, chain.hashes))
    payloads[1] = payloads[1][:-2] + b"\x80\x7f"  # infinity
    put(hierarchy, chain, payloads)
    assert loaded(hierarchy, chain) == payloads
    stats = hierarchy.stats()
    assert stats['kvtier_store_dropped_total{tier="redis",reason="unsupported"}'] == 1
    assert stats['kvtier_store_dropped_total{tier="redis",reason="parent_failed"}'] == 2
    other = node(**redis(server))
    assert loaded(other, chain) == [lossy_kv_of(chain.hashes[0])]
    end(hierarchy, other)


@on_redis
def test_a_damaged_value_is_a_miss(server: RedisServer) -> None:
    hierarchy, chain = node(**redis(server)), chain_of(3)
    put(hierarchy, chain, list(map(kv_of, chain.hashes)))
    key = next(key for key in server.all_keys() if key.endswith(chain.hashes[1].hex()))
    value = bytearray(server.value_of(key))
    value[-CODEC.packed_bytes // 2] ^= 1
    server.cli("SET", key, stdin=bytes(value))
    other = node(**redis(server))
    assert loaded(other, chain) == [lossy_kv_of(chain.hashes[0])]
    assert other.stats()['kvtier_corruption_total{tier="redis"}'] == 1
    end(hierarchy, other)


@on_objects
@pytest.mark.parametrize("form", [*brief([], ["sealed", "encrypted", "compressed"]), "clear", "compressed encrypted"])
def test_an_object_store_keeps_blocks_so_too(form: str, s3: ObjectServer, tmp_path: Path) -> None:
    s3.empty()
    keys = {"access_key_id": "somebody", "secret_access_key": "a key"}
    section = {"bucket": BUCKET, "endpoint": s3.endpoint, **PATIENCE, **keys, **protection(form, tmp_path)}
    first, chain = node(objects=section), chain_of(6)
    put(first, chain, list(map(kv_of, chain.hashes)))
    other, exact = node(objects=section), node(EXACT, None, objects=section)
    assert loaded(other, chain) == list(map(lossy_kv_of, chain.hashes))
    assert loaded(exact, chain_of(6, EXACT)) == []
    end(first, other, exact)


def test_the_slab_keeps_blocks_as_they_are(disk_dir: Path) -> None:
    chain, file = chain_of(5), {"path": str(disk_dir), "size": "16MiB", "deadline": "60s"}
    first = node(file=file)
    put(first, chain, list(map(kv_of, chain.hashes)))
    end(first)
    again = node(file=file)
    assert loaded(again, chain) == list(map(kv_of, chain.hashes))
    end(again)
