"""CudaCopyStream on a real device: bytes, fences in both directions, bandwidth-sized batches, the kernel's path."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvtier.tiers import cuda_transfer
from kvtier.tiers.cuda_transfer import CudaCopyStream, TensorCopier
from kvtier.tiers.host import HostRegion
from kvtier.tiers.transfer import BlockCopies

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
        pytest.importorskip("cupy", reason="pinning needs CuPy")
        assert region.pin()
        assert torch.from_numpy(region.array).is_pinned()
    yield region
    region.close()


@pytest.fixture(params=["kernel", "copy"])
def stream(
    request: pytest.FixtureRequest, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaCopyStream]:
    monkeypatch.setattr(cuda_transfer, "KERNEL_BELOW", 1 << 30 if request.param == "kernel" else 0)
    torch.manual_seed(11)
    l1 = torch.randn(SHAPE, device="cuda").to(torch.bfloat16)
    stream = CudaCopyStream(l1, region)
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
