"""vLLM's worker half over host memory, without vLLM: when a step's loads start, and that each starts once."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_layouts import slot_plan_of

from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.connector.vllm.worker import RegionHandle, WorkerHalf, WorkerStep, handle_of
from kvtier.tiers.host.host import HostRegion

BLOCKS, SLOTS, HEADS, TOKENS, CONTENT = 8, 8, 2, 8, 64
NAMES = ("layer.0", "layer.1")


class Rank:
    """One worker half, and the memory on both sides."""

    def __init__(self) -> None:
        self.tensors = {name: torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for name in NAMES}
        plan = slot_plan_of(NAMES, TOKENS, self.tensors[NAMES[0]][0].nbytes)
        self.region = HostRegion.allocate(SLOTS, plan.block_bytes, shared=True, prefault=False)
        for slot in range(SLOTS):
            self.region.array[slot] = slot + 1
        self.half = WorkerHalf(plan, layerwise=False)
        self.half.register(self.tensors, 0)

    def message(self, *loads: CopyOp, touches: bool = False) -> WorkerStep:
        plan = StepPlan(1, self.region.region_id, loads)
        final_stores = StepPlan(1, self.region.region_id)
        handle = RegionHandle.of(self.region)
        return WorkerStep(handle, plan.encode(), final_stores.encode(), is_idle=False, touches=touches)

    def ended(self) -> tuple[int, ...]:
        """The step's compute is issued, and its loads have ended: their ops."""
        self.drained()
        self.half.collect()
        assert self.half.take_received() == ({"asked"}, set())
        return self.half.take_reports().finished

    def holds(self, block: int, value: int) -> bool:
        return all(bool((tensor[block].numpy().view(np.uint8) == value).all()) for tensor in self.tensors.values())

    def drained(self) -> None:
        assert self.half._stream is None or self.half._stream.drain(30)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.half.close()
    made.region.close()


LOAD = CopyOp(7, "asked", (3, 4), (1, 2), (0, 0), layerwise=False)


def test_a_load_that_the_compute_does_not_wait_for_runs_beside_it(rank: Rank) -> None:
    message = rank.message(LOAD)
    rank.half.begin(message)
    rank.drained()
    assert rank.holds(3, 2)  # before the compute, and long before vLLM says that loads may start
    assert rank.holds(4, 3)
    rank.tensors[NAMES[0]][3] = 0  # a second copy would show
    rank.half.start_load(message)
    rank.half.start_store(message)
    assert rank.ended() == (7,)
    assert not rank.holds(3, 2)


def test_blocks_that_the_step_zeroes_first_are_loaded_after_its_compute(rank: Rank) -> None:
    message = rank.message(LOAD, touches=True)
    rank.half.begin(message)
    rank.drained()
    assert rank.holds(3, 0)
    rank.half.start_load(message)
    rank.drained()
    assert rank.holds(3, 2)
    rank.half.start_store(message)
    assert rank.ended() == (7,)


def test_a_load_that_the_compute_needs_has_come_when_it_starts(rank: Rank) -> None:
    awaited = CopyOp(8, "now", (5, 6), (1, 2), (0, 0), layerwise=True)
    message = rank.message(LOAD, awaited)
    rank.half.begin(message)
    rank.drained()
    assert rank.holds(5, 0)  # vLLM asks for all of this step's before its compute
    rank.half.start_load(message)
    assert rank.holds(5, 2)
    rank.half.start_store(message)
    assert set(rank.ended()) == {7, 8}


def test_a_runner_without_a_hook_before_the_step_starts_loads_once_too(rank: Rank) -> None:
    message = rank.message(LOAD)
    rank.half.start_load(message)
    rank.half.start_store(message)
    assert rank.ended() == (7,)
    assert rank.holds(3, 2)


def test_a_step_planned_as_the_daemon_restarted_loads_from_the_memory_it_was_planned_for(rank: Rank) -> None:
    tiers: Any = SimpleNamespace(region=rank.region)
    message = rank.message(LOAD)
    plan = StepPlan.decode(message.plan)
    known = handle_of(tiers, None, plan)
    assert known == message.region
    other = HostRegion.allocate(SLOTS, rank.region.slot_bytes, shared=True, prefault=False)
    other.array[:] = 99
    tiers.region = other  # between the lease and the plan's end
    rank.half.begin(replace(message, region=handle_of(tiers, known, plan)))
    rank.drained()
    assert rank.holds(3, 2)
    assert handle_of(tiers, None, plan) is None  # unknown: such loads fail
    following = StepPlan(2, other.region_id)
    assert handle_of(tiers, known, following) == RegionHandle.of(other)
    # Without a daemon there is nothing to map, and its memory is free for the next one.
    tiers.region = None
    assert handle_of(tiers, known, StepPlan(3, 0)) is None
    rank.half.start_store(message)
    assert rank.ended() == (7,)
    rank.half.begin(WorkerStep(None, StepPlan(3, 0).encode(), StepPlan(3, 0).encode(), is_idle=True))
    assert rank.half._region is None
    other.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_of_another_engine_under_the_schedulers_numbers_is_not_mapped(
    rank: Rank, caplog: pytest.LogCaptureFixture, elsewhere: bool
) -> None:
    """On another node or in another container its pid and descriptor may be those of another engine of the model."""
    other = HostRegion.allocate(SLOTS, rank.region.slot_bytes, shared=True, prefault=False)
    theirs, ours = RegionHandle.of(other), RegionHandle.of(rank.region)
    handle = replace(ours, machine="another") if elsewhere else replace(ours, fd=theirs.fd)
    message = replace(rank.message(LOAD), region=handle)
    rank.half.begin(message)
    rank.half.start_load(message)
    rank.half.start_store(message)
    rank.half.collect()
    assert rank.half.take_invalid() == {3, 4}
    assert "the scheduler's memory cannot be mapped here, so no blocks are kept: " in caplog.text
    other.close()
