"""Stories of traces: lookups recorded from serving threads, and files read back that may hold anything."""

import asyncio
import errno
import gzip
import json
import logging
import os
import resource
import signal
import stat
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import _trace
import pytest
from _trace import TraceLine, read_trace
from doubles import FakeClock, chain_of
from hypothesis import given, strategies

from kvtier.service.node.lookup_trace import TraceCounts, TraceRecorder
from kvtier.service.web.loop_file import LoopFile
from kvtier.tiers.errors import ConfigError, FormatError

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


def test_serving_threads_never_wait_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    hashes = chain_of(50).hashes

    async def story() -> TraceCounts:
        recorder = TraceRecorder(await LoopFile.create(tmp_path / "trace"), max_waiting=1000)

        def serve() -> None:
            for _ in range(2000):
                recorder.record(hashes, 200)

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.01)
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
        await asyncio.sleep(0.3)
        return recorder  # nobody stops it

    recorder = run(story())
    assert not recorder.record(chain_of(3).hashes, 12)
    assert [line.hash_ids for line in read_trace(tmp_path / "trace")] == [(0, 1, 2)]


GOOD = {"timestamp": 5, "input_length": 100, "output_length": 2, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"timestamp": 5, "inp', "not a JSON object; was the file cut short"),
        (b"\xff\xfe\x00", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"\n", "not a JSON object"),
        (json.dumps(GOOD | {"timestamp": -1}).encode(), "timestamp: not a whole number"),
        (json.dumps(GOOD | {"timestamp": 4}).encode(), "timestamp 4 is before the 5 of the line above"),
        (json.dumps(GOOD | {"timestamp": True}).encode(), "timestamp: not a whole number"),
        (json.dumps(GOOD | {"input_length": 1.5}).encode(), "input_length: not a whole number"),
        (json.dumps(GOOD | {"input_length": 1}).encode(), "hash_ids: 2 blocks for an input_length of 1 tokens"),
        (json.dumps(GOOD | {"output_length": None}).encode(), "output_length: missing"),
        (json.dumps(GOOD | {"hash_ids": "01"}).encode(), "hash_ids: not a list"),
        (json.dumps(GOOD | {"hash_ids": [0, "1"]}).encode(), "hash_ids: not a whole number"),
        (json.dumps(GOOD | {"hash_ids": [1 << 63]}).encode(), "hash_ids: not a whole number"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "not a JSON object"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    reader = read_trace(path)
    assert next(reader) == TraceLine(5, 100, 2, (0, 1))  # what is right comes first
    with pytest.raises(FormatError, match=rf"trace\.jsonl:2: {complaint}"):
        next(reader)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "_MAX_LINE", 1000)
    (tmp_path / "trace").write_bytes(json.dumps(GOOD).encode() + b"\n" + b"[" * 5000)
    with pytest.raises(FormatError, match=r"trace:2: longer than 1000 bytes"):
        list(read_trace(tmp_path / "trace"))


@given(strategies.lists(strategies.binary(max_size=60) | strategies.just(json.dumps(GOOD).encode()), max_size=6))
def test_any_bytes_are_lines_or_an_error_with_a_number(lines: list[bytes]) -> None:
    path = Path(f"/dev/shm/kvtier-trace-{os.getpid()}")
    path.write_bytes(b"\n".join(lines))
    complaint = f"{path}:"
    try:
        assert all(line == TraceLine(5, 100, 2, (0, 1)) for line in read_trace(path))
    except FormatError as error:
        complaint = str(error)
    finally:
        path.unlink()
    assert complaint.startswith(f"{path}:")


def test_compressed_traces_are_read_and_broken_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(GOOD | {"timestamp": n}).encode() + b"\n" for n in range(2000)))
    path.write_bytes(whole)
    assert sum(1 for _ in read_trace(path)) == 2000
    for broken in (whole[: len(whole) // 2], b"not gzip", whole[:200] + b"\0" * 50 + whole[250:]):
        path.write_bytes(broken)
        with pytest.raises(FormatError, match=r"trace\.jsonl\.gz:"):
            list(read_trace(path))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "nothing"))
