"""Copies of a GPU's blocks that find no room, fail, or never end: a miss or a dropped store, and nothing is reused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_tier_rig import GpuBelow
from kv_tier_rig import GREEDY, Open, hits, model_of
from lazy_cuda import LazyCuda, LazyDriver, LazyStream
from tiny_models import prompt

from kvtier.connector.transformers import cache_form, device_copies, tier_blocks
from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.blocks import Blocks, _runs
from kvtier.connector.transformers.cache_form import HostCopy
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import HostEvent

ROWS = torch.tensor([prompt(1, 150)])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuBelow]:
    cuda = LazyCuda(eager=0.3)
    yield GpuBelow(cuda, monkeypatch, slots=4, batches=False)
    cuda.finish()


@pytest.fixture
def expected() -> torch.Tensor:
    """What the model says without KVTier."""
    answer: torch.Tensor = model_of("llama").generate(ROWS, **GREEDY)
    return answer


@pytest.fixture
def kv(gpu: GpuBelow, open_tier: Open) -> KVTier:
    return open_tier(model_of("llama"))


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> list[tuple[int, ...]]:
    """`torch.empty` on a device that has no room for more bytes at once; returns what it refused."""
    real, refused = torch.empty, list[tuple[int, ...]]()

    def empty(*size: int, device: Any = None, **options: Any) -> torch.Tensor:
        made: torch.Tensor = real(*size, device=device, **options)
        if device is not None and made.nbytes > most:
            refused.append(tuple(made.shape))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    monkeypatch.setattr(torch, "empty", empty)
    return refused


def test_staging_shrinks_to_what_there_is_room_for(
    gpu: GpuBelow, kv: KVTier, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = short_of_memory(monkeypatch, 5 * kv._form.block_bytes)  # four of one slot each
    for cached in (0, 144):
        assert hits(kv, ROWS, expected) == cached
    assert [shape[:2] for shape in refused[:2]] == [(4, 4), (4, 2)]
    assert gpu.num_gathered == gpu.num_scattered == 9


def test_without_any_room_blocks_are_copied_as_a_cpu_copies_them(
    gpu: GpuBelow, kv: KVTier, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short_of_memory(monkeypatch, 0)
    for cached in (0, 144):
        assert hits(kv, ROWS, expected) == cached
    assert gpu.num_streams == 0
    assert caplog.text.count("no staging on cpu, so blocks are copied one plane at a time: CUDA out of memory") == 1


def failing(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The copy of that number fails, behind others that the device makes."""
    calls = iter(range(1_000))

    def copy(stream: CudaCopyStream, *arguments: Any, **options: Any) -> Any:
        if next(calls) != number:
            return real(stream, *arguments, **options)
        event = HostEvent()
        event.end("CUDA error: unspecified launch failure")
        return event

    return copy


@pytest.mark.parametrize("number", range(3))
def test_a_store_that_fails_in_the_middle_keeps_nothing_and_costs_no_slots(
    gpu: GpuBelow, kv: KVTier, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(CudaCopyStream, "store", failing(CudaCopyStream.store, number))
        assert torch.equal(kv.generate(ROWS, **GREEDY), expected)
    assert kv.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] == 9
    assert kv.load(ROWS)[1] == 0
    assert torch.equal(kv.generate(ROWS, **GREEDY), expected)
    assert kv.load(ROWS)[1] == 144


@pytest.mark.parametrize("number", range(3))
def test_a_load_that_fails_in_the_middle_is_a_miss(
    gpu: GpuBelow, open_tier: Open, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model = model_of("llama")
    kv = open_tier(model)
    expected = kv.generate(ROWS, **GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(CudaCopyStream, "load", failing(CudaCopyStream.load, number))
        assert hits(kv, ROWS, expected) == 0
    assert kv.stats()['kvtier_miss_total{reason="copy_failed"}'] == 9
    assert kv.load(ROWS)[1] == 144


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), MemoryError("of CuPy's pool")],
    ids=repr,
)
@pytest.mark.parametrize("name", ["empty", "write", "read"])
def test_whatever_a_device_raises_costs_blocks_and_no_answer(
    gpu: GpuBelow, kv: KVTier, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    if name != "read":
        kv.generate(ROWS, **GREEDY)
        assert kv.drain()
    with monkeypatch.context() as patched:
        patched.setattr(Blocks, name, broken)
        assert torch.equal(kv.generate(ROWS, **GREEDY), expected)
    assert kv.num_cached_tokens == (144 if name == "empty" else 0)  # without memory there, by way of the host's
    counted = {"write": 'kvtier_miss_total{reason="copy_failed"}'}.get(
        name, 'kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'
    )
    assert kv.stats().get(counted, 0) == (0 if name == "empty" else 9)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: unknown error"), MemoryError("of CuPy's pool")], ids=repr)
def test_a_stream_that_cannot_be_made_leaves_the_copies_to_the_cpu(
    gpu: GpuBelow, kv: KVTier, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:

    def broken(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("CudaCopyStream", "DeviceCopies._now"):
        with monkeypatch.context() as patched:
            patched.setattr(f"kvtier.connector.transformers.device_copies.{name}", broken)
            assert hits(kv, ROWS, expected) == (0 if name == "CudaCopyStream" else 144)


def dead(kv: KVTier, monkeypatch: pytest.MonkeyPatch) -> list[HostEvent]:
    """From now on the device ends no copy; every wait is short."""
    monkeypatch.setattr(device_copies, "DEADLINE", 0.2)
    monkeypatch.setattr(tier_blocks, "DEADLINE", 0.2)
    monkeypatch.setattr(tier_blocks, "_SEALED", 0.2)
    events: list[HostEvent] = []

    def never(stream: CudaCopyStream, *_: Any, **__: Any) -> HostEvent:
        events.append(HostEvent())
        return events[-1]

    monkeypatch.setattr(CudaCopyStream, "load", never)
    monkeypatch.setattr(CudaCopyStream, "store", never)
    return events


def test_what_a_dead_device_was_given_stays_its_own(
    gpu: GpuBelow, open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    other = torch.tensor([prompt(2, 150)])
    kv = open_tier(model)
    expected = kv.generate(ROWS, **GREEDY)
    hierarchy: Any = kv._opened
    with monkeypatch.context() as broken:
        events = dead(kv, broken)
        # A load is a miss after the deadline; the device may still read its slots, which stay leased.
        assert hits(kv, ROWS, expected) == 0
        assert hierarchy.host.pool.counts().leased == 9
        # Stores are not sealed, and their slots not given to others.
        kv.generate(other, **GREEDY)
        assert hierarchy.host.pool.counts().filling > 0
        assert not kv.drain(0.2)
        # Nothing waits for long, and nothing raises. At last the device comes back.
        for event in events:
            event.end("the device was reset")
    assert kv.drain()
    assert kv.load(ROWS)[1] == 144
    assert kv.load(other)[1] == 0
    assert hierarchy.host.pool.counts().leased == 0
    assert hierarchy.host.pool.counts().filling == 0


def test_states_that_never_arrive_are_not_kept(gpu: GpuBelow, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(8)
    sent = HostCopy(tensor)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: False)
    assert sent.wait(0.05) is None
    monkeypatch.undo()
    gpu.cuda.finish()
    found = sent.wait(0)
    assert found is not None
    assert torch.equal(found, tensor)


def test_waiting_for_states_does_not_spoil_a_capture_of_another_thread(
    gpu: GpuBelow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_form, "cuda_driver", lambda: LazyDriver(gpu.cuda))
    tensor = torch.arange(8)
    sent = HostCopy(tensor)
    gpu.cuda.capturing = LazyStream(gpu.cuda, "graph")
    found = sent.wait(60)  # a spoiled capture is a complaint
    gpu.cuda.capturing = None
    assert found is not None
    assert torch.equal(found, tensor)


def test_blocks_are_taken_once_and_runs_end_where_states_begin() -> None:
    assert list(_runs([0, 1, 2, 5, 6, 8], 2)) == [(0, 0, 2), (2, 2, 1), (3, 5, 2), (5, 8, 1)]
    assert list(_runs(range(0), 2)) == []
    blocks = Blocks([[torch.zeros(2, 4, 1, 8)]], torch.empty(1, 32))
    assert len(blocks) == 3
    assert [len(plane) for plane in blocks.take()] == [2]
    assert list(blocks.take()) == []
