"""Stories of segments over HTTP: a model that recalls facts answers rightly, and everything says what was reused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from extent import brief
from prometheus_client.parser import text_string_to_metric_families
from recall import LENGTH, NUM_DOCUMENTS, Asked, asked, servable, written
from router_rig import routed, until
from server_rig import ServerThread, serving

NAME = "recall"
ON: dict[str, Any] = {"segments": "on", "segment_min_tokens": 8, "block_size": 8}
SERVER = {"cache": ON, "l1": {"num_blocks": 2000}}
REUSED = LENGTH * (NUM_DOCUMENTS - 1)  # the first document is an ordinary prefix
REPAIRED = round(0.15 * REUSED)
QUESTIONS = brief(24, 80)
ONE: dict[str, Any] = {"model": NAME, "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servable(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    return asked(QUESTIONS // 4)


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "kvtier": {"segment": True}}


def parts_of(question: Asked) -> list[dict[str, Any]]:
    """The documents, marked, and the question."""
    return [
        *(marked(written(each)) for each in question.documents),
        {"type": "text", "text": written(question.question)},
    ]


def chat(server: ServerThread, question: Asked, **options: Any) -> Any:
    """The client's raw response; `options` are fields of the body that only kvtier's engine knows."""
    messages: Any = [{"role": "user", "content": parts_of(question)}]
    create: Any = server.client.chat.completions.with_raw_response.create
    return create(messages=messages, extra_body={"ignore_eos": True, **options}, **ONE)


def plain(server: ServerThread, question: Asked, **options: Any) -> Any:
    """The same without a mark, of a tenant that shares nothing."""
    messages: Any = [{"role": "user", "content": written(question.prompt)}]
    extra = {"ignore_eos": True, "cache_salt": "nobody's", **options}
    return server.client.chat.completions.with_raw_response.create(messages=messages, extra_body=extra, **ONE)


def share_right(texts: Sequence[str], questions: Sequence[Asked]) -> float:
    return sum(text == f" {written([each.answer])}" for text, each in zip(texts, questions, strict=True)) / len(
        questions
    )


def said(raw: Any) -> str:
    text: str = raw.parse().choices[0].message.content
    return text


def reused(usage: Any) -> dict[str, int]:
    found: dict[str, Any] = usage.model_dump()["kvtier"]
    share = found.pop("repair_share")
    assert share == (round(found["repaired"] / found["segment"], 4) if found["segment"] else 0)
    return found


def test_a_chat_of_marked_documents_is_answered_rightly(server: ServerThread, questions: list[Asked]) -> None:
    full = [plain(server, each) for each in questions]
    assert all("x-kvtier-approximate" not in raw.headers for raw in full)
    assert all("kvtier" not in raw.parse().usage.model_dump() for raw in full)
    found = [chat(server, each) for each in questions]
    for raw, each in zip(found, questions, strict=True):
        usage = raw.parse().usage
        assert usage.prompt_tokens == len(each.prompt)
        assert reused(usage) == {"segment": REUSED, "repaired": REPAIRED}
        assert usage.prompt_tokens_details.cached_tokens <= LENGTH  # beside, never inside
        assert raw.headers["x-kvtier-approximate"] == str(REUSED - REPAIRED)
    right = share_right([said(raw) for raw in full], questions)
    assert right >= 0.95
    assert share_right([said(raw) for raw in found], questions) >= 0.95 * right
    # Without repair the same model is often wrong: what was reused is really used, and `repair` is really heard.
    unrepaired = [chat(server, each, kvtier={"repair": {"share": 0}}) for each in questions]
    assert share_right([said(raw) for raw in unrepaired], questions) <= 0.85 * right
    assert reused(unrepaired[0].parse().usage) == {"segment": REUSED, "repaired": 0}
    # Repairing everything is a full prefill: nothing about it is approximate.
    whole = [chat(server, each, kvtier={"repair": {"rule": "question", "share": 1}}) for each in questions[:8]]
    assert [said(raw) for raw in whole] == [said(raw) for raw in full[:8]]
    assert reused(whole[0].parse().usage) == {"segment": REUSED, "repaired": REUSED}
    assert "x-kvtier-approximate" not in whole[0].headers


def test_a_stream_says_it_before_its_first_event(server: ServerThread, questions: list[Asked]) -> None:
    messages: Any = [{"role": "user", "content": parts_of(questions[0])}]
    ask: dict[str, Any] = {**ONE, "messages": messages, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
    whole = server.client.chat.completions.create(**ask)
    options = {"include_usage": True}
    create: Any = server.client.chat.completions.with_raw_response.create
    raw = create(**ask, stream=True, stream_options=options)
    assert raw.headers["x-kvtier-approximate"] == str(REUSED - REPAIRED)
    chunks: list[Any] = list(raw.parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert reused(chunks[-1].usage) == reused(whole.usage) == {"segment": REUSED, "repaired": REPAIRED}
    # Of several answers, all are known to be approximate before the first event.
    raw = create(**ask, n=3, stream=True, stream_options=options)
    assert raw.headers["x-kvtier-approximate"] == str(REUSED - REPAIRED)  # a prompt counts once
    chunks = list(raw.parse())
    assert {chunk.choices[0].index for chunk in chunks[:-1]} == {0, 1, 2}
    assert reused(chunks[-1].usage) == {"segment": REUSED, "repaired": REPAIRED}
    plain_stream = create(**{**ask, "messages": [{"role": "user", "content": "t5 t6"}]}, stream=True)
    assert "x-kvtier-approximate" not in plain_stream.headers
    assert len(list(plain_stream.parse())) == 3


def test_a_completion_names_segments_in_tokens_or_marks_parts(server: ServerThread, questions: list[Asked]) -> None:
    first, second = questions[0], questions[4]
    places = [[place * LENGTH, (place + 1) * LENGTH] for place in range(NUM_DOCUMENTS)]
    create: Any = server.client.completions.create

    def ask(prompt: Any, **kvtier: Any) -> Any:
        return create(prompt=prompt, extra_body={"ignore_eos": True, **({"kvtier": kvtier} if kvtier else {})}, **ONE)

    of_tokens = ask(first.prompt, segments=places)
    assert reused(of_tokens.usage) == {"segment": REUSED, "repaired": REPAIRED}
    of_parts = ask(parts_of(first))
    assert of_parts.choices[0].text == of_tokens.choices[0].text == said(chat(server, first))
    assert reused(of_parts.usage) == reused(of_tokens.usage)
    # Several prompts have a list each; the usage is their sum.
    both = ask([first.prompt, second.prompt], segments=[places, places[:2]], repair={"rule": "question", "share": 0.5})
    assert both.choices[0].text == of_tokens.choices[0].text
    assert reused(both.usage) == {"segment": REUSED + LENGTH, "repaired": REUSED // 2 + LENGTH // 2}
    assert reused(ask([first.prompt, second.prompt], segments=[[], places]).usage)["segment"] == REUSED
    # Nothing named, nothing reused, nothing said.
    assert "kvtier" not in ask(first.prompt, segments=[], repair={"share": 0.5}).usage.model_dump()


def test_precomputed_documents_are_held_where_they_are_marked(model: Path, questions: list[Asked]) -> None:
    some = questions[0].documents
    with serving(model, cache=ON) as server:
        done = server.post("kvtier/precompute", texts=[written(each) for each in some])
        assert done.status_code == 200, done.text
        each = {"tokens": LENGTH, "held": 0, "computed": LENGTH}
        total = {name: NUM_DOCUMENTS * number for name, number in each.items()}
        assert done.json() == {"object": "precompute", "model": NAME, **total, "texts": [each] * NUM_DOCUMENTS}
        assert reused(chat(server, questions[0]).parse().usage)["segment"] == REUSED
        assert server.status()["segments"]["outcomes"] == {
            **dict.fromkeys(("loaded", "computed", "lost", "short", "new", "few"), 0),
            "held": NUM_DOCUMENTS - 1, "prefix": 1,
        }  # fmt: skip
        # By token ids it is the same text; another tenant has to have it computed.
        again = server.post("kvtier/precompute", texts=some, model=NAME).json()
        assert again["computed"] == NUM_DOCUMENTS  # a prompt's last token is never loaded
        salted = server.post("kvtier/precompute", texts=some[0], cache_salt="alice").json()
        assert (salted["held"], salted["computed"]) == (0, LENGTH)
        found = chat(server, questions[0], cache_salt="alice").parse()
        assert found.usage.prompt_tokens_details.cached_tokens > 0  # that is the prefix
        assert server.status()["segments"]["outcomes"]["computed"] == NUM_DOCUMENTS - 1
        server.settle()


def test_the_pages_tell_what_came_of_segments(model: Path, questions: list[Asked]) -> None:
    with serving(model, cache=ON) as server:
        for each in questions[:4]:  # of one sample: its documents are computed once
            chat(server, each)
        chat(server, questions[4], kvtier={"repair": {"max_deviation": 0.0}})
        server.settle()
        told = server.status()["segments"]
        assert told["tokens"] == {"reused": 5 * REUSED, "repaired": 4 * REPAIRED + REUSED}
        assert told["blends"] == {"in_part": 4, "in_full": 1}
        assert told["outcomes"]["computed"] == 2 * (NUM_DOCUMENTS - 1)
        assert told["outcomes"]["held"] == 3 * (NUM_DOCUMENTS - 1)
        assert sum(told["deviations"].values()) == 5
        assert told["deviation_sum"] > 0
        families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}

        def of(name: str, label: str) -> dict[str, float]:
            return {s.labels[label]: s.value for s in families[name].samples if s.name == f"{name}_total"}

        assert of("kvtier_engine_segment_tokens", "kind") == told["tokens"]
        assert of("kvtier_engine_blends", "kind") == told["blends"]
        assert of("kvtier_engine_segments", "outcome") == told["outcomes"]
        deviation = families["kvtier_engine_segment_deviation"]
        assert deviation.type == "histogram"
        values = {s.labels.get("le", s.name): s.value for s in deviation.samples}
        assert values["+Inf"] == values["kvtier_engine_segment_deviation_count"] == 5
        assert values["kvtier_engine_segment_deviation_sum"] == told["deviation_sum"]
        buckets = [s.value for s in deviation.samples if "le" in s.labels]
        assert buckets == sorted(buckets)
        share = {s.labels.get("le", s.name): s.value for s in families["kvtier_engine_repair_share"].samples}
        assert (share["0.15"], share["0.175"], share["0.2"], share["1"]) == (0, 4, 4, 5)
        assert told["share_sum"] == share["kvtier_engine_repair_share_sum"] == pytest.approx(4 * REPAIRED / REUSED + 1)
    with serving(model) as server:  # nothing of it where segments are off
        assert "segments" not in server.status()
        assert "kvtier_engine_segment" not in server.http.get("/metrics").text


def test_what_comes_back_without_marks_is_reused_and_told(model: Path) -> None:
    """The second prompt with a text at another place is blended; every answer says so, or that nothing was."""
    documents = asked(1, form=(4, 96))[0].documents
    text = [token for each in documents for token in each]
    with serving(model, cache={**ON, "segments": "auto", "repair_share": "auto"}, l1={"num_blocks": 2000}) as server:

        def ask(lead: int, stream: bool = False, **options: Any) -> Any:
            messages: Any = [{"role": "user", "content": written([*range(10, 20 + lead), *text, 4, 9])}]
            create: Any = server.client.chat.completions.with_raw_response.create
            return create(messages=messages, stream=stream, extra_body={"ignore_eos": True, **options}, **ONE)

        first = ask(1)
        assert reused(first.parse().usage) == {"segment": 0, "repaired": 0}
        assert "x-kvtier-approximate" not in first.headers
        found = ask(2, kvtier={"repair": {"max_deviation": 9}})
        usage = reused(found.parse().usage)
        assert usage["segment"] > len(text) / 2
        assert 0.04 <= usage["repaired"] / usage["segment"] <= 0.21
        assert found.headers["x-kvtier-approximate"] == str(usage["segment"] - usage["repaired"])
        # A stream says it in its header, and an empty list of segments switches it off.
        stream = ask(3, stream=True, kvtier={"repair": {"share": 0.1, "max_deviation": 9}})
        assert int(stream.headers["x-kvtier-approximate"]) > 0
        assert len(list(stream.parse())) == 1
        off = ask(4, kvtier={"segments": []})
        assert "x-kvtier-approximate" not in off.headers
        assert "kvtier" not in off.parse().usage.model_dump()
        # Precomputed, a text is found by the first prompt that has it.
        other = [token for each in asked(1, seed=6, form=(4, 96))[0].documents for token in each]
        done = server.post("kvtier/precompute", texts=other)
        assert done.json()["computed"] == len(other)
        server.settle()
        text = other
        assert reused(ask(5, kvtier={"repair": {"max_deviation": 9}}).parse().usage)["segment"] > len(text) / 2
        server.settle()


def test_a_client_of_the_router_sees_the_same(model: Path, questions: list[Asked]) -> None:
    """The router takes the prompt for the tokens that the replica computes, and changes nothing."""
    with serving(model, cache=ON) as server, routed(server.url, model=str(model)) as router:
        url = f"http://{router.server.address}/v1"
        until(lambda: router.status()["replicas"][0]["state"] == "up")
        direct = chat(server, questions[0])
        through = server.client.with_options(base_url=url)
        messages: Any = [{"role": "user", "content": parts_of(questions[0])}]
        ask: dict[str, Any] = {**ONE, "messages": messages, "extra_body": {"ignore_eos": True}}
        raw = through.chat.completions.with_raw_response.create(**ask)
        answer = raw.parse()
        assert raw.headers["x-kvtier-approximate"] == direct.headers["x-kvtier-approximate"]
        assert "x-kvtier-replica" in raw.headers
        assert answer.choices[0].message.content == said(direct)
        assert answer.usage is not None
        assert reused(answer.usage) == reused(direct.parse().usage)
        prompt_tokens = answer.usage.prompt_tokens
        until(lambda: router.status()["tokens"]["prompt"] == prompt_tokens)
        told = router.status()
        assert told["unknown_prompts"] == {}
        # Its own count of cached tokens by tier is that of the prefix alone.
        cached = answer.usage.prompt_tokens_details
        assert cached is not None
        assert told["tokens"]["told_cached"] == cached.cached_tokens > 0
        assert sum(told["tokens"]["told_tiers"].values()) == cached.cached_tokens
        stream = through.chat.completions.with_raw_response.create(**ask, stream=True)
        assert stream.headers["x-kvtier-approximate"] == raw.headers["x-kvtier-approximate"]
        assert len(list(stream.parse())) == 1
        # Parts of a plain prompt are read, too; an operator's texts pass unread.
        create: Any = through.completions.create
        done = create(prompt=parts_of(questions[0]), extra_body={"ignore_eos": True}, **ONE)
        asked = 2 * answer.usage.prompt_tokens + done.usage.prompt_tokens
        until(lambda: router.status()["tokens"]["prompt"] == asked)
        texts = {"texts": [written(each) for each in questions[0].documents]}
        passed = router.client.post("/v1/kvtier/precompute", json=texts)
        assert passed.json()["held"] > 0
        through.close()
