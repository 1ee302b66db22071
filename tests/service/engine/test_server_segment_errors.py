"""What is wrong with segments over HTTP is one error with the field, the value and the fix, and nothing is admitted."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from server_rig import MODEL, ServerThread, serving

from kvtier.connector.segments import REPAIR_RULES
from kvtier.service.openai.bodies import RepairFields

ON: dict[str, Any] = {"segments": "on", "segment_min_tokens": 16, "block_size": 16}
SERVER = {"cache": ON}
IDS = list(range(1, 101))
DOCUMENT = "a document of some forty characters, say"
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": IDS, "max_tokens": 1, "ignore_eos": True}
TEXT: dict[str, Any] = {**COMPLETION, "prompt": DOCUMENT}
TWO: dict[str, Any] = {**COMPLETION, "prompt": [IDS, IDS[:50]]}


def part(text: Any = DOCUMENT, **options: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "kvtier": {"segment": True, **options}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 1, **fields}


def segments(*named: Any, of: dict[str, Any] = COMPLETION, **fields: Any) -> dict[str, Any]:
    return {**of, "kvtier": {"segments": [*named]}, **fields}


def repair(**given: Any) -> dict[str, Any]:
    return {**COMPLETION, "kvtier": {"segments": [[20, 60]], "repair": given}}


PLACES = "kvtier.segments"
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "overlap": (segments([10, 50], [49, 90]), PLACES, "segments 10 to 50 and 49 to 90 overlap"),
    "empty": (segments([20, 20]), PLACES, "segment 20 to 20: it is empty; its end must be above its start"),
    "beyond": (segments([20, 101]), PLACES, "segment 20 to 101: not within the 100 tokens of the prompt"),
    "before": (segments([-1, 20]), PLACES, "segment -1 to 20: not within"),
    "the second of two": (segments([[1, 40]], [[1, 51]], of=TWO), PLACES, "segment 1 to 51: not within the 50 tokens"),
    "with many choices": (segments([20, 101], n=4), PLACES, "segment 20 to 101: not within"),
    "a list for one": (segments([[1, 40]]), PLACES, "not of the prompt's shape; give a list of pairs"),
    "pairs for two": (segments([1, 40], of=TWO), PLACES, "not of the prompt's shape; give a list of pairs"),
    "one list for two": (segments([[1, 40]], of=TWO), PLACES, "1 lists for 2 prompts; give a list of pairs"),
    "of a text": (segments([1, 40], of=TEXT), PLACES, "they count tokens, but the prompt is text; give token ids"),
    "of parts": (
        segments([1, 4], of={**TEXT, "prompt": [part()]}),
        PLACES,
        "they count tokens, but the prompt is text",
    ),
    "no list": ({**COMPLETION, "kvtier": {"segments": 5}}, PLACES, "kvtier.segments 5: Input should be a valid list"),
    "half a pair": (segments([5]), f"{PLACES}.0", "kvtier.segments.0 [5]: List should have at least 2 items"),
    "no number": (segments([5, "60"]), f"{PLACES}.0.1", 'kvtier.segments.0.1 "60": Input should be a valid integer'),
    "no options": ({**COMPLETION, "kvtier": "on"}, "kvtier", 'kvtier "on": not an object; give one'),
    "unknown": ({**COMPLETION, "kvtier": {"segment": []}}, "kvtier.segment", "[]: unknown field; leave it out"),
    "in a chat": (chat(part(), kvtier={"segments": [[1, 2]]}), PLACES, "[[1, 2]]: not supported; mark a part of type"),
    "share": (repair(share=1.5), "kvtier.repair.share", "1.5: Input should be less than or equal to 1"),
    "no share": (repair(share="much"), "kvtier.repair.share", '"much": Input should be a valid number'),
    "rule": (repair(rule="best"), "kvtier.repair.rule", "\"best\": Input should be 'deviation', 'question', 'first'"),
    "layer": (repair(check_layer=3), "kvtier.repair.check_layer", "check_layer 3: this model's layers are 0 to 2; use"),
    "unknown in repair": (
        repair(shar=0.1),
        "kvtier.repair.shar",
        "kvtier.repair.shar 0.1: unknown field; leave it out",
    ),
    "empty text": (chat(part("")), "messages.0.content.0", "an empty segment; write some text, or leave out its mark"),
    "unknown in a part": (chat(part(segmnt=1)), "messages.0.content.0.kvtier.segmnt", "segmnt 1: unknown field; leave"),
    "part of a prompt": ({**TEXT, "prompt": [{"type": "text"}]}, "prompt.0.text", "missing; it must be given"),
}


@pytest.mark.parametrize("what", BAD)
def test_the_field_at_fault_is_named_and_nothing_is_admitted(server: ServerThread, what: str) -> None:
    body, param, message = BAD[what]
    verb = "chat/completions" if "messages" in body else "completions"
    before = server.engine.stats
    for each in (body, {**body, "stream": True}):
        answer = server.http.post(f"/v1/{verb}", json=each)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"], error
        assert error["message"].startswith(param)
        assert "\n" not in error["message"]
        assert error["type"] == "invalid_request_error"
    assert server.loop.num_live == 0
    assert server.engine.stats == before


@pytest.mark.parametrize(
    ("section", "why"), [("off", 'this engine reuses none; set [cache] segments = "on"'), ("exact", "is approximate")]
)
def test_an_engine_without_segments_refuses_them(model: Path, section: str, why: str) -> None:
    options: dict[str, Any] = {"cache": ON, "exact": True} if section == "exact" else {}
    with serving(model, **options) as server:
        for verb, body, param in (
            ("completions", segments([20, 60]), PLACES),
            ("completions", {**TEXT, "prompt": [part()]}, "prompt"),
            ("chat/completions", chat(part()), "messages"),
        ):
            answer = server.http.post(f"/v1/{verb}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter"), error
            assert error["message"].startswith(param)
            assert why in error["message"]
            assert "leave them out" in error["message"]
        assert server.loop.num_live == 0
        assert server.engine.stats["prompt_tokens"] == 0
        # Without a mark the same fields mean nothing, and a text may be computed beforehand all the same.
        assert server.http.post("/v1/completions", json=segments()).is_success
        plain = chat({**part(), "kvtier": {"segment": False}}, kvtier={"repair": {"share": 0.5}})
        answer = server.http.post("/v1/chat/completions", json=plain)
        assert answer.is_success
        assert "kvtier" not in answer.json()["usage"]
        assert server.post("kvtier/precompute", texts=[DOCUMENT]).json()["computed"] == len(DOCUMENT)


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "texts", "missing_required_parameter"),
        ({"texts": [""]}, 400, "texts", "invalid_value"),
        ({"texts": [part()]}, 400, "texts", "invalid_value"),
        ({"texts": [[1, 258]]}, 400, "texts", "invalid_value"),
        ({"texts": ["x" * 1024]}, 400, "texts", "context_length_exceeded"),
        ({"texts": ["x"] * 73}, 400, "texts", "invalid_value"),
        ({"texts": ["x"], "model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"texts": ["x"], "stream": True}, 400, "stream", "unknown_parameter"),
    ],
)
def test_texts_that_cannot_be_precomputed(
    server: ServerThread, body: dict[str, Any], status: int, param: str, code: str
) -> None:
    before = server.engine.stats
    answer = server.http.post("/v1/kvtier/precompute", content=json.dumps(body), headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert server.engine.stats == before


JSON = {"content-type": "application/json"}


def test_precomputing_obeys_the_token_and_the_room_of_the_server(model: Path) -> None:
    with serving(model, server={"token": "a secret", "max_num_seqs": 2, "max_waiting": 0}) as server:
        refused = server.post("kvtier/precompute", texts=["x"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.http.get("/v1/kvtier/precompute").status_code == 405
        too_many = server.http.post(
            "/v1/kvtier/precompute", json={"texts": ["x"] * 3}, headers={"authorization": "Bearer a secret"}
        )
        assert too_many.json()["error"]["message"] == (
            "texts: 3 answers at once; this server has room for 2: ask for fewer"
        )


def test_every_rule_of_repair_has_its_name_here() -> None:
    (rules, _) = get_args(RepairFields.model_fields["rule"].annotation)
    assert get_args(rules) == REPAIR_RULES
