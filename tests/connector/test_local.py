"""The in-process connector on a GPU: how its copies go is measured, as the configuration says, and counted."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.local import LocalConnector
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.copy_ways import CopyWays
from kvtier.tiers.naming.identity import KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


@pytest.mark.parametrize("batch_from", [None, "64KiB"])
def test_copies_are_measured_unless_they_are_configured(
    batch_from: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CopyWays] = []

    class Stream:
        def __init__(self, tensor: object, region: object, *, ways: CopyWays) -> None:
            made.append(ways)

        def close(self, timeout: float) -> None:
            pass

    monkeypatch.setattr("kvtier.tiers.copies.CudaCopyStream", Stream)
    given = {} if batch_from is None else {"batch_copies_from": batch_from, "copy_grid": 8}
    config = Config.load(host={"size": "1MiB", "pin": False, **given})
    tensor: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
    connector = LocalConnector(config, bytes(32), SHAPE, tensor)
    [ways] = made
    assert ways.wants_measuring == (batch_from is None)
    assert ways.choice.batch_from == (28 << 10 if batch_from is None else 64 << 10)
    ways.count("batch", 4096)
    assert connector.hierarchy.metrics.snapshot()['kvtier_copy_bytes_total{way="batch"}'] == 4096
    connector.close()
