"""Copies between L1 on a device and L2, on an adversary's CUDA: no byte is wrong, and no order is left to chance.

A client that keeps the streams' contract runs random programs of stores, loads and compute. Each planted fault is
found: that is what says that the others were looked for.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cupy import LazyCupy
from engine_layouts import one_rank, tokens_first, two_groups, whole_layers
from extent import brief
from lazy_cuda import LazyCuda, LazyDriver, LazyStream, pin, ranges_of

from kvtier.tiers.copies import cuda_transfer, packer
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream, CudaEvent
from kvtier.tiers.copies.transfer import BlockCopies, BlockPart, CopyDirection, EngineBlocks
from kvtier.tiers.host.host import HostRegion

BLOCKS, SLOTS, LAYERS, HEADS, TOKENS, DIM = 12, 14, 4, 2, 4, 32
LAYER = HEADS * TOKENS * 2 * DIM * 2  # bytes
SLOT = LAYERS * LAYER  # a multiple of 4096: neighbouring slots lie without a gap
LAYOUTS = ["whole", "token-major", "groups", "one rank"]
OWN = ["own, by kernel", "own, by copies", "own, by batches"]
BATCHED = [f"{layout}, by batches" for layout in LAYOUTS]
STEPS = 60


class Client:
    """Keeps the contract: nothing is used that a copy still uses. Its twin makes every copy at once, in order."""

    def __init__(self, cuda: LazyCuda, layout: str, folder: Path) -> None:
        self.cuda = cuda
        self.rng = random.Random(cuda.seed)
        token_major = layout.startswith("token-major")
        shape = (BLOCKS, TOKENS, HEADS, 2 * DIM) if token_major else (BLOCKS, HEADS, TOKENS, 2 * DIM)
        self.region = HostRegion.allocate(SLOTS, SLOT, prefault=False)
        pin(self.region, cuda, piece_bytes=4 * SLOT)
        by_batches = layout.endswith("by batches")
        driver: Any = LazyDriver(cuda, copies_in_batches=by_batches)
        # without batches of runs what is staged still goes by one call
        batch_from = None if layout.startswith("token-major") else 0
        choice = CopyChoice(batch_from, torch_from=None if layout == "own, by kernel" else 0)
        self.kept = np.zeros_like(self.region.array)  # the twin's L2
        if layout in OWN:
            l1 = torch.zeros(BLOCKS, LAYERS, LAYER // 2, dtype=torch.bfloat16)
            self.tensors = [l1]
            parts = _own_parts(l1)
            self.twins = _own_parts(l1.clone())
            cuda.own(l1)
            self.stream = CudaCopyStream(l1, self.region, cupy=LazyCupy(cuda), driver=driver, ways=CopyWays(choice))
        else:
            self.tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
            kind = layout.partition(",")[0]
            parts = _parts(self.tensors, kind)
            self.twins = _parts([tensor.clone() for tensor in self.tensors], kind)
            for tensor in self.tensors:
                cuda.own(tensor)
            cupy = LazyCupy(cuda) if by_batches else None  # alike parts by kernel, or all of them by torch
            blocks = EngineBlocks(parts, SLOT)
            self.stream = CudaCopyStream(blocks, self.region, cupy=cupy, driver=driver, ways=CopyWays(choice))
        self.parts = parts
        self.num_ids = BLOCKS * (1 + max(part.group for part in parts))
        self.users: dict[int, tuple[CudaEvent, CopyDirection]] = {}  # block → the copy that uses it
        self.writers: dict[int, CudaEvent] = {}  # slot → the store that fills it
        self.readers: dict[int, list[CudaEvent]] = {}
        self.value = 0

    def run(self, num_steps: int = STEPS) -> None:
        """A random program; then all has ended and both worlds hold the same bytes."""
        for _ in range(num_steps):
            self._reap()
            action = self.rng.random()
            if action < 0.35:
                self._compute(self.rng.sample(range(self.num_ids), self.rng.randint(1, 5)))
            elif action < 0.65:
                self._store(self.rng.randint(1, 5))
            elif action < 0.9:
                self._load(self.rng.randint(1, 5))
            else:
                for _ in range(self.rng.randint(0, 6)):
                    self.cuda.step()
        self.cuda.finish()
        assert self.stream.drain(5)
        for ours, twin in zip(self.parts, self.twins, strict=True):
            assert torch.equal(ours.tensor, twin.tensor), "L1"
        assert np.array_equal(self.region.array, self.kept), "L2"

    def close(self) -> None:
        self.stream.close(1)
        self.region.close()

    def _reap(self) -> None:
        for block, (event, _) in list(self.users.items()):
            if event.done():
                assert event.error is None
                del self.users[block]
        for slot, event in list(self.writers.items()):
            if event.done():
                del self.writers[slot]
                self._seal(slot)
        readers = {slot: [event for event in events if not event.done()] for slot, events in self.readers.items()}
        self.readers = {slot: events for slot, events in readers.items() if events}

    def _seal(self, slot: int) -> None:
        """The host reads a slot as soon as its store has ended, to name it."""
        start = self.region.address + slot * self.region.slot_stride
        self.cuda.host_touches("sealing", [(start, start + SLOT)], writes=False)
        assert np.array_equal(self.region.array[slot], self.kept[slot]), "sealed before it was there"

    def _compute(self, blocks: list[int]) -> None:
        """Read and write blocks; behind the copies that still use them."""
        for block in blocks:
            if block in self.users:
                assert self.stream.fence(self.users[block][0], 1)
        for block in blocks:
            group, row = divmod(block, BLOCKS)
            self.value += 1
            for part, twin in zip(self.parts, self.twins, strict=True):
                if part.group == group:
                    touched = ranges_of(part.tensor[row : row + 1])
                    self.cuda.compute_op("compute", touched, touched)
                    assert torch.equal(part.tensor[row], twin.tensor[row]), "computed upon before it was there"
                    part.tensor[row].fill_(self.value % 97)
                    twin.tensor[row].fill_(self.value % 97)

    def _store(self, count: int) -> None:
        blocks = [block for block in range(self.num_ids) if self.users.get(block, (None, "store"))[1] == "store"]
        slots = [slot for slot in range(SLOTS) if slot not in self.writers and slot not in self.readers]
        if min(len(blocks), len(slots)) < count:
            return
        copies = self._copies(self._some(blocks, count), self._some(slots, count))
        event = self._issued(self.stream.store(copies))
        for block, slot in copies_of(copies):
            self.users[block], self.writers[slot] = (event, "store"), event
            for twin in self._asked(copies, block):
                value = twin.tensor[block % BLOCKS].contiguous().view(torch.uint8).numpy().reshape(-1)
                self.kept[slot, twin.offset : twin.offset + twin.num_bytes] = value

    def _load(self, count: int) -> None:
        """Into blocks that nobody uses; from slots that are filled, or behind the store that fills them."""
        blocks = [block for block in range(self.num_ids) if block not in self.users]
        if len(blocks) < count:
            return
        slots = self._some(list(range(SLOTS)), count)
        filling = {id(self.writers[slot]): self.writers[slot] for slot in slots if slot in self.writers}
        if len(filling) > 1:
            return
        after = next(iter(filling.values()), None)
        if after is not None:  # it stands for compute's fence, so the blocks have to be idle
            self.cuda.compute.synchronize()
        copies = self._copies(self._some(blocks, count), slots)
        event = self._issued(self.stream.load(copies, after))
        for block, slot in copies_of(copies):
            self.users[block] = (event, "load")
            self.readers.setdefault(slot, []).append(event)
            for twin in self._asked(copies, block):
                row = twin.tensor[block % BLOCKS]
                value = torch.from_numpy(self.kept[slot, twin.offset : twin.offset + twin.num_bytes].copy())
                row.copy_(value.view(torch.bfloat16).view(row.shape))

    def _copies(self, blocks: list[int], slots: list[int]) -> BlockCopies:
        some = self.rng.random() < 0.3
        first, last = sorted(self.rng.sample(range(LAYERS + 1), 2))
        return BlockCopies(np.array(blocks), np.array(slots), (first, last) if some else None)

    def _some(self, numbers: list[int], count: int) -> list[int]:
        """So many of them: neighbours, now and then, where there are any."""
        first = self.rng.choice(numbers)
        run = list(range(first, first + count))
        return run if self.rng.random() < 0.5 and set(run) <= set(numbers) else self.rng.sample(numbers, count)

    def _asked(self, copies: BlockCopies, block: int) -> list[BlockPart]:
        first, last = copies.layers or (0, LAYERS)
        return [twin for twin in self.twins if twin.group == block // BLOCKS and first <= twin.layer < last]

    @staticmethod
    def _issued(event: object) -> CudaEvent:
        assert isinstance(event, CudaEvent)
        assert event.error is None
        return event


def copies_of(copies: BlockCopies) -> Iterator[tuple[int, int]]:
    return zip(copies.device_blocks.tolist(), copies.host_slots.tolist(), strict=True)


def _parts(tensors: list[torch.Tensor], layout: str) -> list[BlockPart]:
    if layout == "token-major":
        return tokens_first(tensors)
    return {"groups": two_groups, "one rank": one_rank}.get(layout, whole_layers)(tensors)


def _own_parts(l1: torch.Tensor) -> list[BlockPart]:
    return [BlockPart(l1[:, layer], layer, layer * LAYER) for layer in range(LAYERS)]


def program(
    seed: int,
    layout: str,
    folder: Path,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
    *,
    room: int | None = None,
    captures: bool = False,
) -> tuple[LazyCuda, Client]:
    """One random program; raises AssertionError for a wrong byte, a race or a complaint.

    `room`: so many bytes the device has for an allocation. `captures`: some thread captures a graph all the while.
    """
    with pytest.MonkeyPatch.context() as patch:
        cuda = LazyCuda(seed, eager=random.Random(seed).choice([0.0, 0.05, 0.3]), room=room)
        cuda.patch(patch)
        cuda.capturing = LazyStream(cuda, "graph") if captures else None
        patch.setattr(packer, "STAGING_BYTES", random.Random(seed + 1).choice([SLOT, 3 * SLOT, 1 << 20]))
        if plant is not None:
            plant(patch)
        client = Client(cuda, layout, folder)
        try:
            client.run()
        finally:
            client.close()
    return cuda, client


@pytest.mark.parametrize("layout", [*LAYOUTS, *OWN, *BATCHED])
def test_random_programs_leave_every_byte_right_and_nothing_to_chance(layout: str, tmp_path: Path) -> None:
    if layout == "own, by kernel" and shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")
    seeds = range(brief(1, 6))
    assert sum(program(seed, layout, tmp_path)[0].num_ops for seed in seeds) > 80 * len(seeds)


@pytest.mark.parametrize("layout", brief(["whole"], LAYOUTS))
@pytest.mark.parametrize(("room", "way"), [(2 * SLOT, "smaller staging"), (0, "without staging")])
def test_a_device_without_memory_for_the_staging_copies_more_slowly(
    layout: str, room: int, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(brief(2, 4)):
        caplog.clear()
        copier: Any = program(seed, layout, tmp_path, _much_staging, room=room)[1].stream._copier
        assert copier.counts[way]
        assert sum("no memory on the device" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("layout", ["whole", *brief([], ["groups", "own, by copies", "whole, by batches"])])
def test_copies_beside_a_capture_neither_fail_nor_spoil_it(layout: str, tmp_path: Path) -> None:
    for seed in range(brief(1, 4)):
        program(seed, layout, tmp_path, captures=True)
        with pytest.raises((AssertionError, RuntimeError)):
            program(seed, layout, tmp_path, _forbidden_in_captures, captures=True)


def _much_staging(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packer, "STAGING_BYTES", 5 * SLOT)


def _forbidden_in_captures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_transfer, "beside_captures", lambda _: nullcontext())


def _one_staging(patch: pytest.MonkeyPatch) -> None:
    real = packer.Packer._rows
    patch.setattr(packer.Packer, "_rows", lambda self, direction, *sizes: real(self, "load", *sizes))


def _copies_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    real = LazyStream.wait_event
    patch.setattr(
        LazyStream, "wait_event", lambda self, event: real(self, event) if self is self.cuda.compute else None
    )


def _done_when_issued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaEvent, "done", lambda self: self._issued.is_set())


def _compute_waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaEvent, "fence", lambda self, stream, timeout: True)


def _on_the_callers_stream(patch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.stream
    patch.setattr(torch.cuda, "stream", lambda stream: real(stream.cuda.compute))


def _without_a_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())


def _unrecorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def _fence_on_another_device(patch: pytest.MonkeyPatch) -> None:
    real = torch.cuda.current_stream
    patch.setattr(torch.cuda, "current_stream", lambda _=None: real())


def _pageable_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def _blocking_copies(patch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.copy_
    patch.setattr(torch.Tensor, "copy_", lambda target, source, non_blocking=False: real(target, source))


def _kernel_on_stream_0(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LazyStream, "cuda_stream", property(lambda _: 0, lambda _, value: None), raising=False)


def _neighbours_joined_wrongly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packer, "ends_of_runs", lambda slots, region: np.zeros(len(slots) - 1, bool))


def _joined_across_pinned_pieces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packer, "ends_of_runs", lambda slots, region: np.diff(slots) != 1)


def _batches_read_before_the_store_they_follow(patch: pytest.MonkeyPatch) -> None:
    real = LazyDriver.copy
    patch.setattr(LazyDriver, "copy", lambda self, *rest, at_any_time: real(self, *rest, at_any_time=True))


def _layers_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = EngineBlocks.select
    patch.setattr(EngineBlocks, "select", lambda self, group, layers: real(self, group, None))


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("whole", _one_staging),
    ("whole", _copies_wait_for_nothing),
    ("whole", _done_when_issued),
    ("own, by copies", _compute_waits_for_nothing),
    ("own, by copies", _on_the_callers_stream),
    ("token-major", _without_a_guard),
    ("groups", _unrecorded),
    ("own, by copies", _fence_on_another_device),
    ("own, by kernel", _pageable_index),
    ("own, by copies", _blocking_copies),
    ("own, by kernel", _kernel_on_stream_0),
    ("own, by copies", _neighbours_joined_wrongly),
    ("groups", _layers_forgotten),
    ("own, by copies", _joined_across_pinned_pieces),
    ("whole, by batches", _batches_read_before_the_store_they_follow),
]


@pytest.mark.parametrize(("layout", "plant"), FAULTS, ids=[plant.__name__.strip("_") for _, plant in FAULTS])
def test_a_planted_fault_is_found(layout: str, plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    if layout == "own, by kernel" and shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")

    def programs() -> None:
        for seed in range(12):
            program(seed, layout, tmp_path, plant)

    with pytest.raises(AssertionError):
        programs()
