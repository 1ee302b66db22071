"""A request's chat to tokens: what the model's template makes of it under transformers, token for token."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import PARTS, SHAPES
from extent import brief
from server_rig import tokenizer
from transformers import PreTrainedTokenizerFast

from kvtier.service.openai.chat import chat_of
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.prompts import Prompts

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place <now> & here",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "naïve é😀"},
                "days": {"type": "integer"},
                "units": {"type": "string", "enum": ["C", "F"]},
                "hours": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "Now", "parameters": {"type": "object", "properties": {}}},
}


def call(arguments: object, name: str = "get_weather", call_id: str = "abcdef123") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "What is 1 < 2 & the weather in 'Köln'?"}
ARGUMENTS: dict[str, Any] = {"units": "C", "city": "Köln", "days": 2}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call(ARGUMENTS)]}
TOLD = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"sky": "blue"}'}
THOUGHT = {"role": "assistant", "content": "It is blue.", "reasoning_content": "They told me so.\n"}
THINKING = {**CALLING, "reasoning_content": "I must ask."}
AGAIN = {"role": "user", "content": "And tomorrow?"}

# What templates are given by transformers: arguments are objects there.
TALKS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "with a system": [SYSTEM, USER],
    "a call": [SYSTEM, USER, CALLING, TOLD],
    "a call thought about": [USER, THINKING, TOLD],
    "an answer to it": [SYSTEM, USER, THINKING, TOLD, THOUGHT, AGAIN],
    "two turns": [SYSTEM, USER, {"role": "assistant", "content": "Fine."}, AGAIN],
}
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER, CLOCK]},
    "variables": {
        "tools": [WEATHER],
        "chat_template_kwargs": {"enable_thinking": False, "tools_in_user_message": False},
    },
    "effort": {"reasoning_effort": "high"},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "no prompt": {"add_generation_prompt": False},
}


def theirs(template: str, messages: list[dict[str, Any]], fields: dict[str, Any]) -> list[int]:
    """What transformers makes of it; the effort and what thinking follows from it are variables like others."""
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    options = {"add_generation_prompt": True, **fields, **fields.get("chat_template_kwargs", {})}
    options.pop("chat_template_kwargs", None)
    if "reasoning_effort" in fields:
        options["enable_thinking"] = True
    ids: list[int] = made.apply_chat_template(copy.deepcopy(messages), return_dict=False, **options)
    return ids


def request(messages: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    """As a client sends it: arguments are texts there."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    return {"model": "m", "messages": messages, **fields}


def opened(home: Path, template: str) -> Prompts:
    tokenizer().save(str(home / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": template}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    return Prompts.open(home)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("talk", brief(["with a system", "an answer to it"], TALKS))
def test_a_chat_is_what_transformers_makes_of_it_in_every_shape(tmp_path: Path, shape: str, talk: str) -> None:
    prompts = opened(tmp_path, SHAPES[shape])
    for name, fields in FIELDS.items():
        expected = theirs(SHAPES[shape], TALKS[talk], fields)
        assert prompts.chat(chat_of(request(TALKS[talk], **fields))).token_ids == expected, name
        assert len(expected) > 10


@pytest.mark.parametrize("shape", [*SHAPES, "parts"])
def test_the_answer_goes_on_with_the_last_turn(tmp_path: Path, shape: str) -> None:
    template = {**SHAPES, "parts": PARTS}[shape]
    prompts = opened(tmp_path, template)
    for said in ("It is", "It is ", "Yes:\n"):
        talk = [USER, {"role": "assistant", "content": said}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        as_seen: list[dict[str, Any]] = [dict(turn) for turn in talk]
        if shape == "parts":  # a template that wants parts is given them
            as_seen = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in talk]
        assert prompts.chat(chat_of(request(talk, **fields))).token_ids == theirs(template, as_seen, fields)


def test_parts_reach_a_template_that_walks_through_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "user", "content": parts}]
    prompts = opened(tmp_path, PARTS)
    assert prompts.chat(chat_of(request(talk))).token_ids == theirs(PARTS, talk, {})
    # any other has lines
    (tmp_path / "other").mkdir()
    lines = [{"role": "user", "content": "a\nb"}]
    for shape in ("qwen-3", "mistral"):
        prompts = opened(tmp_path / "other", SHAPES[shape])
        assert prompts.chat(chat_of(request(talk))).token_ids == theirs(SHAPES[shape], lines, {})


def test_a_developers_turn_is_the_systems_where_the_template_knows_none(tmp_path: Path) -> None:
    talk = [SYSTEM, USER, {"role": "developer", "content": "Now in verse."}]
    as_seen = [{"role": "system", "content": " Be brief. \n\nNow in verse."}, USER]
    prompts = opened(tmp_path, SHAPES["qwen-3"])
    assert prompts.chat(chat_of(request(talk))).token_ids == theirs(SHAPES["qwen-3"], as_seen, {})
    first = [{"role": "developer", "content": "Now in verse."}, USER]
    prompts = opened(tmp_path, SHAPES["gpt-oss"])
    assert prompts.chat(chat_of(request(first))).token_ids == theirs(SHAPES["gpt-oss"], first, {})


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    for home, text in (("chat_template.jinja", "plain"), ("additional_chat_templates/tool_use.jinja", "with tools")):
        (tmp_path / home).parent.mkdir(exist_ok=True)
        (tmp_path / home).write_text(text)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    prompts = Prompts.open(tmp_path)
    assert prompts.chat(chat_of(request([USER]))).token_ids == tokenizer().encode("plain").ids
    assert prompts.chat(chat_of(request([USER], tools=[WEATHER]))).token_ids == tokenizer().encode("with tools").ids


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ("hi", {}),
        ([{"content": "no role"}], {}),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": ["a"]}]}], {}),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}], {}),
        ([USER], {"tools": [{"type": "web_search"}]}),
        ([USER], {"chat_template": "{{ messages }}"}),
        ([USER], {"chat_template_kwargs": {"messages": []}}),
        ([USER], {"truncate_prompt_tokens": 10}),
    ],
)
def test_what_only_the_replica_can_tell_is_unreadable(messages: object, fields: dict[str, Any]) -> None:
    with pytest.raises(OpenAIError):
        chat_of({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", None, 7])
def test_arguments_that_are_no_object_are_an_empty_one(arguments: object) -> None:
    talk = [USER, {"role": "assistant", "tool_calls": [call(arguments)]}]
    (made,) = chat_of({"messages": talk}).turns[1]["tool_calls"]
    assert made["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% set k = 1 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) if n < 200 }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{{ 'x' * size }}",
        "{{ [1] * size }}",
        "{{ 9 ** size }}",
        "{{ messages | tojson(indent=size) }}",
        "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages | tojson }}{{ '%s' | format(padding) }}{% endfor %}",
    ],
)
def test_a_template_ends_whatever_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr("kvtier.service.openai.chat._CPU", 0.2)
    prompts = opened(tmp_path, template)
    variables = {"size": 10**9, "padding": "x" * 10_000}
    begun = time.thread_time()
    with pytest.raises(OpenAIError):
        prompts.chat(chat_of(request([USER], chat_template_kwargs=variables)))
    assert time.thread_time() - begun < 30  # CPU of this thread: without a bound it would be hours
    # the next one has all its time
    (tmp_path / "next").mkdir()
    assert opened(tmp_path / "next", SHAPES["qwen-3"]).chat(chat_of(request([USER]))).token_ids


def test_a_tree_of_a_request_that_has_no_bottom_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}
    with pytest.raises(OpenAIError, match="too deep"):
        opened(tmp_path, SHAPES["qwen-3"]).chat(chat_of({"messages": [USER], "tools": [tool]}))
    while deep:  # piece by piece, as freeing it whole is as deep
        deep = deep[0]
