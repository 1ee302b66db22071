"""Stories of a step in which many requests each store a block: one copy, one job, and each request's own fate."""

import pytest
from connector_rig import Bench, Request, request_of
from doubles import payload_of

from kvtier.connector.plan import WorkerReport
from kvtier.tiers.host import host
from kvtier.tiers.tier import Outcome

MANY = 16  # L1 of the bench has as many blocks


def step_of_many(bench: Bench) -> list[Request]:
    """Each request fills a block of L1; all of them are to be stored."""
    requests = [request_of(1, f"r{n}", first_token=100 * n) for n in range(MANY)]
    for block, request in enumerate(requests):
        bench.scheduler.admit(request)
        bench.compute(request, 0, [block])
        bench.scheduler.store(request.request_id, 0, [block])
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
