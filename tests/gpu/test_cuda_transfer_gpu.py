"""CudaCopyStream on a device: bytes, fences both ways, large batches, every way of copying, an engine's blocks."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_rig import WAYS, DeviceRig, ended_well, pairs
from engine_layouts import Layout, dimension_first, keys_and_values, one_rank, two_groups, whole_layers
from extent import brief

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import EngineBlocks, PartCopier
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

NUM_BLOCKS, NUM_LAYERS, NUM_SLOTS = 48, 4, 64
SHAPE = (NUM_BLOCKS, NUM_LAYERS, 2, 16, 8, 64)  # 128 KiB a block in bfloat16
BLOCK_BYTES = 4 * 2 * 16 * 8 * 64 * 2


@pytest.fixture(params=["pinned", "pageable"])
def region(request: pytest.FixtureRequest, rig: DeviceRig) -> Iterator[HostRegion]:
    region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    if request.param == "pinned":
        rig.pin(region)
    yield region
    region.close()


@pytest.fixture
def l1(rig: DeviceRig) -> torch.Tensor:
    torch.manual_seed(11)
    return rig.upload(torch.randn(SHAPE).to(torch.bfloat16))


@pytest.fixture(params=WAYS)
def stream(
    request: pytest.FixtureRequest, rig: DeviceRig, l1: torch.Tensor, region: HostRegion
) -> Iterator[CudaCopyStream]:
    with rig.stream(l1, region, str(request.param)) as stream:
        yield stream


def block_rows(l1: torch.Tensor) -> torch.Tensor:
    """L1 as bytes, `[num_blocks, num_layers, layer_bytes]`."""
    return l1.view(torch.uint8).view(NUM_BLOCKS, NUM_LAYERS, -1)


def test_scattered_blocks_come_back(
    rig: DeviceRig, stream: CudaCopyStream, l1: torch.Tensor, region: HostRegion
) -> None:
    rows = block_rows(l1)
    before = rig.read(rows).numpy()
    rng = np.random.default_rng(1)
    blocks, slots = rng.permutation(NUM_BLOCKS)[:30].tolist(), rng.permutation(NUM_SLOTS)[:30].tolist()
    ended_well(stream.store(pairs(blocks, slots)))
    rig.host_reads(region, slots)
    for block, slot in zip(blocks, slots, strict=True):
        assert np.array_equal(region.array[slot], before[block].reshape(-1))
    rig.compute(rows.zero_, writes=[rows])
    loaded = stream.load(pairs(blocks, slots))
    assert stream.fence(loaded, 30)
    after = rig.read(rows).numpy()  # on the current stream: the fence alone orders it
    assert np.array_equal(after[blocks], before[blocks])
    assert np.count_nonzero(after.any(axis=(1, 2))) == 30


def test_layer_ranges_move_only_their_layers(
    rig: DeviceRig, stream: CudaCopyStream, l1: torch.Tensor, region: HostRegion
) -> None:
    region.array[:] = np.random.default_rng(2).integers(1, 256, region.array.shape, np.uint8)
    rows = block_rows(l1)
    rig.compute(rows.zero_, writes=[rows])
    loaded = stream.load(pairs([3, 40, 7], [9, 0, 63], (1, 3)))
    assert stream.fence(loaded, 30)
    part = rig.read(rows).numpy()
    expected = region.array[[9, 0, 63]].reshape(3, NUM_LAYERS, -1)
    assert np.array_equal(part[[3, 40, 7], 1:3], expected[:, 1:3])
    assert not part[:, [0, 3]].any()


def test_a_store_sees_the_compute_before_it_and_a_load_does_not_overtake_it(
    rig: DeviceRig, stream: CudaCopyStream, l1: torch.Tensor, region: HostRegion
) -> None:
    block = block_rows(l1)[5]
    rig.busy()
    rig.compute(lambda: block.fill_(7), writes=[block])
    ended_well(stream.store(pairs([5], [5])))  # waits for the fill
    rig.host_reads(region, [5])
    assert (region.array[5] == 7).all()
    # compute that still reads block 5 is queued; a load into it has to come after
    region.array[6] = 9
    rig.busy()
    read = torch.empty_like(block)
    rig.compute(lambda: read.copy_(block), reads=[block], writes=[read])
    loaded = stream.load(pairs([5], [6]))
    assert stream.fence(loaded, 30)
    assert (rig.read(read) == 7).all()
    assert (rig.read(block) == 9).all()
    ended_well(loaded)


def test_both_directions_at_once(rig: DeviceRig, stream: CudaCopyStream, l1: torch.Tensor, region: HostRegion) -> None:
    before = rig.read(block_rows(l1)).numpy()
    region.array[32:48] = np.random.default_rng(5).integers(0, 256, (16, region.slot_stride), np.uint8)
    events = []
    for i in range(16):
        events.append(stream.store(pairs([i], [i])))
        events.append(stream.load(pairs([16 + i], [32 + i])))
    assert stream.drain(30)
    assert [event.error for event in events] == [None] * 32
    rig.host_reads(region, range(16))
    after = rig.read(block_rows(l1)).numpy()
    for i in range(16):
        assert np.array_equal(region.array[i], before[i].reshape(-1))
        assert np.array_equal(after[16 + i].reshape(-1), region.array[32 + i])


# An engine's KV: for each layer [blocks, heads, tokens, keys and values].
HEADS, TOKENS, DIM = 8, 16, 64
OTHERS = [whole_layers, dimension_first]


def engine_tensors(rig: DeviceRig) -> list[torch.Tensor]:
    with torch.inference_mode():  # as engines make theirs
        shape = (NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)
        return [rig.upload(torch.randn(shape).to(torch.bfloat16)) for _ in range(NUM_LAYERS)]


@pytest.mark.parametrize("way", ["batch", "copies"])
@pytest.mark.parametrize("layout", [keys_and_values, one_rank, two_groups, *brief([], OTHERS)])
@pytest.mark.parametrize("staged_slots", brief([3], [3, 100]))
def test_engine_blocks_arrive_as_a_cpu_copies_them(
    rig: DeviceRig, region: HostRegion, layout: Layout, staged_slots: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", staged_slots * BLOCK_BYTES)
    torch.manual_seed(13)
    tensors = engine_tensors(rig)
    twins = [rig.read(tensor) for tensor in tensors]
    expected = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    region.array[:] = expected.array[:] = 0x5A  # a rank leaves the other's half alone
    blocks, twin = (EngineBlocks(layout(side), BLOCK_BYTES) for side in (tensors, twins))
    reference = PartCopier(twin, expected)
    rng = np.random.default_rng(1)
    ids, slots = rng.permutation(blocks.num_blocks)[:30].tolist(), rng.permutation(NUM_SLOTS)[:30].tolist()
    with rig.stream(blocks, region, way) as stream:
        ended_well(stream.store(pairs(ids, slots)))
        rig.host_reads(region, slots)
        assert reference.copy("store", pairs(ids, slots)) is None
        assert np.array_equal(region.array, expected.array)
        # whole blocks and a range of layers back, to other blocks than they are from
        for copies in (pairs(ids[:20], slots[10:]), pairs(ids[20:], slots[:10], (1, 3))):
            loaded = stream.load(copies)
            assert stream.fence(loaded, 30)
            assert reference.copy("load", copies) is None
        for tensor, other in zip(tensors, twins, strict=True):
            assert torch.equal(rig.read(tensor), other)  # on the current stream: the fences alone order it
        assert stream.drain(30)
    expected.close()


def test_engine_blocks_follow_compute_and_their_staging_is_not_overtaken(
    rig: DeviceRig, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", BLOCK_BYTES)  # every block by itself through the same bytes
    every = list(range(NUM_BLOCKS))
    with torch.inference_mode():
        tensors = engine_tensors(rig)
        numbers = torch.arange(NUM_BLOCKS, device=rig.device).to(torch.bfloat16).view(-1, 1, 1, 1)
        with rig.stream(EngineBlocks(keys_and_values(tensors), BLOCK_BYTES), region, "copies") as stream:
            rig.busy()

            def fill() -> None:
                for tensor in tensors:
                    tensor.copy_(numbers.expand_as(tensor))

            rig.compute(fill, writes=tensors)
            stored = stream.store(pairs(every, every))  # waits for the numbers
            loaded = stream.load(pairs(every, every[::-1]), after=stored)  # the blocks the other way round
            assert stream.fence(loaded, 30)
            turned = [rig.read(tensor) for tensor in tensors]
            ended_well(stored, loaded)
        rig.host_reads(region, every)
        kept = torch.from_numpy(region.array).view(torch.bfloat16)[:NUM_BLOCKS]
        assert torch.equal(kept, torch.arange(NUM_BLOCKS).to(torch.bfloat16).view(-1, 1).expand_as(kept))
        for tensor in turned:
            assert torch.equal(tensor, numbers.cpu().flip(0).expand_as(tensor))
