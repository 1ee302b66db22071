"""The in-process connector: its copies on a GPU are measured as configured; a slab says what its model is."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import wait_until

from kvtier.connector.local import LocalConnector, open_tiers
from kvtier.tiers.config.config import Config
from kvtier.tiers.copies.copy_ways import CopyWays
from kvtier.tiers.file.about import apart_by_size
from kvtier.tiers.naming.identity import KVShape, ModelIdentity

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


def test_engines_of_two_sizes_leave_word_of_it_beside_their_slabs(tmp_path: Path) -> None:
    one = ModelIdentity(
        model="tiny", revision="ab" * 20, config_digest="0" * 64, dtype="bfloat16", kv_dtype="bfloat16",
        compute_dtype="bfloat16", num_kv_heads=2, head_dim=8, block_size=4, layers=(0, 1),
    )  # fmt: skip
    config = Config.load(host={"size": "1MiB"}, file={"path": tmp_path, "size": "16MiB"})
    for identity in (one, replace(one, tp_ranks=(0, 2), tp_size=2)):
        assert list(apart_by_size(tmp_path)) == []
        open_tiers(config, identity.fingerprint(), SHAPE, identity).close()
        wait_until((tmp_path / f"{identity.fingerprint().hex()}.about.json").exists)
    assert list(apart_by_size(tmp_path)) == ["tiny, tp_size 1 and 2: [cache] share_across_tp"]
