"""Faults 30, 32, 34 and 36 in Redis: no memory, keys gone, hostile values, and who may find what."""

import itertools
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import doubles
import msgpack
import pytest
import redis_stories
from doubles import chain_of, store, wait_until
from extent import brief
from fault_rig import drops, fetch, forget_l2, misses, rest, settle
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_rig import NO_REDIS, RedisServer, standalone
from redis_stories import (
    CHAIN,
    OTHER,
    is_open,
    key_of,
    kv_of,
    located,
    opened,
    over_redis,
    protection,
    read,
    reads_again,
    whole,
    within,
    write,
    written,
)
from toxic_proxy import ToxicProxy

from kvtier.tiers.hierarchy.hierarchy import evict_everywhere
from kvtier.tiers.redis.store import RedisStore
from kvtier.tiers.tier import Outcome

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

GONE = {Outcome.ABSENT, Outcome.EVICTED}
BAD = {Outcome.CHECKSUM, Outcome.KEY_MISMATCH}


@pytest.fixture
def tier(
    server: RedisServer, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisStore]:
    """A store that has written CHAIN and OTHER, in the clear or as `in_every_form` asks."""
    form = getattr(request, "param", "clear")
    if "compressed" in form:
        for module in (doubles, redis_stories):
            monkeypatch.setattr(module, "payload_of", kv_of)
    with opened(server.url, **protection(form, tmp_path)) as tier:
        written(tier, CHAIN)
        written(tier, OTHER)
        yield tier


in_every_form = pytest.mark.parametrize(
    "tier", ["clear", "compressed encrypted", *brief([], ["sealed", "encrypted", "compressed", "compressed sealed"])],
    indirect=True,
)  # fmt: skip


# 30: no memory, keys gone.


def test_a_server_out_of_memory_drops_stores_as_full_and_goes_on_serving(server: RedisServer) -> None:
    hierarchy = over_redis(server.url)
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    server.cli("CONFIG", "SET", "maxmemory", "1mb")  # less than it holds already; nothing may be evicted
    for n in range(1, 4):
        store(hierarchy, chain_of(6, first_token=10_000 * n))
        rest(hierarchy)
    assert drops(hierarchy, "redis", Outcome.FULL) > 0
    assert drops(hierarchy, "redis", Outcome.IO_ERROR) == 0
    assert not is_open(hierarchy, "write")
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    server.cli("CONFIG", "SET", "maxmemory", "0")
    late = chain_of(4, first_token=99_000)
    assert store(hierarchy, late) == 4
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    assert fetch(hierarchy, late) == 4
    settle(hierarchy)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_server_that_evicts_costs_hits_alone(policy: str) -> None:
    """It may take the epoch with the rest: then everything stored under it is lost, and counted."""
    with standalone(maxmemory="2mb", policy=policy) as server, opened(server.url) as tier:
        chains = [chain_of(16, first_token=10_000 * n) for n in range(1, 30)]  # 1.9 MB of payload
        for chain in chains:
            assert set(write(tier, chain)) <= {Outcome.OK, Outcome.FULL, Outcome.EPOCH}
        outcomes = [outcome for chain in chains for outcome in read(tier, chain)]  # compares every byte
        assert GONE & set(outcomes)
        assert set(outcomes) <= {Outcome.OK, Outcome.EPOCH, *GONE}
        wait_until(lambda: whole(write(tier, chains[0])) and whole(read(tier, chains[0])))


def test_a_key_gone_between_lookup_and_read_is_a_miss(tier: RedisStore, server: RedisServer) -> None:
    server.cli("DEL", key_of(tier, CHAIN.hashes[3]))
    assert tier.lookup(CHAIN.hashes) == 8  # what this process knows
    outcomes = read(tier, CHAIN)
    assert outcomes[3] is Outcome.EVICTED
    assert tier.stats()["evicted"] == 1
    assert whole([*outcomes[:3], *outcomes[4:]])
    assert tier.lookup(CHAIN.hashes) == 3
    assert tier.holds(CHAIN.hashes) == [i != 3 for i in range(8)]
    assert tier.locate(CHAIN.hashes) == 3
    written(tier, CHAIN)
    assert whole(read(tier, CHAIN))


def test_flushall_between_lookup_and_read_is_misses_and_the_next_store_is_found(server: RedisServer) -> None:
    hierarchy = over_redis(server.url)
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    assert hierarchy.lookup(CHAIN.hashes)["redis"] == 8
    server.cli("FLUSHALL")
    assert fetch(hierarchy, CHAIN) == 0
    assert sum(misses(hierarchy, outcome) for outcome in {*GONE, Outcome.EPOCH}) == 8
    assert not is_open(hierarchy, "read")
    assert hierarchy.lookup(CHAIN.hashes)["redis"] == 0
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    assert fetch(hierarchy, CHAIN) == 8
    with opened(server.url) as other:  # another process finds them too
        assert other.locate(CHAIN.hashes) == 8
    settle(hierarchy)


def test_a_key_that_redis_dropped_is_told_as_lost(server: RedisServer) -> None:
    hierarchy = over_redis(server.url, slots=32)
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    assert store(hierarchy, chain_of(32, first_token=50_000)) == 32  # host memory keeps nothing of the chain
    assert hierarchy.drain(60)
    assert located(hierarchy, CHAIN) == 8
    tier = hierarchy.ports[0].tier
    assert isinstance(tier, RedisStore)
    server.cli("DEL", *(key_of(tier, name) for name in CHAIN.hashes))
    assert fetch(hierarchy, CHAIN) == 0
    assert located(hierarchy, CHAIN) == 0
    assert hierarchy.eviction_reason(CHAIN.hashes[0])[:2] == ("lost", "redis")
    assert hierarchy.causes(CHAIN.hashes) == {("lost", "redis"): 8}
    # what an operator removes there is not lost, and a reset forgets it all
    assert store(hierarchy, CHAIN) == 8
    assert hierarchy.drain(60)
    assert evict_everywhere(hierarchy, CHAIN.hashes[6:], 60.0)["redis"] == 2
    assert hierarchy.eviction_reason(CHAIN.hashes[6]).cause == "removed"
    hierarchy.reset()
    assert {cause for cause, _ in hierarchy.causes(CHAIN.hashes)} <= {"reset", "removed"}
    settle(hierarchy)


# 32: hostile values.


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def hostile(value: bytes, other: bytes, path: Path) -> Iterator[bytes]:
    """Values in the place of a good one."""
    head = 4 + int.from_bytes(value[:4], "little")
    yield from (b"", b"\0", value[:-1], value + b"\0", value[: len(value) // 2], value * 2)  # wrong lengths
    yield from (
        random.Random(1).randbytes(100),
        random.Random(1).randbytes(len(value)),
        bytes(len(value)),
        b"\xff" * len(value),
    )
    yield other  # right in itself, another block's
    yield other[:head] + value[head:]
    yield value[:head] + other[head:]
    for length in (0, 1, head - 5, head - 3, 1 << 30, (1 << 32) - 1):  # of the header
        yield length.to_bytes(4, "little") + value[4:]
    yield pickle.dumps(Bomb(path)).ljust(len(value), b".")
    yield value[:4] + pickle.dumps(Bomb(path)).ljust(len(value) - 4, b".")
    deep = b"\x91" * (head - 4)  # arrays in arrays
    wide = b"\xdd\xff\xff\xff\xff".ljust(head - 4, b"\xc0")  # an array of 4 G elements, it says
    long = b"\xc6\xff\xff\xff\xff".ljust(head - 4, b"\0")  # 4 GB of bytes, it says
    yield from (value[:4] + bomb + value[head:] for bomb in (deep, wide, long))
    fields = msgpack.unpackb(value[4:head])
    wrongs: list[object] = [None, -1, 1 << 40, "text", b"", b"\xff" * 32, [], {}]
    for name, wrong in itertools.product(fields, wrongs):
        packed = msgpack.packb({**fields, name: wrong})
        if packed != value[4:head]:
            yield len(packed).to_bytes(4, "little") + packed + value[head:]


@in_every_form
def test_hostile_values_are_misses_and_run_no_code(tier: RedisStore, server: RedisServer, tmp_path: Path) -> None:
    """Each is rejected, forgotten, and does not come back; the blocks beside it are served."""
    key = key_of(tier, CHAIN.hashes[2])
    value, other = server.value_of(key), server.value_of(key_of(tier, CHAIN.hashes[3]))
    values = list(hostile(value, other, tmp_path / "made"))
    assert len(values) > 60
    tracemalloc.start()
    try:
        for bad in values:
            server.cli("SET", key, stdin=bad)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            outcomes = read(tier, CHAIN)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
            assert outcomes[2] in BAD, bad[:100]
            assert not tier.holds(CHAIN.hashes)[2]
            written(tier, CHAIN)  # over whatever stands there
            reads_again(tier, CHAIN)
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda value: value + b"\0",
        lambda value: value * 2,
        lambda value: value * 5000,  # 21 MB
        lambda value: value[:-1],
        lambda value: value[:-200],  # longer than a payload, shorter than a record
        lambda value: b"",
    ],
    ids=["a byte more", "twice", "huge", "a byte less", "a head less", "empty"],
)
@pytest.mark.parametrize("bad", brief([(0, 1, 17, 31)], [(3,), (0, 1, 17, 31)]), ids=str)
def test_a_value_of_another_length_costs_itself_alone(
    server: RedisServer, bad: tuple[int, ...], wrong: Callable[[bytes], bytes]
) -> None:
    """Longer ones cost the connection too; what was asked for behind them is asked for on the next one."""
    chain = chain_of(32)
    with opened(server.url) as tier:
        written(tier, chain)
        for i in bad:
            key = key_of(tier, chain.hashes[i])
            server.cli("SET", key, stdin=wrong(server.value_of(key)))
        outcomes = read(tier, chain)
        assert outcomes == [Outcome.CHECKSUM if i in bad else Outcome.OK for i in range(32)]
        assert {i for i in bad if tier.holds(chain.hashes)[i]} == set()
        # They are gone from the server: the next one who asks finds nothing, and the next store is whole.
        assert read(tier, chain) == [Outcome.ABSENT if i in bad else Outcome.OK for i in range(32)]
        written(tier, chain)
        assert whole(read(tier, chain))


def test_a_value_of_another_type_is_a_miss(tier: RedisStore, server: RedisServer) -> None:
    key = key_of(tier, CHAIN.hashes[2])
    server.cli("DEL", key)
    server.cli("RPUSH", key, "not", "a", "string")
    outcomes = read(tier, CHAIN)
    assert outcomes[2] is not Outcome.OK
    assert whole([*outcomes[:2], *outcomes[3:]])
    written(tier, CHAIN)
    assert whole(read(tier, CHAIN))


@pytest.mark.parametrize(
    "answer",
    [
        b"$1073741824\r\n",
        b"$1073741824\r\n" + b"x" * 5000,
        b"$99999999999999999999999\r\n",
        b"$-2\r\n",
        b"$4 096\r\n",
        b"$\r\n",
        b"*1073741824\r\n",
        b"*-1\r\n",
        b"%2\r\n",
        b">3\r\n$7\r\nmessage\r\n",
        b"!4\r\nERR.\r\n",
        b"-\r\n",
        b"-" + b"x" * 1_000_000,
        b"\r\n\r\n\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(1000),
    ],
)
def test_hostile_answers_are_misses_and_take_no_memory(server: RedisServer, answer: bytes) -> None:
    with ToxicProxy(server.port) as proxy, opened(f"redis://127.0.0.1:{proxy.port}") as tier:

        def is_fooled(ask: Callable[[], bool]) -> bool:
            """Whether it takes the forged answer for a hit. A refresh of expiries meanwhile may be who gets it."""
            for _ in range(5):
                proxy.forge(answer)
                with within(tier, 0.5):
                    if not ask():
                        return False
            return True

        written(tier, CHAIN)
        tracemalloc.start()
        try:
            assert not is_fooled(lambda: whole(read(tier, CHAIN)))
            assert tracemalloc.get_traced_memory()[1] < (4 << 20)  # the proxy's own million among it
        finally:
            tracemalloc.stop()
        proxy.heal()
        written(tier, CHAIN)
        reads_again(tier, CHAIN)
        assert not is_fooled(lambda: set(write(tier, OTHER)) == {Outcome.OK})
        proxy.heal()
        reads_again(tier, CHAIN)  # or the next connection's greeting would be forged
        assert not is_fooled(lambda: tier.locate(OTHER.hashes) == 6)
        proxy.heal()
        written(tier, OTHER)
        reads_again(tier, OTHER)


@pytest.mark.parametrize(
    "epoch",
    [b"", b"0" * 16, b"f" * 16, b"F" * 16, b"-1", b"9" * 400, random.Random(2).randbytes(16), bytes(1 << 20), None],
)
def test_a_hostile_epoch_costs_hits_at_most(tier: RedisStore, server: RedisServer, epoch: bytes | None) -> None:
    [key] = [key for key in server.all_keys() if key.endswith("epoch")]
    if epoch is None:  # of another type
        server.cli("DEL", key)
        server.cli("RPUSH", key, "not", "a", "string")
    else:
        server.cli("SET", key, stdin=epoch)
    read(tier, CHAIN)  # compares every byte
    wait_until(lambda: whole(write(tier, CHAIN)) and whole(read(tier, CHAIN)))
    with opened(server.url) as other:
        assert other.locate(CHAIN.hashes) == 8
        tier.reset()
        wait_until(lambda: whole(write(tier, OTHER)) and whole(read(tier, OTHER)))
        assert set(read(tier, CHAIN)) <= {*GONE, Outcome.EPOCH}
        assert set(read(other, CHAIN)) <= {*GONE, Outcome.EPOCH}


@in_every_form
@settings(max_examples=brief(30, 150))
@given(data=st.data())
def test_any_value_is_the_one_stored_or_a_miss(tier: RedisStore, server: RedisServer, data: st.DataObject) -> None:
    chain_hash = CHAIN.hashes[0]
    written(tier, CHAIN)
    key = key_of(tier, chain_hash)
    value = server.value_of(key)
    start = data.draw(st.integers(0, 400) | st.integers(0, len(value)))
    patch = data.draw(st.binary(max_size=64))
    bad = data.draw(
        st.sampled_from([value[:start] + patch + value[start + len(patch) :], value[:start] + patch, patch])
    )
    server.cli("SET", key, stdin=bad)
    outcome = read(tier, CHAIN)[0]  # compares every byte of what it gets
    assert (outcome is Outcome.OK) == (bad == value)


# 34 and 36: who may find what.


def test_two_tenants_share_no_block_in_redis(server: RedisServer) -> None:
    chains = [chain_of(8, salt=salt) for salt in (None, "a", "b", "ab")]
    with opened(server.url) as ours, opened(server.url) as theirs:
        for i, chain in enumerate(chains):
            assert [theirs.locate(other.hashes) for other in chains] == [8] * i + [0] * (4 - i)
            assert all(outcome in GONE for outcome in read(theirs, chain))
            written(ours, chain)
            assert theirs.locate(chain.hashes) == 8
            assert whole(read(theirs, chain))  # each byte of its own tenant
