"""What the benchmarks of a GPU share: which device, L1 and pinned L2 with the copies between, rounds.

With `--dry` the device is this CPU and everything is small: the same code, with the copy stream that a CPU has.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import _report
import numpy as np
import torch
from _report import Given, Row, in_turns, took
from numpy.typing import NDArray

from kvtier.tiers.config import Config
from kvtier.tiers.copies import (
    BlockCopies,
    BlockPart,
    CopyEvent,
    CopyStream,
    CopyWays,
    CudaCopyStream,
    EngineBlocks,
    HostCopyStream,
)
from kvtier.tiers.host import HostRegion

KIB: Final = 1 << 10
MIB: Final = 1 << 20
DEADLINE: Final = 60.0  # seconds for any copy
LAYOUTS: Final = ("own", "NHD", "HND", "cross-layer")  # where an engine keeps a block: our L1, and vLLM's three


@dataclass(frozen=True, slots=True)
class Geometry8B:
    """A Llama-8B's KV in blocks of 16 tokens: 2 MiB a block in bfloat16. In small, the same in form."""

    num_layers: int = 32
    num_heads: int = 8
    num_tokens: int = 16
    head_dim: int = 128

    @property
    def layer_bytes(self) -> int:
        return self.num_heads * self.num_tokens * 2 * self.head_dim * 2

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


SMALL: Final = Geometry8B(4, 2, 4, 32)


DRY: Final = _report.option("--dry", action="store_true", help="the same code on this CPU, in small: proves no figure")


def device(given: Given) -> torch.device:
    """Ends the program with status 2 where there is no GPU and no `--dry`."""
    if given.dry and given.save:
        given.error("--save with --dry: a dry run proves no figure; leave one of them out")
    if not given.dry and not torch.cuda.is_available():
        given.error("torch finds no GPU: run this on a machine with one, or with --dry, in small on this CPU")
    if given.dry:
        torch.set_num_threads(1)  # little work: threads that wait for each other would take longer
    return torch.device("cpu" if given.dry else f"cuda:{torch.cuda.current_device()}")


def pinned_region(num_slots: int, slot_bytes: int, device: torch.device) -> HostRegion:
    """L2, with every page there; pinned, if a GPU copies from it. SystemExit says why it cannot be pinned."""
    region = HostRegion.allocate(num_slots, slot_bytes)
    region.wait_prefaulted()
    if device.type == "cuda":
        region.pin(device.index)
        if region.pinning is None or not region.pinning.wait(600) or region.pinning.error:
            reason = region.pinning.error if region.pinning else "libcuda.so.1 is not there or does not start"
            region.close()
            raise SystemExit(f"L2 of {num_slots * slot_bytes >> 20} MiB cannot be pinned: {reason}; raise `ulimit -l`")
    return region


@contextmanager
def copying(l1: torch.Tensor | EngineBlocks, region: HostRegion, device: torch.device) -> Iterator[CopyStream]:
    """The stream that an engine on this device gets; on a GPU, once it is measured which way is best."""
    stream: CopyStream
    if device.type == "cuda":
        ways = CopyWays.to_measure(Config.load().host)
        stream = CudaCopyStream(l1, region, ways=ways)
        unmeasured, end = CopyWays().choice.reason, time.monotonic() + 10
        while region.pinned and ways.wants_measuring and ways.choice.reason == unmeasured:
            if time.monotonic() > end:
                _report.progress("the ways of copying are not measured yet: published figures count")
                break
            time.sleep(0.05)
    else:
        stream = HostCopyStream(l1, region)
    try:
        yield stream
    finally:
        stream.close(DEADLINE)


def engine_tensor(layout: str, num_blocks: int, geometry: Geometry8B, device: torch.device) -> Any:
    """L1 as an engine keeps it: our own block-first tensor, or the parts of vLLM's KV tensors.

    vLLM shows each layer as `[blocks, heads, tokens, keys and values]`, however it lies in memory. NHD has tokens
    before heads there, HND heads before tokens; cross-layer has all layers of a block side by side.
    """
    layers, heads, tokens, both = geometry.num_layers, geometry.num_heads, geometry.num_tokens, 2 * geometry.head_dim

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    if layout == "own":
        return zeros(num_blocks, layers, 2, tokens, heads, both // 2)
    if layout == "cross-layer":
        whole = zeros(num_blocks, layers, tokens, heads, both)
        return _by_layer([whole[:, layer].permute(0, 2, 1, 3) for layer in range(layers)], geometry.layer_bytes)
    if layout == "NHD":
        tensors = [zeros(num_blocks, tokens, heads, both).permute(0, 2, 1, 3) for _ in range(layers)]
    else:
        tensors = [zeros(num_blocks, heads, tokens, both) for _ in range(layers)]
    return _by_layer(tensors, geometry.layer_bytes)


def piece_tensor(layout: str, num_blocks: int, piece_bytes: int, num_layers: int, device: torch.device) -> Any:
    """L1 whose blocks are one piece each ("own"), or `num_layers` pieces in as many tensors ("layers")."""
    if layout == "own":
        return torch.zeros((num_blocks, 4, piece_bytes // 4), dtype=torch.uint8, device=device)
    shape = (num_blocks, piece_bytes)
    return _by_layer([torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(num_layers)], piece_bytes)


def _by_layer(tensors: Sequence[torch.Tensor], layer_bytes: int) -> EngineBlocks:
    parts = [BlockPart(tensor, layer, layer * layer_bytes) for layer, tensor in enumerate(tensors)]
    return EngineBlocks(parts, len(tensors) * layer_bytes)


def enqueue(stream: CopyStream, direction: str, copies: BlockCopies) -> CopyEvent:
    return stream.load(copies) if direction == "load" else stream.store(copies)


def ended(events: Sequence[CopyEvent]) -> None:
    """Wait for all of them; SystemExit if one hangs or fails."""
    for event in events:
        if not event.wait(DEADLINE) or event.error:
            raise SystemExit(f"a copy failed: {event.error or f'it has not ended in {DEADLINE:.0f} s'}")


class BigCopies:
    """The limit: whole runs of memory between the device and pinned memory, each way on a stream of its own."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._streams = {way: torch.cuda.Stream(device) if pinned else None for way in ("load", "store")}
        for direction in ("load", "store"):
            ours = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._pairs[direction] = (ours, host) if direction == "load" else (host, ours)

    def copy(self, directions: Sequence[str], times: int = 1) -> None:
        """Copy so many times in each direction, all at once, and wait."""
        for _ in range(times):
            for direction in directions:
                target, source = self._pairs[direction]
                stream = self._streams[direction]
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    target.copy_(source, non_blocking=True)
        for stream in self._streams.values():
            if stream is not None:
                stream.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait for the compute of this thread, as an engine does that reads its tokens."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def interleaved(
    variants: Mapping[str, Callable[[], Callable[[], None]]], rounds: int
) -> dict[str, NDArray[np.float64]]:
    """Seconds of each variant in each round. A variant is prepared, and what that returns is timed."""
    turns = {name: lambda prepare=prepare: took(prepare()) for name, prepare in variants.items()}
    return {name: np.array(seconds) for name, seconds in in_turns(turns, rounds, warm_up=1).items()}


def mid(values: Iterable[float], digits: int = 3, quantile: float = 0.5) -> float:
    return round(float(np.quantile(list(values), quantile)), digits)


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows, each told on the way: a run that is cut short has not measured in vain."""
    for row in rows:
        _report.progress("  ".join(f"{name} {value}" for name, value in row.items()))
        yield row


def setup_of(options: Given) -> dict[str, object]:
    return {"dry": "this CPU, in small: no figure of a GPU"} if options.dry else {}
