"""The engine's connector where L1 is on a GPU: each region is pinned for the device that copies, before it copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from service_rig import FINGERPRINT

from kvtier.connector.local import LocalConnector
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.copy_ways import CopyWays
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.naming.identity import KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was done, in order."""
    done: list[tuple[str, Any]] = []

    class Stream:
        def __init__(self, tensor: Any, region: HostRegion, *, ways: CopyWays) -> None:
            done.append(("copies", region.region_id))

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
    assert done == [("pins", (first.region_id, 3)), ("copies", first.region_id)]
    # a daemon was restarted: its memory is another one, and is pinned anew
    second = HostRegion.allocate(4, SHAPE.block_bytes, shared=True)
    monkeypatch.setattr(made.tiers, "region", second)
    made.worker.connect(second.region_id)
    made.worker.connect(second.region_id)
    assert done[2:] == [("pins", (second.region_id, 3)), ("copies", second.region_id), ("closed", True)]
    made.close()
    second.close()


def test_nothing_is_pinned_where_it_is_off_and_a_missing_driver_is_named(
    done: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    made = connector(pin=False)
    assert [what for what, _ in done] == ["copies"]
    made.close()
    assert "libcuda" not in caplog.text
    connector().close()
    assert "[host] pin: libcuda.so.1 is not found" in caplog.text
