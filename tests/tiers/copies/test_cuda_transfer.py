"""The CUDA stream on a CPU, over an adversary's CUDA: fences, errors, ends, ways to copy, and a device that fails.

What a real device does with the same calls is in tests/gpu/test_cuda_transfer_gpu.py.
"""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from doubles import wait_until
from lazy_cuda import LazyCuda, LazyDriver, LazyEvent, LazyStream, pin, ranges_of

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream, CudaEvent
from kvtier.tiers.copies.transfer import (
    DEVICE_ERRORS,
    BlockCopies,
    BlockPart,
    CopyEvent,
    EngineBlocks,
    HostEvent,
    is_lasting,
    is_of_capture,
    is_out_of_memory,
)
from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import CudaError, PinnedPieces

BLOCKS, LAYERS, LAYER = 8, 2, 2048
SLOT = LAYERS * LAYER
BY_TORCH = CopyWays(CopyChoice(batch_from=None, torch_from=0))
ILLEGAL = "CUDA error: an illegal memory access was encountered"
COMPILED = packer.TensorCopier._compiled


class AcceleratorError(RuntimeError):
    """torch's, since 2.8."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class CUDARuntimeError(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__("cudaErrorSomething: what it means")
        self.status = status


class OutOfMemoryError(MemoryError):
    """CuPy's: no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "memory", "capture", "lasting"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, False, False),
        (OutOfMemoryError("Out of memory allocating 512 bytes"), True, False, False),
        (CudaError("cuMemcpyBatchAsync: CUDA_ERROR_OUT_OF_MEMORY (2)", 2), True, False, False),
        (CUDARuntimeError(2), True, False, False),
        (AcceleratorError("CUDA error: operation not permitted", 900), False, True, False),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False, True, False),
        (AcceleratorError(ILLEGAL, 700), False, False, True),
        (CUDARuntimeError(719), False, False, True),
        (CudaError("cuMemHostRegister_v2: error 709", 709), False, False, True),
        (RuntimeError(ILLEGAL + "\nCUDA kernel errors might be reported later"), False, False, True),
        (RuntimeError("CUDA error: invalid argument"), False, False, False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_errors_are_told_apart(error: Exception, memory: bool, capture: bool, lasting: bool) -> None:
    assert isinstance(error, DEVICE_ERRORS)
    assert (is_out_of_memory(error), is_of_capture(error), is_lasting(error)) == (memory, capture, lasting)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = LazyCuda(eager=0.0)
        self.cuda.patch(monkeypatch)
        self.region = HostRegion.allocate(BLOCKS, SLOT, prefault=False)
        pin(self.region, self.cuda)
        self.l1 = torch.arange(BLOCKS * SLOT).view(BLOCKS, LAYERS, -1).to(torch.uint8)
        self.cuda.own(self.l1)
        self.driver: Any = LazyDriver(self.cuda, copies_in_batches=False)
        self.stream = self.open()

    def open(self, ways: CopyWays = BY_TORCH, l1: EngineBlocks | None = None, **more: Any) -> CudaCopyStream:
        cupy = object() if l1 is None else None
        return CudaCopyStream(l1 or self.l1, self.region, cupy=cupy, driver=self.driver, ways=ways, **more)

    def finish(self, *events: CopyEvent) -> None:
        """The device does all it was given, nothing of it left to chance."""
        self.cuda.finish()
        assert all(event.wait(60) and event.error is None for event in events)


def pairs(*numbers: int) -> BlockCopies:
    return BlockCopies(np.array(numbers, np.int64), np.array(numbers, np.int64))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(packer.TensorCopier, "_compiled", lambda *_: None)
    kept = len(host._KEPT)
    world = World(monkeypatch)
    yield world
    world.cuda.dead = ""
    world.cuda.finish()
    world.stream.close(1)
    world.region.close()
    del host._KEPT[kept:]


def test_a_lost_device_ends_the_stream_with_one_line_and_its_memory_stays(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    stream, region = world.stream, world.region
    stored, loaded = stream.store(pairs(1, 2)), stream.load(pairs(5))
    ended = stream.store(pairs(3))
    while not ended.done():
        world.cuda.step()
    world.cuda.dead = ILLEGAL
    loaded = stream.load(pairs(6)) if loaded.done() else loaded
    assert stored.done()  # of the same stream as `ended`, which came behind it
    late = [stream.store(pairs(0)), stream.load(pairs(0))]
    for event in late:
        assert event.done()
        assert event.error is not None
        assert not event.is_lost  # the device was given nothing
    assert stream.mark() is None
    address, array = region.address, region.array
    stream.close(0.01)
    region.close()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "CUDA has failed for good" in record.getMessage()
    # memory that a device may still write to is mapped, and registered, for good
    array[7] = 7
    assert (address, address + BLOCKS * array.shape[1]) in world.cuda.registered


def test_a_driver_error_becomes_the_events_error(world: World) -> None:
    stored = world.stream.store(pairs(1, 2))
    world.cuda.dead = ILLEGAL
    assert stored.wait(1)
    assert stored.error == ILLEGAL
    assert stored.is_lost
    world.cuda.dead = ""  # whatever it says from now on
    for after in (stored, None):
        late = world.stream.load(pairs(1), after=after)
        assert late.error == f"the device is lost: {ILLEGAL}"
        assert not late.is_lost


def test_an_event_that_cannot_be_asked_once_is_no_lost_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = world.stream.store(pairs(1))
    real, asked = LazyEvent.query, iter(range(9))

    def refused_once(self: LazyEvent) -> bool:
        if not next(asked):
            raise RuntimeError("CUDA error: invalid resource handle")
        return real(self)

    monkeypatch.setattr(LazyEvent, "query", refused_once)
    assert not stored.done()  # another event behind it is asked from now on
    world.cuda.finish()
    assert stored.done()
    assert stored.error == "CUDA error: invalid resource handle"
    assert not stored.is_lost
    assert world.stream.store(pairs(1)).error is None


@pytest.mark.parametrize("error", [OutOfMemoryError("Out of memory"), CudaError("cuX: error 1", 1)])
def test_whatever_a_copy_raises_becomes_its_error(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(packer.TensorCopier, "copy", refuse)
        failed = world.stream.store(pairs(1))
    world.cuda.finish()
    assert failed.done()
    assert failed.error == str(error)
    assert not failed.is_lost


def test_without_an_event_behind_it_a_copy_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LazyEvent.record

    def refuse(self: LazyEvent, stream: LazyStream | None = None) -> None:
        if stream is not world.cuda.compute:
            raise RuntimeError(ILLEGAL)
        real(self, stream)

    with monkeypatch.context() as patch:
        patch.setattr(LazyEvent, "record", refuse)
        stored = world.stream.store(pairs(1))
    assert stored.done()
    assert stored.is_lost


def test_memory_of_copies_in_flight_at_close_stays(world: World, caplog: pytest.LogCaptureFixture) -> None:
    stored = world.stream.store(pairs(1, 2))
    array = world.region.array
    world.stream.close(0.0)
    assert not stored.done()
    assert "their memory is not used again" in caplog.text
    assert world.stream.load(pairs(0)).error == "the stream is closed"
    world.region.close()
    assert world.cuda.registered  # the device goes on, and still may
    world.cuda.finish()
    assert np.array_equal(array[1], world.l1[1].reshape(-1).numpy())


def test_a_copy_that_hangs_in_the_thread_does_not_hold_up_a_close(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hanging(*_: Any, **__: Any) -> None:
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(packer.TensorCopier, "copy", hanging)
    monkeypatch.setattr(world.region, "pinning", None)
    hung, behind = world.stream.store(pairs(1)), world.stream.store(pairs(2))
    assert begun.wait(60)
    kept = len(host._KEPT)
    world.stream.close(0.01)
    assert hung.is_lost
    assert hung.error == "a copy hung when the stream was closed"
    assert behind.done()
    may_end.set()
    world.region.close()
    assert len(host._KEPT) == kept + 1  # what the copy may still write to is not used again


def test_a_copy_waits_for_one_that_the_thread_has_yet_to_give_the_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, copy = threading.Event(), packer.TensorCopier.copy

    def late(self: Any, direction: Any, *copies: Any, **options: Any) -> None:
        assert direction == "load" or may_go_on.wait(60)
        copy(self, direction, *copies, **options)

    monkeypatch.setattr(packer.TensorCopier, "copy", late)
    with monkeypatch.context() as patch:
        patch.setattr(world.region, "is_pinned", lambda slots: False)
        stored = world.stream.store(pairs(1))
    loaded = world.stream.load(pairs(1), after=stored)
    assert not loaded.done()
    may_go_on.set()
    while not loaded.done():
        world.cuda.step()
    assert loaded.error is None


def test_a_capture_on_the_calling_stream_takes_no_copies(world: World) -> None:
    before = world.stream.store(pairs(1))
    world.cuda.capturing = world.cuda.compute
    refused = world.stream.load(pairs(2))
    assert refused.error == "a CUDA graph is being captured on the calling stream"
    assert world.stream.mark() is None
    assert not world.stream.fence(before, 0)  # a graph cannot wait for it
    while not before.done():
        world.cuda.step()
    assert world.stream.fence(before, 0)
    world.cuda.capturing = None
    assert world.stream.load(pairs(2)).error is None


def test_without_an_event_a_copy_follows_the_callers_compute(world: World) -> None:
    """Copies that do not wait for it are races, which `finish` finds."""
    read, written = ranges_of(world.l1[5:6]), ranges_of(world.l1[1:2])
    world.cuda.compute_op("compute", read, written)
    loaded = world.stream.load(pairs(5))
    world.finish(world.stream.store(pairs(1)), loaded)
    # compute waits for the load by itself; the calling thread does not
    assert world.stream.fence(world.stream.load(pairs(1)), 0)
    world.cuda.compute_op("compute", written, written)
    world.cuda.finish()
    with pytest.raises(TypeError, match=r"torch\.cuda\.Event"):
        world.stream.load(pairs(1), after=HostEvent())


def test_what_was_enqueued_before_a_failure_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.Tensor.copy_, iter(range(9))

    def second_refused(*copy: Any, **options: Any) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("CUDA error: out of memory")
        return real(*copy, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", second_refused)
        loaded = world.stream.load(pairs(0, 2))
    assert not loaded.done()  # the first copy is still on its way: nobody may take its block
    assert not world.stream.fence(loaded, 0)  # but compute that needs it learns at once
    after = world.stream.store(pairs(0), after=loaded)
    assert after.error == "what it waited for failed: CUDA error: out of memory"
    world.cuda.finish()
    assert loaded.done()
    assert loaded.error == "CUDA error: out of memory"


@pytest.mark.parametrize("slots", [[BLOCKS], [-1], [0]])
def test_copies_outside_a_tier_fail_in_their_event(world: World, slots: list[int]) -> None:
    layers = (0, LAYERS + 1) if slots == [0] else None
    event = world.stream.store(BlockCopies(np.zeros(1, np.int64), np.array(slots), layers))
    assert event.done()
    assert event.error is not None
    assert not world.region.array.any()


def test_the_queue_is_bounded_by_what_the_device_has_not_done(world: World) -> None:
    stream = world.open(max_queued=2)
    events = [stream.store(pairs(n)) for n in range(3)]
    assert [event.error for event in events] == [None, None, "the copy queue is full"]
    other_way = stream.load(pairs(4))  # has a queue of its own
    world.finish(*events[:2], other_way)
    world.finish(stream.store(pairs(0)))


def test_a_pageable_region_is_copied_by_a_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.region, "pinning", None)
    before = world.l1.clone()
    stored = [world.stream.store(pairs(n)) for n in range(4)]
    loaded = world.stream.load(BlockCopies(np.array([7]), np.array([3])), after=stored[-1])
    assert isinstance(loaded, CudaEvent)
    wait_until(lambda: loaded.is_issued)
    world.finish(*stored, loaded)
    assert torch.equal(world.l1[7], before[3])


def test_the_device_gets_no_copy_before_its_slots_are_pinned(world: World) -> None:
    class Driver(LazyDriver):
        """Pins one piece each time it may."""

        may = threading.Semaphore(0)

        def register(self, address: int, num_bytes: int) -> None:
            assert self.may.acquire(timeout=60)

    driver, region = Driver(world.cuda), world.region
    region.pinning = pinning = PinnedPieces(region, driver, 0, piece_bytes=2 * region.slot_stride)
    stored, behind = world.stream.store(pairs(6)), world.stream.store(pairs(0))
    assert isinstance(behind, CudaEvent)
    wait_until(lambda: pinning._wanted)
    driver.may.release()
    while not region.is_pinned(np.array([0])):
        assert not stored.wait(0.01)
    assert not behind.is_issued  # its own slot is pinned, but it comes after the other
    driver.may.release()  # what is waited for comes before slots 2 to 5
    wait_until(lambda: behind.is_issued)
    world.finish(stored, behind)
    assert np.array_equal(region.array[[6, 0]], world.l1[[6, 0]].reshape(2, -1).numpy())
    assert not region.is_pinned(np.array([2]))
    driver.may.release(1000)
    assert pinning.wait(60)


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


def test_small_pieces_go_by_kernel_and_large_ones_by_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "LayoutKernels", Launches)
    monkeypatch.setattr(packer.TensorCopier, "_compiled", COMPILED)
    stream = world.open(CopyWays(CopyChoice(torch_from=2 * SLOT)))
    copier: Any = stream._copier
    launches = copier.kernels
    stream.store(pairs(0, 2, 5))
    stream.load(BlockCopies(np.array([0, 2]), np.array([6, 4]), (0, 1)))
    assert launches.calls == [("gather", 3), ("scatter", 2)]
    num_ops = world.cuda.num_ops
    stored = stream.store(pairs(0, 1))  # merged: large enough for the copy engine
    assert world.cuda.num_ops == num_ops + 1
    assert len(launches.calls) == 2
    world.finish(stored)
    assert np.array_equal(world.region.array[:2], world.l1[:2].reshape(2, -1).numpy())
    world.finish(stream.load(pairs()))


def test_engine_blocks_a_full_device_refuses_fail_and_the_next_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tensors = [world.l1[:, n].view(BLOCKS, 4, 16, -1) for n in range(LAYERS)]  # heads before tokens
    parts = [BlockPart(layer.transpose(1, 2), n, n * LAYER) for n, layer in enumerate(tensors)]
    stream = world.open(l1=EngineBlocks(parts, SLOT))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", refuse)  # no room for what the gathering needs
        failed = stream.store(pairs(3))
    world.cuda.finish()
    assert failed.done()
    assert failed.error == "CUDA out of memory"
    assert not world.region.array.any()
    world.finish(stream.store(pairs(3)))
    assert world.region.array[3].any()
    with pytest.raises(ValueError, match=f"blocks of {SLOT // 2} bytes, slots of {SLOT}"):
        world.open(l1=EngineBlocks(parts[:1], SLOT // 2))


def test_an_event_nobody_issued_is_pending() -> None:
    event = CudaEvent()
    assert not event.done()
    assert not event.wait(0.001)
