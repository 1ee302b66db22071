"""CudaCopyStream on a real device: bytes, fences both ways, large batches, the kernel's path, an engine's blocks."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream, TensorCopier
from kvtier.tiers.copies.engine_blocks import BlockPart, EngineBlocks, PartCopier
from kvtier.tiers.copies.transfer import BlockCopies
from kvtier.tiers.host.host import HostRegion

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CuPy's and the driver's own
]

NUM_BLOCKS, NUM_LAYERS, NUM_SLOTS = 48, 4, 64
SHAPE = (NUM_BLOCKS, NUM_LAYERS, 2, 16, 8, 64)  # 128 KiB a block in bfloat16
BLOCK_BYTES = 4 * 2 * 16 * 8 * 64 * 2


def pairs(blocks: list[int], slots: list[int], layers: tuple[int, int] | None = None) -> BlockCopies:
    return BlockCopies(np.array(blocks, np.int64), np.array(slots, np.int64), layers)


@pytest.fixture(params=["pinned", "pageable"])
def region(request: pytest.FixtureRequest) -> Iterator[HostRegion]:
    region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    if request.param == "pinned":
        region.pin(torch.cuda.current_device())
        assert region.pinning is not None
        assert region.pinning.wait(60)
        assert torch.from_numpy(region.array).is_pinned()
    yield region
    region.close()


@pytest.fixture(params=["kernel", "copy"])
def stream(request: pytest.FixtureRequest, region: HostRegion) -> Iterator[CudaCopyStream]:
    choice = CopyChoice(batch_from=None, torch_from=None if request.param == "kernel" else 0)
    torch.manual_seed(11)
    l1 = torch.randn(SHAPE, device="cuda").to(torch.bfloat16)
    stream = CudaCopyStream(l1, region, ways=CopyWays(choice))
    yield stream
    stream.close(30)


def l1_of(stream: CudaCopyStream) -> torch.Tensor:
    """L1 as bytes, `[num_blocks, num_layers, layer_bytes]`."""
    assert isinstance(stream._copier, TensorCopier)
    return stream._copier.l1


def test_scattered_blocks_come_back(stream: CudaCopyStream, region: HostRegion) -> None:
    l1 = l1_of(stream)
    before = l1.cpu().numpy()
    rng = np.random.default_rng(1)
    blocks, slots = rng.permutation(NUM_BLOCKS)[:30].tolist(), rng.permutation(NUM_SLOTS)[:30].tolist()
    stored = stream.store(pairs(blocks, slots))
    assert stored.wait(30)
    assert stored.error is None
    for block, slot in zip(blocks, slots, strict=True):
        assert np.array_equal(region.array[slot], before[block].reshape(-1))
    l1.zero_()
    loaded = stream.load(pairs(blocks, slots))
    assert stream.fence(loaded, 30)
    after = l1.cpu().numpy()  # on the current stream: the fence alone orders it
    assert np.array_equal(after[blocks], before[blocks])
    assert np.count_nonzero(after.any(axis=(1, 2))) == 30


def test_layer_ranges_move_only_their_layers(stream: CudaCopyStream, region: HostRegion) -> None:
    region.array[:] = np.random.default_rng(2).integers(1, 256, region.array.shape, np.uint8)
    l1 = l1_of(stream)
    l1.zero_()
    loaded = stream.load(pairs([3, 40, 7], [9, 0, 63], (1, 3)))
    assert stream.fence(loaded, 30)
    part = l1.cpu().numpy()
    expected = region.array[[9, 0, 63]].reshape(3, NUM_LAYERS, -1)
    assert np.array_equal(part[[3, 40, 7], 1:3], expected[:, 1:3])
    assert not part[:, [0, 3]].any()


def test_a_store_sees_the_compute_before_it_and_a_load_does_not_overtake_it(
    stream: CudaCopyStream, region: HostRegion
) -> None:
    l1 = l1_of(stream)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # some tens of milliseconds of compute in front
        busy = busy @ busy
        busy = busy / busy.norm()
    l1[5].fill_(7)
    stored = stream.store(pairs([5], [5]))  # waits for the fill
    assert stored.wait(30)
    assert (region.array[5] == 7).all()
    # compute that still reads block 5 is queued; a load into it has to come after
    region.array[6] = 9
    for _ in range(20):
        busy = busy @ busy
        busy = busy / busy.norm()
    read = l1[5].clone()
    loaded = stream.load(pairs([5], [6]))
    assert stream.fence(loaded, 30)
    assert (read == 7).all()
    assert (l1[5] == 9).all()
    assert loaded.wait(30)


def test_both_directions_at_once(stream: CudaCopyStream, region: HostRegion) -> None:
    l1 = l1_of(stream)
    before = l1.cpu().numpy()
    region.array[32:48] = np.random.default_rng(5).integers(0, 256, (16, region.slot_stride), np.uint8)
    events = []
    for i in range(16):
        events.append(stream.store(pairs([i], [i])))
        events.append(stream.load(pairs([16 + i], [32 + i])))
    assert stream.drain(30)
    assert [event.error for event in events] == [None] * 32
    after = l1.cpu().numpy()
    for i in range(16):
        assert np.array_equal(region.array[i], before[i].reshape(-1))
        assert np.array_equal(after[16 + i].reshape(-1), region.array[32 + i])


# An engine's KV: for each layer [blocks, heads, tokens, keys and values].
HEADS, TOKENS, DIM = 8, 16, 64
LAYER_BYTES = HEADS * TOKENS * 2 * DIM * 2
Layout = Callable[[list[torch.Tensor]], list[BlockPart]]


def whole_layers(tensors: list[torch.Tensor]) -> list[BlockPart]:
    return [BlockPart(tensor, layer, layer * LAYER_BYTES) for layer, tensor in enumerate(tensors)]


def keys_and_values(tensors: list[torch.Tensor]) -> list[BlockPart]:
    """As our own blocks have them: keys before values, tokens before heads."""
    return [
        BlockPart(tensor[..., kv * DIM : (kv + 1) * DIM].transpose(1, 2), layer, (2 * layer + kv) * LAYER_BYTES // 2)
        for layer, tensor in enumerate(tensors)
        for kv in (0, 1)
    ]


def dimension_first(tensors: list[torch.Tensor]) -> list[BlockPart]:
    return [BlockPart(tensor.transpose(2, 3), layer, layer * LAYER_BYTES) for layer, tensor in enumerate(tensors)]


def second_rank(tensors: list[torch.Tensor]) -> list[BlockPart]:
    """Half of the heads of every layer, in the second half of a slot."""
    half = BLOCK_BYTES // 2
    return [BlockPart(tensor[:, 4:], layer, half + layer * LAYER_BYTES // 2) for layer, tensor in enumerate(tensors)]


def two_groups(tensors: list[torch.Tensor]) -> list[BlockPart]:
    return [BlockPart(tensor, layer, layer * LAYER_BYTES, layer % 2) for layer, tensor in enumerate(tensors)]


def engine_tensors() -> list[torch.Tensor]:
    with torch.inference_mode():  # as engines make theirs
        return [
            torch.randn((NUM_BLOCKS, HEADS, TOKENS, 2 * DIM), device="cuda").to(torch.bfloat16)
            for _ in range(NUM_LAYERS)
        ]


@pytest.mark.parametrize("layout", [whole_layers, keys_and_values, dimension_first, second_rank, two_groups])
@pytest.mark.parametrize("staged_slots", [3, 100])
def test_engine_blocks_arrive_as_a_cpu_copies_them(
    region: HostRegion, layout: Layout, staged_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", staged_slots * BLOCK_BYTES)
    torch.manual_seed(13)
    tensors = engine_tensors()
    twins = [tensor.cpu() for tensor in tensors]
    expected = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    region.array[:] = expected.array[:] = 0x5A  # a rank leaves the other's half alone
    blocks, twin = (EngineBlocks(layout(side), BLOCK_BYTES) for side in (tensors, twins))
    stream, reference = CudaCopyStream(blocks, region), PartCopier(twin, expected)
    rng = np.random.default_rng(1)
    ids, slots = rng.permutation(blocks.num_blocks)[:30].tolist(), rng.permutation(NUM_SLOTS)[:30].tolist()
    stored = stream.store(pairs(ids, slots))
    assert stored.wait(30)
    assert stored.error is None
    assert reference.copy("store", pairs(ids, slots)) is None
    assert np.array_equal(region.array, expected.array)
    # whole blocks and a range of layers back, to other blocks than they are from
    for copies in (pairs(ids[:20], slots[10:]), pairs(ids[20:], slots[:10], (1, 3))):
        loaded = stream.load(copies)
        assert stream.fence(loaded, 30)
        assert reference.copy("load", copies) is None
    for tensor, other in zip(tensors, twins, strict=True):
        assert torch.equal(tensor.cpu(), other)  # on the current stream: the fences alone order it
    assert stream.drain(30)
    stream.close(30)
    expected.close()


def test_engine_blocks_follow_compute_and_their_staging_is_not_overtaken(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", BLOCK_BYTES)  # every block by itself through the same bytes
    with torch.inference_mode():
        tensors = engine_tensors()
        stream = CudaCopyStream(EngineBlocks(keys_and_values(tensors), BLOCK_BYTES), region)
        every = np.arange(NUM_BLOCKS)
        numbers = torch.arange(NUM_BLOCKS, device="cuda").to(torch.bfloat16).view(-1, 1, 1, 1)
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):  # some tens of milliseconds of compute in front
            busy = busy @ busy
            busy = busy / busy.norm()
        for tensor in tensors:
            tensor.copy_(numbers.expand_as(tensor))
        stored = stream.store(pairs(every.tolist(), every.tolist()))  # waits for the numbers
        loaded = stream.load(
            pairs(every.tolist(), every[::-1].tolist()), after=stored
        )  # the blocks the other way round
        assert stream.fence(loaded, 30)
        turned = [tensor.clone() for tensor in tensors]
    assert stream.drain(30)
    assert stored.error is None
    assert loaded.error is None
    kept = torch.from_numpy(region.array).view(torch.bfloat16)[:NUM_BLOCKS]
    assert torch.equal(kept, torch.arange(NUM_BLOCKS).to(torch.bfloat16).view(-1, 1).expand_as(kept))
    for tensor in turned:
        assert torch.equal(tensor, numbers.flip(0).expand_as(tensor))
    stream.close(30)
