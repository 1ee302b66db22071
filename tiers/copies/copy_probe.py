"""Measures at the first use of a device which way its copies are fastest, in the background, and stores the result."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

import numpy as np
import torch

from kvtier.tiers.config import format_size
from kvtier.tiers.copies.copy_ways import DEFAULT, ChoiceKey, CopyChoice, CopyWay, CopyWays, KeptChoices
from kvtier.tiers.copies.transfer import BlockCopies, BlockPart, CopyDirection, EngineBlocks
from kvtier.tiers.host import CudaDriver, HostRegion

logger = logging.getLogger(__name__)

_REPEATS: Final = 3  # the fastest counts: other work of the device only adds time
_PATIENCE: Final = 1.0  # seconds that copies of some MiB may take
_POLL: Final = 50e-6
_MAX_PIECES: Final = 2048  # copied at a time, and of their bytes:
_MAX_BYTES: Final = 64 << 20  # it takes the device a millisecond: with less the calls themselves would be compared
_PARTS: Final = 8  # of an engine's block
_FORCED: Final[dict[CopyWay, CopyChoice]] = {
    "batch": CopyChoice(batch_from=0),
    "kernel": CopyChoice(batch_from=None, torch_from=None),
    "torch": CopyChoice(batch_from=None, torch_from=0),
    "staging": CopyChoice(batch_from=None),
}


class Copier(Protocol):
    """Copies on the current stream."""

    def copy(self, direction: CopyDirection, copies: BlockCopies, *, is_chained: bool = True) -> None:
        """Enqueue valid copies."""


MakeCopier = Callable[[torch.Tensor | EngineBlocks, HostRegion, CopyWays], Copier]


class CopyProbe:
    """A `CopyTimer` of a device, by the copiers that will use the result. It touches neither L1 nor L2.

    Times are the device's own, from before the first copy was enqueued to the end of the last. So they include the
    enqueueing, if that takes longer than the copies.
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
        """Bytes per second of scattered pieces, loads, stores and both at once. RuntimeError if the device refuses."""
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
        """Release all memory; enqueued copies have ended. Idempotent."""
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
                finally:  # copies enqueued before a failure use memory that is released next
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


SIZES: Final = tuple(4096 << power for power in range(9))  # bytes of a piece: 4 KiB to 1 MiB
GRIDS: Final = (8, 16, 24, 32)
_GRID_SIZE: Final = 64 << 10  # of the pieces by which grids are compared
_AS_GOOD: Final = 0.95  # of the best rate: the copy engines then leave more to the model than threads do
NO_BATCHES: Final = "this driver has no batched copies (they need driver 570)"
DEADLINE: Final = 5.0  # seconds for all of it, waits for another process's measurement included


class CopyTimer(Protocol):
    """Copies on a device that can be timed."""

    @property
    def ways(self) -> Sequence[CopyWay]:
        """The ways that exist here."""

    def rate(self, way: CopyWay, piece_bytes: int, grid: int) -> float:
        """Bytes per second of many scattered pieces of one size, there and back. RuntimeError of the driver."""


class MeasuringStopped(RuntimeError):
    """The measurement is not wanted any more, or is past its deadline."""


def measured(probe: CopyTimer, go_on: Callable[[], None] = lambda: None) -> CopyChoice:
    """Compare the ways. `go_on` is called before each measurement, and raises to stop."""

    def rate(way: CopyWay, size: int, grid: int) -> float:
        go_on()
        return probe.rate(way, size, grid)

    grid, kernel_rates = DEFAULT.grid, dict[int, float]()
    if "kernel" in probe.ways:
        kernel_rates = {grid: rate("kernel", _GRID_SIZE, grid) for grid in GRIDS}
        grid = next(grid for grid in GRIDS if kernel_rates[grid] >= _AS_GOOD * max(kernel_rates.values()))
    rates: dict[CopyWay, dict[int, float]] = {way: {} for way in probe.ways}
    for size in SIZES:
        for way in probe.ways:
            rates[way][size] = rate(way, size, grid)
    gathered = {way: of_way for way, of_way in rates.items() if way != "batch"}
    best = {size: max((of_way[size] for of_way in gathered.values()), default=0.0) for size in SIZES}
    batch_from = _from(rates["batch"], best) if "batch" in rates else None
    torch_from = DEFAULT.torch_from
    if "kernel" in rates and "torch" in rates:
        torch_from = _from(rates["torch"], rates["kernel"])
    return CopyChoice(batch_from, torch_from, grid, "measured", _reason(rates, batch_from))


def _from(rates: Mapping[int, float], others: Mapping[int, float]) -> int | None:
    """The least size from which on `rates` are as good as the others; 0 if all are, None if the largest is not."""
    start: int | None = None
    for size in reversed(SIZES):
        if rates[size] < _AS_GOOD * others[size]:
            return start
        start = size
    return 0


def _reason(rates: Mapping[CopyWay, Mapping[int, float]], batch_from: int | None) -> str:
    """The rates at the size that decided."""
    if "batch" not in rates:
        return NO_BATCHES
    at = SIZES[-1] if batch_from is None else max(batch_from, SIZES[0])
    shown = ", ".join(f"{way} {of_way[at] / 1e9:.1f}" for way, of_way in rates.items())
    return f"pieces of {format_size(at)}: {shown} GB/s"


class Calibration:
    """One measurement, on a thread of its own. Until it ends the defaults hold, and afterwards, too, if it fails."""

    def __init__(
        self,
        ways: CopyWays,
        key: ChoiceKey,
        make_probe: Callable[[], AbstractContextManager[CopyTimer]],
        *,
        kept: KeptChoices | None = None,
        deadline: float | None = None,
    ) -> None:
        """Take a former measurement, or start one. `make_probe` is called on the thread.

        `deadline` are the seconds for all of it, 5 by default.
        """
        self._ways = ways
        self._key = key
        self._make_probe = make_probe
        self._kept = kept or KeptChoices()
        self._deadline = DEADLINE if deadline is None else deadline
        self._give_up_at = time.monotonic() + self._deadline
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if "+" not in key.ways:
            ways.choose(CopyChoice(reason="nothing to choose from: " + NO_BATCHES))
            self._kept.keep(key, ways.choice)
        elif (choice := self._kept.load(key)) is not None:
            ways.choose(choice)
        else:
            self._thread = threading.Thread(target=self._run, name="kvtier-calibrate", daemon=True)
            self._thread.start()
        ways.show(key.device)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the choice is final; False if `timeout` seconds passed first."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def close(self, timeout: float) -> bool:
        """Measure no more; False if the current measurement has not ended in time. Idempotent."""
        self._closing.set()
        return self.wait(timeout)

    def _run(self) -> None:
        try:
            with self._kept.alone(self._key, self._is_over) as is_alone:
                choice = self._kept.load(self._key)  # another process may have measured meanwhile
                if choice is None:
                    choice = self._measured() if is_alone else _failed("another process measures, for too long")
        except Exception as error:  # of driver, torch or CuPy: a failure may cost no more than the choice
            is_ours = isinstance(error, MeasuringStopped)
            choice = _failed(str(error) if is_ours else f"{type(error).__name__}: {error}")
            if not self._closing.is_set():
                self._kept.keep(self._key, choice)  # for `doctor`; the next start measures
                logger.warning("how copies go best is not known, so published figures count: %s", choice.reason)
        self._ways.choose(choice)
        self._ways.show(self._key.device)

    def _measured(self) -> CopyChoice:
        with self._make_probe() as probe:
            choice = measured(probe, self._go_on)
        self._kept.keep(self._key, choice)
        text = "never" if choice.batch_from is None else f"from {choice.batch_from} bytes on"
        logger.info("copies by the driver: %s (%s)", text, choice.reason)
        return choice

    def _is_over(self) -> bool:
        return self._closing.is_set() or time.monotonic() >= self._give_up_at

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise MeasuringStopped("closed while it was measured")
        if time.monotonic() >= self._give_up_at:
            raise MeasuringStopped(f"past its deadline of {self._deadline:.1f} s")


def _failed(why: str) -> CopyChoice:
    return CopyChoice(reason=f"not measured: {why}")
