"""CUDA graphs beside copies: captured while another thread copies, and replayed between stores and loads."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_rig import WAYS, DeviceRig, ended_well, pairs

from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

NUM_BLOCKS, SLOT = 32, 256 << 10


@pytest.fixture
def region(rig: DeviceRig) -> Iterator[HostRegion]:
    region = HostRegion.allocate(NUM_BLOCKS, SLOT)
    rig.pin(region, slots_per_piece=8)
    yield region
    region.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_is_captured_and_replayed_beside_copies(rig: DeviceRig, region: HostRegion, way: str) -> None:
    l1 = rig.upload(torch.zeros((NUM_BLOCKS, 4, SLOT // 4), dtype=torch.uint8))
    region.array[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    written, every = l1[0], list(range(NUM_BLOCKS))
    with rig.stream(l1, region, way) as stream:
        # torch waits for all copies before it captures
        loaded = stream.load(pairs(every[1:], every[1:]))
        replay = rig.graph(lambda: written.add_(1), reads=[written], writes=[written])
        ended_well(loaded)
        rig.compute(written.zero_, writes=[written])
        # a decode step: the graph writes a block, a store takes it; loads of other blocks go on beside it
        for step in range(1, 9):
            replay()
            stored = stream.store(pairs([0], [step]))
            beside = stream.load(pairs(every[16:], every[16:]))
            assert stream.fence(stored, 30)  # the next step writes to the block
            ended_well(stored, beside)
            rig.host_reads(region, [step])
            assert (region.array[step] == step).all()
        # a graph that reads what a load brings is launched behind it
        total = rig.upload(torch.zeros(1, dtype=torch.int64))
        ahead = rig.graph(lambda: total.copy_(l1[1:2].sum()), reads=[l1[1:2]], writes=[total])
        for slot in (20, 30):
            rig.busy()
            loaded = stream.load(pairs([1], [slot]))
            assert stream.fence(loaded, 30)
            ahead()
            assert rig.read(total).item() == slot * SLOT
            ended_well(loaded)


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_another_thread_do_not_spoil_a_capture(rig: DeviceRig, region: HostRegion, way: str) -> None:
    l1 = rig.upload(torch.zeros((NUM_BLOCKS, 4, SLOT // 4), dtype=torch.uint8))
    region.array[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    written = l1[0]
    with rig.stream(l1, region, way) as stream:
        ended = list[bool]()

        def copies() -> None:
            for block in range(1, 9):
                event = stream.load(pairs([block, block + 16], [block, block + 16]))
                ended.append(event.wait(30) and event.error is None)  # asks about the event

        def act() -> None:
            written.add_(1)
            beside = threading.Thread(target=copies)
            beside.start()
            beside.join(60)
            written.add_(1)

        replay = rig.graph(act, reads=[written], writes=[written])
        assert ended
        assert all(ended)
        rig.compute(written.zero_, writes=[written])
        replay()
        assert (rig.read(written) == 2).all()
        assert (rig.read(l1[1:9]).view(8, -1)[:, 0] == torch.arange(1, 9)).all()
