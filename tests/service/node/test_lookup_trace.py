"""Stories of traces: lookups recorded from serving threads, and files read back that may hold anything."""

import asyncio
import errno
import logging
import os
import resource
import signal
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from at_once import at_once
from doubles import FakeClock, chain_of, wait_until
from http_rig import ServePages
from service_rig import Attach, load, store

from kvtier.service.admin import http_app
from kvtier.service.node import lookups
from kvtier.service.node.lookups import PastLookups, TraceCounts, TraceRecorder
from kvtier.service.observe.statuses import OptimumFigures
from kvtier.service.traces.request_trace import TraceLine, read_trace
from kvtier.service.web.loop_file import LoopFile
from kvtier.tiers.errors import ConfigError, FormatError
from kvtier.tiers.reuse.ends import Hint, RequestEnd

T = TypeVar("T")


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(story)


def test_lookups_become_lines_that_anybody_reads(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.jsonl"

    async def story() -> TraceCounts:
        recorder = TraceRecorder(await LoopFile.create(path), clock=clock)
        first, second = chain_of(3), chain_of(2, first_token=900)
        assert recorder.record(first.hashes, 13)
        clock.advance(1.5)
        assert recorder.record(second.hashes, 8, output_length=20)
        assert recorder.record(first.hashes[:2] + second.hashes[:1], 12)
        assert recorder.record([], 3)  # a prompt shorter than a block
        return await recorder.stop()

    counts = run(story())
    assert counts == TraceCounts(4, 0, path.stat().st_size)
    # Mooncake's form, to the letter; blocks are numbered in the order they were first seen.
    assert path.read_text().splitlines()[1] == (
        '{"timestamp": 1500, "input_length": 8, "output_length": 20, "hash_ids": [3, 4]}'
    )
    assert [line.hash_ids for line in read_trace(path)] == [(0, 1, 2), (3, 4), (0, 1, 3), ()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Recording starts a file, it never goes on with one.
    with pytest.raises(ConfigError, match="exists already"):
        run(TraceRecorder.start(path))


def test_a_line_tells_how_its_request_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.jsonl"

    async def story() -> None:
        recorder = TraceRecorder(await LoopFile.create(path), clock=clock)
        first, second = chain_of(5), chain_of(4, first_token=900)
        recorder.record(first.hashes[:2], 8, block_size=4)  # of three full blocks: the last was not asked for
        clock.advance(1)
        recorder.record(second.hashes, 16, block_size=4)
        recorder.record(first.hashes[:1], 4, block_size=4)
        clock.advance(1)
        # The second ends first, and its line waits for the one above it. The third's end is never told.
        recorder.ended(RequestEnd(second.hashes, 4, 2, Hint.FINISHED, 7))
        await asyncio.sleep(0.3)
        assert path.read_bytes() == b""
        recorder.ended(RequestEnd(first.hashes, 3, 11, client=2))
        recorder.ended(RequestEnd(first.hashes, 3, 11, client=2))  # of a lookup that is not there: nothing
        while path.read_bytes().count(b"\n") < 2:
            await asyncio.sleep(0.01)
        assert (await recorder.stop()).num_recorded == 3

    run(story())
    first, second, third = read_trace(path)
    assert first == TraceLine(0, 8, 11, (0, 1), block_size=4, answer_ids=(2, 3), ended=2000, tenant=2)
    assert second == TraceLine(1000, 16, 2, (4, 5, 6, 7), 4, answer_ids=(), ended=2000, hint="finished", tenant=7)
    assert third == TraceLine(1000, 4, 0, (0,), block_size=4)


def test_an_end_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    clock = FakeClock()
    path = tmp_path / "trace.jsonl"

    async def story() -> None:
        recorder = TraceRecorder(await LoopFile.create(path), max_waiting=100, patience=5, clock=clock)
        recorder.record(chain_of(3).hashes, 12)
        clock.advance(5)
        while path.read_bytes().count(b"\n") < 1:
            await asyncio.sleep(0.01)
        # Nor while half of the room is taken.
        for n in range(20):
            recorder.record(chain_of(3, first_token=100 * n).hashes, 12)
        while path.read_bytes().count(b"\n") < 8:
            await asyncio.sleep(0.01)
        await recorder.stop()

    run(story())
    assert sum(1 for _ in read_trace(path)) == 21


def test_serving_threads_never_wait_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    hashes = chain_of(50).hashes

    async def story() -> TraceCounts:
        recorder = TraceRecorder(await LoopFile.create(tmp_path / "trace"), max_waiting=1000)

        def serve() -> None:
            for _ in range(2000):
                recorder.record(hashes, 200)

        await asyncio.to_thread(at_once, *[serve] * 3)
        return await recorder.stop()

    counts = run(story())
    assert counts.num_recorded + counts.num_dropped == 6000
    assert counts.num_dropped > 0
    assert counts.num_recorded == sum(1 for _ in read_trace(tmp_path / "trace")) > 0


def test_numbers_are_remembered_for_the_blocks_seen_last(tmp_path: Path) -> None:
    a, b = chain_of(4).hashes, chain_of(4, first_token=900).hashes

    async def story() -> None:
        recorder = TraceRecorder(await LoopFile.create(tmp_path / "trace"), max_known=16)
        for hashes in (a, b, a, *(chain_of(4, first_token=10_000 + 100 * n).hashes for n in range(4)), a, b):
            recorder.record(hashes, 16)
        await recorder.stop()

    run(story())
    first, second, again, *others, late, _ = [line.hash_ids for line in read_trace(tmp_path / "trace")]
    assert first == again == (0, 1, 2, 3)
    assert second == (4, 5, 6, 7)
    # Sixteen others later the first ones are forgotten: new numbers, which nobody else had.
    assert not {*late} & {*first, *second, *(n for ids in others for n in ids)}


def test_a_full_trace_ends_with_a_whole_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> TraceCounts:
        recorder = await TraceRecorder.start(tmp_path / "trace", max_bytes=1000)
        taken = [recorder.record(chain_of(3).hashes, 12) for _ in range(20)]
        assert all(taken)
        await recorder.stop()
        assert not recorder.record(chain_of(3).hashes, 12)  # over, and counted
        return recorder.counts()

    with caplog.at_level(logging.WARNING):
        counts = run(story())
    assert (tmp_path / "trace").stat().st_size == counts.num_bytes <= 1000
    assert sum(1 for _ in read_trace(tmp_path / "trace")) == counts.num_recorded > 5
    assert counts.num_recorded + counts.num_dropped == 21
    assert [record.getMessage() for record in caplog.records] == [
        f"trace: recording ends: {tmp_path}/trace: the trace has {counts.num_bytes} bytes, all it may have"
    ]


def test_a_full_disk_ends_the_recording_not_the_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> TraceCounts:
        recorder = await TraceRecorder.start(tmp_path / "trace")
        for _ in range(100):
            recorder.record(chain_of(3).hashes, 12)
        return await recorder.stop()

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
        with caplog.at_level(logging.WARNING):
            counts = run(story())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert counts.num_dropped == 100
    assert f"trace: recording ends: {tmp_path}/trace: {os.strerror(errno.EFBIG)}" in caplog.text
    # What reached the disk reads up to the line that was cut.
    with pytest.raises(FormatError, match=r"trace:\d+: not a JSON object; was the file cut short"):
        list(read_trace(tmp_path / "trace"))


def test_a_recorder_cancelled_with_its_loop_closes_the_file(tmp_path: Path) -> None:
    async def story() -> TraceRecorder:
        recorder = await TraceRecorder.start(tmp_path / "trace")
        recorder.record(chain_of(3).hashes, 12)
        recorder.ended(RequestEnd(chain_of(3).hashes, 3, 9))
        while not (tmp_path / "trace").read_bytes():
            await asyncio.sleep(0.01)
        return recorder  # nobody stops it

    recorder = run(story())
    assert not recorder.record(chain_of(3).hashes, 12)
    assert [line.hash_ids for line in read_trace(tmp_path / "trace")] == [(0, 1, 2)]


# The last hour's lookups in memory: bounded, and what the best policy would have found of them.


def look(past: PastLookups, capacity: int) -> OptimumFigures:
    past.convert()
    found = past.look(capacity)
    assert found is not None
    return found


def test_the_best_policy_keeps_what_returns() -> None:
    clock = FakeClock()
    past = PastLookups(1 << 10, clock)
    assert past.look(8) is None
    kept, passing = chain_of(4), [chain_of(4, first_token=1000 * number) for number in range(1, 6)]
    # One chain returns after each of five that never do: with room for four blocks an LRU would find nothing.
    for other in passing:
        for chain in (kept, other):
            past.record(chain.hashes, len(chain.hashes), 0, 0)
            clock.advance(1)
    found = look(past, 4)
    assert (found.asked, found.found, found.optimum, found.capacity) == (40, 0, 16, 4)
    assert found.seconds == 10
    assert len(found.steps) == 60
    assert all(optimum <= asked for _, asked, _, optimum in found.steps)
    assert found.steps[0][0] > found.steps[-1][0] > 0
    assert look(past, 2).optimum == 8


def test_what_an_answer_left_could_be_found() -> None:
    past = PastLookups(1 << 10, FakeClock())
    whole = chain_of(6)
    past.record(whole.hashes[:4], len(whole.hashes[:4]), 0, 0)
    past.record(whole.hashes)  # the prompt's blocks, and two of the answer
    past.record(whole.hashes, len(whole.hashes), 5, 0)
    assert (look(past, 6).optimum, look(past, 6).asked) == (6, 10)
    assert look(past, 3).optimum == 5  # no bound below what was found


def test_it_is_bounded_in_time_blocks_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    past = PastLookups(10, clock)
    for number in range(5):
        past.record(chain_of(4, first_token=1000 * number).hashes, 4, 4, 0)
    assert look(past, 8).asked == 8  # two chains of four are within ten blocks
    clock.advance(3601)
    past.convert()
    assert past.look(8) is None
    monkeypatch.setattr(lookups, "_MOST_WAITING", 6)
    for _ in range(4):
        past.record(chain_of(4).hashes, 4, 0, 0)
    assert past.num_dropped == 2
    past.convert()
    past.record(chain_of(2).hashes, 2, 2, 0)  # there is room again
    assert look(past, 8).asked == 10
    assert past.num_dropped == 2


@pytest.mark.parametrize("kept", [1 << 10, 0])
def test_a_daemon_tells_what_was_possible(
    kept: int, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach
) -> None:
    monkeypatch.setattr(http_app, "_OPTIMUM", 0.05)
    monkeypatch.setattr(lookups, "_PAUSE", 0.05)
    monkeypatch.setattr(lookups, "_RARELY", 0.0)
    daemon = serve_pages(host={"size": 1 << 20}, service={"kept_lookups": kept})
    tiers, chain = attach(), chain_of(6)
    load(tiers, chain_of(6, first_token=1000))  # in vain
    store(tiers, chain)
    load(tiers, chain)

    def told() -> object:
        [model] = daemon.client.get("/status").json()["models"]
        return model["optimum"]

    if kept:
        wait_until(lambda: told() is not None and told()["asked"] == 12)  # type: ignore[index]
        optimum = told()
        assert isinstance(optimum, dict)
        assert (optimum["found"], optimum["optimum"], optimum["capacity"]) == (6, 6, 64)
        page = daemon.client.get("/metrics").text
        assert "kvtier_optimum_share{" in page
        assert "} 0.5\n" in page
    else:
        assert told() is None
