"""A device that fails: what is told apart, what goes on, and what is never used again."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lazy_cuda import LazyCuda, LazyDriver, LazyEvent, LazyStream, pin

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.block_copier import BlockCopies
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import DEVICE_ERRORS, is_lasting, is_of_capture, is_out_of_memory
from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import CudaError

BLOCKS, LAYERS, LAYER = 8, 2, 2048
SLOT = LAYERS * LAYER
BY_TORCH = CopyWays(CopyChoice(batch_from=None, torch_from=0))
ILLEGAL = "CUDA error: an illegal memory access was encountered"


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
        driver: Any = LazyDriver(self.cuda, copies_in_batches=False)
        self.stream = CudaCopyStream(self.l1, self.region, cupy=object(), driver=driver, ways=BY_TORCH)


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


def test_copies_in_flight_on_a_lost_device_are_lost(world: World) -> None:
    stored = world.stream.store(pairs(1, 2))
    world.cuda.dead = ILLEGAL
    assert stored.wait(1)
    assert stored.error == ILLEGAL
    assert stored.is_lost


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
