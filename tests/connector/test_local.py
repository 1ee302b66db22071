"""The in-process connector: its copies on a GPU are measured as configured; a slab says what its model is.

Each region is pinned for the device that copies, before it copies.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import wait_until
from service_rig import FINGERPRINT

from kvtier.connector.local import LocalConnector, open_apart, open_tiers
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.copy_ways import CopyWays
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.file.about import apart_by_size
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.naming.identity import KVShape, ModelIdentity

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
ONE = ModelIdentity(
    model="tiny", revision="ab" * 20, config_digest="0" * 64, dtype="bfloat16", kv_dtype="bfloat16",
    compute_dtype="bfloat16", num_kv_heads=2, head_dim=8, block_size=4, layers=(0, 1),
)  # fmt: skip


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was done, in order."""
    done: list[tuple[str, Any]] = []

    class Stream:
        def __init__(self, tensor: Any, region: HostRegion, *, ways: CopyWays) -> None:
            done.extend([("copies", region.region_id), ("ways", ways)])

        def close(self, timeout: float) -> None:
            done.append(("closed", timeout > 0))

    monkeypatch.setattr("kvtier.tiers.copies.CudaCopyStream", Stream)
    monkeypatch.setattr(HostRegion, "pin", lambda self, device: done.append(("pins", (self.region_id, device))))
    return done


def connector(**host: Any) -> LocalConnector:
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    return LocalConnector(Config.load(host={"size": "1MiB", **host}), FINGERPRINT, SHAPE, tensor)


def test_each_region_is_pinned_for_the_device_that_copies(
    done: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connector()
    first = made.hierarchy.host.region
    assert done[:2] == [("pins", (first.region_id, 3)), ("copies", first.region_id)]
    # a daemon was restarted: its memory is another one, and is pinned anew
    second = HostRegion.allocate(4, SHAPE.block_bytes, shared=True)
    monkeypatch.setattr(made.tiers, "region", second)
    made.worker.connect(second.region_id)
    made.worker.connect(second.region_id)
    assert done[3:5] == [("pins", (second.region_id, 3)), ("copies", second.region_id)]
    assert done[6:] == [("closed", True)]
    made.close()
    second.close()


def test_nothing_is_pinned_where_it_is_off_and_a_missing_driver_is_named(
    done: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(pin=False)
    assert [what for what, _ in done] == ["copies", "ways"]
    made.close()
    assert "libcuda" not in caplog.text
    connector().close()
    assert "[host] pin: libcuda.so.1 is not found" in caplog.text


@pytest.mark.parametrize("batch_from", [None, "64KiB"])
def test_copies_are_measured_unless_they_are_configured(batch_from: str | None, done: list[tuple[str, Any]]) -> None:
    made = connector(pin=False, **({} if batch_from is None else {"batch_copies_from": batch_from, "copy_grid": 8}))
    ways = dict(done)["ways"]
    assert ways.wants_measuring == (batch_from is None)
    assert ways.choice.batch_from == (28 << 10 if batch_from is None else 64 << 10)
    ways.count("batch", 4096)
    assert made.hierarchy.metrics.snapshot()['kvtier_copy_bytes_total{way="batch"}'] == 4096
    made.close()


def test_engines_of_two_sizes_leave_word_of_it_beside_their_slabs(tmp_path: Path) -> None:
    config = Config.load(host={"size": "1MiB"}, file={"path": tmp_path, "size": "16MiB"})
    for identity in (ONE, replace(ONE, tp_ranks=(0, 2), tp_size=2)):
        assert list(apart_by_size(tmp_path)) == []
        open_tiers(config, identity.fingerprint(), SHAPE, identity).close()
        wait_until((tmp_path / f"{identity.fingerprint().hex()}.about.json").exists)
    assert list(apart_by_size(tmp_path)) == ["tiny, tp_size 1 and 2: [cache] share_across_tp"]


@pytest.mark.parametrize("option", ["share_across_tp", "share_across_pp"])
def test_an_engine_without_ranks_refuses_to_cut_blocks(option: str) -> None:
    """KVTier and kvtier's engine: what one head or layer has cannot be cut, so there any number says the same."""
    with pytest.raises(ConfigError, match=rf"\[cache\] {option} 4: this engine keeps blocks whole; leave it out"):
        open_apart(Config.load(cache={option: 4}), ONE, SHAPE, None)
    for size, identity in ((1, ONE), (4, replace(ONE, num_kv_heads=1, layers=(0,)))):
        open_apart(Config.load(host={"size": "1MiB"}, cache={option: size}), identity, SHAPE, None)[0].close()
