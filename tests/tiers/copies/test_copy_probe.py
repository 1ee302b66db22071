"""The measurement of a device on an adversary's CUDA: real copiers and streams, times that a script gives."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_cupy import LazyCupy
from lazy_cuda import LazyCuda, LazyDriver, Op, pin

from kvtier.tiers.config.sections import HostConfig
from kvtier.tiers.copies import copy_probe
from kvtier.tiers.copies.copy_ways import CopyWays, KeptChoices
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.metrics import Metrics

KIB = 1 << 10
SLOT = 16 * KIB


def scripted(op: Op) -> float:
    """Seconds on a device whose batches are as fast as its kernel from 64 KiB on, and whose kernel needs 16 blocks.

    Both ways at once it is as fast as one way alone.
    """
    num_bytes = sum(high - low for low, high in op.writes)
    if op.what.startswith("batch of"):
        return num_bytes / (51e9 if num_bytes / int(op.what.split()[2]) >= 64 * KIB else 5e9)
    if op.what.startswith("kv_"):
        blocks = int(op.what.split()[-2])
        return num_bytes / (41e9 * min(1.0, blocks / 16))
    if op.what.startswith("copy of"):
        return 6e-6 + num_bytes / 51e9
    return num_bytes / 1500e9  # gathers on the device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LazyCuda:
    monkeypatch.setattr(copy_probe, "_MAX_PIECES", 16)  # every op is compared with every other
    monkeypatch.setattr(copy_probe, "_MAX_BYTES", 4 << 20)  # the script's times count, not this machine's
    monkeypatch.setattr(copy_probe, "DEADLINE", 300.0)
    monkeypatch.setattr(copy_probe, "_PATIENCE", 60.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda = LazyCuda(5, eager=0.9, cost=scripted)
    cuda.patch(monkeypatch)
    return cuda


@pytest.fixture
def region(cuda: LazyCuda) -> Iterator[HostRegion]:
    region = HostRegion.allocate(8, SLOT, prefault=False)
    pin(region, cuda)
    yield region
    region.close()


def ended(stream: CudaCopyStream) -> None:
    assert stream._calibration is not None
    assert stream._calibration.wait(120)


def own(region: HostRegion, driver: Any, ways: CopyWays, cupy: Any) -> CudaCopyStream:
    return CudaCopyStream(torch.zeros(8, 4, SLOT // 4, dtype=torch.uint8), region, cupy=cupy, driver=driver, ways=ways)


def test_our_own_blocks_are_measured_by_the_copies_they_get(cuda: LazyCuda, region: HostRegion, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")
    kept, driver, metrics = region.array.copy(), LazyDriver(cuda), Metrics()
    ways = CopyWays.to_measure(HostConfig(), metrics)
    stream = own(region, driver, ways, LazyCupy(cuda))
    ended(stream)
    assert (ways.choice.batch_from, ways.choice.grid, ways.choice.source) == (64 * KIB, 16, "measured")
    assert ways.choice.reason.startswith("pieces of 64KiB: batch 68.0, kernel 54.7, torch")
    assert "kvtier_copies_total" not in "".join(metrics.snapshot())  # what is measured with is not counted
    stream.close(1)
    cuda.finish()
    assert (region.array == kept).all()  # L2 was not touched
    assert len(cuda.registered) == 1  # nothing but L2 is pinned any more
    # the next stream knows it
    num_ops, again = cuda.num_ops, CopyWays.to_measure(HostConfig())
    stream = own(region, driver, again, LazyCupy(cuda))
    assert again.choice == ways.choice
    assert cuda.num_ops == num_ops
    stream.close(1)


def test_an_engines_blocks_are_measured_against_their_staging(cuda: LazyCuda, region: HostRegion) -> None:
    driver: Any = LazyDriver(cuda)
    parts = [BlockPart(torch.zeros(8, SLOT, dtype=torch.uint8), 0, 0)]
    ways = CopyWays.to_measure(HostConfig())
    stream = CudaCopyStream(EngineBlocks(parts, SLOT), region, driver=driver, ways=ways)
    ended(stream)
    # Staged pieces travel eight at a time: 8 KiB are 64 KiB then, which a batch moves fast. Of loads, stores and both
    # at once, the latter as fast as one of them, the rate is 4/3.
    assert (ways.choice.batch_from, ways.choice.source) == (64 * KIB, "measured")
    assert ways.choice.reason.startswith("pieces of 64KiB: batch 68.0, staging ")
    assert [each.key.kind for each in KeptChoices().all()] == ["engine"]
    stream.close(1)
    cuda.finish()


def test_memory_of_copies_that_do_not_end_stays(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, kept = list[HostRegion](), list[tuple[object, ...]]()
    monkeypatch.setattr(host, "_KEPT", kept)

    class Endless:
        def copy(self, *_: object, **__: object) -> None:
            monkeypatch.setattr(copy_probe, "_PATIENCE", 0.0)
            monkeypatch.setattr(torch.cuda.Event, "query", lambda event: False)

    def make(memory: object, region: HostRegion, ways: CopyWays) -> Endless:
        regions.append(region)
        return Endless()

    driver: Any = LazyDriver(cuda)
    with (
        pytest.raises(RuntimeError, match="have not ended"),
        copy_probe.CopyProbe.open(torch.device("cpu", 0), driver, make, ["torch"]) as probe,
    ):
        probe.rate("torch", 4 * KIB, 16)
    assert [region.num_slots for region in regions] == [0]  # it is closed,
    assert len(kept) == len(cuda.registered) == 1  # and its memory is mapped and pinned as before


def test_what_is_configured_is_not_measured(cuda: LazyCuda, region: HostRegion) -> None:
    ways = CopyWays.to_measure(HostConfig(batch_copies_from=1, copy_grid=8))
    stream = own(region, LazyDriver(cuda), ways, None)
    assert stream._calibration is None
    stream.close(1)
