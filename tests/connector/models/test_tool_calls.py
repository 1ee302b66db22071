"""Which answers call a tool, in the forms that models write: Hermes and Qwen, Llama, Mistral."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvtier.connector.models.answers import ToolCalls, is_call


def tokenizer() -> Tokenizer:
    """Every byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


CALLS = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "I look it up.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>",
    '{"name": "weather", "parameters": {"city": "Rome"}}',
    ' [{"name": "weather", "arguments": {}}]',
    '{"type": "function", "function": {"name": "weather", "arguments": "{}"}}',
    '```json\n{"name": "weather", "parameters": {}}\n```',
    '<|python_tag|>weather.call(city="Rome")',
    '[TOOL_CALLS][{"name": "weather", "arguments": {}}]',
]
OTHERS = [
    "",
    "It rains in Rome.",
    '{"city": "Rome", "rains": true}',
    '{"name": "Rome", "country": "Italy"}',
    'Write {"name": "weather", "parameters": {}} to call it.',
]


@pytest.mark.parametrize("text", CALLS)
def test_a_call(text: str) -> None:
    assert is_call(text)
    assert ToolCalls(tokenizer())(tokenizer().encode(text).ids)


@pytest.mark.parametrize("text", OTHERS)
def test_no_call(text: str) -> None:
    assert not is_call(text)
    assert not ToolCalls(tokenizer())(tokenizer().encode(text).ids)


def test_a_mark_may_be_one_token_and_the_answer_longer_than_what_is_read() -> None:
    qwens = tokenizer()
    qwens.add_tokens([AddedToken("<tool_call>")])
    mark = qwens.token_to_id("<tool_call>")
    assert mark is not None
    assert ToolCalls(qwens)([65] * 5000 + [mark] + [65] * 5000)
    assert ToolCalls(tokenizer())(tokenizer().encode(CALLS[2] + " " * 9000).ids)
    assert not ToolCalls(qwens)([65] * 10000)
