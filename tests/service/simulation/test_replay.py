"""Stories of simulated tiers: beside a plain LRU, with tiers below, and on the command line."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_rig import kvtier
from doubles import BLOCK_SIZE, SLOT_BYTES
from extent import brief
from service_rig import environment

from kvtier.service.simulation.value import Capacity, SimulatedTiers, TraceReplay, sweep
from kvtier.service.traces.request_trace import RequestTrace, TraceLine, trace_of

SLOTS = 48


def chats(num_requests: int) -> list[TraceLine]:
    """Chats that share a head of two blocks; each turn's prompt is all that was said, then a question."""
    draw = random.Random(7)
    live: list[list[int]] = []
    fresh, lines = iter(range(2, 1 << 30)), []
    for number in range(num_requests):
        if len(live) < 9:
            live.append([0, 1])
        at = min(int(draw.expovariate(0.4)), len(live) - 1)
        said = live[at]
        said += [next(fresh) for _ in range(draw.randint(1, 3))]
        prompt, answer = tuple(said), [next(fresh) for _ in range(draw.randint(0, 2))]
        said += answer
        if len(said) > 20 or draw.random() < 0.1:
            del live[at]
        tokens, told = BLOCK_SIZE * len(prompt), BLOCK_SIZE * len(answer)
        lines.append(TraceLine(500 * number, tokens, told, prompt, BLOCK_SIZE, tuple(answer)))
    return lines


def found_by_lru(trace: RequestTrace, num_slots: int) -> int:
    """Blocks of prompts that an LRU finds in which a chain's last block is used first."""
    held: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request in range(len(trace)):
        chain = trace.chain(request).tolist()
        prompt = chain[: trace.num_prompt[request]]
        found += next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_slots:
            held.popitem(last=False)
    return found


def test_lru_is_a_plain_lru_and_no_run_beats_the_optimum() -> None:
    trace = trace_of(chats(300))
    replay = TraceReplay(trace, SLOT_BYTES)
    told: list[tuple[int, int]] = []
    capacities = [Capacity(SLOTS * SLOT_BYTES, policy=policy) for policy in ("lru", "predicted")]
    runs = sweep(replay, capacities, lambda done, total: told.append((done, total)), num_processes=1)
    assert told == [(0, 2), (1, 2), (2, 2)]
    asked = int(trace.num_prompt.sum())
    assert runs[0].found.sum() == pytest.approx(found_by_lru(trace, SLOTS), abs=0.01 * asked)
    assert runs[0].num_evicted > 0
    assert not runs[0].found[:, 1:].any()
    # Processes side by side find the same, in the same order.
    beside = sweep(replay, capacities, lambda done, total: None, num_processes=2)
    assert all(np.array_equal(one.found, other.found) for one, other in zip(runs, beside, strict=True))


def test_a_slab_and_redis_find_what_memory_has_lost() -> None:
    trace = trace_of(chats(150))
    replay = TraceReplay(trace, SLOT_BYTES)
    rooms: list[dict[str, Any]] = [{}, {"disk": 8 << 20}, {"redis": 8 << 20}, {"redis": 8 << 20, "redis_ttl": 1.0}]
    alone, disk, redis, late = (replay.run(Capacity(SLOTS * SLOT_BYTES, **room, policy="lru")) for room in rooms)
    for run in (disk, redis):
        assert run.found.sum() > alone.found.sum()
    assert disk.found[:, 1].sum() > 0
    assert disk.num_written > 0
    assert redis.found[:, 2].sum() > 0
    assert late.found.sum() < redis.found.sum()  # what nobody reads for a second is gone
    # A pebibyte is as good as room for all, and takes no more memory here.
    enough, most = (replay.run(Capacity(memory=size, disk=size)) for size in (8 << 20, 1 << 50))
    assert np.array_equal(enough.found, most.found)
    tiers = SimulatedTiers(Capacity(SLOTS * SLOT_BYTES, 64 << 10), SLOT_BYTES, BLOCK_SIZE)
    for request in range(len(trace)):
        tiers.request(replay.end(request), float(request))
    assert tiers.slab is not None
    assert tiers.slab.num_evicted > 0
    tiers.check()


def written(path: Path, lines: Sequence[TraceLine]) -> Path:
    fields = ("timestamp", "input_length", "output_length", "hash_ids", "block_size", "answer_ids")
    path.write_text("".join(json.dumps({name: getattr(line, name) for name in fields}) + "\n" for line in lines))
    return path


def test_the_command_says_what_sizes_are_worth(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", chats(100))
    (tmp_path / "worth").write_text(json.dumps({"kvtier_worth": 1, "prefill_tokens_per_second": 50}))
    arguments = [path, "--memory", "2KiB,1MiB,2048", "--token-bytes", 16, "--processes", 1, "--gpu-hour", 3600]
    ended = kvtier("simulate", *arguments, "--from", tmp_path / "worth", "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["kvtier_simulate"] == 1
    assert told["rates"]["prefill"] == 50
    assert [(row["policy"], row["memory_bytes"]) for row in told["rows"]] == [
        (policy, size) for size in (2048, 1 << 20) for policy in ("predicted", "lru")
    ]
    for row in told["rows"]:
        assert 0 < row["block_hit_share"] <= row["optimum_block_hit_share"]
        assert row["money_saved"] == pytest.approx(row["seconds_saved"])  # a price of one a second
        assert row["mean_ttft"] < row["mean_ttft_without"]
    # With room for all, all policies find what there is.
    assert told["rows"][2]["block_hit_share"] == told["rows"][3]["optimum_block_hit_share"]
    page = tmp_path / "a.html"
    shown = kvtier("simulate", *arguments, "--png", tmp_path / "a.png", "--html", page, columns="200").stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert page.read_text().count("<svg") == 2
    assert "<td>predicted</td>" in page.read_text()
    assert not re.search(r"<script|(src|href)=.?https?:", page.read_text())  # nothing from elsewhere
    assert "money saved" in shown
    assert "- token_bytes: 16 bytes of KV a token" in shown


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--memory", "lots"], '--memory "lots": not a size'),
        (["--memory", "1"], '--memory "1": 1 bytes are less than a block of any model; did you mean "1GiB"?'),
        (["--memory", "1KiB", "--token-bytes", "1024"], "--memory 1024: a block has 4096 bytes; give room for one"),
        (["--policy", "best"], "--policy 'best': use predicted, lru, s3fifo"),
        (["--from", "/dev/null"], "--from /dev/null: not JSON"),
        (["--gpu-hour", "inf"], "--gpu-hour inf: use a number from 1e-09 to 1e+12"),
        # Files to draw to are tried before the trace is read.
        (["--png", "/dev/null/a.png"], "--png '/dev/null/a.png': Not a directory; name a file that can be written"),
        (["--html", "/"], "--html '/': Is a directory; name a file that can be written"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, options: list[str], complaint: str) -> None:
    ended = kvtier("simulate", written(tmp_path / "trace", chats(3)), "--token-bytes", 16, *options)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"kvtier: {complaint}")


def endless(path: Path) -> subprocess.Popen[str]:
    """`kvtier simulate` with two workers busy for long; in a session of its own, as behind a terminal."""
    command = [sys.executable, "-m", "kvtier.cli", "simulate", str(written(path / "trace", chats(20_000)))]
    command += ["--memory", "1MiB,2MiB,4MiB,8MiB", "--token-bytes", "16", "--processes", "2"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_processes(process.pid, 5)  # with the server that forks, and who tracks its resources
    return process


def alive_in(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                found += [int(entry.name)] if int(own) == group and state != "Z" else []
    return found


def wait_for_processes(group: int, number: int) -> None:
    """Until so many are alive in a group."""
    end = time.monotonic() + 60
    while len(alive := alive_in(group)) != number:
        assert time.monotonic() < end, alive
        time.sleep(0.05)


@pytest.mark.parametrize("everybody", brief([True], [True, False]))  # as a terminal's Ctrl-C does it; it alone
def test_ctrl_c_ends_it_and_its_workers_at_once(tmp_path: Path, everybody: bool) -> None:
    process = endless(tmp_path)
    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    wait_for_processes(process.pid, 0)


def test_its_workers_end_with_it_when_it_is_killed(tmp_path: Path) -> None:
    process = endless(tmp_path)
    process.kill()
    process.communicate(timeout=30)  # nobody holds its streams any more
    wait_for_processes(process.pid, 0)


def test_every_wrong_line_of_a_trace_is_told_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"hash_ids": 1}\n\n')
    ended = kvtier("simulate", tmp_path / "trace")
    assert ended.returncode == 2
    assert f"kvtier: {tmp_path}/trace:1: hash_ids: Expected `array`, got `int`" in ended.stderr
    assert f"{tmp_path}/trace:2: not a JSON object" in ended.stderr
