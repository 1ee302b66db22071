"""A namespace keeps the probe of whoever made it, in every tier that can; a model that computes otherwise stays out."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_rig import BUCKET, ObjectServer
from redis_rig import NO_REDIS, standalone

from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import KVMismatch
from kvtier.tiers.file import slab
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.naming.kv_probe import KVProbe

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
    opened(OTHER, objects=objects).close()  # nothing of before counts
    assert len(s3.keys("kvtier/kv-probes")) == 2


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
