"""Stories of penalties, bias, logprobs and echo through the official client, whole and streamed."""

from pathlib import Path
from typing import Any

import pytest
from server_rig import MODEL, ServerThread, serving, tokenizer

from kvtier.service.openai.prompts import TokenTexts

PROMPT = "How likely is each of these tokens, and which others might have come?"
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
TEXT_ONLY = {"256": -100, "257": -100}  # no special tokens, which are no text
CHAT: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": PROMPT}]}


def test_bias_penalties_and_min_p_come_to_the_engine(server: ServerThread) -> None:
    (star,) = tokenizer().encode("*").ids
    biased = server.client.completions.create(**ASK, prompt=PROMPT, logit_bias={str(star): 100})
    assert biased.choices[0].text == "******"
    # A penalty of what is there outweighs the bias from the second token on: each time something else comes.
    bias = {str(token): 100 for token in tokenizer().encode("*+-").ids}
    chat = server.client.chat.completions.create(**CHAT | {"max_tokens": 3}, logit_bias=bias, presence_penalty=2)
    assert set(chat.choices[0].message.content or "") == set("*+-")
    own = {"ignore_eos": True, "min_p": 1.0, "repetition_penalty": 1.0}
    drawn = server.client.completions.create(**ASK | {"temperature": 1.5, "extra_body": own}, prompt=PROMPT)
    assert drawn.choices[0].text == server.client.completions.create(**ASK, prompt=PROMPT).choices[0].text


def test_a_chats_logprobs_whole_and_streamed(server: ServerThread) -> None:
    asked: dict[str, Any] = {**CHAT, "logprobs": True, "top_logprobs": 2, "logit_bias": TEXT_ONLY}
    whole = server.client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    told = whole.logprobs.content or []
    assert len(told) == 6
    assert b"".join(bytes(each.bytes or []) for each in told).decode(errors="replace") == whole.message.content
    for each in told:
        assert each.logprob <= each.top_logprobs[0].logprob
        assert 0 >= each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
    chunks = list(server.client.chat.completions.create(**asked, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content or []]
    assert [each.token for each in streamed] == [each.token for each in told]
    # found in L1 or computed: the last bits may differ
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in told], abs=1e-3)
    for one, other in zip(streamed, told, strict=True):
        assert [each.logprob for each in one.top_logprobs] == pytest.approx(
            [each.logprob for each in other.top_logprobs], abs=1e-3
        )
    alone = server.client.chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs
    assert alone is not None
    assert [each.top_logprobs for each in alone.content or []] == [[]] * 6
    assert server.client.chat.completions.create(**CHAT).choices[0].logprobs is None


def test_a_completion_with_echo_and_its_prompts_logprobs(server: ServerThread) -> None:
    plain = server.client.completions.create(**ASK, prompt=PROMPT, logprobs=3).choices[0]
    echoed = server.client.completions.create(**ASK, prompt=PROMPT, logprobs=3, echo=True)
    (choice,) = echoed.choices
    assert choice.text == PROMPT + plain.text
    assert echoed.usage is not None
    assert echoed.usage.prompt_tokens_details.model_dump()["cached_tokens"] == 0  # all of it is computed anew
    assert choice.logprobs is not None
    assert plain.logprobs is not None
    length = len(PROMPT)  # a token is a letter
    assert choice.logprobs.tokens == [*PROMPT, *(plain.logprobs.tokens or [])]
    assert choice.logprobs.text_offset == list(range(length + 6))
    assert (choice.logprobs.token_logprobs or [])[0] is None
    assert (choice.logprobs.top_logprobs or [])[0] is None
    assert (choice.logprobs.token_logprobs or [])[length:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
    for token, found in zip(PROMPT[1:], (choice.logprobs.top_logprobs or [])[1:], strict=False):
        assert token in found  # the token itself is always there
        assert len(found) <= 4  # fewer, if halves of characters are among them: these have one text
    # In a stream the prompt comes first, and everything once; without logprobs it is found cached.
    chunks = list(server.client.completions.create(**ASK, prompt=PROMPT, logprobs=3, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    told = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.tokens or []]
    assert told == choice.logprobs.tokens
    ids = tokenizer().encode(PROMPT).ids
    cheap = server.client.completions.create(**ASK, prompt=ids, echo=True)
    assert cheap.choices[0].text == choice.text
    assert cheap.usage is not None
    assert cheap.usage.prompt_tokens_details.model_dump()["cached_tokens"] > 0


def test_an_exact_engine_says_that_it_has_no_logprobs_of_prompts(model: Path) -> None:
    with serving(model, exact=True) as exact:
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "echo": True}
        assert exact.post("completions", **asked).json()["choices"][0]["text"].startswith(PROMPT)
        refused = exact.post("completions", **asked, logprobs=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_a_tokens_bytes_are_those_of_its_text() -> None:
    texts = TokenTexts(tokenizer())
    ids = tokenizer().encode("aé\n😀").ids
    assert b"".join(texts.of(each)[1] for each in ids) == "aé\n😀".encode()
    assert texts.of(ids[0]) == ("a", b"a")
    assert texts.of(256) == ("<|begin|>", b"<|begin|>")


def test_an_answer_is_no_shorter_than_min_tokens(server: ServerThread) -> None:
    """An end that the bias makes certain, by a token and by a string, comes as soon as it may."""
    (star, dot) = tokenizer().encode("*.").ids
    ends = {str(dot): 100, str(star): 90}
    own = {"stop_token_ids": [dot], "min_tokens": 4}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "temperature": 0, "prompt": PROMPT}
    answer = server.client.completions.create(**asked, logit_bias=ends, extra_body=own)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("****", "stop")
    stars: dict[str, Any] = {**asked, "logit_bias": {str(star): 100}, "stop": ["*"], "extra_body": {"min_tokens": 3}}
    assert server.client.completions.create(**stars).choices[0].text == "***"
    chunks = list(server.client.completions.create(**stars, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "***"
    for wrong, why in (
        ({"min_tokens": 10}, "min_tokens: more than the answer's 9 at most; lower it"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens: a response_format or tool_choice"),
    ):
        refused = server.post("completions", **{**asked, **wrong})
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone_scores_the_prompt_and_answers_nothing(server: ServerThread, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "echo": True, "temperature": 0, "logprobs": 1}
    more = server.client.completions.create(**asked, max_tokens=1).choices[0].logprobs
    assert more is not None
    if stream:
        chunks = list(
            server.client.completions.create(**asked, max_tokens=0, stream=True, stream_options={"include_usage": True})
        )
        (choice,), usage = chunks[0].choices, chunks[-1].usage
    else:
        whole = server.client.completions.create(**asked, max_tokens=0)
        (choice,), usage = whole.choices, whole.usage
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == (more.tokens or [])[:-1]
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx((more.token_logprobs or [])[1:-1], abs=1e-3)
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (0, len(PROMPT))
    server.settle()
    refused = server.post("completions", model=MODEL, prompt=PROMPT, max_tokens=0)
    assert refused.status_code == 400
    assert "max_tokens: 0 is for echo true alone; write at least 1" in refused.json()["error"]["message"]
