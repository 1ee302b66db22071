"""Stories of benchmarks/routing.py: what its simulated replicas do by the clock, and what it says of a bad trace."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import routing
from command_rig import program
from routing import Hardware, SimulatedReplica, SimulatedRequest, TracePrompt, prompts_of

from kvtier.service.traces import TraceLine

SLOW = Hardware(
    l1_blocks=12,
    l2_blocks=32,
    tokens_per_second=100,
    context_that_doubles=float("inf"),
    step_seconds=1,
    decode_seconds=0,
    load_bytes_per_second=50,
    token_bytes=1,
    step_tokens=200,
    max_running=2,
)


def line(*ids: int, at: int = 0, tokens: int | None = None, answer: int = 1) -> TraceLine:
    """A prompt of whole blocks of 100 tokens and one token more, or of so many tokens."""
    return TraceLine(at, len(ids) * 100 - 99 if tokens is None else tokens, answer, ids)


def serve(replica: SimulatedReplica, prompts: Sequence[TracePrompt]) -> list[SimulatedRequest]:
    """All at their time, to the end."""
    requests = [SimulatedRequest(prompt) for prompt in prompts]
    coming = list(requests)
    while coming or replica.wake_at is not None:
        if coming and (replica.wake_at is None or coming[0].prompt.arrival < replica.wake_at):
            request = coming.pop(0)
            replica.submit(request, request.prompt.arrival)
        elif replica.wake_at is not None:
            replica.advance(replica.wake_at)
    replica.check()
    return requests


def test_a_prompt_costs_what_is_not_cached() -> None:
    replica = SimulatedReplica("a", SLOW, 100)
    # Four blocks and a token, 200 tokens a step: 2 s of work and 1 s for the step, twice; a last step for the token.
    # Ten answers' tokens, of which one is out: nine more steps of a second.
    first, again = serve(replica, prompts_of([line(1, 2, 3, 4, 5, answer=10), line(1, 2, 3, 4, 9, at=60_000)], 100))
    assert first.first_token == pytest.approx(3 + 3 + 1.01)
    # Later only the last token is new; what it was is known of both tiers.
    assert again.first_token == pytest.approx(60 + 1.01)
    assert (first.cached, again.cached) == ({"l1": 0, "l2": 0}, {"l1": 4, "l2": 0})
    assert replica.holdings() == {"l1": 4, "l2": 4}
    assert replica.num_computed == 402


def test_l2_holds_what_l1_had_to_give_up_and_loading_takes_its_time() -> None:
    replica = SimulatedReplica("a", SLOW, 100)
    chains = [(1, 2, 3, 4), (11, 12, 13, 14), (21, 22, 23, 24), (31, 32, 33, 34)]
    lines = [line(*chain, 0, at=60_000 * number) for number, chain in enumerate([*chains, chains[0]])]
    *_, again = serve(replica, prompts_of(lines, 100))
    # L1 is 12 blocks: the first chain lost at least its tail. A block comes up in two seconds.
    num_loaded = again.cached["l2"]
    assert (num_loaded > 0, sum(again.cached.values())) == (True, 4)
    assert again.first_token == pytest.approx(240 + 2 * num_loaded + 1.01)


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"timestamp": "now"}, "timestamp: Expected `int`, got `str`"),
        (
            {"input_length": 512 * 768, "hash_ids": list(range(768))},
            "input_length 393216: with its answer more than a replica's 768 blocks of L1; leave it out",
        ),
    ],
)
def test_a_bad_trace_is_one_line_with_its_line_and_field(bad: dict[str, object], told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = [GOOD, GOOD, GOOD | bad, GOOD]
    path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in lines).encode()))
    ended = program(routing.main, "routing.py", "--trace", path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"routing: {path}:3: {told}")
    assert ended.stderr.count("\n") == 1


def test_a_bad_command_line_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for arguments, told in (
        (["--trace", str(tmp_path / "none")], "none: No such file or directory; name a trace that can be read"),
        (["--trace", str(tmp_path / "empty")], "empty: no requests; name a trace in Mooncake's form"),
        (["--replicas", "0"], "argument --replicas: '0': write a whole number from 1 on"),
        (["--requests", "2"], "2 requests: too few to measure; give more, by --requests or another --trace"),
    ):
        ended = program(routing.main, "routing.py", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert told in ended.stderr


@pytest.mark.exhaustive  # its parts are shown above, the policy in test_routing_policy.py
def test_prefix_aware_routing_is_best_on_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "RESULTS", tmp_path)
    monkeypatch.setattr("_report.RESULTS", tmp_path)
    ended = program(routing.main, "routing.py", "--quick", "--json", "--save")
    assert ended.returncode == 0
    told = json.loads(ended.stdout)
    assert told == json.loads((tmp_path / "routing.json").read_text())
    assert (tmp_path / "routing.png").stat().st_size > 10_000
    assert told["setup"]["measured"] == "requests 101 to 300"
    rows = {row["policy"]: row for row in told["results"]}
    assert set(rows) == {*routing.POLICIES, routing.ORACLE}
    assert rows["prefix-aware"]["cached"] > 1.5 * rows["round robin"]["cached"]
    assert rows["prefix-aware"]["TTFT p50 s"] < rows["round robin"]["TTFT p50 s"]
    assert rows[routing.ORACLE]["of oracle"] == 1
