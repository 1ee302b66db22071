"""Pinning on a device: piece by piece, and refused by the driver. The next calls know of no error, and copies go on."""

import numpy as np
import pytest
import torch
from device_rig import DeviceRig, ended_well, pairs

from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import PinDriver, PinnedPieces

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

NUM_BLOCKS, SLOT = 12, 64 << 10


class OnlyTheFirst:
    """The device's driver, where memory may be locked for one piece only."""

    def __init__(self, driver: PinDriver) -> None:
        self.driver = driver
        self.num_asked = 0

    def use(self, device: int) -> None:
        self.driver.use(device)

    def register(self, address: int, num_bytes: int) -> None:
        self.num_asked += 1
        # what is not there cannot be pinned: the driver itself refuses
        self.driver.register(address, num_bytes)
        if self.num_asked > 1:
            self.driver.unregister(address)
            raise RuntimeError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")

    def unregister(self, address: int) -> None:
        self.driver.unregister(address)


def compute_goes_on(rig: DeviceRig) -> None:
    """A launch and a copy of torch's, which would die of an error that was left pending."""
    ones = torch.ones(64, device=rig.device)
    rig.compute(lambda: ones.add_(1), writes=[ones])
    assert rig.read(ones).sum() == 128


def test_what_the_driver_refuses_is_told_and_leaves_no_error_behind(
    rig: DeviceRig, caplog: pytest.LogCaptureFixture
) -> None:
    region = HostRegion.allocate(NUM_BLOCKS, SLOT)
    rig.pin(region, slots_per_piece=NUM_BLOCKS)
    again = PinnedPieces(region, rig.pin_driver(), 0)  # the same memory: the driver says no
    assert again.wait(60)
    assert again.error is not None
    assert "ALREADY_REGISTERED" in again.error
    assert "are pinned, copies of the rest are slow" in caplog.text
    assert again.num_bytes == 0
    compute_goes_on(rig)
    again.close()
    assert region.pinned  # the first one's is still there
    region.close()
    compute_goes_on(rig)


def test_blocks_in_pinned_and_in_other_slots_are_all_copied(rig: DeviceRig) -> None:
    l1 = rig.upload(torch.randint(0, 256, (NUM_BLOCKS, 4, SLOT // 4), dtype=torch.uint8))
    before = rig.read(l1).numpy().reshape(NUM_BLOCKS, -1)
    region = HostRegion.allocate(NUM_BLOCKS, SLOT)
    region.pinning = PinnedPieces(region, OnlyTheFirst(rig.pin_driver()), 0, piece_bytes=4 * SLOT)
    assert region.pinning.wait(60)
    assert region.pinning.num_bytes == 4 * SLOT
    compute_goes_on(rig)
    slots = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()  # pinned and pageable in one copy
    with rig.stream(l1, region, "batch") as stream:
        ended_well(stream.store(pairs(range(NUM_BLOCKS), slots)))
        rig.host_reads(region, slots)
        assert np.array_equal(region.array[slots], before)
        rig.compute(l1.zero_, writes=[l1])
        back = [stream.load(pairs([block], [slot])) for block, slot in enumerate(slots)]
        for event in back:
            assert stream.fence(event, 30)
        assert np.array_equal(rig.read(l1).numpy().reshape(NUM_BLOCKS, -1), before)
        ended_well(*back)
    region.close()


def test_memory_is_pinned_anew_behind_its_end(rig: DeviceRig) -> None:
    for _ in range(3):  # a region that goes takes its registration along
        region = HostRegion.allocate(NUM_BLOCKS, SLOT)
        rig.pin(region)
        region.close()
    compute_goes_on(rig)
