"""Stories of the two connector sides together: promised, loaded, stored, aborted, failed; the test ends the copies."""

import time
from collections.abc import Sequence
from functools import partial

import msgpack
import pytest
from connector_rig import NUM_LAYERS, Bench, Request, request_of
from doubles import BLOCK_SIZE, FakeClock, MemoryTier, chain_of, payload_of, store, wait_until
from hypothesis import given
from hypothesis import strategies as st
from service_rig import drops, wanted

from kvtier.connector.plan import CopyOp, StepPlan, WorkerReport
from kvtier.connector.scheduler import ConnectorUpdate
from kvtier.tiers.copies.transfer import BlockCopies, CopyEvent
from kvtier.tiers.errors import FormatError
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Wanted
from kvtier.tiers.host import host
from kvtier.tiers.pool import Reservation
from kvtier.tiers.tier import Outcome
from kvtier.tiers.tracing import Trace


def test_what_one_request_computed_the_next_one_loads(bench: Bench) -> None:
    first = request_of(3)
    assert bench.scheduler.lookup(first, 0) == 0  # cold
    bench.scheduler.allocated("a", [0, 1, 2, 3], 0)
    bench.compute(first, 0, [0, 1, 2])
    bench.scheduler.store("a", 0, [0, 1, 2])
    bench.step()
    assert bench.update() == ConnectorUpdate()  # still copying: blocks 0, 1, 2 must stay
    bench.stream.complete_all()
    assert bench.update() == ConnectorUpdate(released=(0, 1, 2))
    bench.scheduler.finished("a")
    assert bench.hierarchy.drain(60)

    second = request_of(3, "b")
    assert bench.scheduler.lookup(second, 0) == 3 * BLOCK_SIZE
    bench.scheduler.allocated("b", [7, 8, 9, 10], 3 * BLOCK_SIZE)
    bench.step()
    assert bench.update().loaded == ()
    bench.stream.complete_all()
    assert bench.update().loaded == ("b",)
    for i, block in enumerate([7, 8, 9]):
        assert bench.l1[block].tobytes() == payload_of(second.chain.hashes[i])


def test_a_traced_request_that_ends_before_its_lookup_leaves_nothing(bench: Bench) -> None:
    """As one that is aborted while it waits for its turn."""
    bench.scheduler.traces["a"] = Trace("")
    bench.scheduler.finished("a")
    assert not bench.scheduler.traces


def test_at_least_the_last_token_is_computed(bench: Bench) -> None:
    chain = chain_of(3)
    store(bench.hierarchy, chain)
    exact = Request("a", chain, 3 * BLOCK_SIZE)  # the prompt ends with block 2: its last token lies in it
    assert bench.scheduler.lookup(exact, 0) == 2 * BLOCK_SIZE


def test_lookup_is_idempotent_counted_once_and_relative_to_l1(bench: Bench) -> None:
    request = request_of(4)
    store(bench.hierarchy, request.chain)
    for _ in range(100):
        assert bench.scheduler.lookup(request, BLOCK_SIZE) == 3 * BLOCK_SIZE
    stats = bench.hierarchy.stats()
    assert stats['kvtier_lookup_blocks_total{tier="l1"}'] == 1
    assert stats['kvtier_lookup_blocks_total{tier="l2"}'] == 3
    assert bench.scheduler.lookup(request, 2 * BLOCK_SIZE) == 2 * BLOCK_SIZE  # L1 learned a block meanwhile
    assert bench.scheduler.lookup(request, 0) == 4 * BLOCK_SIZE  # L1 lost them all
    bench.scheduler.allocated("a", [5, 6, 7, 8, 9], 4 * BLOCK_SIZE)
    assert [op.device_blocks for op in bench.step().loads] == [(5, 6, 7, 8)]
    bench.stream.complete_all()
    bench.update()


def test_pending_until_the_blocks_arrive_or_the_deadline_passes() -> None:
    tier, clock = MemoryTier(), FakeClock()
    request, slow = request_of(3), request_of(3, "slow", first_token=100)
    tier.fill(request.chain)
    tier.fill(slow.chain)
    tier.gate.clear()
    bench = Bench(tier, clock)
    assert bench.scheduler.lookup(request, 0) is PENDING
    assert bench.scheduler.lookup(slow, 0) is PENDING
    clock.advance(1)
    assert bench.scheduler.lookup(slow, 0) == 0  # its deadline: nothing had arrived
    tier.gate.set()
    wait_until(lambda: bench.hierarchy.promoter.idle or bench.hierarchy.lookup(request.chain.hashes)["l2"] == 3)
    assert bench.scheduler.lookup(request, 0) == 3 * BLOCK_SIZE or clock.now > 1000.5  # in time, or late and cold
    for name in ("a", "slow"):
        bench.scheduler.finished(name)
    wait_until(lambda: bench.hierarchy.promoter.idle)
    bench.close()


def test_a_failed_load_is_named_with_its_first_block_and_counted(bench: Bench) -> None:
    """FAULTS 24."""
    request = request_of(4)
    store(bench.hierarchy, request.chain)
    assert bench.scheduler.lookup(request, BLOCK_SIZE) == 3 * BLOCK_SIZE
    bench.scheduler.allocated("a", [0, 1, 2, 3, 4], 3 * BLOCK_SIZE)
    bench.step()
    bench.stream.fail_next()
    assert bench.update().failed == (("a", 1),)
    assert bench.hierarchy.stats()['kvtier_miss_total{reason="copy_failed"}'] == 3


def test_behind_a_lost_copy_nothing_is_loaded_or_stored_and_its_slots_stay_out_of_use() -> None:
    bench = Bench()
    request, other = request_of(3), request_of(2, "b", 1000)
    store(bench.hierarchy, other.chain)
    assert bench.scheduler.lookup(request, 0) == 0
    bench.scheduler.allocated("a", [0, 1, 2, 3], 0)
    bench.scheduler.store("a", 0, [0, 1, 2])
    promised = bench.scheduler.lookup(other, 0)
    assert promised == 2 * BLOCK_SIZE
    plan = bench.step()
    [op] = plan.stores
    report = WorkerReport(failed=(op.op_id,), lost=(op.op_id,))
    assert bench.scheduler.update(report).released == (0, 1, 2)
    pool = bench.hierarchy.host.pool
    assert pool.counts().quarantined == 3
    assert bench.hierarchy.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] == 3
    # The device is lost: what was promised is taken back, the engine computes, and stores are dropped and counted.
    assert bench.scheduler.allocated("b", [4, 5], promised) == 0
    assert bench.scheduler.lookup(request_of(2, "c", 1000), 0) == 0
    bench.scheduler.store("b", 0, [4, 5])
    assert not bench.step()
    assert bench.update().released == (4, 5)
    assert bench.hierarchy.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] == 5
    bench.scheduler.close()
    assert pool.counts().leased == 0
    # No other store ever gets the slots that the device may still write to.
    taken = [bench.hierarchy.reserve([wanted(chain_of(4, 5000 + 100 * i))])[0] for i in range(12)]
    slots = {slot for reservation in taken if reservation is not None for slot in reservation.slots}
    assert slots.isdisjoint(op.host_slots)
    assert len(slots) == pool.num_slots - 3
    for reservation in taken:
        if reservation is not None:
            bench.hierarchy.abandon(reservation, Outcome.ABORTED)
    bench.hierarchy.check(in_use=True)
    bench.worker.close(0.01)
    bench.hierarchy.close()


def test_a_failed_load_is_final_for_its_request_and_for_no_other(bench: Bench) -> None:
    bench.load(request := request_of(3), [0, 1, 2, 3])
    bench.step()
    bench.stream.fail_next()
    assert bench.update().failed == (("a", 0),)
    assert bench.scheduler.lookup(request, 0) == 0  # asked again at every step: a promise would fail for ever
    bench.scheduler.finished("a")
    other = request_of(3, "b")
    assert bench.scheduler.lookup(other, 0) == 3 * BLOCK_SIZE


def test_a_steps_copies_are_one_for_the_device_each_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is told by the call: a decoding step of many requests has one store, and every op ends with it."""
    given: list[int] = []
    store = bench.stream.store

    def counted(copies: BlockCopies) -> CopyEvent:
        given.append(len(copies))
        return store(copies)

    monkeypatch.setattr(bench.stream, "store", counted)
    requests = [request_of(1, f"r{number}", first_token=100 * number) for number in range(4)]
    for block, request in enumerate(requests):
        bench.keep(request, [block])
    assert len(bench.step().stores) == 4
    assert given == [4]
    bench.stream.complete_all()
    assert sorted(bench.update().released) == [0, 1, 2, 3]
    assert bench.hierarchy.drain(60)
    assert all(bench.hierarchy.lookup(request.chain.hashes)["l2"] == 1 for request in requests)


def test_a_store_is_fenced_before_its_blocks_are_written_again(bench: Bench) -> None:
    first, second = request_of(1), request_of(1, "b", first_token=100)
    ops: list[CopyOp] = []
    for request, block in ((first, 0), (second, 1)):
        bench.keep(request, [block])
        ops += bench.step().stores
    bench.stream.complete_next()  # the first one has read its block
    bench.worker.fence([op.op_id for op in ops])  # the second one is late: by now its block holds something else
    bench.l1[:2] = 0
    bench.stream.complete_all()
    bench.update()
    assert bench.hierarchy.drain(60)
    assert bench.hierarchy.lookup(first.chain.hashes)["l2"] == 1
    assert bench.hierarchy.lookup(second.chain.hashes)["l2"] == 0


def test_a_failed_store_leaves_nothing_visible(bench: Bench) -> None:
    request = request_of(2)
    bench.keep(request, [0, 1])
    bench.step()
    bench.stream.fail_next()
    assert bench.update().released == (0, 1)
    assert bench.hierarchy.drain(60)
    assert bench.hierarchy.lookup(request.chain.hashes).miss == 2


def test_blocks_already_stored_are_released_without_a_copy(bench: Bench) -> None:
    request = request_of(4)
    store(bench.hierarchy, request.chain, 0, 2)
    bench.keep(request, [0, 1, 2, 3])
    assert [op.device_blocks for op in bench.step().stores] == [(2, 3)]
    assert bench.update().released == (0, 1)
    bench.stream.complete_all()
    assert bench.update().released == (2, 3)


@pytest.mark.parametrize("ends", ["in time", "too late", "its step failed"])
def test_a_store_that_got_no_slot_in_time_is_offered_again(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, is_late = Bench(), True
    reserve, tiers = bench.hierarchy.reserve, bench.hierarchy

    def late(wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        tiers.is_late = is_late
        return [None] * len(wanted) if is_late else reserve(wanted)

    monkeypatch.setattr(tiers, "reserve", late)
    request = request_of(3)
    bench.keep(request, [0, 1, 2])
    bench.scheduler.finished("a")
    assert not bench.step().stores
    assert not bench.scheduler.idle  # and L1 keeps the blocks
    assert bench.update().released == ()
    if ends == "its step failed":
        bench.scheduler.drop_late()
    if ends == "too late":
        monkeypatch.setattr(time, "monotonic", partial(sum, (time.monotonic(), 60.0)))
        assert not bench.step().stores
    is_late = False
    assert bool(bench.step().stores) is (ends == "in time")
    bench.stream.complete_all()
    assert bench.update().released == (0, 1, 2)
    assert bench.hierarchy.drain(60)
    is_kept = ends == "in time"
    assert bench.hierarchy.lookup(request.chain.hashes).blocks == 3
    assert bench.hierarchy.lookup(request.chain.hashes).miss == (0 if is_kept else 3)
    assert drops(bench.hierarchy, Outcome.TIMEOUT) == (0 if is_kept else 3)
    bench.close()


def test_a_request_from_before_a_reset_never_stores_again(bench: Bench) -> None:
    request = request_of(2)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.allocated("a", [0, 1, 2], 0)
    bench.hierarchy.reset()  # the weights changed
    bench.scheduler.store("a", 0, [0, 1])
    assert not bench.step().stores
    assert bench.update().released == (0, 1)


def test_an_expired_promise_is_not_loaded() -> None:
    clock = FakeClock()
    bench = Bench(clock=clock)
    request = request_of(2)
    store(bench.hierarchy, request.chain)
    assert bench.scheduler.lookup(request, 0) == 2 * BLOCK_SIZE
    clock.advance(bench.hierarchy.settings.lease_deadline)
    bench.hierarchy.tick()
    assert bench.scheduler.allocated("a", [0, 1, 2], 2 * BLOCK_SIZE) == 0  # compute all of it
    assert not bench.step()
    bench.close()


def test_layerwise_each_layer_is_waited_for_by_itself(bench: Bench) -> None:
    bench.worker._groups = lambda num_blocks: [(0, 1), (1, 4)]  # type: ignore[method-assign]
    bench.load(request_of(2), [0, 1, 2], layerwise=True)
    bench.step()
    assert not bench.worker.wait_layer(0)  # nothing has arrived: late
    bench.stream.complete_next()
    assert bench.worker.wait_layer(0)
    assert not bench.worker.wait_layer(3)
    bench.stream.complete_next()
    assert bench.worker.wait_layer(3)
    assert bench.update().loaded == ("a",)


def test_a_drafter_computes_after_the_poll_that_reported_the_load(bench: Bench) -> None:
    """vLLM polls between the model and its drafter, and stores behind both."""
    bench.load(request_of(2), [0, 1, 2], layerwise=True)
    bench.step()
    bench.stream.complete_all()
    assert bench.update().loaded == ("a",)
    assert bench.worker.wait_layer(NUM_LAYERS - 1)  # the drafter's layer
    assert bench.worker.arrived()


def test_compute_never_waits_for_another_requests_asynchronous_load(bench: Bench) -> None:
    bench.load(request_of(2), [0, 1, 2])
    bench.step()
    assert bench.worker.wait_layer(0)
    bench.stream.complete_all()
    bench.update()


def test_a_dead_copy_costs_one_deadline_however_many_layers_wait(bench: Bench) -> None:
    for number in range(4):
        bench.load(request_of(1, str(number), 100 * number), [2 * number, 2 * number + 1], layerwise=True)
    waited: list[float] = []
    fence = bench.stream.fence

    def noted(event: CopyEvent, timeout: float) -> bool:
        waited.append(timeout)
        return fence(event, timeout)

    bench.stream.fence = noted  # type: ignore[method-assign]
    bench.step()
    assert not any([bench.worker.wait_layer(layer) for layer in range(NUM_LAYERS)])
    assert not bench.worker.arrived()
    assert sum(timeout > 0 for timeout in waited) == 1  # the deadline is 10 ms for all of them
    bench.stream.complete_all()
    assert bench.worker.arrived()
    assert len(bench.update().loaded) == 4


def test_recomputing_is_decided_once_for_a_request() -> None:
    tier = MemoryTier()
    bench = Bench(tier, load_policy="auto")
    request = request_of(6)
    tier.fill(request.chain)
    bench.hierarchy.rates.loaded("file", 1, 1.0)
    bench.hierarchy.rates.computed(10**6, 1.0)
    assert {bench.scheduler.lookup(request, 0) for _ in range(100)} == {0}
    assert bench.hierarchy.stats()['kvtier_miss_total{reason="recompute"}'] == 6
    bench.close()


# Stories of a step in which many requests each store a block: one copy, one job, and each request's own fate.


MANY = 16  # L1 of the bench has as many blocks


def step_of_many(bench: Bench) -> list[Request]:
    """Each request fills a block of L1; all of them are to be stored."""
    requests = [request_of(1, f"r{n}", first_token=100 * n) for n in range(MANY)]
    for block, request in enumerate(requests):
        bench.keep(request, [block])
    bench.step()
    return requests


def held(bench: Bench, requests: list[Request]) -> list[bool]:
    assert bench.hierarchy.drain(60)
    return [bench.hierarchy.holds(request.chain.hashes)[0] for request in requests]


def dropped(bench: Bench, reason: Outcome) -> float:
    name = f'kvtier_store_dropped_total{{tier="l2",reason="{reason.value}"}}'
    return bench.hierarchy.stats().get(name, 0.0)


def test_all_are_found_with_the_bytes_that_were_computed(bench: Bench) -> None:
    requests = step_of_many(bench)
    bench.stream.complete_all()
    assert sorted(bench.update().released) == list(range(MANY))
    assert held(bench, requests) == [True] * MANY
    for block, request in enumerate(requests):
        again = Request(f"again {block}", request.chain, request.num_tokens)
        assert bench.scheduler.lookup(again, 0) == request.chain.block_size
        bench.scheduler.allocated(again.request_id, [block, block], request.chain.block_size)
    bench.l1[:] = 0
    bench.step()
    bench.stream.complete_all()
    assert len(bench.update().loaded) == MANY
    for block, request in enumerate(requests):
        assert bench.l1[block].tobytes() == payload_of(request.chain.hashes[0])
        bench.scheduler.finished(f"again {block}")
        bench.scheduler.finished(request.request_id)


def test_those_whose_copy_failed_are_dropped_alone(bench: Bench) -> None:
    requests = step_of_many(bench)
    bench.stream.complete_all()
    report = bench.worker.poll()
    assert len(report.finished) == MANY
    bad = {report.finished[3], report.finished[11]}
    told = WorkerReport(tuple(each for each in report.finished if each not in bad), tuple(bad))
    assert sorted(bench.scheduler.update(told).released) == list(range(MANY))
    assert held(bench, requests) == [n not in (3, 11) for n in range(MANY)]
    assert dropped(bench, Outcome.COPY_FAILED) == 2


def test_a_store_that_was_given_up_is_reported_failed_alone(bench: Bench) -> None:
    requests = step_of_many(bench)
    [late] = [op_id for op_id, store in bench.scheduler._stores.items() if store.request_id == "r5"]
    bench.worker.fence([late])  # its block is written to now, and the copy has not read it
    bench.stream.complete_all()
    report = bench.worker.poll()
    assert report.failed == (late,)
    assert bench.worker.idle
    bench.scheduler.update(report)
    assert held(bench, requests) == [n != 5 for n in range(MANY)]


def test_a_reset_within_the_step_drops_all_of_it(bench: Bench) -> None:
    requests = step_of_many(bench)
    bench.stream.complete_all()
    bench.hierarchy.reset()
    bench.update()
    assert held(bench, requests) == [False] * MANY
    assert dropped(bench, Outcome.EPOCH) == MANY


def test_memory_that_cannot_be_hashed_is_published_of_no_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: object, slots: object) -> list[int]:
        raise IndexError("the region is closed")

    monkeypatch.setattr(host.HostRegion, "checksums", no_memory)
    requests = step_of_many(bench)
    bench.stream.complete_all()
    bench.update()
    assert held(bench, requests) == [False] * MANY
    assert dropped(bench, Outcome.IO_ERROR) == MANY


# A step plan crosses a process border: it survives the trip, and nothing else is taken for one.


PLAN = StepPlan(
    step=7,
    region=42,
    loads=(CopyOp(1, "a", (3, 4), (8, 9), (1, 1), layerwise=True),),
    stores=(CopyOp(2, "b", (5,), (0,), (3,)),),
)


def test_a_plan_survives_the_trip() -> None:
    assert StepPlan.decode(PLAN.encode()) == PLAN
    assert StepPlan.decode(StepPlan(1, 0).encode()) == StepPlan(1, 0)


def test_an_empty_plan_is_false() -> None:
    assert PLAN
    assert not StepPlan(1, 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [99, 1, 0, [], []],  # another version
        [1, -1, 0, [], []],
        [1, 1, 0, [[1, "a", [1], [2, 3], [1], False]], []],  # columns of unequal length
        [1, 1, 0, [[1, 5, [1], [2], [1], False]], []],  # the request id is no text
        [1, 1, 0, [[1, "a", [1], [2], [1], 1]], []],  # the kind is no bool
        [1, 1, 0, [[1, "a", [True], [2], [1], False]], []],
        [1, 1, 0, [[1, "a"]], []],
        {"step": 1},
    ],
)
def test_what_is_no_plan_is_a_format_error(value: object) -> None:
    with pytest.raises(FormatError):
        StepPlan.decode(msgpack.packb(value))


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_a_format_error_or_another_plan(position: int, value: int) -> None:
    data = bytearray(PLAN.encode())
    data[position % len(data)] = value
    try:
        StepPlan.decode(bytes(data))
    except FormatError:
        return
