"""Copy streams: one contract for the host and the manual twin, then what only one of them has."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from device_rig import pairs
from manual_copies import ManualCopyStream
from numpy.typing import NDArray

from kvtier.tiers.copies.transfer import (
    L1,
    BlockCopies,
    CopyEvent,
    CopyStream,
    HostCopyStream,
    HostEvent,
    block_bytes_view,
)
from kvtier.tiers.host import memory
from kvtier.tiers.host.host import HostRegion

NUM_BLOCKS, NUM_LAYERS, NUM_SLOTS = 24, 3, 32
LAYER_BYTES = 2 * 4 * 2 * 64 * 2  # K and V, 4 tokens, 2 heads of 64 bfloat16
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES


def block_of(key: int) -> NDArray[np.uint8]:
    """The bytes of block `key`, [num_layers, layer_bytes]: every byte follows from key, layer and position."""
    position = np.arange(LAYER_BYTES)
    return np.stack([(key * 7 + layer * 31 + position) % 251 for layer in range(NUM_LAYERS)]).astype(np.uint8)


class Rig:
    """L1, L2 and a stream between them; `run` lets the stream finish what it was given."""

    def __init__(self, make: Callable[[torch.Tensor, HostRegion], CopyStream], run: Callable[[CopyStream], None]):
        self.tensor = torch.zeros(NUM_BLOCKS, NUM_LAYERS, 2, 4, 2, 64, dtype=torch.bfloat16)
        self.l1 = block_bytes_view(self.tensor)
        self.region = HostRegion.allocate(NUM_SLOTS, BLOCK_BYTES)
        self.stream = make(self.tensor, self.region)
        self._run = run

    def fill_l1(self, blocks: list[int]) -> None:
        for block in blocks:
            self.l1[block] = block_of(block)

    def slot(self, index: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.region.slot(index), np.uint8).reshape(NUM_LAYERS, LAYER_BYTES)

    def finish(self, *events: CopyEvent) -> None:
        """Let every event end, and look that all went well."""
        self._run(self.stream)
        for event in events:
            assert event.wait(60)
            assert event.done()
            assert event.error is None


def complete_all(stream: CopyStream) -> None:
    assert isinstance(stream, ManualCopyStream)
    stream.complete_all()


def on_a_thread(l1: L1, region: HostRegion, **settings: int) -> HostCopyStream:
    return HostCopyStream(l1, region, at_once=0, **settings)


TWINS = {
    "host": (on_a_thread, lambda stream: None),
    "host-python": (on_a_thread, lambda stream: None),
    "host-2-threads": (lambda l1, region: HostCopyStream(l1, region, 2, at_once=0), lambda stream: None),
    "host-at-once": (HostCopyStream, lambda stream: None),
    "manual": (ManualCopyStream, complete_all),
}


@pytest.fixture(params=list(TWINS))
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "host-python":
        monkeypatch.setenv("KVTIER_COMPILED", "off")
    rig = Rig(*TWINS[request.param])
    yield rig
    rig.stream.close(10 if request.param != "manual" else 0)
    rig.region.close()


def test_store_then_load_brings_scattered_blocks_back(rig: Rig) -> None:
    rig.fill_l1([3, 11, 4, 23])
    stored = rig.stream.store(pairs([3, 11, 4, 23], [30, 2, 3, 17]))
    rig.finish(stored)
    # every slot holds its block, and no other slot was touched
    for block, slot in ((3, 30), (11, 2), (4, 3), (23, 17)):
        assert np.array_equal(rig.slot(slot), block_of(block))
    assert np.count_nonzero(rig.region.array.any(axis=1)) == 4
    # load them elsewhere, in another order
    loaded = rig.stream.load(pairs([0, 1, 2], [17, 30, 2]))
    rig.finish(loaded)
    for block, key in ((0, 23), (1, 3), (2, 11)):
        assert np.array_equal(rig.l1[block], block_of(key))


def test_layer_ranges_move_only_their_layers(rig: Rig) -> None:
    for slot in range(6):
        rig.slot(slot)[:] = block_of(slot)
    # layer by layer, as a layerwise load does: two calls make up the block
    first = rig.stream.load(pairs([5, 9, 10], [0, 4, 5], (0, 1)))
    rig.finish(first)
    assert np.array_equal(rig.l1[9, 0], block_of(4)[0])
    assert not rig.l1[9, 1:].any()
    rest = rig.stream.load(pairs([5, 9, 10], [0, 4, 5], (1, 3)))
    rig.finish(rest)
    for block, slot in ((5, 0), (9, 4), (10, 5)):
        assert np.array_equal(rig.l1[block], block_of(slot))
    # and a store of a middle layer leaves the others of the slot alone
    stored = rig.stream.store(pairs([9], [20], (1, 2)))
    rig.finish(stored)
    assert np.array_equal(rig.slot(20)[1], block_of(4)[1])
    assert not rig.slot(20)[[0, 2]].any()


def test_long_runs_and_reversed_runs_arrive_whole(rig: Rig) -> None:
    rig.fill_l1(list(range(NUM_BLOCKS)))
    stored = rig.stream.store(pairs(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))))  # one run on both sides
    rig.finish(stored)
    loaded = rig.stream.load(pairs(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))[::-1]))  # descending
    rig.finish(loaded)
    for block in range(NUM_BLOCKS):
        assert np.array_equal(rig.l1[block], block_of(NUM_BLOCKS - 1 - block))


def test_an_empty_batch_ends_well(rig: Rig) -> None:
    rig.finish(rig.stream.load(pairs([], [])))


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        (pairs([NUM_BLOCKS], [0]), "L1 block outside 0..23: 24"),
        (pairs([-1], [0]), "L1 block outside"),
        (pairs([0, 1], [0, NUM_SLOTS]), "L2 slot outside 0..31: 0..32"),
        (pairs([0], [0], (0, NUM_LAYERS + 1)), "layers 0..4: L1 has 3"),
        (pairs([0], [0], (2, 2)), "layers 2..2"),
        (pairs([1, 2], [1]), "(2,) device blocks for (1,) host slots"),
    ],
)
def test_copies_outside_a_tier_fail_in_their_event(rig: Rig, copies: BlockCopies, message: str) -> None:
    rig.fill_l1([0, 1])
    event = rig.stream.store(copies)
    assert event.wait(0)
    assert event.error is not None
    assert message in event.error
    assert not rig.region.array.any()  # nothing of it was copied
    rig.finish(rig.stream.store(pairs([0], [0])))  # and the stream goes on


def test_a_copy_waits_for_the_event_given(rig: Rig) -> None:
    compute = HostEvent()
    rig.fill_l1([7])
    stored = rig.stream.store(pairs([7], [7]), after=compute)
    loaded = rig.stream.load(pairs([8], [7]), after=stored)  # a chain across the directions
    assert not stored.wait(0.02)
    assert not loaded.done()
    compute.end()
    rig.finish(stored, loaded)
    assert np.array_equal(rig.l1[8], block_of(7))


def test_a_copy_after_a_failed_one_fails_too(rig: Rig) -> None:
    compute = HostEvent()
    compute.end("device lost")
    stored = rig.stream.store(pairs([7], [7]), after=compute)
    loaded = rig.stream.load(pairs([8], [7]), after=stored)
    rig._run(rig.stream)
    assert loaded.wait(60)
    assert stored.error == "what it waited for failed: device lost"
    assert loaded.error is not None
    assert loaded.error.endswith(stored.error)


def test_something_that_is_no_event_is_refused(rig: Rig) -> None:
    with pytest.raises(TypeError, match="after: a CopyEvent, not str"):
        rig.stream.load(pairs([0], [0]), after="now")


def test_fence_returns_once_the_copy_is_visible(rig: Rig) -> None:
    rig.slot(1)[:] = block_of(1)
    event = rig.stream.load(pairs([2], [1]))
    rig._run(rig.stream)
    assert rig.stream.fence(event, 10)
    assert np.array_equal(rig.l1[2], block_of(1))


def test_drain_ends_with_the_last_copy(rig: Rig) -> None:
    gate = HostEvent()
    event = rig.stream.load(pairs([0], [0]), after=gate)
    assert not rig.stream.drain(0.01)
    gate.end()
    rig._run(rig.stream)
    assert rig.stream.drain(60)
    assert event.done()


def test_close_drains_first(rig: Rig) -> None:
    rig.fill_l1(list(range(NUM_BLOCKS)))
    events = [rig.stream.store(pairs([block], [block])) for block in range(NUM_BLOCKS)]
    rig._run(rig.stream)
    rig.stream.close(10)
    rig.stream.close(10)
    assert all(event.error is None for event in events)
    for block in range(NUM_BLOCKS):
        assert np.array_equal(rig.slot(block), block_of(block))


def test_close_past_its_deadline_cancels_and_refuses(rig: Rig) -> None:
    stuck = HostEvent()  # compute that never ends
    events = [rig.stream.load(pairs([0], [0]), after=stuck), rig.stream.store(pairs([1], [1]), after=stuck)]
    events += [rig.stream.load(pairs([2], [2]))]  # behind the stuck one
    rig.stream.close(0.02)
    late = rig.stream.load(pairs([0], [0]))
    for event in (*events, late):
        assert event.wait(60)
        assert event.error is not None
        assert "closed" in event.error
    assert rig.stream.drain(0)


@pytest.mark.parametrize("twin", ["host", "manual"])
def test_a_full_queue_refuses_at_once_and_only_its_direction(twin: str) -> None:
    kind = {"host": on_a_thread, "manual": ManualCopyStream}[twin]
    rig = Rig(lambda l1, region: kind(l1, region, max_queued=2), TWINS[twin][1])
    gate = HostEvent()
    waiting = [rig.stream.store(pairs([n], [n]), after=gate) for n in range(2)]
    refused = rig.stream.store(pairs([2], [2]))
    assert refused.done()
    assert refused.error == "the copy queue is full"
    # loads have their own queue; and the stores waiting are none the worse
    load = rig.stream.load(pairs([5], [5]))
    assert load.error is None
    gate.end()
    rig.finish(*waiting, load)
    rig.stream.close(1)
    rig.region.close()


def test_blocks_of_another_size_than_the_slots_are_refused() -> None:
    region = HostRegion.allocate(2, BLOCK_BYTES + 64)
    with pytest.raises(ValueError, match=f"blocks of {BLOCK_BYTES} bytes, slots of {BLOCK_BYTES + 64}"):
        ManualCopyStream(torch.zeros(2, NUM_LAYERS, LAYER_BYTES, dtype=torch.uint8), region)
    region.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_the_byte_view_shows_the_tensors_own_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(2 * 3 * 2 * 4).reshape(2, 3, 2, 4).to(dtype)
    view = block_bytes_view(tensor)
    assert view.shape == (2, 3, 8 * dtype.itemsize)
    assert np.array_equal(view, tensor.view(torch.uint8).numpy().reshape(view.shape))
    view[1, 2] = 0
    assert not tensor[1, 2].any()


def test_the_byte_view_refuses_strided_memory() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        block_bytes_view(torch.zeros(2, 3, 4).transpose(0, 1))
    with pytest.raises(ValueError, match="contiguous"):
        block_bytes_view(np.zeros((2, 3, 4)).transpose(1, 0, 2))


@pytest.mark.parametrize("twin", ["host", "host-at-once"])
def test_a_copy_that_raises_fails_and_spares_the_next(monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    def fault(*copies: object) -> None:
        raise ZeroDivisionError("oops")

    rig = Rig(*TWINS[twin])
    assert isinstance(rig.stream, HostCopyStream)
    with monkeypatch.context() as patch:
        patch.setattr(rig.stream._copier, "_copy_blocks", fault)
        failed = rig.stream.load(pairs([0], [0]))
        assert failed.wait(60)
    assert failed.error == "ZeroDivisionError: oops"
    rig.finish(rig.stream.load(pairs([0], [0])))
    rig.stream.close(1)
    rig.region.close()


def test_loads_overtake_queued_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    gate, entered = threading.Event(), threading.Event()
    rig = Rig(*TWINS["host"])
    assert isinstance(rig.stream, HostCopyStream)
    copier = rig.stream._copier
    real = copier.copy

    def recorded(direction: str, copies: BlockCopies, cancelled: Callable[[], bool]) -> str | None:
        entered.set()
        gate.wait(10)
        order.append(direction)
        return real(direction, copies, cancelled)  # type: ignore[arg-type]

    monkeypatch.setattr(copier, "copy", recorded)
    events = [rig.stream.store(pairs([0], [0]))]
    assert entered.wait(60)  # the first store is under way
    events += [rig.stream.store(pairs([1], [1])), rig.stream.load(pairs([2], [2]))]
    gate.set()
    rig.finish(*events)
    assert order == ["store", "load", "store"]
    rig.stream.close(1)
    rig.region.close()


def test_a_few_bytes_are_copied_by_whoever_asks_unless_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(*TWINS["host-at-once"])
    assert isinstance(rig.stream, HostCopyStream)
    copied_by: list[str] = []
    real = rig.stream._copier.copy

    def recorded(direction: str, copies: BlockCopies, cancelled: Callable[[], bool]) -> str | None:
        copied_by.append(threading.current_thread().name)
        return real(direction, copies, cancelled)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.stream._copier, "copy", recorded)
    assert rig.stream.store(pairs([0], [0])).done()
    gate = HostEvent()
    waits = rig.stream.store(pairs([1], [1]), after=gate)
    behind = rig.stream.store(pairs([2], [2]))  # of one direction each ends behind the one before it
    assert not waits.done()
    assert not behind.done()
    gate.end()
    rig.finish(waits, behind)
    own = threading.current_thread().name
    assert copied_by[0] == own
    assert own not in copied_by[1:]
    rig.stream.close(1)
    assert rig.stream.store(pairs([0], [0])).error == "the stream is closed"
    rig.region.close()


def test_close_waits_for_a_copy_that_a_caller_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may go right behind the close."""
    rig = Rig(*TWINS["host-at-once"])
    assert isinstance(rig.stream, HostCopyStream)
    entered, may_go_on = threading.Event(), threading.Event()
    real = rig.stream._copier.copy

    def slow(direction: str, copies: BlockCopies, cancelled: Callable[[], bool]) -> str | None:
        entered.set()
        may_go_on.wait(10)
        return real(direction, copies, lambda: False)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.stream._copier, "copy", slow)
    events: list[CopyEvent] = []
    caller = threading.Thread(target=lambda: events.append(rig.stream.store(pairs([0], [0]))))
    closer = threading.Thread(target=rig.stream.close, args=(0.0,))
    caller.start()
    assert entered.wait(60)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    may_go_on.set()
    closer.join(60)
    assert not closer.is_alive()
    caller.join(60)
    assert events[0].done()
    rig.region.close()


def test_a_caller_that_is_interrupted_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(*TWINS["host-at-once"])
    assert isinstance(rig.stream, HostCopyStream)

    def interrupted(*copies: object) -> str | None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.stream._copier, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.stream.load(pairs([0], [0]))
    assert rig.stream.drain(0)
    rig.finish(rig.stream.load(pairs([0], [0])))
    rig.stream.close(1)
    rig.region.close()


def test_close_stops_a_large_copy_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, calls = threading.Event(), []

    def slow(device: object, blocks: NDArray[np.int64], *rest: object) -> None:
        calls.append(len(blocks))
        entered.set()
        time.sleep(0.02)

    monkeypatch.setattr(memory, "COPY_PIECE", BLOCK_BYTES)
    rig = Rig(*TWINS["host"])
    assert isinstance(rig.stream, HostCopyStream)
    monkeypatch.setattr(rig.stream._copier, "_copy_blocks", slow)
    event = rig.stream.store(pairs(list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS))))
    assert entered.wait(60)
    rig.stream.close(0)
    assert event.error == "cancelled: the stream was closed"
    assert calls == [1] * len(calls)
    assert len(calls) < NUM_BLOCKS
    rig.region.close()
