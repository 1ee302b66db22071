"""Fault 32 with intent: others write and read the server; what a checksum, a secret and a key each hold against it."""

import logging
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis
import xxhash
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, wait_until
from redis_rig import NO_REDIS, RedisServer
from redis_stories import (
    CHAIN,
    FINGERPRINT,
    OTHER,
    SECRET,
    key_of,
    opened,
    options,
    protection,
    read,
    whole,
    write,
    written,
)

from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.finding import Status
from kvtier.tiers.redis.opening import check_redis
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.tier import BlockRecord, Outcome

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

FORMS = ["clear", "sealed", "encrypted"]
MISS = {Outcome.ABSENT, Outcome.EVICTED, Outcome.CHECKSUM, Outcome.KEY_MISMATCH}


def forged(value: bytes, payload: bytes) -> bytes:
    """A record like the one there, whose payload is the attacker's, and every checksum that he can make anew."""
    head = value[:-SLOT_BYTES]
    fields = msgpack.unpackb(head[4:])
    if "xxh3" in fields:
        fields["xxh3"] = xxhash.xxh3_64_intdigest(payload).to_bytes(8, "little")
        if fields["codec"] == "raw":
            unsealed = head[:4] + msgpack.packb(fields)[:-8]
            fields["seal"] = xxhash.xxh3_64_intdigest(unsealed).to_bytes(8, "little")
    return bytes(head[:4] + msgpack.packb(fields) + payload)


def everything_in(server: RedisServer) -> dict[bytes, bytes]:
    """What somebody with access to the server sees: its keys and values."""
    with redis.Redis("127.0.0.1", server.port) as client:
        return {key: client.get(key) or b"" for key in client.keys("*")}  # pyrefly: ignore[bad-return] # bytes


@pytest.mark.parametrize("form", FORMS)
def test_a_forged_record_is_served_only_without_a_secret(server: RedisServer, form: str, tmp_path: Path) -> None:
    payload = payload_of(b"what the attacker wants the model to have read")
    with opened(server.url, **protection(form, tmp_path)) as tier:
        written(tier, CHAIN)
        # Somebody else on the server puts another payload in the place of block 2's.
        key = key_of(tier, CHAIN.hashes[2])
        server.cli("SET", key, stdin=forged(server.value_of(key), payload))
        buffers = np.zeros((8, SLOT_BYTES), np.uint8)
        results = tier.read(CHAIN.hashes, [memoryview(buffer) for buffer in buffers])
        if form == "clear":  # checksums tell accidents; docs/storage.md says so
            assert isinstance(results[2], BlockRecord)
            assert buffers[2].tobytes() == payload
            return
        # A miss; the rest is served, and the next store stands in its place.
        assert results[2] is Outcome.CHECKSUM
        assert all(isinstance(result, BlockRecord) for i, result in enumerate(results) if i != 2)
        written(tier, CHAIN)
        assert whole(read(tier, CHAIN))
        # A whole record in the clear, as anybody can make one, is none either.
        with opened(server.url) as clear:
            written(clear, CHAIN)
            server.cli("SET", key, stdin=server.value_of(key_of(clear, CHAIN.hashes[2])))
        assert read(tier, CHAIN)[2] in MISS


def test_namespaces_of_any_secret_and_key_live_side_by_side(server: RedisServer, tmp_path: Path) -> None:
    """Nobody finds another's blocks, moves them, deletes them, or forgets them with his own."""
    with ExitStack() as stack:
        ways = [(form, mark) for form in FORMS for mark in ("", "!") if form != "clear" or not mark]
        ways += [("compressed", ""), ("compressed sealed", ""), ("compressed encrypted", "")]
        tiers = [stack.enter_context(opened(server.url, **protection(*way[:1], tmp_path, way[1]))) for way in ways]
        for number, tier in enumerate(tiers):
            assert tier.locate(CHAIN.hashes) == 0, ways[number]
            assert set(read(tier, CHAIN)) <= MISS
            written(tier, CHAIN)
        assert len(everything_in(server)) == len(tiers) * (8 + 1)  # and an epoch each
        # Everybody's value in the place of everybody else's: misses, whoever it is.
        values = [server.value_of(key_of(tier, CHAIN.hashes[0])) for tier in tiers]
        for tier, own in zip(tiers, values, strict=True):
            for value in values:
                server.cli("SET", key_of(tier, CHAIN.hashes[0]), stdin=value)
                assert (read(tier, CHAIN)[0] is Outcome.OK) == (value == own)
            written(tier, CHAIN)
        # One deletes, one resets: the others have theirs.
        tiers[1].discard(CHAIN.hashes)
        tiers[3].reset()
        wait_until(lambda: whole(write(tiers[3], OTHER)))
        for number, tier in enumerate(tiers):
            assert whole(read(tier, CHAIN)) == (number not in (1, 3)), ways[number]
        # The next process of each finds its own.
        for number in (0, 2, 4, 5, 7):
            with opened(server.url, **protection(ways[number][0], tmp_path, ways[number][1])) as restarted:
                assert restarted.locate(CHAIN.hashes) == 8
                assert whole(read(restarted, CHAIN))


@pytest.mark.parametrize("form", ["sealed", "encrypted"])
def test_values_of_other_blocks_epochs_and_models_are_misses(server: RedisServer, form: str, tmp_path: Path) -> None:
    """All of them made by who has the secret; a server may answer with any of them."""
    with opened(server.url, **protection(form, tmp_path)) as tier:
        written(tier, CHAIN)
        written(tier, OTHER)
        old = server.value_of(key_of(tier, CHAIN.hashes[1]))
        # Another block's, and its head before this one's payload.
        other = server.value_of(key_of(tier, OTHER.hashes[1]))
        for value in (other, other[:-SLOT_BYTES] + old[-SLOT_BYTES:], old[:-SLOT_BYTES] + other[-SLOT_BYTES:]):
            server.cli("SET", key_of(tier, CHAIN.hashes[1]), stdin=value)
            assert read(tier, CHAIN)[1] in MISS
        # Its own, of before a reset.
        tier.reset()
        wait_until(lambda: whole(write(tier, OTHER)))
        server.cli("SET", key_of(tier, CHAIN.hashes[1]), stdin=old)
        assert read(tier, CHAIN)[1] in MISS
        # Another model's, of one secret or key.
        with opened(server.url, b"another model".ljust(32, b"."), **protection(form, tmp_path)) as stranger:
            written(stranger, CHAIN)
            server.cli("SET", key_of(tier, CHAIN.hashes[1]), stdin=server.value_of(key_of(stranger, CHAIN.hashes[1])))
        assert read(tier, CHAIN)[1] in MISS


@pytest.mark.parametrize("form", FORMS)
def test_what_a_server_shows_of_prompts(server: RedisServer, form: str, tmp_path: Path) -> None:
    """Encrypted: neither tokens nor KV, nor names that would tell somebody who guesses them that he is right."""
    with opened(server.url, **protection(form, tmp_path)) as tier:
        written(tier, CHAIN)
        seen = b"\n".join(key + b"\n" + value for key, value in everything_in(server).items())
        assert tier.locate(CHAIN.hashes) == 8
    tokens = [struct.pack(f"<{BLOCK_SIZE}I", *range(i * 4, i * 4 + 4)) for i in range(8)]
    payloads = [payload_of(chain_hash)[start:][:16] for chain_hash in CHAIN.hashes for start in (0, 2000, 4080)]
    names = [name for chain_hash in CHAIN.hashes for name in (chain_hash, chain_hash.hex().encode())]
    for private in [*tokens, *payloads, *names, CHAIN.root, FINGERPRINT]:
        assert (private in seen) == (form != "encrypted")


@pytest.mark.parametrize("form", ["sealed", "encrypted"])
def test_blocks_of_a_megabyte_go_through_nodes_side_by_side(server: RedisServer, form: str, tmp_path: Path) -> None:
    """Many batches of groups, two nodes, one server, every byte compared."""
    size, chain = 1 << 20, chain_of(24)
    payloads = [payload_of(chain_hash, size) for chain_hash in chain.hashes]
    records = [
        BlockRecord(h, chain.parent(i), chain.block_tokens(i), checksum(memoryview(payloads[i])))
        for i, h in enumerate(chain.hashes)
    ]
    more = protection(form, tmp_path)
    stores = [
        RedisStore.open(options(server.url, **more), FINGERPRINT, slot_bytes=size, block_size=BLOCK_SIZE)
        for _ in range(2)
    ]
    slots = [memoryview(bytearray(payload)) for payload in payloads]
    assert set(stores[0].write(records, slots)) == {Outcome.OK}
    assert [bytes(slot) for slot in slots] == payloads  # a store leaves its slots as they are
    into = [memoryview(bytearray(size)) for _ in payloads]
    assert stores[1].read(chain.hashes, into) == records
    assert [bytes(buffer) for buffer in into] == payloads
    for each in stores:
        each.check()
        each.close()


@pytest.mark.parametrize("form", ["sealed", "encrypted"])
def test_another_secret_is_misses_and_no_failure(
    server: RedisServer, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two nodes that were not given the same one: each serves itself, nothing breaks, nothing is shown."""
    caplog.set_level(logging.DEBUG)
    with (
        opened(server.url, **protection(form, tmp_path)) as ours,
        opened(server.url, **protection(form, tmp_path, "?")) as theirs,
    ):
        written(ours, CHAIN)
        assert theirs.locate(CHAIN.hashes) == 0
        written(theirs, CHAIN)
        key = key_of(ours, CHAIN.hashes[0])
        server.cli("SET", key, stdin=server.value_of(key_of(theirs, CHAIN.hashes[0])))
        assert read(ours, CHAIN)[0] is Outcome.CHECKSUM
        assert whole(read(theirs, CHAIN))
        shown = caplog.text + repr(ours) + repr(vars(ours)) + repr(ours.space) + str(ours._config.model_dump_json())
    assert SECRET not in shown
    assert "1 records are not what their keys say" in shown


def refused(url: str, **more: Any) -> str:
    """The one line a configuration ends with, and what `kvtier doctor` says of it in its place."""
    with pytest.raises(ConfigError) as told, opened(url, **more):
        pass
    line = str(told.value)
    assert "\n" not in line
    [finding] = [f for f in check_redis(options(url, **more)) if f.status is Status.ERROR]
    assert f"{finding.found}; {finding.fix}" == line
    return line


def test_a_key_file_that_cannot_be_used_is_one_line(server: RedisServer, tmp_path: Path) -> None:
    key_file = protection("encrypted", tmp_path)["key_file"]
    assert Status.ERROR not in [finding.status for finding in check_redis(options(server.url, key_file=key_file))]
    assert refused(server.url, key_file=str(tmp_path / "nowhere")).startswith('[redis] key_file "')
    Path(key_file).chmod(0o644)
    assert "others may open it; run: chmod" in refused(server.url, key_file=key_file)
    Path(key_file).chmod(0o600)
    Path(key_file).write_text("hunter2hunter2")
    line = refused(server.url, key_file=key_file)
    assert "holds no key of 32 bytes" in line
    assert "hunter2" not in line


def test_a_secret_and_a_key_file_together_or_a_short_secret_are_one_line(server: RedisServer, tmp_path: Path) -> None:
    for more in ({"secret": "hunter2"}, {"secret": "hunter2hunter2hunter2", **protection("encrypted", tmp_path)}):
        with pytest.raises(ConfigError, match=r"^\[redis\] secret \(not shown\): ") as told:
            options(server.url, **more)
        assert "hunter2" not in str(told.value)
