"""Times each way to copy pieces of one size between memory of its own on a device and pinned memory of its own."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import numpy as np
import torch

from kvtier.tiers.copies.block_copier import BlockCopies, CopyDirection
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWay, CopyWays
from kvtier.tiers.copies.engine_blocks import BlockPart, EngineBlocks
from kvtier.tiers.host import CudaDriver, HostRegion

_REPEATS: Final = 3  # the fastest counts: what else the device does only adds
_PATIENCE: Final = 1.0  # seconds that copies of some MiB may take
_POLL: Final = 50e-6
_MAX_PIECES: Final = 2048  # copied at a time, and of their bytes:
_MAX_BYTES: Final = 64 << 20  # takes the device a millisecond: with less the calls themselves would be compared
_PARTS: Final = 8  # of an engine's block
_FORCED: Final[dict[CopyWay, CopyChoice]] = {
    "batch": CopyChoice(batch_from=0),
    "kernel": CopyChoice(batch_from=None, torch_from=None),
    "torch": CopyChoice(batch_from=None, torch_from=0),
    "staging": CopyChoice(batch_from=None),
}


class Copier(Protocol):
    """What copies on the current stream."""

    def copy(self, direction: CopyDirection, copies: BlockCopies, *, is_chained: bool = True) -> None:
        """Enqueue valid copies."""


MakeCopier = Callable[[torch.Tensor | EngineBlocks, HostRegion, CopyWays], Copier]


class CopyProbe:
    """A `CopyTimer` of a device, by the very copiers that are to choose. It touches neither L1 nor L2: both are in use.

    Times are the device's own, from before the first copy was enqueued to the end of the last. So they include the
    enqueueing, where that takes longer than the copies.
    """

    def __init__(
        self, device: torch.device, driver: CudaDriver, make_copier: MakeCopier, ways: Sequence[CopyWay],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.ways = ways
        self._device = device
        self._driver = driver
        self._make_copier = make_copier
        self._sleep = sleep
        self._bench: _ProbeMemory | None = None
        self._copier: Copier
        self._forced = CopyWays()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    @contextmanager
    def open(
        cls, device: torch.device, driver: CudaDriver, make_copier: MakeCopier, ways: Sequence[CopyWay]
    ) -> "Iterator[CopyProbe]":
        """A probe for the length of a `with`, on the calling thread."""
        driver.use(device.index)
        with driver.beside_captures():
            probe = cls(device, driver, make_copier, ways)
            try:
                yield probe
            finally:
                probe.close()

    def rate(self, way: CopyWay, piece_bytes: int, grid: int) -> float:
        """Bytes per second of scattered pieces. RuntimeError if the device refuses.

        Loads alone, stores alone and both at once together: a kernel shares the link badly, copy engines do not.
        """
        if self._bench is None or self._bench.piece_bytes != piece_bytes:
            self.close()
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._bench = _ProbeMemory(self._device, self._driver, piece_bytes, is_engine="staging" in self.ways)
                self._copier = self._make_copier(self._bench.memory, self._bench.region, self._forced)
        bench, forced = self._bench, _FORCED[way]
        self._forced.choice = CopyChoice(forced.batch_from, forced.torch_from, grid)
        kinds: Sequence[Sequence[CopyDirection]] = (("load",), ("store",), ("load", "store"))
        seconds = sum(self._seconds(bench, kind) for kind in kinds)
        num_copies = sum(len(bench.copies[direction]) for kind in kinds for direction in kind)
        return num_copies * bench.region.slot_bytes / max(seconds, 1e-9)

    def close(self) -> None:
        """Let go of all memory; what was enqueued has ended. Idempotent."""
        if self._bench is not None:
            self._bench.region.close()
            self._bench = None

    def _seconds(self, bench: "_ProbeMemory", directions: Sequence[CopyDirection]) -> float:
        took = float("inf")
        for _ in range(_REPEATS):
            with torch.cuda.device(self._device):
                begun, ended = _timed_event(), _timed_event()
                begun.record(self._stream)
                try:
                    for direction, stream in zip(directions, (self._stream, self._other), strict=False):
                        if stream is self._other:
                            stream.wait_event(begun)
                        with torch.cuda.stream(stream):
                            self._copier.copy(direction, bench.copies[direction], is_chained=False)
                finally:  # what was enqueued before a failure uses memory that goes next
                    self._stream.wait_stream(self._other)
                    ended.record(self._stream)
                    self._wait(ended)
            took = min(took, begun.elapsed_time(ended) / 1e3)
        return took

    def _wait(self, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                if self._bench is not None:
                    self._bench.region.keep()  # it is in use: never to be unmapped
                    self.close()
                raise RuntimeError(f"copies of some MiB have not ended in {_PATIENCE:.0f} s")
            self._sleep(_POLL)


class _ProbeMemory:
    """Memory of both sides for pieces of one size, half of it for each direction: blocks descend, so nothing merges."""

    def __init__(self, device: torch.device, driver: CudaDriver, piece_bytes: int, *, is_engine: bool) -> None:
        self.piece_bytes = piece_bytes
        pieces = min(_MAX_PIECES, _MAX_BYTES // piece_bytes)
        count = max(2, pieces // _PARTS if is_engine else pieces)
        self.memory: torch.Tensor | EngineBlocks
        if is_engine:
            slot_bytes = _PARTS * piece_bytes
            tensors = [torch.empty((2 * count, piece_bytes), dtype=torch.uint8, device=device) for _ in range(_PARTS)]
            parts = [BlockPart(tensor, number, number * piece_bytes) for number, tensor in enumerate(tensors)]
            self.memory = EngineBlocks(parts, slot_bytes)
        else:
            slot_bytes = piece_bytes
            self.memory = torch.empty((2 * count, 1, piece_bytes), dtype=torch.uint8, device=device)
        self.region = HostRegion.allocate(2 * count, slot_bytes)
        self.region.pin(device.index, driver)
        pinning = self.region.pinning
        if pinning is None or not pinning.wait(_PATIENCE) or pinning.error is not None:
            why = "no driver" if pinning is None else pinning.error or "it takes too long"
            self.region.close()
            raise RuntimeError(f"memory to measure with is not pinned: {why}")
        blocks = np.arange(count, dtype=np.int64)
        self.copies: dict[CopyDirection, BlockCopies] = {
            "load": BlockCopies(blocks[::-1].copy(), blocks),
            "store": BlockCopies(count + blocks[::-1], count + blocks),
        }


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
