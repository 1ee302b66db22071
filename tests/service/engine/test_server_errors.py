"""What is wrong with a request is said in OpenAI's shape with the field named, and leaves the server well."""

import json
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from doubles import wait_until
from extent import brief
from http_rig import talk
from pydantic import ValidationError
from router_rig import routed, until
from server_rig import MODEL, ServerThread, client, serving

from kvtier.service.engine import server as server_process
from kvtier.service.openai.bodies import ChatBody, CompletionBody, parse
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.web import http_server as guard

TOKEN = "a secret nobody sees"
USER = [{"role": "user", "content": "hi"}]
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 1}
MANY_MARKS = {"type": "text", "text": "x", "kvtier": {f"x{number}": 1 for number in range(1000)}}
VERBS = ("completions", "chat/completions")
SERVER = {"server": {"max_waiting": 8}}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}


def well(server: ServerThread) -> bool:
    return server.http.get("/healthz").json() == {"status": "ok"} and server.loop.num_live == 0


@pytest.mark.parametrize(
    ("verb", "wrong", "status", "param", "code"),
    [
        ("completions", {"model": "gpt-9"}, 404, "model", "model_not_found"),
        ("completions", {"model": 7}, 400, "model", "invalid_value"),
        ("completions", {"prompt": "x" * 1024}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"max_tokens": 1024}, 400, "prompt", "context_length_exceeded"),
        ("chat/completions", {"max_tokens": 2000}, 400, "messages", "context_length_exceeded"),
        ("completions", {"prompt": ""}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": {"text": "hi"}}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": [1, 258]}, 400, "prompt", "invalid_value"),
        ("completions", {"prompt": ["hi", 1]}, 400, "prompt.1", "invalid_value"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "invalid_value"),
        ("completions", {"kvtier": {"hint": "maybe"}}, 400, "kvtier.hint", "invalid_value"),
        ("completions", {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ("completions", {"max_tokens": True}, 400, "max_tokens", "invalid_value"),
        ("completions", {"temperature": float("nan")}, 400, "temperature", "invalid_value"),
        ("completions", {"n": 17}, 400, "n", "invalid_value"),
        ("completions", {"prompt": ["hi"] * 17}, 400, "prompt", "invalid_value"),
        ("completions", {"stop": ""}, 400, "stop.0", "invalid_value"),
        ("completions", {"stream": "yes"}, 400, "stream", "invalid_value"),
        ("completions", {"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
        ("completions", {"repetition_penalty": 1e-300}, 400, "repetition_penalty", "invalid_value"),
        ("completions", {"suffix": "."}, 400, "suffix", "unsupported_parameter"),
        ("completions", {"logit_bias": {"five": 1}}, 400, "logit_bias", "invalid_value"),
        ("completions", {"logit_bias": {"258": 1}}, 400, "logit_bias", "invalid_value"),
        ("completions", {"kvtier": {"promt": "hi"}}, 400, "kvtier.promt", "unknown_parameter"),
        ("chat/completions", {"tools": [{"type": "x"}]}, 400, "tools.0.type", "invalid_value"),
        ("chat/completions", {"tool_choice": "maybe"}, 400, "tool_choice", "invalid_value"),
        ("chat/completions", {"functions": [{}]}, 400, "functions", "unsupported_parameter"),
        ("chat/completions", {"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
        ("chat/completions", {"max_completion_tokens": 5}, 400, "max_tokens", "invalid_value"),
        ("chat/completions", {"messages": []}, 400, "messages", "invalid_value"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, 400, "messages.0.role", "missing_required_parameter"),
        ("chat/completions", {"messages": [{**USER[0], "role": "robot"}]}, 400, "messages.0.role", "invalid_value"),
        ("chat/completions", {"messages": [IMAGE]}, 400, "messages.0.content.0.type", "invalid_value"),
    ],
)
def test_the_field_at_fault_is_named(
    server: ServerThread, verb: str, wrong: dict[str, Any], status: int, param: str, code: str
) -> None:
    right = PROMPT if verb == "completions" else CHAT
    content = json.dumps({**right, **wrong}).encode()
    for streams in (content, content[:-1] + b', "stream": true}'):
        if "stream" in wrong or ("stream_options" in wrong and streams is not content):
            continue
        answer = server.http.post(f"/v1/{verb}", content=streams, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
        assert error["type"] == "invalid_request_error"
        assert param.partition(".")[0] in error["message"]
        assert "\n" not in error["message"]
    assert well(server)


@pytest.mark.parametrize(
    ("body_type", "wrong", "param"),
    [
        (CompletionBody, {"prompt": [1] + [""] * 1000}, "prompt.1"),
        (CompletionBody, {"prompt": [[1]] * 5000}, "prompt"),
        (CompletionBody, {"prompt": "hi", **{f"x{number}": 1 for number in range(1000)}}, None),
        (ChatBody, {"messages": [{}] * 1000}, "messages.0.role"),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 1000}]}, "messages.0.content.0.type"),
        (ChatBody, {"messages": USER, "stream_options": {f"x{number}": 1 for number in range(1000)}}, "stream_options"),
        (CompletionBody, {"prompt": [1], "kvtier": {"segments": [["a", "b"]] * 1000}}, "kvtier.segments.0.0"),
        (ChatBody, {"messages": [{"role": "user", "content": [MANY_MARKS] * 1000}]}, "messages.0.content.0.kvtier"),
    ],
)
def test_of_a_million_mistakes_only_the_first_are_looked_for(
    body_type: type[ChatBody | CompletionBody], wrong: dict[str, Any], param: str | None
) -> None:
    """Each that is found is memory and time while all streams stand still."""
    body = {"model": MODEL, **wrong}
    with pytest.raises(OpenAIError) as refused:
        parse(body_type, json.dumps(body).encode())
    assert refused.value.param == param
    if param is not None:
        with pytest.raises(ValidationError) as found:
            body_type.model_validate(body)
        assert found.value.error_count() <= 2
    assert len(str(refused.value)) < 200


def test_what_asks_for_nothing_is_taken(server: ServerThread) -> None:
    """Clients send neutral values of what they do not use."""
    neutral: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "n": 1}
    server.client.completions.create(**PROMPT, **neutral, best_of=1, echo=False, suffix=None, logprobs=None)
    response: Any = server.client.chat.completions.create(
        **CHAT, **neutral, tools=[], response_format={"type": "text"}, logprobs=False, metadata={"a": "b"}
    )
    assert response.choices[0].finish_reason in ("length", "stop")
    # An answer's message comes back as the client writes it, with every field that says nothing.
    said = response.choices[0].message.model_dump()
    assert said["tool_calls"] is said["annotations"] is None
    again: Any = server.client.chat.completions.create(**CHAT | {"messages": [*USER, said, *USER]})
    assert again.choices
    options: dict[str, Any] = {"stream_options": {"include_usage": None}, "max_tokens": None, "stop": None, "n": None}
    silent: dict[str, Any] = {"tools": None, "logprobs": None, "response_format": None, "tool_choice": None}
    assert server.post("chat/completions", **{**CHAT, **silent, **options, "max_tokens": 1, "stream": True}).is_success


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json_object_says_so(server: ServerThread, verb: str, content: bytes) -> None:
    answer = server.http.post(f"/v1/{verb}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body")
    assert answer.json()["error"]["code"] == "bad_json"
    assert well(server)


def test_a_body_of_many_lists_is_refused_before_they_are_made(server: ServerThread) -> None:
    lists = b'{"model": "x", "nobody": [' + b"[]," * 200_000 + b"1]}"
    answer = server.http.post("/v1/completions", content=lists, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_json")
    assert "200002 lists and objects" in answer.json()["error"]["message"]
    # brackets in a text are none
    code = {**PROMPT, "nobody": '{"a": [1, "\\\\"]}' * 60_000}
    assert server.post("completions", **code).is_success


def test_pages_bodies_and_types_that_are_not_taken(server: ServerThread) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
    ):
        answer = server.http.request(method, path)
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})
    plain = server.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    large = server.http.post("/v1/completions", json={**PROMPT, "prompt": "x" * (9 << 20)})
    assert large.status_code == 413
    assert "8388608 bytes" in large.json()["error"]["message"]
    assert well(server)


def test_a_token_is_asked_for_without_a_hint(model: Path) -> None:
    with serving(model, server={"token": TOKEN}) as guarded:
        for key in ("wrong", TOKEN[:-1], TOKEN + "x"):
            asking = client(guarded.url, key)
            asks: list[Callable[[], object]] = [
                asking.models.list,
                partial(asking.completions.create, **PROMPT),
                partial(asking.chat.completions.create, **CHAT, stream=True),
            ]
            for ask in asks:
                with pytest.raises(openai.AuthenticationError) as refused:
                    ask()
                assert refused.value.body == {
                    "message": "not allowed",
                    "type": "authentication_error",
                    "param": None,
                    "code": "invalid_api_key",
                }
            asking.close()
        for page in ("metrics", "healthz", "readyz", "status"):
            answer = guarded.http.get(f"/{page}")
            assert answer.status_code == 200
            assert TOKEN not in answer.text
        assert guarded.status()["refused"] == {"401": 9}
        assert 'kvtier_engine_refused_total{status="401"} 9.0' in guarded.http.get("/metrics").text
        allowed = client(guarded.url, TOKEN)
        assert allowed.models.list().data[0].id == MODEL
        allowed.close()
        for key, status in ((TOKEN, 200), ("wrong", 401), ("", 401)):  # Anthropic's header
            assert guarded.http.get("/v1/models", headers={"x-api-key": key}).status_code == status


def test_too_many_requests_at_once_are_told_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_SPARE", 0)
    monkeypatch.setattr(guard, "_BODY", 600.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(model, server={"max_num_seqs": 1, "max_waiting": 2}) as server:
        server.http.close()
        host, _, port = server.server.address.rpartition(":")
        slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(3)]
        for connection in slow:
            connection.sendall(head + b"Content-Length: 9\r\n\r\n{")
        # Not before all are under way: of four connections without a request the one that waits longest is closed.
        wait_until(lambda: server.server._http._num_requests == 3)
        assert httpx2.get(f"{server.url}/status", timeout=60).status_code == 503
        answer = httpx2.get(f"{server.url}/v1/models", timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        # Health checks have room of their own.
        assert httpx2.get(f"{server.url}/healthz", timeout=60).status_code == 200
        for connection in slow:
            connection.close()


def test_a_thousand_malformed_requests_leave_it_well(server: ServerThread) -> None:
    """Half are streams of bytes, half are JSON that is nearly right."""
    dice = random.Random(5)
    for number in range(brief(150, 500)):
        answer = talk(server.url.removeprefix("http://"), bytes_of_rubbish(dice))
        assert answer == b"" or answer.startswith(b"HTTP/1."), answer[:100]
        assert not answer.startswith(b"HTTP/1.1 500")
        if number % 50 == 0:
            assert server.http.get("/healthz").status_code == 200
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        for _ in range(brief(150, 500)):
            verb, content = nearly_right(dice)
            told = http.post(f"/v1/{verb}", content=content, headers={"content-type": "application/json"})
            assert told.status_code in (200, 400, 404, 429), told.text
            if told.status_code != 200:
                assert set(told.json()["error"]) == {"message", "type", "param", "code"}
    server.settle()
    assert well(server)
    assert server.num_free == server.engine.pool.num_blocks
    assert server.client.completions.create(**PROMPT).choices


def bytes_of_rubbish(dice: random.Random) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    start = dice.choice(
        [b"", b"GET /v1/models HTTP/1.1\r\n", head, head + b"Content-Length: 5\r\n\r\n", b"\x16\x03\x01"]
    )
    parts = [
        b"\r\n",
        b"\r\n\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"ffffffffff\r\n",
        b'{"model": "tiny", "prompt": ',
        b"X: " + b"a" * dice.randrange(20_000) + b"\r\n",
        dice.randbytes(dice.randrange(60)),
    ]
    return start + b"".join(dice.choices(parts, k=dice.randrange(6)))


def nearly_right(dice: random.Random) -> tuple[str, bytes]:
    """A right body with one or two fields of it, or others, spoilt; sometimes cut."""
    verb = dice.choice(VERBS)
    body: dict[str, Any] = {**(PROMPT if verb == "completions" else CHAT)}
    others = ["n", "stop", "temperature", "top_p", "seed", "stream_options", "cache_salt", "logit_bias", "kvtier"]
    values: list[Any] = [
        None, True, -1, 0, 2, 1e308, float("nan"), "", "hi", "\ud800", "\0", [], [1], [[2]], [None], ["a", 1], {},
        {"type": "text"}, [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}], "é" * 2000,
        {"segments": [[0, 1]]}, {"segments": [[[]]], "repair": {}},
    ]  # fmt: skip
    for field in dice.choices([*body, *others, "x"], k=dice.randrange(1, 3)):
        body[field] = dice.choice(values)
    content = json.dumps(body, ensure_ascii=dice.random() < 0.9).encode(errors="surrogatepass")
    return verb, content[: dice.randrange(len(content))] if dice.random() < 0.1 else content


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.mark.parametrize("origins", [(), ("https://chat.example",)])
def test_pages_of_listed_origins_may_call_the_api(model: Path, origins: tuple[str, ...]) -> None:
    def allowed(client: httpx2.Client, origin: str) -> str | None:
        asked = client.options("/v1/completions", headers={"origin": origin, **PREFLIGHT})
        answered = client.get("/v1/models", headers={"origin": origin})
        assert answered.status_code == 200
        found = {each.headers.get("access-control-allow-origin") for each in (asked, answered)}
        assert len(found) == 1
        return found.pop()

    with (
        serving(model, server={"cors_origins": origins}) as engine,
        routed(f"http://{engine.http.base_url.netloc.decode()}", cors_origins=origins) as router,
    ):
        until(lambda: router.client.get("/readyz").status_code == 200)
        for each in (engine.http, router.client):
            assert allowed(each, "https://chat.example") == (origins[0] if origins else None)
            assert allowed(each, "https://evil.example") is None
