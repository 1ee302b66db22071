"""The CUDA stream's logic on a CPU: fences, errors, closing and pieces, with the device's streams and events faked.

What a real device does with the same calls is in tests/gpu/test_cuda_transfer_gpu.py.
"""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from doubles import wait_until
from lazy_cuda import LazyCuda, LazyDriver, pin

from kvtier.tiers.copies import cuda_transfer, packer
from kvtier.tiers.copies.block_copier import BlockCopies, BlockPart, EngineBlocks
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream, CudaEvent
from kvtier.tiers.copies.transfer import HostEvent
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import PinnedPieces

NUM_BLOCKS, NUM_LAYERS, LAYER_BYTES, NUM_SLOTS = 12, 3, 4096, 16
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES


class FakeEvent(torch.cuda.Event):
    """A device event that passes when the test's device says so."""

    def __new__(cls, device: "FakeDevice") -> "FakeEvent":
        return object.__new__(cls)

    def __init__(self, device: "FakeDevice") -> None:
        self.fake = device
        self.recorded_on: object = None

    def record(self, stream: object = None) -> None:
        self.recorded_on = stream
        self.fake.log.append(("record", stream))

    def query(self) -> bool:
        if self.fake.error:
            raise RuntimeError(self.fake.error)
        return not self.fake.busy


class FakeStream:
    def __init__(self, device: "FakeDevice", name: str) -> None:
        self.device, self.name, self.cuda_stream = device, name, 0

    def wait_event(self, event: FakeEvent) -> None:
        self.device.log.append(("wait", self, event.recorded_on))

    def __repr__(self) -> str:
        return self.name


class FakeDevice:
    """Copies are made at once; their events pass while not `busy`; `error` is what the driver then answers."""

    def __init__(self) -> None:
        self.busy = False
        self.error = ""
        self.log: list[tuple[object, ...]] = []
        self.compute = FakeStream(self, "compute")
        self.named = iter(("loads", "stores"))


class Launches:
    """Stands for LayoutKernels: notes which kernel was launched, for how many blocks."""

    def __init__(self, geometry: object, cupy: object) -> None:
        self.calls: list[tuple[str, int]] = []

    def compile(self, canonical: object) -> None:
        pass

    def gather(self, blocks: int, slots: int, count: int, canonical: object, stream: int) -> None:
        self.calls.append(("gather", count))

    def scatter(self, blocks: int, slots: int, count: int, canonical: object, stream: int) -> None:
        self.calls.append(("scatter", count))


def no_cupy(geometry: object, cupy: object) -> None:
    raise ImportError("No module named 'cupy'")


def pairs(blocks: list[int], slots: list[int], layers: tuple[int, int] | None = None) -> BlockCopies:
    return BlockCopies(np.array(blocks, np.int64), np.array(slots, np.int64), layers)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(cuda_transfer, "_stream", lambda _: FakeStream(device, next(device.named)))
    monkeypatch.setattr(cuda_transfer, "_device_event", lambda: FakeEvent(device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: device.compute)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(packer, "LayoutKernels", no_cupy)
    return device


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    pin(region)
    yield region
    region.close()


@pytest.fixture
def l1() -> torch.Tensor:
    return torch.arange(NUM_BLOCKS * BLOCK_BYTES).reshape(NUM_BLOCKS, NUM_LAYERS, 2, -1).to(torch.uint8)


def test_copies_arrive_and_pieces_are_merged(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = CudaCopyStream(l1, region)
    before = l1.clone()
    copied: list[int] = []
    real = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        copied.append(len(target))
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    event = stream.store(pairs([4, 9, 5, 6, 0], [8, 2, 9, 10, 1]))
    assert copied == [1, 1, 3]  # slots 8, 9 and 10 are blocks 4, 5 and 6: one copy
    assert event.wait(0)
    assert event.error is None
    for block, slot in ((4, 8), (9, 2), (5, 9), (6, 10), (0, 1)):
        assert np.array_equal(region.array[slot], before[block].reshape(-1).numpy())
    # loads of a layer range: never merged, and only those layers
    copied.clear()
    stream.load(pairs([1, 2], [8, 9], (1, 2)))
    assert copied == [1, 1]
    assert torch.equal(l1[1, 1], before[4, 1])
    assert torch.equal(l1[1, [0, 2]], before[1, [0, 2]])
    stream.close(1)


def test_without_an_event_a_copy_follows_the_callers_compute(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor
) -> None:
    stream = CudaCopyStream(l1, region)
    stream.store(pairs([0], [0]))
    # compute so far is marked, the store stream waits for the mark, and only then marks its own end
    assert repr(device.log) == "[('record', compute), ('wait', stores, compute), ('record', stores)]"
    device.log.clear()
    event = stream.load(pairs([0], [0]))
    assert repr(device.log) == "[('record', compute), ('wait', loads, compute), ('record', loads)]"
    # compute waits for the load by itself; the calling thread does not
    device.busy = True
    assert stream.fence(event, 0)
    assert repr(device.log[-1]) == "('wait', compute, loads)"
    device.busy = False
    stream.close(1)


def test_a_copy_waits_for_the_event_given(device: FakeDevice, region: HostRegion, l1: torch.Tensor) -> None:
    stream = CudaCopyStream(l1, region)
    layer_done = FakeEvent(device)
    layer_done.record(device.compute)
    device.log.clear()
    stored = stream.store(pairs([0], [0]), after=layer_done)
    stream.load(pairs([1], [0]), after=stored)
    assert [entry for entry in device.log if entry[0] == "wait"] == [
        ("wait", stream._streams["store"], device.compute),
        ("wait", stream._streams["load"], stream._streams["store"]),
    ]
    with pytest.raises(TypeError, match=r"torch\.cuda\.Event"):
        stream.load(pairs([1], [0]), after=HostEvent())
    stream.close(1)


def test_an_event_is_pending_until_the_device_passes_it(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor
) -> None:
    stream = CudaCopyStream(l1, region)
    device.busy = True
    event = stream.store(pairs([0], [0]))
    assert not event.done()
    assert not event.wait(0.001)
    assert not stream.drain(0.001)
    device.busy = False
    assert event.wait(1)
    assert stream.drain(0)
    stream.close(1)


def test_a_driver_error_becomes_the_events_error(device: FakeDevice, region: HostRegion, l1: torch.Tensor) -> None:
    stream = CudaCopyStream(l1, region)
    event = stream.load(pairs([0], [0]))
    device.error = "CUDA error: an illegal memory access was encountered"
    assert event.wait(1)
    assert event.error == device.error
    # the device is lost: whatever was to follow fails at once, and so does everything else
    assert event.is_lost
    for after in (stream.store(pairs([0], [1]), after=event), stream.store(pairs([0], [1]))):
        assert after.done()
        assert after.error == f"the device is lost: {device.error}"
        assert not after.is_lost
    device.error = ""
    stream.close(1)


def test_a_copy_the_driver_refuses_fails_and_the_next_goes_on(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    stream = CudaCopyStream(l1, region)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", refuse)
        failed = stream.store(pairs([0], [0]))
    assert failed.done()
    assert failed.error == "CUDA error: out of memory"
    assert stream.store(pairs([0], [0])).error is None
    stream.close(1)


def test_what_was_enqueued_before_a_failure_is_waited_for(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch.Tensor.copy_, iter(range(9))

    def second_refused(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("CUDA error: out of memory")
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", second_refused)
    stream = CudaCopyStream(l1, region)
    device.busy = True
    loaded = stream.load(pairs([0, 2], [0, 2]))
    assert not loaded.done()  # the first copy is still on its way: nobody may take its block
    assert not stream.fence(loaded, 0)  # but compute that needs it learns at once
    after = stream.store(pairs([0], [1]), after=loaded)
    assert after.error == "what it waited for failed: CUDA error: out of memory"
    device.busy = False
    assert loaded.done()
    assert loaded.error == "CUDA error: out of memory"
    stream.close(1)


def test_a_device_that_takes_no_event_fails_the_copy(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stream = CudaCopyStream(l1, region)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "record", refuse)
        event = stream.store(pairs([0], [0]))
    assert event.done()
    assert event.error == "CUDA error: an illegal memory access was encountered"
    stream.close(1)


def test_without_a_working_compiler_blocks_are_copied_one_by_one(
    device: FakeDevice,
    region: HostRegion,
    l1: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(launches: Launches, canonical: object) -> None:
        raise RuntimeError("nvrtc: error: failed to open libnvrtc-builtins.so")

    monkeypatch.setattr(Launches, "compile", broken)
    monkeypatch.setattr(packer, "LayoutKernels", Launches)
    stream = CudaCopyStream(l1, region)
    assert "nvrtc: error" in caplog.text
    assert stream.store(pairs([3], [4])).wait(1)
    assert np.array_equal(region.array[4], l1[3].reshape(-1).numpy())
    stream.close(1)


@pytest.mark.parametrize(
    "copies", [pairs([NUM_BLOCKS], [0]), pairs([0], [NUM_SLOTS]), pairs([-1], [0]), pairs([0], [0], (0, 4))]
)
def test_copies_outside_a_tier_fail_in_their_event(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, copies: BlockCopies
) -> None:
    stream = CudaCopyStream(l1, region)
    event = stream.store(copies)
    assert event.done()
    assert event.error is not None
    assert not region.array.any()
    stream.close(1)


def test_the_queue_is_bounded_by_what_the_device_has_not_done(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor
) -> None:
    stream = CudaCopyStream(l1, region, max_queued=2)
    device.busy = True
    events = [stream.store(pairs([n], [n])) for n in range(3)]
    assert [event.error for event in events] == [None, None, "the copy queue is full"]
    assert stream.load(pairs([0], [0])).error is None  # the other direction has its own
    device.busy = False
    assert stream.store(pairs([0], [0])).error is None
    stream.close(1)


def test_close_leaves_to_the_device_what_it_was_given(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    stream = CudaCopyStream(l1, region)
    device.busy = True
    event = stream.store(pairs([0], [0]))
    stream.close(0.001)
    assert "in flight" in caplog.text
    assert not event.done()  # the DMA runs on: nobody may take its slot yet
    late = stream.load(pairs([0], [0]))
    assert late.error == "the stream is closed"
    device.busy = False
    assert event.done()
    assert event.error is None
    stream.close(0)


def test_a_pageable_region_is_copied_by_a_thread(device: FakeDevice, l1: torch.Tensor) -> None:
    region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)  # not pinned
    stream = CudaCopyStream(l1, region)
    events = [stream.store(pairs([n], [n])) for n in range(4)]
    loaded = stream.load(pairs([11], [3]), after=events[-1])
    assert loaded.wait(60)
    assert loaded.error is None
    assert torch.equal(l1[11], l1[3])
    stream.close(10)
    region.close()


def test_the_device_gets_no_copy_before_its_slots_are_pinned(device: FakeDevice, l1: torch.Tensor) -> None:
    class Driver(LazyDriver):
        """Pins one piece each time it may."""

        may = threading.Semaphore(0)

        def register(self, address: int, num_bytes: int) -> None:
            assert self.may.acquire(timeout=60)

        def unregister(self, address: int) -> None:
            pass

    driver, region = Driver(LazyCuda()), HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
    region.pinning = PinnedPieces(region, driver, 0, piece_bytes=2 * region.slot_stride)
    stream = CudaCopyStream(l1, region)
    stored, behind = stream.store(pairs([3], [6])), stream.store(pairs([1], [0]))
    wait_until(lambda: region.pinning is not None and region.pinning._wanted)
    driver.may.release()
    while not region.is_pinned(np.array([0])):
        assert not stored.wait(0.01)
    assert not behind.done()  # its own slot is pinned, but it comes after the other
    assert not region.array.any()
    driver.may.release()  # what is waited for comes before slots 2 to 5
    assert stored.wait(60)
    assert behind.wait(60)
    assert np.array_equal(region.array[[6, 0]], l1[[3, 1]].reshape(2, -1).numpy())
    assert not region.is_pinned(np.array([2]))
    driver.may.release(1000)
    assert region.pinning.wait(60)
    stream.close(10)
    region.close()


def test_small_pieces_go_by_kernel_and_large_ones_by_copy(
    device: FakeDevice, region: HostRegion, l1: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "LayoutKernels", Launches)
    stream = CudaCopyStream(l1, region, ways=CopyWays(CopyChoice(torch_from=2 * BLOCK_BYTES)))
    copier: Any = stream._copier
    launches = copier.kernels
    stream.store(pairs([0, 2, 5], [9, 4, 1]))
    stream.load(pairs([0, 2], [9, 4], (0, 1)))
    assert launches.calls == [("gather", 3), ("scatter", 2)]
    stream.store(pairs([0, 1], [4, 5]))  # merged: large enough for the copy engine
    assert len(launches.calls) == 2
    assert np.array_equal(region.array[4:6], l1[:2].reshape(2, -1).numpy())
    assert stream.load(pairs([], [])).done()
    stream.close(1)


def rank_of_two(rank: int, tensors: list[torch.Tensor]) -> EngineBlocks:
    """A rank's layers, heads before tokens in the engine and behind them in its half of a slot."""
    half, layer_bytes = BLOCK_BYTES // 2, LAYER_BYTES // 2
    parts = [BlockPart(layer.transpose(1, 2), n, rank * half + n * layer_bytes) for n, layer in enumerate(tensors)]
    return EngineBlocks(parts, BLOCK_BYTES)


def tensors_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shape = (NUM_BLOCKS, 4, 16, LAYER_BYTES // 2 // 4 // 16)
    return [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for _ in range(NUM_LAYERS)]


def test_ranks_fill_a_slot_together(device: FakeDevice, region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", BLOCK_BYTES)  # two halves of a slot at a time
    device.named = iter(("loads", "stores") * 2)
    ranks = [tensors_of(0), tensors_of(1)]
    streams = [CudaCopyStream(rank_of_two(rank, tensors), region) for rank, tensors in enumerate(ranks)]
    region.array[:] = 0x5A
    # each rank stores the same three blocks from block tables of its own
    for stream, blocks in zip(streams, ([1, 2, 3], [7, 5, 6]), strict=True):
        event = stream.store(pairs(blocks, [4, 5, 9]))
        assert event.wait(0)
        assert event.error is None
    slots = torch.from_numpy(region.array).view(NUM_SLOTS, 2, NUM_LAYERS, 16, 4, -1)
    for slot, of_ranks in ((4, (1, 7)), (5, (2, 5)), (9, (3, 6))):
        for rank, block in enumerate(of_ranks):
            for number, layer in enumerate(ranks[rank]):
                assert torch.equal(slots[slot, rank, number], layer[block].transpose(0, 1))
    assert (region.array[[0, 1, 2, 3, 6, 7, 8, 10]] == 0x5A).all()
    # one rank takes the middle layer of a slot back, and nobody else sees anything of it
    before = [layer.clone() for layer in (*ranks[0], *ranks[1])]
    kept = region.array.copy()
    assert streams[1].load(pairs([0, 11], [5, 9], (1, 2))).wait(0)
    before[4][0], before[4][11] = before[4][5], before[4][6]
    assert all(map(torch.equal, (*ranks[0], *ranks[1]), before))
    assert np.array_equal(region.array, kept)
    for stream in streams:
        stream.close(1)


def test_engine_blocks_are_ordered_as_our_own(device: FakeDevice, region: HostRegion) -> None:
    stream = CudaCopyStream(rank_of_two(0, tensors_of(0)), region)
    stored = stream.store(pairs([0, 1], [0, 1]))
    assert repr(device.log) == "[('record', compute), ('wait', stores, compute), ('record', stores)]"
    device.log.clear()
    device.busy = True
    loaded = stream.load(pairs([2], [0]), after=stored)
    assert stream.fence(loaded, 0)
    assert repr(device.log) == "[('wait', loads, stores), ('record', loads), ('wait', compute, loads)]"
    assert not loaded.done()
    device.busy = False
    assert stream.drain(1)
    # ids of blocks, slots and layers are checked against the engine's
    for copies in (pairs([NUM_BLOCKS], [0]), pairs([0], [NUM_SLOTS]), pairs([0], [0], (2, 4))):
        assert stream.store(copies).error is not None
    stream.close(1)


def test_engine_blocks_a_full_device_refuses_fail_and_the_next_go_on(
    device: FakeDevice, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tensors = tensors_of(0)
    stream = CudaCopyStream(rank_of_two(0, tensors), region)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", refuse)  # no room for what the gathering needs
        failed = stream.store(pairs([0], [3]))
    assert failed.done()
    assert failed.error == "CUDA out of memory"
    assert not region.array.any()
    assert stream.store(pairs([0], [3])).error is None
    assert region.array[3].any()
    stream.close(1)


def test_engine_blocks_over_a_pageable_region_are_copied_by_a_thread(device: FakeDevice) -> None:
    region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)  # not pinned
    with torch.inference_mode():  # as engines make theirs; the thread is not in it
        tensors = tensors_of(1)
    stream = CudaCopyStream(rank_of_two(1, tensors), region)
    loaded = stream.load(pairs([11], [3]), after=stream.store(pairs([2], [3])))
    assert loaded.wait(60)
    assert loaded.error is None
    assert all(torch.equal(layer[11], layer[2]) for layer in tensors)
    stream.close(10)
    region.close()


def test_engine_blocks_of_another_size_are_refused(device: FakeDevice, region: HostRegion) -> None:
    blocks = EngineBlocks([BlockPart(tensors_of(0)[0], 0, 0)], BLOCK_BYTES // 2)
    with pytest.raises(ValueError, match=f"blocks of {BLOCK_BYTES // 2} bytes, slots of {BLOCK_BYTES}"):
        CudaCopyStream(blocks, region)


def test_an_event_nobody_issued_is_pending() -> None:
    event = CudaEvent()
    assert not event.done()
    assert not event.wait(0.001)
