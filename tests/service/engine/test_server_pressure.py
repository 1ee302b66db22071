"""Stories of a server that has too much to do, loses its clients, fails or has to stop: nothing leaks, all are told."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from server_rig import BLOCK, MODEL, ServerThread, serving, wait_for

from kvtier.service.openai.prompts import Prompts
from kvtier.tiers.config.config import Config
from kvtier.tiers.naming.chain import TokenChain

LONG = "The quick brown fox jumps over the lazy dog, again and again. " * 3
ASK: dict[str, Any] = {"model": MODEL, "prompt": LONG, "temperature": 0, "extra_body": {"ignore_eos": True}}


@contextmanager
def held(server: ServerThread, after: int = 0) -> Iterator[None]:
    """The engine's steps, but for the first `after`, wait until the end of the block."""
    go, step, free = threading.Event(), server.engine.step, iter(range(after))

    def wait_and_step() -> Any:
        assert next(free, None) is not None or go.wait(60)
        return step()

    server.engine.step = wait_and_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        go.set()
        server.engine.step = step  # type: ignore[method-assign]


def beside(work: Callable[[], Any]) -> "Future[Any]":
    """Do it on a thread."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(work)
    finally:
        thread.shutdown(wait=False)


def idle(server: ServerThread) -> bool:
    """Whether nobody is computed and L1 is all free."""
    return server.loop.num_live == 0 and server.num_free == server.engine.pool.num_blocks


def test_a_full_server_says_so_and_has_room_again_later(model: Path) -> None:
    with serving(model, server={"max_num_seqs": 1, "max_waiting": 1}) as server:
        with held(server):
            first, second = (beside(lambda: server.client.completions.create(max_tokens=3, **ASK)) for _ in range(2))
            wait_for(lambda: server.loop.num_live == 2)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as refused:
                    server.client.completions.create(max_tokens=3, stream=stream, **ASK)
                assert refused.value.code == "rate_limit_exceeded"
                assert refused.value.response.headers["retry-after"] == "1"
            assert server.http.get("/healthz").status_code == 200
            assert server.status()["refused"] == {"429": 2}
        assert first.result().choices[0].text == second.result().choices[0].text
        assert server.client.completions.create(max_tokens=3, **ASK).choices[0].text == first.result().choices[0].text
        # What no waiting makes room for is the request's own mistake.
        with pytest.raises(openai.BadRequestError, match="n: 3 answers at once"):
            server.client.completions.create(max_tokens=3, n=3, **ASK)
        wait_for(lambda: idle(server))


def test_the_context_it_tells_of_is_the_one_it_has_room_for(model: Path) -> None:
    # L1 holds less than the model could read
    with serving(model, l1={"num_blocks": 4}) as server:
        (listed,) = server.http.get("/v1/models").json()["data"]
        room = listed["max_model_len"]
        assert room == listed["kvtier"]["max_model_len"] == server.status()["max_model_len"] == 4 * BLOCK
        prompt = [1] * (room - 2)
        assert server.post("completions", model=MODEL, prompt=prompt, max_tokens=2).status_code == 200
        refused = server.post("completions", model=MODEL, prompt=prompt, max_tokens=3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {room} tokens" in refused.json()["error"]["message"]


def test_who_finds_no_room_costs_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens nor jobs are made for a request that is not taken, however many it would be."""
    with serving(model, server={"max_num_seqs": 2, "max_waiting": 0}) as server:
        with held(server):
            live = beside(lambda: server.client.completions.create(max_tokens=1, n=2, **ASK))
            wait_for(lambda: server.loop.num_live == 2)
            monkeypatch.setattr(Prompts, "tokenized", None)
            refused = server.post("completions", model=MODEL, prompt="x")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            for ask, param in (({"prompt": [[1]] * 3}, "prompt"), ({"prompt": [[1]] * 4096, "n": 128}, "n")):
                error = server.post("completions", model=MODEL, **ask).json()["error"]
                assert (error["param"], error["code"]) == (param, "invalid_value")
                assert error["message"].startswith(f"{param}: ")
            monkeypatch.undo()
        assert len(live.result().choices) == 2


def test_a_deadline_ends_a_request_and_frees_its_blocks(model: Path) -> None:
    with serving(model, server={"request_timeout": "300ms"}) as server:
        with held(server):
            for stream in (False, True):  # before its first token a stream has a status, too
                with pytest.raises(openai.APIStatusError) as late:
                    server.client.completions.create(max_tokens=3, stream=stream, **ASK)
                assert (late.value.status_code, late.value.code) == (504, "timeout")
                assert late.value.response.headers["x-should-retry"] == "false"
        wait_for(lambda: idle(server))
    # Behind it, the error is the stream's last event.
    with serving(model, server={"request_timeout": "5s"}) as server:
        with server.http.stream(
            "POST", "/v1/completions", json=body(max_tokens=800, stream=True, ignore_eos=True)
        ) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_lines()
            lines = [next(pieces)]
            with held(server):  # nor would it have ended by itself
                lines += [line for line in pieces if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        assert "data: [DONE]" not in lines
        assert len(lines) > 1
        wait_for(lambda: idle(server))


def test_a_deadline_ends_segments_and_texts_to_precompute(model: Path) -> None:
    """With those that were queued to bring the segments: nothing of them stays."""
    cache = {"segments": "on", "segment_min_tokens": 16, "block_size": 16}
    marked: dict[str, Any] = {"prompt": [*range(1, 101)], "kvtier": {"segments": [[20, 60], [60, 95]]}}
    with serving(model, cache=cache, server={"request_timeout": "300ms"}) as server:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("completions", body(max_tokens=2, **marked)),
            ("completions", body(max_tokens=2, stream=True, n=2, **marked)),
            ("kvtier/precompute", {"texts": [LONG, LONG[::-1]]}),
        ]
        with held(server):
            for path, ask in asked:
                late = server.post(path, **ask)
                assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        wait_for(lambda: idle(server) and not server.engine.has_unfinished)


def body(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": LONG, "temperature": 0, "ignore_eos": True, **options}


def test_few_prompts_are_tokenized_at_once_and_none_for_ever(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, tokenized = threading.Event(), Prompts.tokenized
    entered: list[object] = []

    def wait_and_tokenize(*arguments: Any) -> Any:
        entered.append(arguments)
        assert go.wait(60)
        return tokenized(*arguments)

    with serving(model, server={"request_timeout": "5s"}) as server:
        monkeypatch.setattr(Prompts, "tokenized", wait_and_tokenize)
        asked = [beside(lambda: server.post("completions", **body(max_tokens=1))) for _ in range(4)]
        wait_for(lambda: len(entered) == 4)
        late = server.post("completions", **body(max_tokens=1))
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        assert len(entered) == 4
        go.set()
        assert {each.result().status_code for each in asked} == {504}  # theirs is over, too
        wait_for(lambda: server.post("completions", **body(max_tokens=1)).status_code == 200)
        wait_for(lambda: idle(server))


def test_a_reset_forgets_what_every_tier_holds_and_is_refused_while_requests_are_live(model: Path) -> None:
    with serving(model) as server:
        ask = body(max_tokens=1)
        server.post("completions", **ask)
        server.settle()
        assert cached_tokens(server.post("completions", **ask)) > 0
        server.settle()
        assert server.http.post("/admin/reset", json={}).json() == {"reset": [server.loop.fingerprint]}
        assert cached_tokens(server.post("completions", **ask)) == 0
        with held(server):
            live = beside(lambda: server.post("completions", **body(max_tokens=100, ignore_eos=True)))
            wait_for(lambda: server.loop.num_live == 1)
            refused = beside(lambda: server.http.post("/admin/reset", json={}))
            wait_for(lambda: server.loop._inbox)
        assert refused.result().status_code == 409
        assert "requests are live" in refused.result().json()["error"]["message"]
        assert live.result().status_code == 200


def cached_tokens(answer: httpx2.Response) -> int:
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_who_hangs_up_is_computed_for_no_longer(model: Path) -> None:
    with serving(model) as server:
        asked = body(max_tokens=800, stream=True, n=2, ignore_eos=True)
        with held(server, after=20), server.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()  # kept: an iterator that is dropped hangs up
            next(lines)
            assert server.loop.num_live == 2
        wait_for(lambda: idle(server))
        assert server.status()["outcomes"] == {"aborted": 2}
        # One that waits for the whole answer, too.
        with held(server):
            host, _, port = server.server.address.rpartition(":")
            with socket.create_connection((host, int(port))) as asking:
                content = json.dumps(body(max_tokens=800, ignore_eos=True)).encode()
                head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                asking.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                wait_for(lambda: server.loop.num_live == 1)
            wait_for(lambda: server.loop._inbox)  # it is known
        wait_for(lambda: idle(server))
        assert server.status()["outcomes"] == {"aborted": 3}
        assert server.client.completions.create(max_tokens=3, **ASK).choices[0].finish_reason == "length"


def test_a_step_that_fails_once_costs_nobody_anything(model: Path) -> None:
    with serving(model) as server:
        expected = server.client.completions.create(max_tokens=6, **ASK).choices[0].text
        with failing(server, times=1):
            assert server.client.completions.create(max_tokens=6, **ASK).choices[0].text == expected
        assert server.status()["steps"]["failed"] == 1
        assert server.http.get("/healthz").status_code == 200


def test_an_engine_that_fails_says_so_and_recovers(model: Path) -> None:
    with serving(model) as server:
        with failing(server, times=10**9):
            with pytest.raises(openai.InternalServerError) as failed:
                server.client.completions.create(max_tokens=6, **ASK)
            assert failed.value.code == "engine_error"
            assert "broken" not in str(failed.value)  # the log's, not the client's
            health = server.http.get("/healthz")
            assert health.status_code == 503
            assert "steps failed" in health.json()["status"]
            assert server.http.get("/readyz").status_code == 503
        wait_for(lambda: idle(server))
        assert server.client.completions.create(max_tokens=6, **ASK).choices[0].finish_reason == "length"
        assert server.http.get("/healthz").status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_cannot_go_on_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor starts another one. It would fail every request, thousands of times a second, and log each."""
    server = ServerThread(model)

    def broken(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(server.engine.scheduler, "schedule", broken)
    with pytest.raises(openai.InternalServerError) as failed:
        server.client.completions.create(max_tokens=6, **ASK)
    server.thread.join(60)
    is_over, num_failed = not server.thread.is_alive(), server.loop.tally.failed_steps
    server.server.stop()
    server.thread.join(60)
    server.client.close()
    server.http.close()
    assert (failed.value.code, is_over, num_failed) == ("stopping", True, 1)


@contextmanager
def failing(server: ServerThread, times: int) -> Iterator[None]:
    """The next steps of the model raise."""
    run, left = server.engine.runner.run, [times]

    def broken(batch: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("a broken device")
        return run(batch)

    server.engine.runner.run = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.engine.runner.run = run  # type: ignore[method-assign]


def test_a_server_that_stops_lets_answers_end_and_takes_no_more(model: Path) -> None:
    with serving(model) as server:
        stream = server.client.completions.create(max_tokens=30, stream=True, **ASK)
        pieces = [next(stream)]
        with held(server):
            server.server.stop()  # what SIGTERM does
            assert server.http.get("/readyz").status_code == 503
            assert server.http.get("/healthz").status_code == 200
            refused = server.http.post("/v1/completions", json=body(max_tokens=1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason == "length"
        server.thread.join(60)
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/healthz")


def test_what_does_not_end_in_time_is_told(model: Path) -> None:
    assert Config().server.patience == Config().server.request_timeout
    with serving(model, server={"drain": "1ms"}) as server:
        stream = server.client.completions.create(max_tokens=800, stream=True, **ASK)
        next(stream)
        server.server.stop()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)


def test_what_fails_while_a_request_is_taken_in_is_that_requests_alone(model: Path) -> None:
    with serving(model) as server:
        add_request, calls = server.engine.add_request, []

        def fail_at_the_third(*args: Any, **options: Any) -> str:
            calls.append(options)
            if len(calls) == 3:
                raise MemoryError("no room for a third")
            return add_request(*args, **options)

        with held(server):
            other = beside(lambda: server.client.completions.create(max_tokens=3, **ASK))
            wait_for(lambda: server.loop.num_live == 1)
            server.engine.add_request = fail_at_the_third  # type: ignore[method-assign]
            failing = beside(lambda: server.client.completions.create(max_tokens=3, n=3, **ASK))
            wait_for(lambda: server.loop.num_live == 4)
        with pytest.raises(openai.InternalServerError) as failed:
            failing.result()
        assert failed.value.code == "engine_error"
        text = other.result().choices[0].text
        wait_for(lambda: idle(server))
        assert server.status()["outcomes"] == {"length": 1, "failed": 3}
        # and the loop goes on
        assert server.client.completions.create(max_tokens=3, **ASK).choices[0].text == text


def test_a_prompt_is_named_once_for_all_its_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[tuple[str, int]] = []
    extend = TokenChain.extend

    def noting(chain: TokenChain, tokens: Sequence[int]) -> None:
        hashed.append((threading.current_thread().name, len(tokens)))
        extend(chain, tokens)

    with serving(model) as server:
        monkeypatch.setattr(TokenChain, "extend", noting)
        answer = server.client.completions.create(max_tokens=2, n=4, **ASK)
        assert len(answer.choices) == 4
        (whole,) = (thread for thread, length in hashed if length == len(LONG))
        assert whole != server.thread.name  # which steps the engine
        assert [length for _, length in hashed if length != len(LONG)] == [1] * 8  # each its own answer's tokens
        monkeypatch.undo()
