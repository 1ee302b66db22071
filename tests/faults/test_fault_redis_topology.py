"""Faults 31 and 33 in Redis: failover, moved slots, a read-only server, passwords and certificates, one slow shard."""

import logging
from collections.abc import Iterator

import pytest
from doubles import chain_of, store, wait_until
from extent import brief
from fault_rig import drops, fetch, forget_l2, misses, rest, settle
from redis_rig import NO_REDIS, Cluster, RedisServer, cluster, replicated, standalone, watched
from redis_stories import (
    OTHER,
    is_open,
    located,
    opened,
    over_redis,
    read,
    reads_again,
    until,
    whole,
    within,
    write,
    written,
)

from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import PortSettings
from kvtier.tiers.tier import ChainHash, Outcome

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))

LONG = chain_of(24)
FAILED = {Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.BREAKER_OPEN}
SECRET = "hunter2-and-more"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Three masters behind proxies; a story heals what it hurts."""
    with cluster(proxied=True) as nodes:
        yield nodes


@pytest.fixture
def nodes(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for proxy, master in zip(shared.proxies, shared.masters, strict=True):
        proxy.heal()
        master.cli("FLUSHALL")


def homes(nodes: Cluster, hashes: list[ChainHash]) -> dict[ChainHash, tuple[int, str]]:
    """Which master, by its number, holds each block, and under which key."""
    held = [(i, key) for i, master in enumerate(nodes.masters) for key in master.all_keys()]
    ends = {h.hex(): h for h in hashes}
    return {ends[key[-64:]]: (i, key) for i, key in held if key[-64:] in ends}


def stored(hierarchy: Hierarchy) -> Hierarchy:
    """LONG lies in Redis, and only there."""
    assert store(hierarchy, LONG) == 24
    rest(hierarchy)
    forget_l2(hierarchy)
    assert hierarchy.lookup(LONG.hashes)["redis"] == 24
    return hierarchy


def fetches_all_again(hierarchy: Hierarchy) -> None:
    def fetched() -> bool:
        forget_l2(hierarchy)
        return located(hierarchy, LONG) == 24 and fetch(hierarchy, LONG) == 24

    until(hierarchy, fetched)


# 31: failover.


def test_a_master_killed_is_misses_until_its_replica_takes_over() -> None:
    with cluster(replicas=1) as nodes:
        # No vote decides who takes over: a busy machine would call a slow master dead, and lose what it alone had.
        for node in (*nodes.masters, *nodes.replicas):
            node.cli("CONFIG", "SET", "cluster-node-timeout", "60000")
        hierarchy = stored(over_redis(nodes.url, mode="cluster"))
        for master, replica in zip(nodes.masters, nodes.replicas, strict=True):
            replicated(master, replica)
        nodes.masters[1].kill()
        assert fetch(hierarchy, LONG) < 24  # what came is checked, the rest is computed
        rest(hierarchy)
        nodes.replicas[1].cli("CLUSTER", "FAILOVER", "TAKEOVER")
        fetches_all_again(hierarchy)
        until(hierarchy, lambda: not is_open(hierarchy, "write"))
        late = chain_of(12, first_token=50_000)
        assert store(hierarchy, late) == 12
        rest(hierarchy)
        forget_l2(hierarchy)
        assert fetch(hierarchy, late) == 12
        settle(hierarchy)


def test_a_master_killed_in_a_cluster_without_replicas_costs_its_own_keys() -> None:
    with cluster() as nodes, opened(nodes.url, mode="cluster") as tier:
        written(tier, LONG)
        lost = {chain_hash for chain_hash, (i, _) in homes(nodes, LONG.hashes).items() if i == 1}
        assert 0 < len(lost) < 24
        nodes.masters[1].kill()
        for _ in range(5):
            outcomes = read(tier, LONG)
            assert {LONG.hashes[i] for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK} == lost
        nodes.masters[1].start()  # empty, and a stranger to the others: they keep its place
        assert read(tier, LONG).count(Outcome.OK) == 24 - len(lost)


def test_sentinels_name_a_new_master_and_it_is_found_without_a_restart() -> None:
    with watched(password=SECRET) as group:
        hierarchy = stored(over_redis(group.url, mode="sentinel", sentinel_name=group.name, password=SECRET))
        replicated(group.master, group.replica)
        group.master.kill()
        assert fetch(hierarchy, LONG) == 0
        fetches_all_again(hierarchy)
        settle(hierarchy)


# 31: moved slots.


def test_a_slot_on_its_way_to_another_master_is_a_miss_at_most_and_found_there(nodes: Cluster) -> None:
    with opened(nodes.url, mode="cluster") as tier:
        written(tier, LONG)
        chain_hash, (i, key) = next(iter(homes(nodes, LONG.hashes).items()))
        source, target = nodes.masters[i], nodes.masters[(i + 1) % 3]
        ids = [node.cli("CLUSTER", "MYID").decode() for node in (source, target)]
        slot = source.cli("CLUSTER", "KEYSLOT", key).decode()
        target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        assert whole(read(tier, LONG))  # still where it was
        source.cli("MIGRATE", "127.0.0.1", str(target.port), key, "0", "5000")
        for _ in range(3):  # ASK
            outcomes = read(tier, LONG)
            assert {h for h, outcome in zip(LONG.hashes, outcomes, strict=True) if outcome is not Outcome.OK} <= {
                chain_hash
            }
        for node in (target, source, nodes.masters[(i + 2) % 3]):
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        outcomes = read(tier, LONG)  # MOVED
        assert outcomes.count(Outcome.OK) >= 23
        wait_until(lambda: whole(write(tier, LONG)))
        reads_again(tier, LONG)
        assert homes(nodes, LONG.hashes)[chain_hash] == ((i + 1) % 3, key)
        for node in nodes.masters:  # and back
            node.cli("FLUSHALL")
        for node in (source, target, nodes.masters[(i + 2) % 3]):
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", ids[0])


def test_a_server_that_turns_read_only_drops_stores_serves_on_and_takes_them_again(redis_server: RedisServer) -> None:
    hierarchy = stored(over_redis(redis_server.url))
    redis_server.cli("REPLICAOF", "127.0.0.1", "1")  # of nobody: it serves what it has
    while not is_open(hierarchy, "write"):
        store(hierarchy, OTHER)
        rest(hierarchy)
        forget_l2(hierarchy)
    assert drops(hierarchy, "redis", Outcome.IO_ERROR) > 0
    redis_server.cli("REPLICAOF", "NO", "ONE")
    until(hierarchy, lambda: not is_open(hierarchy, "write") and not is_open(hierarchy, "read"))
    assert store(hierarchy, OTHER) == 6
    rest(hierarchy)
    fetches_all_again(hierarchy)
    assert fetch(hierarchy, OTHER) == 6
    settle(hierarchy)


# 31: passwords and certificates.


def test_a_password_changed_while_running_is_misses_and_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with standalone(password=SECRET) as server:
        hierarchy = stored(over_redis(server.url, password=SECRET))
        server.cli("CONFIG", "SET", "requirepass", "another-secret")
        server.password = "another-secret"
        server.cli("CLIENT", "KILL", "TYPE", "normal")
        while not is_open(hierarchy, "read"):
            assert fetch(hierarchy, LONG) == 0
        assert sum(misses(hierarchy, outcome) for outcome in FAILED) > 0
        for _ in range(5):
            hierarchy.tick()
            hierarchy.wait_progress(0.02)
        server.cli("CONFIG", "SET", "requirepass", SECRET)
        server.password = SECRET
        fetches_all_again(hierarchy)
        assert SECRET not in caplog.text
        settle(hierarchy)


# 33: one slow shard.


@pytest.mark.parametrize("toxic", ["mute", *brief([], ["slow"])])
def test_one_slow_shard_costs_its_own_keys_and_no_others(nodes: Cluster, toxic: str) -> None:
    patience = PortSettings(deadline=60.0, failures=5, retry_after=1000.0)
    hierarchy = over_redis(nodes.url, patience, mode="cluster")
    stored(hierarchy)
    slow = {chain_hash for chain_hash, (i, _) in homes(nodes, LONG.hashes).items() if i == 1}
    assert 0 < len(slow) < 24
    if toxic == "mute":
        nodes.proxies[1].mute()
    else:
        nodes.proxies[1].rate = 500
    port = hierarchy.ports[0]
    buffers = [memoryview(bytearray(4096)) for _ in LONG.hashes]
    for _ in range(brief(6, 12)):  # more often than the breaker of the whole tier is patient
        with within(port.tier, 2.0):
            results = port.read(LONG.hashes, buffers)
        served = {h for h, result in zip(LONG.hashes, results, strict=True) if not isinstance(result, Outcome)}
        assert served == set(LONG.hashes) - slow
    assert not is_open(hierarchy, "read")
    with opened(
        nodes.url, mode="cluster", connect_timeout="2s", deadline="2s"
    ) as other:  # a stranger finds what lies before the first that it cannot ask
        first = min(LONG.hashes.index(chain_hash) for chain_hash in slow)
        assert other.locate(LONG.hashes[:first]) == first
    nodes.proxies[1].heal()
    tier = port.tier
    assert tier is not None
    wait_until(lambda: not any(isinstance(r, Outcome) for r in tier.read(LONG.hashes, buffers)))
    settle(hierarchy)
