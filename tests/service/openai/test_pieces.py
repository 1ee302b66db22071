"""Marked texts of chats and prompts: the same tokens everywhere, and an error if a template changes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import QWEN_3
from server_rig import TEMPLATE, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvtier.service.openai.bodies import ChatPrompt, CompletionPrompt
from kvtier.service.openai.chat import TokenizedPrompt, chat_of
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.prompts import Prompts

DOCUMENTS = ["The first document.", "  <|end|> another,\n\nwith odd é😀 ends\t", "The third."]


def directory(home: Path, template: str = "") -> Path:
    tokenizer().save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return home


def part(text: str, segment: bool | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({} if segment is None else {"kvtier": {"segment": segment}})}


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in turns]}


def tokenized(prompts: Prompts, body: dict[str, Any]) -> TokenizedPrompt:
    """As the engine's server reads it; the router, which reads the body itself, makes the same of it."""
    (made,) = prompts.tokenized(ChatPrompt.model_validate(body))
    assert prompts.chat(chat_of(body)) == made
    return made


def texts_of(made: TokenizedPrompt) -> list[list[int]]:
    return [made.token_ids[start:end] for start, end in made.segments]


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


# A template that gets parts, one that gets text, and one of a model's shape, which looks at what a text begins with.
PARTS = """{% for message in messages %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("template", [TEMPLATE, PARTS, QWEN_3], ids=["texts", "parts", "qwen-3"])
def test_a_marked_text_has_the_same_tokens_wherever_it_stands(tmp_path: Path, template: str) -> None:
    prompts = Prompts.open(directory(tmp_path, template))
    for order in (DOCUMENTS, DOCUMENTS[::-1]):
        parts = [part("Read this."), *(part(text, True) for text in order), part("What?", False)]
        made = tokenized(
            prompts, chat(("system", "Be brief."), ("user", parts), ("assistant", "It is."), ("user", "?"))
        )
        assert texts_of(made) == [ids(text) for text in order]
        # All of it is the prompt without marks, of a tokenizer to which borders mean nothing.
        plain = [part(each["text"]) for each in parts]
        unmarked = tokenized(
            prompts, chat(("system", "Be brief."), ("user", plain), ("assistant", "It is."), ("user", "?"))
        )
        assert made.token_ids == unmarked.token_ids
        assert unmarked.segments == ()
        # The text of the same length that a client could send instead of a placeholder is nothing special.
        assert tokenized(prompts, chat(("user", "kvtier0123456789abcdefx0x"))).segments == ()


def test_marks_in_several_messages(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, TEMPLATE))
    turns = [
        ("system", [part("a tool, say", True)]),
        ("user", [part("x"), part("y", True)]),
        ("assistant", [part("z", True)]),
    ]
    made = tokenized(prompts, chat(*turns))
    assert texts_of(made) == [ids("a tool, say"), ids("y"), ids("z")]
    # A role that the template does not know becomes one that it knows, and its text stays what it is.
    made = tokenized(prompts, chat(("developer", [part("rules", True)]), ("user", "x")))
    assert texts_of(made) == [ids("rules")]


LEFT_OUT = "leaves this text out, or changes it; do not mark it"


@pytest.mark.parametrize(
    ("template", "text", "why"),
    [
        ("{{ messages[0].content | trim }}", "a line\n", "changes this text (white space at its ends, say); send what"),
        ("{{ messages[0].content | upper }}", "loud", LEFT_OUT),
        ("{{ messages[0].content | tojson }}", 'a "quoted" text', "changes this text"),
        ("nothing of it", "hello", LEFT_OUT),
        (
            "{{ messages[0].content }} {{ messages[0].content }}",
            "twice",
            "writes this text several times; do not mark it",
        ),
        ("{{ messages[0].content.split('</think>')[-1] }}", "a</think>b", "changes this text"),
        ("{{ messages[0].content }}{{ messages[0].content | length }}", "four", "changes this text"),
    ],
)
def test_a_template_that_changes_a_marked_text_is_told_of(tmp_path: Path, template: str, text: str, why: str) -> None:
    prompts = Prompts.open(directory(tmp_path, template))
    with pytest.raises(OpenAIError, match="a segment, but the model's template") as refused:
        prompts.tokenized(ChatPrompt.model_validate(chat(("user", [part(text, True)]))))
    assert (refused.value.status, refused.value.param) == (400, "messages.0.content.0")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert prompts.tokenized(ChatPrompt.model_validate(chat(("user", [part(text)]))))  # without the mark it is taken


def test_the_text_at_fault_is_named_among_many(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, "{% for m in messages %}{{ m.content | trim }};{% endfor %}"))
    for ends, place in (("b ", "messages.1.content.1"), ("b", None)):
        turns = [
            ("user", [part("x", True)]),
            ("user", [part("a", True), part(ends, True)]),
            ("user", [part("y", True)]),
        ]
        body = ChatPrompt.model_validate(chat(*turns))
        if place is None:
            assert len(prompts.tokenized(body)[0].segments) == 4
            continue
        with pytest.raises(OpenAIError) as refused:
            prompts.tokenized(body)
        assert refused.value.param == place


def test_a_template_that_tells_the_time_tells_it_once(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}"))
    (made,) = prompts.tokenized(ChatPrompt.model_validate(chat(("user", [part("now", True)]))))
    assert texts_of(made) == [ids("now")]


def test_a_text_that_says_its_quotes_as_they_are_may_be_quoted(tmp_path: Path) -> None:
    prompts = Prompts.open(directory(tmp_path, "{{ messages[0].content | tojson(ensure_ascii=true) }}"))
    assert texts_of(tokenized(prompts, chat(("user", [part("no escapes", True)])))) == [ids("no escapes")]


def completion(prompt: object) -> CompletionPrompt:
    return CompletionPrompt.model_validate({"model": "m", "prompt": prompt})


def test_a_prompt_in_parts_has_the_special_tokens_of_a_whole_one(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    words.save(str(tmp_path / "tokenizer.json"))
    prompts = Prompts.open(tmp_path)
    for parts, expected, segments in (
        ([part("a ", True), part("b"), part(" a b", True)], [0, 2, 3, 2, 3, 1], [(1, 2), (3, 5)]),
        ([part("a"), part(" b a", True)], [0, 2, 3, 2, 1], [(2, 4)]),
        ([part("a "), part("b")], [0, 2, 3, 1], []),
        ([part("a", False)], [0, 2, 1], []),
    ):
        (made,) = prompts.tokenized(completion(parts))
        assert (made.token_ids, list(made.segments)) == (expected, segments)
        assert prompts.tokenized(completion("".join(each["text"] for each in parts)))[0].token_ids == expected
    assert prompts.segment("texts", "a b") == [2, 3]  # as it stands in a prompt
    with pytest.raises(OpenAIError, match=r"prompt\.1: a segment without tokens; write some text"):
        prompts.tokenized(completion([part("a"), part(" ", True)]))


def test_a_prompt_in_parts_is_bounded_as_a_whole(tmp_path: Path) -> None:
    (directory(tmp_path) / "config.json").write_text('{"max_position_embeddings": 10}')
    prompts = Prompts.open(tmp_path)
    half = part("x" * 5 * len("<|begin|>"), True)
    assert len(prompts.tokenized(completion([half, half]))[0].segments) == 2
    with pytest.raises(OpenAIError, match="context is 10 tokens") as refused:
        prompts.tokenized(completion([half, half, part("x")]))
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
