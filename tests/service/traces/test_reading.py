"""Stories of traces read back: every form, what is assumed, and files that are something else."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies

from kvtier.service.traces import request_trace as forms
from kvtier.service.traces.request_trace import TraceLine, load_lines, load_trace, parse_line, read_trace
from kvtier.tiers.errors import ConfigError, FormatError

GOOD = {"timestamp": 5, "input_length": 100, "output_length": 2, "hash_ids": [0, 1]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"timestamp": 5, "inp', "not a JSON object; was the file cut short"),
        (b"\xff\xfe\x00", "not a JSON object"),
        (b"[1]", "not a JSON object; write one a line"),
        (gzip.compress(b"{}", mtime=0), "compressed by gzip; give the file a name that ends in .gz"),
        (b"[" * 100_000, "not a JSON object"),
        (json.dumps(GOOD | {"timestamp": -1}).encode(), "timestamp: Expected `int` >= 0"),
        (json.dumps(GOOD | {"timestamp": 4}).encode(), "timestamp 4 is before the 5 of the line above"),
        (b'{"timestamp": NaN, "input_length": 100, "hash_ids": [0]}', "timestamp: Expected `int`, got `float`"),
        (json.dumps(GOOD | {"input_length": None}).encode(), "Object missing required field `input_length`"),
        (json.dumps(GOOD | {"input_length": 1}).encode(), "hash_ids: 2 blocks for an input_length of 1 tokens"),
        (json.dumps(GOOD | {"hash_ids": [1 << 63]}).encode(), r"hash_ids\[0\]: Expected `int` <= "),
        (json.dumps(GOOD | {"hash_ids": [3, 3]}).encode(), "hash_ids: a block stands there twice"),
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


def test_all_wrong_lines_are_named_and_the_last_of_many_counted(tmp_path: Path) -> None:
    bad = [GOOD | {"hash_ids": n} for n in range(25)]
    path = written(tmp_path / "trace", GOOD, *bad, GOOD)
    with pytest.raises(ConfigError) as caught:
        load_lines(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}:2: hash_ids: Expected `array`, got `int`"
    assert lines[19:] == [f"{path}:21: hash_ids: Expected `array`, got `int`", f"{path}: 5 more lines are wrong"]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_LINE", 1000)
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


def test_times_may_be_floats(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(GOOD | {"timestamp": time}) + "\n" for time in (0.0, 27.9, 1e3)))
    assert [line.timestamp for line in load_lines(path)] == [0, 27, 1000]


def test_compressed_traces_are_read_and_broken_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(b"".join(json.dumps(GOOD | {"timestamp": n}).encode() + b"\n" for n in range(2000)))
    path.write_bytes(whole)
    seen: list[tuple[int, int]] = []
    assert len(load_lines(path, progress=lambda done, total: seen.append((done, total)))) == 2000
    assert {total for _, total in seen} == {len(whole)}
    assert all(done <= total for done, total in seen)
    for broken in (whole[: len(whole) // 2], b"not gzip", whole[:200] + b"\0" * 50 + whole[250:]):
        path.write_bytes(broken)
        with pytest.raises(FormatError, match=r"trace\.jsonl\.gz:"):
            list(read_trace(path))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("first", "what"),
    [
        ('{"custom_id": "1", "body": {}}\n', "it has 'custom_id': this is a batch of OpenAI requests"),
        ('{"conversations": []}\n', "this is a list of ShareGPT conversations"),
        ('{"type": "BlockStored", "block_hashes": [1]}\n', "this is KV events: they list blocks stored"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "comma-separated values, not JSON lines"),
        ('{"\\u001b[2J": "red"}\n', r"no hash_ids among '\x1b[2J'"),
    ],
)
def test_a_foreign_file_is_named_and_read_no_further(tmp_path: Path, first: str, what: str) -> None:
    path = written(tmp_path / "file", first, first, first)
    with pytest.raises(ConfigError) as caught:
        load_lines(path)
    assert str(caught.value).startswith(f"{path}:1: ")
    assert what in str(caught.value)
    assert "name a trace in Mooncake's form" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lookup_logs_of_lmcache_are_one_trace(tmp_path: Path) -> None:
    line = {"timestamp": 1711929600.5, "request_id": "a", "model_name": "M", "chunk_size": 256, "seq_len": 600}
    written(tmp_path / "lookup_hashes_20260401_000001.jsonl", line | {"chunk_hashes": ["0xa", "0xb"]})
    written(
        tmp_path / "lookup_hashes_20260401_000002.jsonl",
        line | {"timestamp": 1711929602.0, "chunk_hashes": ["0xa", "0xc"]},
        line | {"timestamp": 1711929602.0, "model_name": "N", "chunk_hashes": ["0xa"]},
    )
    lines = load_lines(tmp_path)
    assert lines[0] == TraceLine(0, 600, 0, (0, 1), block_size=256)
    assert lines[1].timestamp == 1500
    assert [each.hash_ids for each in lines] == [(0, 1), (0, 2), (3,)]  # another model's chunk is another block
    with pytest.raises(FormatError, match="chunk_hashes: 3 chunks of 256 for a seq_len of 600"):
        parse_line(json.dumps(line | {"chunk_hashes": ["0xa", "0xb", "0xc"]}).encode())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no lookup_hashes"):
        load_lines(tmp_path / "empty")


def test_bailian_traces_tell_seconds(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40, "output_length": 9}
    (read,) = load_lines(written(tmp_path / "trace", line | {"type": "text", "turn": 1, "hash_ids": [7, 8, 9]}))
    assert read == TraceLine(61250, 40, 9, (7, 8, 9), block_size=16)


def test_the_next_turn_tells_what_an_answer_left(tmp_path: Path) -> None:
    turns = [
        {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 9000, "input_length": 2100, "output_length": 500, "hash_ids": [0, 1, 3, 4, 5]},
    ]
    trace = load_trace(written(tmp_path / "trace", *turns))
    assert trace.block_size == 512
    assert trace.num_prompt.tolist() == [2, 4]
    # 1,600 tokens are three full blocks: the third is the next turn's. Of the second answer nobody tells.
    assert trace.chain(0).tolist() == [0, 1, 2]
    assert trace.chain(1).tolist() == [0, 1, 2, 3, 4]
    assert trace.begun.tolist() == [0, 9]
    assert [each.partition(":")[0] for each in trace.assumed] == ["block_size", "answers"]


def test_what_is_told_is_not_assumed(tmp_path: Path) -> None:
    told = {"block_size": 4, "answer_ids": [7], "hint": "tool", "tenant": 3, "ended": 900}
    line = {"timestamp": 1, "input_length": 8, "output_length": 4, "hash_ids": [5, 6]} | told
    trace = load_trace(written(tmp_path / "trace", line))
    assert trace.chain(0).tolist() == [0, 1, 2]
    assert (trace.hints.tolist(), trace.tenants.tolist(), trace.assumed) == ([2], [3], ())


def test_a_trace_without_times_and_answers_still_runs(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", *({"input_length": 64, "hash_ids": [n, n + 10]} for n in range(3)))
    trace = load_trace(path)
    assert (trace.block_size, trace.begun.tolist()) == (32, [0, 1, 2])
    assert [each.partition(":")[0] for each in trace.assumed] == ["block_size", "answers", "times"]


def test_a_block_size_that_nobody_can_tell_is_asked_for(tmp_path: Path) -> None:
    lines = ({"input_length": length, "hash_ids": [length]} for length in (70, 90))
    path = written(tmp_path / "trace", *lines)
    with pytest.raises(ConfigError, match="the trace does not say how many tokens a block has; give --block-s"):
        load_trace(path)
    assert load_trace(path, block_size=64).num_prompt.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="--block-size 16: its requests have blocks of 46 to"):
        load_trace(path, block_size=16)
    written(path, GOOD | {"block_size": 64}, GOOD | {"block_size": 32})
    with pytest.raises(ConfigError, match="block_size: not the same in all lines"):
        load_trace(path)
    written(path, GOOD | {"block_size": 64})
    with pytest.raises(ConfigError, match="--block-size 32: the trace says 64"):
        load_trace(path, block_size=32)


def test_an_answer_too_long_to_be_simulated_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 32, "output_length": 1000000000000, "hash_ids": [1, 2], "block_size": 16}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl: output_length 1000000000000: 62500000000 blocks of 16 tokens"):
        load_trace(path)
