"""Stories of what clients send beside OpenAI's fields: it is ignored and counted; and of vLLM's pages."""

import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_rig import MODEL, ServerThread, tokenizer

import kvtier
from kvtier.service.engine.loop import OTHER, IgnoredFields

CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}


def ignored(server: ServerThread) -> dict[str, float]:
    """Requests by the field that was ignored."""
    families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    samples = families["kvtier_engine_ignored_fields"].samples
    return {each.labels["field"]: each.value for each in samples if each.name.endswith("_total")}


def test_unknown_fields_are_ignored_and_counted(server: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    plain = server.post("chat/completions", **CHAT, temperature=0).json()["choices"]
    mark = {"cache_control": {"type": "for ever"}}
    part = {"type": "text", "text": "hi", **mark}
    messages = [{"role": "user", "content": [part, {**part, "text": ""}], **mark}]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = server.post("chat/completions", **{**CHAT, "messages": messages}, temperature=0, thinking={"a": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain  # nothing else comes of it
    assert ignored(server) == {"cache_control": 2, "thinking": 2}
    told = [each.getMessage() for each in caplog.records if "request field" in each.getMessage()]
    assert [each.split(":")[0] for each in told] == ["request field cache_control", "request field thinking"]
    # What is known is still looked at, and what is kvtier's own has to be right.
    assert server.post("completions", model=MODEL, prompt="a", promt="b", top_p=2).json()["error"]["param"] == "top_p"
    refused = server.post("chat/completions", **CHAT, kvtier={"hints": "tool"}).json()["error"]
    assert (refused["param"], refused["code"]) == ("kvtier.hints", "unknown_parameter")


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("bad_words", ["x"], []),
        ("guided_json", {"type": "object"}, None),
        ("use_beam_search", True, False),
        ("length_penalty", 2.0, 1.0),
        ("skip_special_tokens", False, True),
    ],
)
def test_a_field_that_changes_answers_is_refused(
    server: ServerThread, field: str, value: object, neutral: object
) -> None:
    refused = server.post("chat/completions", **CHAT, **{field: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"].partition(".")[0], error["code"]) == (field, "unsupported_parameter")
    assert server.post("completions", model=MODEL, prompt="a", max_tokens=1, **{field: value}).status_code == 400
    assert server.post("chat/completions", **CHAT, **{field: neutral}).status_code == 200


def test_tools_that_the_model_would_not_see_are_refused(server: ServerThread) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    refused = server.post("chat/completions", **CHAT, tools=[tool])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "has no place for them" in refused.json()["error"]["message"]
    assert server.post("chat/completions", **CHAT, tools=[]).status_code == 200
    # What must be called is called all the same: the answer follows the tool's schema.
    required = {**CHAT, "max_tokens": 64, "tool_choice": "required"}
    assert server.post("chat/completions", **required, tools=[tool]).status_code == 200


def test_names_of_unknown_fields_are_few() -> None:
    fields = IgnoredFields()
    fields.record(["x" * 65, "two words", "é", ""])
    assert fields.counts == {OTHER: 1}
    for number in range(100):
        fields.record([f"x{number}"])
    assert len(fields.counts) == 32
    assert sum(fields.counts.values()) == 101


def test_tokens_and_back_as_vllm_tells_them(server: ServerThread) -> None:
    ids = tokenizer().encode("héllo").ids
    told = server.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert told == {"count": 6, "max_model_len": 1024, "tokens": ids, "token_strs": ["h", "Ã", "©", "l", "l", "o"]}
    assert server.http.post("/detokenize", json={"tokens": ids, "model": MODEL}).json() == {"prompt": "héllo"}
    # Of a chat: what an answer's prompt is.
    chat = {"messages": CHAT["messages"]}
    told = server.http.post("/tokenize", json=chat).json()
    used = server.client.chat.completions.create(**CHAT).usage
    assert used is not None
    assert (told["count"], told["token_strs"]) == (used.prompt_tokens, None)
    whole = server.http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert whole == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
    told = server.http.post("/tokenize", json={**chat, "add_generation_prompt": False}).json()
    assert tokenizer().decode(told["tokens"], skip_special_tokens=False) == "<|begin|>user\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        # A chat is read as `/v1/chat/completions` reads it.
        ("tokenize", {"messages": [{"content": "a"}]}, "messages.0.role"),
        ("tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("detokenize", {"tokens": [1, 258]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_what_has_no_tokens_is_refused(server: ServerThread, path: str, body: dict[str, Any], param: str) -> None:
    answer = server.http.post(f"/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert server.http.post(f"/{path}", json={**body, "model": "another"}).status_code in (400, 404)


def test_health_and_version_as_vllm_has_them(server: ServerThread) -> None:
    answer = server.http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert server.http.get("/version").json() == {"version": kvtier.__version__}
