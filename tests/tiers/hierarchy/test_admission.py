"""`admit_after = "auto"`: a tier that falls behind is offered only what was seen before, until it has caught up."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import SLOT_BYTES, FakeClock, MemoryTier, chain_of, hierarchy_of, store, wait_until
from fault_rig import settle
from object_rig import BUCKET, ObjectServer
from redis_rig import NO_REDIS, standalone

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, KVMismatch
from kvtier.tiers.file import slab
from kvtier.tiers.hierarchy.demote import TierAdmission
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.naming.kv_probe import KVProbe
from kvtier.tiers.pool import NUM_AGES, EvictionLog
from kvtier.tiers.reuse import EDGES
from kvtier.tiers.tier import Outcome


def new(number: int, num_blocks: int = 4) -> TokenChain:
    """A conversation that nobody has asked for yet."""
    return chain_of(num_blocks, first_token=10_000 * (number + 1))


def is_selective(hierarchy: Hierarchy) -> bool:
    """As the metrics tell."""
    return hierarchy.stats()['kvtier_selective_admission{tier="file",why="queue"}'] == 1


def dropped(hierarchy: Hierarchy, reason: str) -> float:
    return hierarchy.stats().get(f'kvtier_store_dropped_total{{tier="file",reason="{reason}"}}', 0)


def fall_behind(hierarchy: Hierarchy, tier: MemoryTier, *chains: TokenChain) -> None:
    """Stores come while the tier takes none: eight blocks fill the queue. Then it goes on."""
    tier.gate.clear()
    for chain in chains:
        store(hierarchy, chain)
    tier.gate.set()
    assert hierarchy.ports[0].queue.drain(60)


def test_a_slab_that_falls_behind_gets_what_was_seen_before() -> None:
    tier, clock = MemoryTier(), FakeClock()
    settings = HierarchySettings(admit_after="auto", store_queue=8 * SLOT_BYTES)
    hierarchy = hierarchy_of(slots=64, tier=tier, settings=settings, clock=clock)
    store(hierarchy, new(0))
    assert hierarchy.ports[0].queue.drain(60)
    assert tier.lookup(new(0).hashes) == 4  # at the first sighting
    assert not is_selective(hierarchy)

    fall_behind(hierarchy, tier, new(1), new(2), new(3))
    assert is_selective(hierarchy)
    assert dropped(hierarchy, "not_admitted") == 4  # the third of them
    store(hierarchy, new(4))
    assert hierarchy.ports[0].queue.drain(60)
    assert tier.lookup(new(4).hashes) == 0
    assert dropped(hierarchy, "not_admitted") == 8
    assert hierarchy.host.pool.lookup(new(4).hashes) == 4  # memory has it

    # The conversation goes on: what it had is seen a second time, and stored; its new blocks are not.
    store(hierarchy, new(4, 6), 4, 6)
    assert hierarchy.ports[0].queue.drain(60)
    assert tier.lookup(new(4, 6).hashes) == 4
    assert dropped(hierarchy, "not_admitted") == 10
    # What memory lost, and an engine computed again, was seen twice, too.
    store(hierarchy, new(5))
    hierarchy.host.pool.evict(new(5).hashes)
    store(hierarchy, new(5))
    assert hierarchy.ports[0].queue.drain(60)
    assert tier.lookup(new(5).hashes) == 4

    clock.advance(9.0)
    assert is_selective(hierarchy)  # it may be no more than a pause
    clock.advance(2.0)
    assert not is_selective(hierarchy)
    store(hierarchy, new(4, 7), 6, 7)  # with what was left out before
    assert hierarchy.ports[0].queue.drain(60)
    assert tier.lookup(new(4, 7).hashes) == 7

    # It falls behind again at once: this time it has to keep up for longer.
    fall_behind(hierarchy, tier, new(6, 12))  # it has room for eight; four stand in line meanwhile
    assert tier.lookup(new(6, 12).hashes) == 12
    clock.advance(15.0)
    assert is_selective(hierarchy)
    clock.advance(6.0)
    assert not is_selective(hierarchy)
    settle(hierarchy)


def test_a_tier_whose_blocks_go_before_requests_return_gets_what_was_seen_before() -> None:
    clock, metrics = FakeClock(), Metrics()
    eviction_log = EvictionLog("file", 64, 64, clock)
    gaps = np.zeros(len(EDGES))
    gaps[np.searchsorted(EDGES, 60.0)] = 20.0  # most requests return after a minute
    admission = TierAdmission("file", lambda: [eviction_log], lambda: gaps, metrics, clock)
    clock.advance(31.0)
    assert not admission.is_selective(0.0)  # nothing was evicted yet
    eviction_log.aged(np.full(32, 20))
    assert not admission.is_selective(0.0)  # it looks every half a minute
    clock.advance(31.0)
    assert admission.is_selective(0.0)
    assert metrics.snapshot()['kvtier_selective_admission{tier="file",why="residence"}'] == 1
    eviction_log.aged(np.full(32, 90))  # longer than requests take, but not by much
    clock.advance(31.0)
    assert admission.is_selective(0.0)
    eviction_log.aged(np.full(32, 600))
    clock.advance(31.0)
    assert not admission.is_selective(0.0)
    assert len(eviction_log.ages) == NUM_AGES + 1
    eviction_log.aged(np.full(32, 5))
    clock.advance(31.0)
    assert admission.is_selective(0.0)
    clock.advance(600.0)  # nothing was evicted for longer than requests take: there is room again
    assert not admission.is_selective(0.0)


def test_the_option_takes_a_number_or_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CACHE__ADMIT_AFTER", "auto")
    assert Config.load().cache.admit_after == "auto"
    for wrong in ("often", 0, 1001, True, 1.5):
        with pytest.raises(ConfigError, match=r'\[cache\] admit_after .*write 1 to 1000, or "auto"'):
            Config.load(cache={"admit_after": wrong})


# A namespace keeps the probe of whoever made it, in every tier that can; a model that computes otherwise stays out.


SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=4, dtype="float32")
MODEL = b"model".ljust(32, b".")
PLANES = [np.random.default_rng(seed).normal(size=(2, 7, 32)) for seed in range(4)]
OURS, ROUNDED = KVProbe.of(PLANES, "float32"), KVProbe.of([plane * 1.0001 for plane in PLANES], "float32")
OTHER = KVProbe.of([plane * 1.5 for plane in PLANES], "float32")

on_redis = pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))


def opened(probe: KVProbe | None, **sections: Any) -> Hierarchy:
    config = Config.load(host={"size": "1MiB"}, **sections)
    return open_hierarchy(config, MODEL, SHAPE, kv_probe=probe)


def test_a_slab_opens_for_a_model_that_rounds_differently_not_for_one_that_computes_differently(tmp_path: Path) -> None:
    file = {"path": str(tmp_path), "size": "8MiB"}
    opened(None, file=file).close()  # of an engine that is not asked: the next one is the maker
    opened(OURS, file=file).close()
    opened(ROUNDED, file=file).close()
    with pytest.raises(KVMismatch, match=r"file: the KV kept .* was computed otherwise \(0\.3"):
        opened(OTHER, file=file)
    opened(None, file=file).close()
    opened(OURS, file=file).close()  # and it is the first one's still
    [path] = tmp_path.glob("*.slab")
    with path.open("r+b") as handle:  # rubbish is no probe: there is nothing to compare with
        handle.seek(slab.KV_PROBE_OFFSET)
        handle.write(b"\xff" * 100)
    opened(OTHER, file=file).close()


@on_redis
def test_redis_keeps_a_probe_for_each_epoch_and_a_tier_that_disagrees_leaves_none_in_others(tmp_path: Path) -> None:
    with standalone() as server:
        redis = {"url": server.url, "connect_timeout": "20s", "deadline": "20s"}
        opened(OURS, redis=redis).close()
        [key] = [key for key in server.all_keys() if "kv-probe" in key]
        assert KVProbe.unpack(server.value_of(key)).distance(OURS) == 0.0
        file = {"path": str(tmp_path), "size": "8MiB"}
        with pytest.raises(KVMismatch, match="Redis: the KV kept"):
            opened(OTHER, redis=redis, file=file)
        opened(OURS, redis=redis, file=file).close()  # the slab had not taken the other one's
        tiers = opened(OURS, redis=redis)
        tiers.reset()
        tiers.close()
        opened(OTHER, redis=redis).close()  # nothing of before counts


def test_a_bucket_keeps_a_probe_for_each_epoch(s3: ObjectServer) -> None:
    s3.empty()
    objects = {
        **{"bucket": BUCKET, "endpoint": s3.endpoint, "access_key_id": "anybody", "secret_access_key": "anything"},
        **{"connect_timeout": "20s", "deadline": "20s"},
    }
    opened(OURS, objects=objects).close()
    [key] = s3.keys("kvtier/kv-probes")
    assert KVProbe.unpack(s3.content(key)).distance(OURS) == 0.0
    with pytest.raises(KVMismatch, match="object store: the KV kept"):
        opened(OTHER, objects=objects)
    opened(ROUNDED, objects=objects).close()
    tiers = opened(OURS, objects=objects)
    tiers.reset()
    tiers.close()
    tiers = opened(OTHER, objects=objects)  # nothing of before counts
    assert len(s3.keys("kvtier/kv-probes")) == 2
    tiers.reset()
    store(tiers, chain_of(4))  # keeps the probe of who runs in the new epoch, too
    assert tiers.drain(60)
    with pytest.raises(KVMismatch, match="object store: the KV kept"):
        opened(OURS, objects=objects)
    tiers.close()


@on_redis
@pytest.mark.parametrize("way", ["reset", "flushed", "evicted"])
def test_a_running_engine_keeps_its_probe_where_redis_has_none_and_uses_nothing_of_another_model(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.tiers.shared.life._COMPARED", 0.0)  # as long after the last comparison
    with standalone() as server:
        redis = {"url": server.url, "connect_timeout": "20s", "deadline": "20s"}
        ours = opened(OURS, redis=redis)
        [tier] = [port.tier for port in ours.ports]
        assert tier is not None
        store(ours, chain_of(4))
        assert ours.drain(60)

        def lose() -> None:
            if way == "reset":
                ours.reset()
            elif way == "flushed":
                server.cli("FLUSHALL")
            else:
                [key] = [key for key in server.all_keys() if "kv-probe" in key]
                server.cli("DEL", key)

        lose()
        store(ours, chain_of(4, first_token=1000))
        assert ours.drain(60)
        assert tier.locate(chain_of(4, first_token=1000).hashes) == 4
        with pytest.raises(KVMismatch, match="Redis: the KV kept"):
            opened(OTHER, redis=redis)
        # Where the other one was first, its blocks are not read, and ours are not added.
        lose()
        for key in [key for key in server.all_keys() if "kv-probe" in key]:
            server.cli("DEL", key)
        other = opened(OTHER, redis=redis)
        theirs = chain_of(4, first_token=2000)
        store(other, theirs)
        assert other.drain(60)
        wait_until(lambda: tier.locate(theirs.hashes) is not Outcome.EPOCH)  # another began meanwhile
        assert tier.locate(theirs.hashes) is Outcome.IO_ERROR
        assert "computed otherwise" in caplog.text
        other.close()
        ours.close()


@on_redis
def test_a_server_that_attaches_later_with_another_models_kv_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with standalone() as server:
        redis = {"url": server.url, "connect_timeout": "20s", "deadline": "20s"}
        opened(OURS, redis=redis).close()
        server.kill()
        tiers = opened(OTHER, redis=redis)  # nobody to ask
        [port] = tiers.ports
        assert port.tier is None
        server.start()
        opened(OURS, redis=redis).close()  # its memory was empty: whoever comes first is the maker
        assert not port.probe("read")
        assert port.tier is None
        tiers.close()
    assert "Redis: the KV kept under this model's name was computed otherwise" in caplog.text
