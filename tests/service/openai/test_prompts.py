"""A checkpoint's text to tokens: the template as transformers renders it, and every way it can be missing or wrong."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_rig import tokenizer
from transformers import PreTrainedTokenizerFast

from kvtier.service.command_line import object_in
from kvtier.service.openai.bodies import ChatPrompt, CompletionPrompt, json_object
from kvtier.service.openai.chat import chat_of
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.prompts import Prompts
from kvtier.tiers.errors import ConfigError

CHATTY = """{%- if messages[0]['role'] == 'system' %}
    {{- bos_token + 'SYS ' + messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if tools is not none or documents is not none %}with tools{% endif %}
    {% if loop.index0 > 8 %}{% break %}{% endif %}
{{ message.role }}: {{ message.content | tojson(ensure_ascii=true) }}{{ eos_token }}
{% generation %}!{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "what is 1 < 2 & 'é😀'?"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|end|>"}, {"role": "user", "content": ""}],
]


def directory(home: Path, template: object = CHATTY, **settings: object) -> Path:
    tokenizer().save(str(home / "tokenizer.json"))
    chosen = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", **settings}
    (home / "tokenizer_config.json").write_text(json.dumps({**chosen, "chat_template": template}))
    return home


def chat(messages: object) -> ChatPrompt:
    return ChatPrompt.model_validate({"model": "m", "messages": messages})


@pytest.mark.parametrize("messages", TALKS)
def test_a_chat_is_what_transformers_makes_of_it(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer(), bos_token="<|begin|>", eos_token="<|end|>", chat_template=CHATTY
    )
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    prompts = Prompts.open(directory(tmp_path))
    assert prompts.tokenized(chat(messages))[0].token_ids == expected
    in_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    assert prompts.tokenized(chat(in_parts))[0].token_ids == expected


@pytest.mark.parametrize("form", ["a list of templates", "a file of its own"])
def test_where_a_template_may_stand(tmp_path: Path, form: str) -> None:
    simple = "{{ messages[0].content }}"
    if form == "a file of its own":
        directory(tmp_path, "{{ wrong }}")
        (tmp_path / "chat_template.jinja").write_text(simple)
    else:
        directory(tmp_path, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": simple}])
    assert (
        Prompts.open(tmp_path).tokenized(chat(TALKS[0]))[0].token_ids == tokenizer().encode(TALKS[0][0]["content"]).ids
    )


def test_prompts_are_texts_or_tokens(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path))
    for prompt, expected in (
        ("ab", [tokenizer().encode("ab").ids]),
        (["ab", "c"], [tokenizer().encode(text).ids for text in ("ab", "c")]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [[]]),
    ):
        body = CompletionPrompt.model_validate({"model": "m", "prompt": prompt})
        assert [each.token_ids for each in prompts.tokenized(body)] == expected


def test_other_threads_go_on_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    """An engine's step and its streams, say: a tokenizer that kept the GIL would let nobody in until it is through."""
    prompts, text = Prompts.open(directory(tmp_path)), "a long text, " * 20_000
    body = CompletionPrompt.model_validate({"model": "m", "prompt": text})
    made: list[list[int]] = []
    ended = threading.Event()

    def tokenize() -> None:
        made.append(prompts.tokenized(body)[0].token_ids)
        ended.set()

    thread = threading.Thread(target=tokenize)
    thread.start()
    num_turns = 0
    while not ended.wait(0.002):
        num_turns += 1
    thread.join()
    assert len(made[0]) == len(text)
    assert num_turns > 10


def test_a_text_that_cannot_fit_is_not_tokenized(tmp_path: Path) -> None:
    (directory(tmp_path) / "config.json").write_text('{"max_position_embeddings": 10}')
    longest = 10 * len("<|begin|>")  # of ten tokens
    prompts = Prompts.open(tmp_path)
    (made,) = prompts.tokenized(CompletionPrompt.model_validate({"model": "m", "prompt": "x" * longest}))
    assert len(made.token_ids) == longest
    for body in (
        CompletionPrompt.model_validate({"model": "m", "prompt": ["x", "x" * (longest + 1)]}),
        chat([{"role": "user", "content": "x" * longest}]),
    ):
        with pytest.raises(OpenAIError, match="context is 10 tokens") as refused:
            prompts.tokenized(body)
        param = "messages" if isinstance(body, ChatPrompt) else "prompt"
        assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_what_a_template_refuses_is_the_clients_error(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path))
    with pytest.raises(OpenAIError, match="roles must alternate") as refused:
        prompts.tokenized(chat([{"role": "assistant", "content": "I begin"}]))
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_text_that_utf8_cannot_write_is_the_clients_error(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, "{{ messages[0].content }}"))
    halved = chat_of({"messages": [{"role": "user", "content": "half of a pair: \ud800"}]})  # JSON's escapes can say it
    with pytest.raises(OpenAIError, match="messages: not a text that UTF-8 can write"):
        prompts.chat(halved)


def test_a_model_that_cannot_chat_says_so(tmp_path: Path) -> None:
    with pytest.raises(OpenAIError, match="no chat template; use /v1/completions") as refused:
        Prompts.open(directory(tmp_path, None)).tokenized(chat(TALKS[0]))
    assert refused.value.param == "messages"


def test_a_template_gets_out_of_no_sandbox(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(OpenAIError, match="template refuses"):
        prompts.tokenized(chat(TALKS[0]))


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda home: (home / "tokenizer.json").unlink(), "no tokenizer.json there; save the tokenizer with the model"),
        (lambda home: (home / "tokenizer.json").write_text("{"), "tokenizer.json is not one"),
        (lambda home: (home / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
        (lambda home: (home / "chat_template.jinja").write_text("{% if %}"), "its chat template cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_one_line(tmp_path: Path, spoil: Any, line: str) -> None:
    spoil(directory(tmp_path))
    with pytest.raises(ConfigError, match=line) as refused:
        Prompts.open(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": [1, -0, 1.5, 1e5, 1e400, 18446744073709551616, -9223372036854775809], "a\xc3\xa9": "\\/\\u00e9"}',
        b'{"a": NaN, "b": -Infinity}',
        b'{"a": "\\ud800"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000,
        b"",
    ],
)
def test_bodies_are_read_as_json_reads_them(data: bytes) -> None:
    def outcome(read: Callable[[bytes], object]) -> str:
        try:
            return repr(read(data))
        except ValueError as error:
            return str(error)
        except OpenAIError as error:
            return str(error.content["error"]["message"])

    assert outcome(json_object) == outcome(object_in)
