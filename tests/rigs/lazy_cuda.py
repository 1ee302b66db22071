"""An adversary's CUDA on a CPU: streams run late and in an order that a seed chooses; every op is checked for races.

Vector clocks give happens-before: stream order, events, and what the host has waited for. Two ops on the same bytes,
one of them a write, that are not ordered are a race, whatever order the seed happened to choose. What a driver allows
and an engine must not do is a complaint: a copy through pageable memory, a launch without a device guard, memory of
another stream that nobody recorded.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import PIECE_BYTES, PinnedPieces

Ranges = list[tuple[int, int]]  # of addresses, half-open, ascending, disjoint
Spans = Iterable[tuple[int, int]] | NDArray[np.int64]  # the same in any order, and any number of times

_KEPT: Final = 8000  # ops that a new one is compared with
_FEW: Final = 200  # of them, before those that are over are sought


class Race(NamedTuple):
    """Two ops, in the order they were issued, that nothing orders; both touch the byte at `address`."""

    first: str
    second: str
    address: int


@dataclass(slots=True)
class Op:
    """What a stream was given: `run` does it, late."""

    what: str
    stream: str
    number: int  # in its stream, from 1
    clock: dict[str, int]  # stream → the last op of it that is over before this one begins
    reads: Ranges
    writes: Ranges
    run: Callable[[], object]


class LazyStream:
    """Stands for a torch.cuda.Stream."""

    def __init__(self, cuda: "LazyCuda", name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.cuda_stream = 4096 + len(cuda.streams)  # what a launch names it by; 0 is the default stream's
        self.num_issued = self.num_done = 0
        self.clock: dict[str, int] = {}
        self.queue: list[Op] = []
        self.waits: dict[int, list[tuple[str, int]]] = {}  # op → (stream, op of it) that it waits for
        self.took: dict[int, float] = {}  # op → seconds of the device that it cost
        cuda.streams[name] = self

    def wait_event(self, event: "LazyEvent") -> None:
        """Nothing issued from now on begins before the event."""
        self.cuda.require_alive()
        if self is self.cuda.capturing:
            self.cuda.spoil("a wait for work outside")
        if event.stream is None:
            return
        _join(self.clock, event.clock)
        self.waits.setdefault(self.num_issued + 1, []).append((event.stream.name, event.number))
        if self is self.cuda.compute:  # compute runs at once, so what it needs has to be there
            self.cuda.run_to(event.stream, event.number)

    def wait_stream(self, other: "LazyStream") -> None:
        """Nothing issued from now on begins before what the other stream was given by now is over."""
        event = self.cuda.event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.cuda.run_to(self, self.num_issued)
        _join(self.cuda.host, self.clock)

    def may_run(self) -> bool:
        waited = self.waits.get(self.queue[0].number, ())
        return all(self.cuda.streams[name].num_done >= number for name, number in waited)

    def run_one(self) -> None:
        op = self.queue.pop(0)
        self.waits.pop(op.number, None)
        with torch.inference_mode():
            op.run()
        self.num_done = op.number
        self.took[op.number] = self.cuda.cost(op)

    def __repr__(self) -> str:
        return self.name


class LazyEvent:
    """Stands for a torch.cuda.Event: it passes once its stream has come that far."""

    cuda: "LazyCuda"  # set on the class that `LazyCuda.patch` makes of it

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: LazyStream | None = None
        self.number = 0
        self.clock: dict[str, int] = {}

    def record(self, stream: LazyStream | None = None) -> None:
        self.cuda.require_alive()
        self.stream = stream or self.cuda.current_stream()
        if self.stream.num_issued + 1 in self.stream.waits:  # the event, too, is behind what the stream waits for
            self.cuda.issue(self.stream, "event", [], [], lambda: None)
        self.number = self.stream.num_issued
        self.clock = dict(self.stream.clock)
        _join(self.clock, self.cuda.host)

    def query(self) -> bool:
        self.cuda.require_alive()
        self.cuda.forbidden_in_captures("asking about an event")
        self.cuda.let_run()
        if self.stream is None:
            return True
        if self.stream.num_done < self.number:
            return False
        _join(self.cuda.host, self.clock)
        return True

    def elapsed_time(self, end: "LazyEvent") -> float:
        """Milliseconds that the ops between two events of one stream cost. RuntimeError if one has not passed."""
        assert self.stream is not None
        assert self.stream is end.stream
        if self.stream.num_done < end.number:
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * sum(self.stream.took[number] for number in range(self.number + 1, end.number + 1))

    def synchronize(self) -> None:
        if self.stream is not None:
            self.cuda.run_to(self.stream, self.number)
            _join(self.cuda.host, self.clock)


class Current(threading.local):
    """What is current in a thread: streams, and guards of the device."""

    def __init__(self) -> None:
        self.inside: list[LazyStream] = []
        self.guards = 0


@dataclass
class LazyCuda:
    """The device. `eager`: how likely it does something whenever somebody asks about an event."""

    seed: int = 0
    eager: float = 0.1
    races: list[Race] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    streams: dict[str, LazyStream] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)  # stream → what the host knows to be over
    registered: Ranges = field(default_factory=list)  # pieces of memory that were pinned, each by itself
    num_ops: int = 0
    cost: Callable[[Op], float] = lambda op: 0.0  # seconds of the device
    capturing: LazyStream | None = None  # what is issued there becomes a graph
    room: int | None = None  # bytes that an allocation on the device may have; None: any
    dead: str = ""  # what every call answers since the device was lost
    num_relaxed: int = 0  # guards that let this thread do what captures forbid

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.compute = LazyStream(self, "compute")
        self.elsewhere = LazyStream(self, "another device's")
        self._issued: list[Op] = []
        self._current = Current()
        self._real_copy = torch.Tensor.copy_
        self._pinned: set[int] = set()  # addresses of tensors in pinned memory
        self._owned: list[
            tuple[tuple[int, int], set[str]]
        ] = []  # memory of the compute stream; who else has recorded it

    def event(self) -> LazyEvent:
        """One of this device's."""
        made = LazyEvent()
        made.cuda = self
        return made

    # What the driver is asked.

    def issue(self, stream: LazyStream, what: str, reads: Spans, writes: Spans, run: Callable[[], object]) -> None:
        """Give a stream an op."""
        given = [spans_of(side) for side in (reads, writes)]
        if any(self._is_over_a_border(spans) for spans in given):
            self.complaints.append(f"{what} reaches over the border of two pieces of pinned memory")
        stream.num_issued += 1
        _join(stream.clock, self.host)  # it was issued after all that the host knows of
        stream.clock[stream.name] = stream.num_issued
        read, written = map(_merged, given)
        op = Op(what, stream.name, stream.num_issued, dict(stream.clock), read, written, run)
        self._check(op)
        if stream is not self.compute:
            self._check_memory(op, stream)
        if len(self._issued) > _FEW:  # nothing is unordered with what the host knows to be over
            self._issued = [each for each in self._issued[-_KEPT:] if self.host.get(each.stream, 0) < each.number]
        self._issued = [*self._issued, op]
        stream.queue.append(op)
        self.num_ops += 1

    def compute_op(self, what: str, reads: Spans, writes: Spans) -> None:
        """The compute stream reads and writes this now: the caller does it, behind this call."""
        self.issue(self.compute, what, reads, writes, lambda: None)
        self.run_to(self.compute, self.compute.num_issued)

    def _is_over_a_border(self, spans: NDArray[np.int64]) -> bool:
        pieces = np.sort(spans_of(self.registered), axis=0)  # they are disjoint
        if not len(pieces):
            return False
        at = np.searchsorted(pieces[:, 0], spans[:, 0], "right") - 1
        ends = np.where(at < 0, 0, pieces[at, 1])
        return bool(((spans[:, 0] < ends) & (ends < spans[:, 1])).any())

    def host_touches(self, what: str, ranges: Spans, *, writes: bool) -> None:
        """The host itself reads or writes this now."""
        touched = _merged(spans_of(ranges))
        op = Op(what, "host", 0, self.host, [] if writes else touched, touched if writes else [], lambda: None)
        self._check(op)

    def require_alive(self) -> None:
        if self.dead:
            raise RuntimeError(self.dead)

    def forbidden_in_captures(self, what: str) -> None:
        """In torch's usual mode a capture forbids such calls on every thread, and is spoiled by one."""
        if self.capturing is not None and not self.num_relaxed:
            self.spoil(what)

    def spoil(self, what: str) -> None:
        self.complaints.append(f"{what} has spoiled a capture")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def own(self, tensor: torch.Tensor) -> None:
        """This memory was allocated for the compute stream: another stream that uses it has to record it."""
        start = tensor.untyped_storage().data_ptr()
        self._owned.append(((start, start + tensor.untyped_storage().nbytes()), set()))

    def current_stream(self, device: object = None) -> LazyStream:
        """The stream that is current on that device; without a device and a guard, that of another one."""
        if self._current.inside:
            return self._current.inside[-1]
        return self.compute if device is not None or self._current.guards else self.elsewhere

    def step(self) -> bool:
        """Run one op that may run, of the adversary's choice. False: there is none."""
        ready = [stream for stream in self.streams.values() if stream.queue and stream.may_run()]
        if ready:
            self.rng.choice(ready).run_one()
        return bool(ready)

    def let_run(self) -> None:
        """Somebody looks: now and then the device has got on meanwhile."""
        if self.rng.random() < max(self.eager, 0.05):
            for _ in range(self.rng.randint(1, 4)):
                self.step()

    def run_to(self, stream: LazyStream, number: int) -> None:
        """Do as little as possible until the stream has come so far."""
        while stream.num_done < number:
            for name, other in stream.waits.pop(stream.queue[0].number, ()):
                self.run_to(self.streams[name], other)
            stream.run_one()

    def finish(self) -> None:
        """Run everything, and fail if anything was wrong."""
        while self.step():
            pass
        self.require_clean()

    def require_clean(self) -> None:
        assert not self.races, self.races[:3]
        assert not self.complaints, self.complaints[:3]

    # How torch is made to ask it.

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the device below torch for the length of a test."""
        event = type("LazyEvent", (LazyEvent,), {"cuda": self})
        names = (f"copies {number}" for number in range(1_000_000))
        set_ = monkeypatch.setattr
        set_(torch.cuda, "Event", event)
        set_(torch.cuda, "Stream", lambda device=None, **_: LazyStream(self, next(names)))
        set_(torch.cuda, "current_stream", self.current_stream)
        set_(torch.cuda, "get_device_name", lambda device: "an adversary's device")
        set_(torch.cuda, "is_current_stream_capturing", lambda: self.capturing is self.current_stream(0))
        set_(torch.cuda, "stream", self._entered)
        set_(torch.cuda, "device", self._guarded)
        set_(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor, stream))
        set_(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        set_(torch.Tensor, "copy_", self._copying(torch.Tensor.copy_))
        set_(torch.Tensor, "index_copy_", self._index_copying(torch.Tensor.index_copy_))
        set_(torch, "index_select", self._selecting(torch.index_select))
        set_(torch.Tensor, "to", self._uploading(torch.Tensor.to))
        set_(torch, "empty", self._allocating(torch.empty))

    @contextmanager
    def _entered(self, stream: LazyStream) -> Iterator[None]:
        self._current.inside.append(stream)
        try:
            yield
        finally:
            self._current.inside.pop()

    @contextmanager
    def _guarded(self, device: object) -> Iterator[None]:
        self._current.guards += 1
        try:
            yield
        finally:
            self._current.guards -= 1

    @property
    def _side(self) -> LazyStream | None:
        """The copy stream that is current, if one is."""
        return self._current.inside[-1] if self._current.inside else None

    def _record(self, tensor: torch.Tensor, stream: LazyStream) -> None:
        start = tensor.untyped_storage().data_ptr()
        for (low, high), known in self._owned:
            if low <= start < high:
                known.add(stream.name)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.forbidden_in_captures("an allocation of pinned memory")
        pinned = tensor.clone()
        self._pinned.add(pinned.data_ptr())
        return pinned

    def _copying(self, real: Any) -> Callable[..., torch.Tensor]:
        def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if (stream := self._side) is None:
                copied: torch.Tensor = real(target, source, non_blocking)
                return copied
            if not (non_blocking and target.is_contiguous() and source.is_contiguous()):
                self.complaints.append(f"a copy of {tuple(target.shape)} goes through pageable memory, and waits")
            what = f"copy of {tuple(target.shape)}"
            self.issue(stream, what, ranges_of(source), ranges_of(target), lambda: real(target, source))
            return target

        return copy_

    def _index_copying(self, real: Any) -> Callable[..., torch.Tensor]:
        def index_copy_(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            if (stream := self._side) is None:
                copied: torch.Tensor = real(target, dim, index, source)
                return copied
            reads = [*ranges_of(source), *ranges_of(index)]
            self.issue(stream, "index_copy_", reads, rows_of(target, index), lambda: real(target, dim, index, source))
            return target

        return index_copy_

    def _selecting(self, real: Any) -> Callable[..., torch.Tensor]:
        def index_select(
            source: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            if (stream := self._side) is None or out is None:
                selected: torch.Tensor = real(source, dim, index) if out is None else real(source, dim, index, out=out)
                return selected
            reads = [*rows_of(source, index), *ranges_of(index)]
            self.issue(stream, "index_select", reads, ranges_of(out), lambda: real(source, dim, index, out=out))
            return out

        return index_select

    def _uploading(self, real: Any) -> Callable[..., torch.Tensor]:
        """Its bytes are there at once, its op is not: who reads them on another stream is found as a race."""

        def to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
            if non_blocking and args == ("cpu",):
                return self._download(tensor)
            if (stream := self._side) is None or not non_blocking:
                moved: torch.Tensor = real(tensor, *args, **options)
                return moved
            if tensor.data_ptr() not in self._pinned:
                self.complaints.append(f"an upload of {tuple(tensor.shape)} from pageable memory waits")
            uploaded = tensor.clone()
            self.issue(stream, "upload", ranges_of(tensor), ranges_of(uploaded), lambda: (tensor, uploaded))
            return uploaded

        return to

    def _download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rubbish, until the stream comes to it: the host has to wait for an event behind it."""
        stream = self.current_stream(tensor.device)
        brought = torch.empty_like(tensor)
        brought.view(torch.uint8).fill_(0xAB)
        copy_ = self._real_copy
        self.issue(stream, "download", ranges_of(tensor), ranges_of(brought), lambda: copy_(brought, tensor))
        return brought

    def _allocating(self, real: Any) -> Callable[..., torch.Tensor]:
        def empty(*size: int, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
            if self._side is None:
                made: torch.Tensor = real(*size, dtype=dtype, **options)
                return made
            self.forbidden_in_captures("an allocation")
            made = real(*size, dtype=dtype)
            if self.room is not None and made.nbytes > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return made

        return empty

    def _check(self, op: Op) -> None:
        for other in reversed(self._issued):
            if op.clock.get(other.stream, 0) >= other.number:
                continue
            for ours, theirs in ((op.writes, other.writes), (op.writes, other.reads), (op.reads, other.writes)):
                if (address := _overlap(ours, theirs)) is not None:
                    first, second = (f"{each.what} on {each.stream}" for each in (other, op))
                    self.races.append(Race(first, second, address))
                    return

    def _check_memory(self, op: Op, stream: LazyStream) -> None:
        if not self._current.guards:
            self.complaints.append(f"{op.what} was issued while another device was current")
        for span, known in self._owned:
            if stream.name not in known and _overlap([span], [*op.reads, *op.writes]) is not None:
                self.complaints.append(f"{op.what} uses memory that {stream} has not recorded: it may be reused")


class LazyDriver:
    """The driver's batched copies: one op of the stream; sources that may be read at any time are read at once.

    What it is given to pin is pinned at once.
    """

    version = "12.8"

    def __init__(self, cuda: LazyCuda, *, copies_in_batches: bool = True) -> None:
        self.cuda = cuda
        self.copies_in_batches = copies_in_batches
        self.num_batches = self.num_pieces = 0

    def use(self, device: int) -> None:
        """Every device is this one."""

    def register(self, address: int, num_bytes: int) -> None:
        self.cuda.registered.append((address, address + num_bytes))

    def unregister(self, address: int) -> None:
        self.cuda.registered[:] = [span for span in self.cuda.registered if span[0] != address]

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        self.cuda.num_relaxed += 1
        try:
            yield
        finally:
            self.cuda.num_relaxed -= 1

    def copy(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int,
        *, at_any_time: bool,
    ) -> None:  # fmt: skip
        [on] = [each for each in self.cuda.streams.values() if each.cuda_stream == stream]
        spans = [
            [(int(at), int(at + size)) for at, size in zip(side, sizes, strict=True)] for side in (sources, targets)
        ]
        self.num_batches += 1
        self.num_pieces += len(sizes)
        if at_any_time:
            self.cuda.host_touches("a batch that reads at once", spans[0], writes=False)

        def run() -> None:
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

        self.cuda.issue(on, f"batch of {len(sizes)} pieces", spans[0], spans[1], run)


def pin(region: HostRegion, cuda: LazyCuda | None = None, *, piece_bytes: int = PIECE_BYTES) -> None:
    """All of the region is pinned now, in pieces of that size; `cuda` knows them."""
    region.pinning = PinnedPieces(region, LazyDriver(cuda or LazyCuda()), 0, piece_bytes=piece_bytes, pause=0)
    assert region.pinning.wait(60)


def ranges_of(tensor: torch.Tensor) -> Ranges:
    """The bytes of a tensor of any strides, as the runs it consists of."""
    if not tensor.numel():
        return []
    run, outer = tensor.itemsize, list[tuple[int, int]]()
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride * tensor.itemsize == run:
            run *= size
        else:
            outer.append((size, stride * tensor.itemsize))
    starts = np.array([tensor.data_ptr()], np.int64)
    for size, stride in outer:
        starts = (starts[:, None] + np.arange(size) * stride).ravel()
    return [(start, start + run) for start in np.sort(starts).tolist()]


def rows_of(tensor: torch.Tensor, index: torch.Tensor) -> Ranges:
    """The bytes of some rows."""
    return [span for row in index.tolist() for span in ranges_of(tensor[row : row + 1])]


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, number in other.items():
        clock[name] = max(clock.get(name, 0), number)


def spans_of(ranges: Spans) -> NDArray[np.int64]:
    """`[ranges, 2]`."""
    return np.asarray(ranges if isinstance(ranges, np.ndarray) else list(ranges), np.int64).reshape(-1, 2)


def _merged(spans: NDArray[np.int64]) -> Ranges:
    if not len(spans):
        return []
    lows, ends = spans[np.argsort(spans[:, 0], kind="stable")].T
    ends = np.maximum.accumulate(ends)
    firsts = np.flatnonzero(np.concatenate(([True], lows[1:] > ends[:-1])))
    lasts = np.append(firsts[1:], len(lows)) - 1
    return list(zip(lows[firsts].tolist(), ends[lasts].tolist(), strict=True))


def _overlap(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> int | None:
    """The first byte that both have; both ascend."""
    i = j = 0
    while i < len(ours) and j < len(theirs):
        low, high = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if low < high:
            return low
        if ours[i][1] <= theirs[j][1]:
            i += 1
        else:
            j += 1
    return None
