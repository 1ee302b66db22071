"""Stories of `kvtier bench` against a plain OpenAI server that says no more than it must, and goes wrong somehow."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_rig import kvtier

from kvtier.service.bench import bench
from kvtier.service.bench.bench import (
    PATTERNS,
    BenchOptions,
    BenchResult,
    LoadPace,
    ScriptedSession,
    Server,
    Shape,
    run_bench,
    sessions_of,
    sessions_of_trace,
)
from kvtier.tiers.errors import ConfigError

ODD = {"prompt_tokens": "many", "completion_tokens": 1.5, "prompt_tokens_details": {"cached_tokens": -1}}


class Plain(BaseHTTPRequestHandler):
    """Two pieces of text, and no usage. `ways` says what goes wrong with which request; `bodies` is what was asked."""

    bodies: list[dict[str, Any]]
    ways: dict[int, str]
    held: threading.Event
    models: object = {"data": [{"id": "plain"}]}

    def log_message(self, format: str, *_: object) -> None:
        return

    def do_GET(self) -> None:
        status = self.models if isinstance(self.models, int) else 200
        self._send(status, self.models if isinstance(self.models, str) else json.dumps(self.models))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        way = self.ways.get(len(self.bodies), "well")
        if way == "old" and "stream_options" in body:
            return self._send(400, "{}")
        if way == "busy":
            return self._send(503, "{}")
        word = "word\u2028" if way == "lines" else "word "
        if way == "hangs":
            self.held.wait(30)
        delta = {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
        last = {"choices": [{"index": 0, "delta": {"content": "end"}, "finish_reason": "stop"}]}
        ways: dict[str, list[Any]] = {"cut": [delta], "garbled": ["{"], "fails": [delta, {"error": {}}]}
        ways |= {"deep": ["[" * 50_000], "endless": ["x" * 200_000], "odd": [{**last, "error": None, "usage": ODD}]}
        events = ways.get(way, [delta, last])
        text = "".join(
            f"data: {one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)}\n\n" for one in events
        )
        return self._send(200, text + ("data: [DONE]\n\n" if way in ("well", "old") else ""))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def plain() -> Iterator[tuple[str, type[Plain]]]:
    handler: Any = type("Handler", (Plain,), {"bodies": [], "ways": {}, "held": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        handler.held.set()
        server.shutdown()
        thread.join()


def measured(url: str, *others: str, pace: LoadPace | None = None, deadline: float = 60.0, **shape: Any) -> BenchResult:
    small: dict[str, Any] = {"prompt_tokens": 16, "turn_tokens": 4, "answer_tokens": 4, **shape}
    options = BenchOptions((url, *others), Shape(**small), pace or LoadPace(2), deadline=deadline)
    counted: list[int] = []
    outcome = run_bench(options, lambda total: lambda: counted.append(total))
    assert len(counted) == sum(each.requests for each in outcome.figures)
    return outcome


def test_a_server_that_says_no_usage_is_measured_all_the_same(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    outcome = measured(url, num_requests=6)
    [figures] = outcome.figures
    assert (figures.requests, figures.errors, figures.model) == (6, {}, "plain")
    assert figures.output_tokens == 12  # as many as there were pieces
    assert figures.cached_share is None
    assert figures.ttft is not None
    assert 0 < figures.ttft.p50 <= figures.ttft.p90 <= figures.ttft.p99
    assert ("cached, % of them", "?") in outcome.table.rows
    assert all(body["stream_options"] == {"include_usage": True} for body in handler.bodies)


def test_whatever_goes_wrong_is_counted_by_kind(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    handler.ways = {1: "busy", 2: "cut", 3: "garbled", 4: "fails", 5: "hangs"}
    [figures] = measured(url, num_requests=7, pace=LoadPace(1), deadline=6.0).figures
    assert figures.errors == {
        "status 503": 1,
        "stream cut off": 1,
        "malformed answer": 1,
        "error in the stream": 1,
        "no end within 6 s": 1,
    }
    assert figures.requests == 7
    with pytest.raises(ConfigError, match="is the server up"):
        measured("http://127.0.0.1:9")
    for wrong in ("127.0.0.1:9", "http://", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="write it as in"):
            measured(wrong)


def test_rubbish_is_an_error_of_one_request_and_no_more(
    plain: tuple[str, type[Plain]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_MOST_ANSWER", 100_000)
    url, handler = plain
    handler.ways = {1: "deep", 2: "endless", 3: "odd", 4: "lines"}
    outcome = measured(url, num_requests=5, pace=LoadPace(1))
    [figures] = outcome.figures
    assert figures.errors == {"malformed answer": 2}
    # A usage that is no number is none; a separator of lines may stand in a text.
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (None, None, 1 + 2 + 2)
    assert outcome.measured.answers[0][3].text == "word\u2028end"
    wrong: list[object] = ["[" * 50_000, {"data": [{"id": 5}]}, {"data": "x"}, [], " " * 200_000]
    for models in wrong:
        handler.models = models
        with pytest.raises(ConfigError, match="/v1/models: not an OpenAI server's answer"):
            measured(url)
    handler.models = 503
    with pytest.raises(ConfigError, match=r"/v1/models: status 503; check the URL, and --token if it wants one$"):
        measured(url)
    # A trace that cannot be read is told line by line, with status 2; so is one of more text than there is memory for.
    (tmp_path / "a").write_text('{"hash_ids": 1}\n{"input_length": 268435457, "hash_ids": [1]}\n\n')
    ended = kvtier("bench", url, "--trace", tmp_path / "a")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 2)
    assert f"{tmp_path}/a:1: hash_ids: Expected `array`, got `int`\n{tmp_path}/a:3: not a JSON" in ended.stderr
    (tmp_path / "a").write_text('{"input_length": 268435457, "hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match="input_length: 268435457 tokens in 1 requests; ask for at most"):
        sessions_of_trace(tmp_path / "a", 1, 1, 1.0)


def test_an_old_server_is_asked_again_without_the_option_it_does_not_know(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    handler.ways = {1: "old"}
    [figures] = measured(url, num_requests=3, pace=LoadPace(1)).figures
    assert figures.errors == {}
    assert ["stream_options" in body for body in handler.bodies] == [True, False, False, False]


def test_the_next_turn_has_the_answer_in_its_prompt(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    outcome = measured(url, pattern="turns", num_requests=5, num_turns=3, pace=LoadPace(1))
    lengths = [len(body["messages"]) for body in handler.bodies]
    assert lengths == [2, 4, 6, 2, 4]  # the system's text, then the user's and the answers
    assert handler.bodies[1]["messages"][2] == {"role": "assistant", "content": "word end"}
    assert handler.bodies[1]["messages"][:2] == handler.bodies[0]["messages"]
    assert outcome.json["kvtier_bench"] == 1


def test_two_servers_are_asked_the_same_by_turns_at_a_rate(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    outcome = measured(url, f"{url}/v1/", num_requests=5, pace=LoadPace(rate=200.0))
    first, second = outcome.figures
    assert (first.requests, second.requests) == (5, 5)
    asked = [body["messages"][-1]["content"] for body in handler.bodies]
    assert all(asked.count(text) == 2 for text in asked)


def test_a_trace_keeps_its_times_and_its_equal_blocks(plain: tuple[str, type[Plain]], tmp_path: Path) -> None:
    url, handler = plain
    rows = [(0, 8, [1, 2]), (300, 7, [1, 3])]
    lines = [{"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": ids} for at, n, ids in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({**line, "block_size": 4}) + "\n" for line in lines))
    options = BenchOptions((url,), Shape(), LoadPace(), trace=tmp_path / "a.jsonl", speed=2.0)
    outcome = run_bench(options, lambda _: lambda: None)
    first, second = (body["messages"][-1]["content"].split() for body in handler.bodies)
    assert (len(first), len(second)) == (8, 7)
    assert first[:4] == second[:4]
    assert first[4:7] != second[4:]
    assert [body["max_tokens"] for body in handler.bodies] == [5, 5]
    began = [answer.began for answer in outcome.measured.answers[0]]
    assert max(began) >= 0.15


def test_every_pattern_asks_what_it_was_told_to(tmp_path: Path) -> None:
    for pattern in PATTERNS:
        shape = Shape(pattern, num_requests=41, prompt_tokens=100, num_turns=4, seed=3)
        sessions = sessions_of(shape)
        assert sum(len(session.turns) for session in sessions) == 41
        assert sessions == sessions_of(shape)  # by the seed
        pieces = [piece for session in sessions for piece in session.system.split("\n\n")]
        assert len(set(pieces)) < len(pieces)  # some have them in common
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_turns": 0}, "--turns 0: use a whole number from 1 to"),
        ({"num_requests": 10**9}, "--requests 1000000000: use a whole number from 1 to"),
        ({"num_requests": 10**6, "prompt_tokens": 10**6}, "--requests 1000000: 1000000000000 tokens in all"),
    ]
    for wrong, complaint in cases:
        with pytest.raises(ConfigError, match=complaint):
            Shape(**wrong)
    with pytest.raises(ConfigError, match=r"rate 0\.0"):
        LoadPace(rate=0.0)


def test_the_verb_prints_a_table_and_writes_page_and_picture(plain: tuple[str, type[Plain]], tmp_path: Path) -> None:
    url, _ = plain
    small = ["--requests", "3", "--prompt-tokens", "8"]
    ended = kvtier("bench", url, *small, "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "TTFT p90, ms" in ended.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert "src=" not in page
    ended = kvtier("bench", url, *small, "--json")
    assert json.loads(ended.stdout)["servers"][0]["requests"] == 3
    assert kvtier("bench", url, "--concurrency", 0).returncode == 2


def test_ctrl_c_does_not_wait_for_more_prompts(plain: tuple[str, type[Plain]], monkeypatch: pytest.MonkeyPatch) -> None:
    went_on = False

    def many(_: Shape) -> list[ScriptedSession]:
        nonlocal went_on
        signal.raise_signal(signal.SIGINT)
        went_on = True
        return []

    monkeypatch.setattr(bench, "sessions_of", many)
    ended = kvtier("bench", plain[0])
    assert (ended.returncode, ended.stdout, ended.stderr, went_on) == (130, "", "", False)


def test_ctrl_c_before_any_answer_is_no_failure(
    plain: tuple[str, type[Plain]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pressed(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(Server, "ask", pressed)
    ended = kvtier("bench", plain[0], "--prompt-tokens", "8", "--concurrency", 1)
    assert ended.returncode == 3
    assert "interrupted: " in ended.stdout


def test_ctrl_c_prints_what_was_measured_so_far(plain: tuple[str, type[Plain]]) -> None:
    url, handler = plain
    handler.ways = {4: "hangs"}
    command = [sys.executable, "-m", "kvtier.cli", "bench", url, "--concurrency", "1", "--prompt-tokens", "8", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(handler.bodies) < 4:
        assert process.poll() is None
        handler.held.wait(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    told = json.loads(out)
    assert (told["is_whole"], told["in_flight"], told["servers"][0]["requests"]) == (False, 1, 3)
    assert process.returncode == 3
