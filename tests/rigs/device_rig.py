"""One story for a GPU and for this CPU: a real CUDA device, or an adversary's in its place (lazy_cuda.py)."""

import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pytest
import torch
from cpu_cupy import FakeCupy, LazyCupy
from lazy_cuda import LazyCuda, LazyDriver, LazyEvent, LazyStream, pin, ranges_of

from kvtier.tiers.copies.copy_ways import CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import BlockCopies, EngineBlocks
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import PinDriver, PinnedPieces, cuda_driver

WAYS: Final = ("kernel", "batch", "copies")


@contextmanager
def cuda_stream(
    l1: torch.Tensor | EngineBlocks, region: HostRegion, way: str, *, cupy: Any = None, driver: Any = None
) -> Iterator[CudaCopyStream]:
    """A GPU's stream whose pinned copies go this way, whatever their size. `cupy`, `driver`: else the machine's."""
    batch_from, torch_from = 0 if way == "batch" else None, None if way == "kernel" else 0
    ways = CopyWays(replace(CopyWays().choice, batch_from=batch_from, torch_from=torch_from))
    stream = CudaCopyStream(l1, region, cupy=cupy, driver=driver, ways=ways)
    try:
        yield stream
    finally:
        stream.close(60.0)


class DeviceRig(Protocol):
    """What a story asks of its device."""

    device: torch.device

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the host there, with the same strides: an engine's memory."""

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's bytes as compute sees them now, on the host."""

    def compute(self, act: Callable[[], object], *, reads: Iterable[torch.Tensor] = (), writes: Any = ()) -> None:
        """Compute that reads and writes these tensors, on the current stream."""

    def busy(self) -> None:
        """Some tens of milliseconds of compute in front of what comes next."""

    def pin(self, region: HostRegion, *, slots_per_piece: int = 4) -> None:
        """Pin all of it now."""

    def pin_driver(self) -> PinDriver:
        """What pins."""

    def host_reads(self, region: HostRegion, slots: Sequence[int]) -> None:
        """The host looks at slots now."""

    def stream(self, l1: torch.Tensor | EngineBlocks, region: HostRegion, way: str) -> Any:
        """A stream whose copies go that way, as a context manager; skips the test where there is no such way."""

    def graph(self, act: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Any) -> Callable[[], None]:
        """That compute as a CUDA graph, captured now; returns what replays it."""

    def launcher(self, folder: Path) -> tuple[Any, int]:
        """CuPy, and the number of a stream for launches."""

    def synchronize(self) -> None:
        """Wait for everything, if the device can still be asked."""

    def break_down(self) -> None:
        """An error that stays: from now on every call fails, in this process. On a GPU in a child process only."""


class CudaRig:
    """The machine's GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._is_broken = False

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return there.copy_(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def compute(self, act: Callable[[], object], *, reads: Iterable[torch.Tensor] = (), writes: Any = ()) -> None:
        act()

    def busy(self) -> None:
        matrix = torch.randn(4096, 4096, device=self.device)
        for _ in range(20):
            matrix = matrix @ matrix
            matrix = matrix / matrix.norm()

    def pin(self, region: HostRegion, *, slots_per_piece: int = 4) -> None:
        piece_bytes = slots_per_piece * region.slot_stride
        region.pinning = PinnedPieces(region, self.pin_driver(), self.device.index or 0, piece_bytes=piece_bytes)
        assert region.pinning.wait(60)
        assert region.pinned, region.pinning.error

    def pin_driver(self) -> PinDriver:
        driver = cuda_driver()
        assert driver is not None
        return driver

    def host_reads(self, region: HostRegion, slots: Sequence[int]) -> None:
        pass

    def stream(
        self, l1: torch.Tensor | EngineBlocks, region: HostRegion, way: str
    ) -> AbstractContextManager[CudaCopyStream]:
        if way == "kernel":
            pytest.importorskip("cupy")
        driver = cuda_driver()
        if way == "batch" and not (driver is not None and driver.copies_in_batches):
            pytest.skip("the driver is older than 570: it copies in no batches")
        return cuda_stream(l1, region, way)

    def graph(self, act: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Any) -> Callable[[], None]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            act()  # warms up, as engines do
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            act()
        return lambda: graph.replay()

    def launcher(self, folder: Path) -> tuple[Any, int]:
        return pytest.importorskip("cupy"), torch.cuda.current_stream().cuda_stream

    def synchronize(self) -> None:
        with suppress(RuntimeError) if self._is_broken else nullcontext():
            torch.cuda.synchronize()

    def break_down(self) -> None:
        self._is_broken = True
        few = torch.ones(4, device=self.device)
        few[torch.tensor([1 << 20], device=self.device)]  # an assertion fails on the device


class LazyRig:
    """An adversary's device on this CPU; at the end nothing has raced."""

    def __init__(self, cuda: LazyCuda, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.device = torch.device("cpu")
        self.cuda = cuda
        self.driver = LazyDriver(cuda)
        self.cupy = LazyCupy(cuda)
        self._is_broken = False

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        self.cuda.own(there)
        return there

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.cuda.compute_op("read", ranges_of(tensor), [])
        self.cuda.compute.synchronize()
        return tensor.clone()

    def compute(self, act: Callable[[], object], *, reads: Iterable[torch.Tensor] = (), writes: Any = ()) -> None:
        touched = [[span for tensor in tensors for span in ranges_of(tensor)] for tensors in (reads, writes)]
        self.cuda.compute_op("compute", *touched)
        act()

    def busy(self) -> None:
        """Its streams are late in any case."""

    def pin(self, region: HostRegion, *, slots_per_piece: int = 4) -> None:
        pin(region, self.cuda, piece_bytes=slots_per_piece * region.slot_stride)

    def pin_driver(self) -> PinDriver:
        return _PinsOnce(self.cuda)

    def host_reads(self, region: HostRegion, slots: Sequence[int]) -> None:
        starts = [region.address + slot * region.slot_stride for slot in slots]
        self.cuda.host_touches("the host", [(start, start + region.slot_bytes) for start in starts], writes=False)

    @contextmanager
    def stream(self, l1: torch.Tensor | EngineBlocks, region: HostRegion, way: str) -> Iterator[CudaCopyStream]:
        if way == "kernel" and shutil.which("g++") is None:
            pytest.skip("no g++ to run the kernel's source on this CPU")
        driver = self.driver if way == "batch" else LazyDriver(self.cuda, copies_in_batches=False)
        with cuda_stream(l1, region, way, cupy=self.cupy, driver=driver) as stream:
            issuer, stream._issuer = stream._issuer, _AtOnce()  # type: ignore[assignment]  # the device has no lock
            issuer.shutdown()
            yield stream
            self.synchronize()

    def graph(self, act: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Any) -> Callable[[], None]:
        self.cuda.capturing = LazyStream(self.cuda, f"graph {len(self.cuda.streams)}")
        try:
            self.compute(act, reads=reads, writes=writes)
        finally:
            self.cuda.capturing = None
        return lambda: self.compute(act, reads=reads, writes=writes)

    def launcher(self, folder: Path) -> tuple[Any, int]:
        if shutil.which("g++") is None:
            pytest.skip("no g++ to run the kernel's source on this CPU")
        return FakeCupy(), self.cuda.compute.cuda_stream

    def synchronize(self) -> None:
        if not self._is_broken:
            self.cuda.finish()

    def break_down(self) -> None:
        self._is_broken = True

        def fails(*_: object, **__: object) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        for kind, names in ((LazyStream, ("wait_event",)), (LazyEvent, ("query", "record", "synchronize"))):
            for name in names:
                self._monkeypatch.setattr(kind, name, fails)
        self._monkeypatch.setattr(self.cuda, "issue", fails)


class _AtOnce:
    """An issuing thread that is as fast as its caller."""

    def submit(self, act: Callable[..., None], *arguments: object) -> "Future[None]":
        done: Future[None] = Future()
        act(*arguments)
        done.set_result(None)
        return done

    def shutdown(self, **_: object) -> None:
        pass


class _PinsOnce:
    """As the driver: what is registered cannot be registered again."""

    def __init__(self, cuda: LazyCuda) -> None:
        self.registered = cuda.registered

    def use(self, device: int) -> None:
        """Every device is this one."""

    def register(self, address: int, num_bytes: int) -> None:
        if any(low < address + num_bytes and address < high for low, high in self.registered):
            raise RuntimeError("cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)")
        self.registered.append((address, address + num_bytes))

    def unregister(self, address: int) -> None:
        self.registered[:] = [span for span in self.registered if span[0] != address]


@contextmanager
def rig_of(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[DeviceRig]:
    """Kind "cuda" or "lazy", whose order of things the seed chooses. At the end all is done, and nothing has raced."""
    rig: DeviceRig
    if kind == "cuda":
        rig = CudaRig()
    else:
        cuda = LazyCuda(seed, eager=random.Random(seed).choice([0.0, 0.05, 0.3]))
        cuda.patch(monkeypatch)
        rig = LazyRig(cuda, folder, monkeypatch)
    yield rig
    rig.synchronize()


def pairs(blocks: Sequence[int], slots: Sequence[int], layers: tuple[int, int] | None = None) -> BlockCopies:
    return BlockCopies(np.array(blocks, np.int64), np.array(slots, np.int64), layers)


def ended_well(*events: Any) -> None:
    """Wait for each, and require that it has copied."""
    for event in events:
        assert event.wait(30)
        assert event.error is None
