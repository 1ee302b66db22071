"""A story of answers that reason: what the next turn lacks is not stored, and it finds no less."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import QWEN_3
from exact_engines import forget
from server_rig import BLOCK, MODEL, TEMPLATE, ServerThread, save_checkpoint, serving, tokenizer

from kvtier.connector.local import LocalConnector
from kvtier.engine.requests import SampledToken
from kvtier.service.openai.prompts import Prompts

WORDS = ("<think>", "</think>")
REASONED = "<think>\nThey ask for a town, and I go through all the towns that I know.\n</think>\n\nRome is the town."
QUESTION = {"role": "user", "content": "Which town is the capital of Italy?"}
NEXT = {"role": "user", "content": "And which one is that of France?"}
CALLING = (
    '<think>\nI have to ask.\n</think>\n\n<tool_call>\n{"name": "town", "arguments": {"of": "Italy"}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "town", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint(tmp_path_factory.mktemp("model"), *WORDS)
    with_template(directory, QWEN_3)
    return directory


def with_template(directory: Path, template: str) -> Prompts:
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return Prompts.open(directory)


def two_turns(server: ServerThread, monkeypatch: pytest.MonkeyPatch, answer: str, then: object) -> dict[str, int]:
    """Bytes that the first turn stored, and tokens that the second one found in the slab alone; and of how many."""

    def sample(batch: Any, _: Any) -> list[SampledToken]:
        ids = [*tokenizer(*WORDS).encode(answer).ids, 257]
        return [SampledToken(ids[chunk.sequence.num_generated]) for chunk in batch.chunks if chunk.samples]

    monkeypatch.setattr(server.engine.runner, "sample", sample)
    connector = server.engine.connector
    assert isinstance(connector, LocalConnector)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    said = server.post("chat/completions", **ask, messages=[QUESTION]).json()["choices"][0]["message"]
    assert said["content"].startswith("<think>")
    server.settle()
    block = server.engine.shape.block_bytes
    stored = connector.hierarchy.host.pool.check().ready * block
    forget(server.engine, "slab")  # and the tail in L2, as a restart does
    usage = server.post("chat/completions", **ask, messages=[QUESTION, said, then]).json()["usage"]
    server.settle()
    found, whole = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
    return {"stored": stored, "block": block, "found": found, "of": whole}


def told_by(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, answer: str, then: object
) -> dict[bool | str, dict[str, int]]:
    """The same two turns, by what is stored of answers."""
    told: dict[bool | str, dict[str, int]] = {}
    for kept in (True, "answers"):
        file = {"path": str(home / str(kept)), "size": "64MiB", "deadline": "60s"}
        with serving(model, cache={"store_generated": kept, "prefetch_deadline": "60s"}, file=file) as server:
            told[kept] = two_turns(server, monkeypatch, answer, then)
    print(told)  # for whoever looks
    return told


def test_without_its_reasoning_a_turn_is_found(model: Path, disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_by(model, disk_dir, monkeypatch, REASONED, NEXT)
    assert told["answers"]["found"] == told[True]["found"] > 0
    assert told[True]["stored"] - told["answers"]["stored"] > len(REASONED) // BLOCK // 2 * told[True]["block"]


def test_reasoning_stays_during_tool_calls(model: Path, disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"role": "tool", "tool_call_id": "call_0", "content": "Rome"}
    told = told_by(model, disk_dir, monkeypatch, CALLING, said)
    assert told["answers"] == told[True]
    assert told[True]["found"] > told[True]["of"] - 100 > len(CALLING)


def test_the_template_says_what_becomes_of_reasoning(model: Path, tmp_path: Path) -> None:
    begins, ends = 258, 259  # behind bytes and special tokens
    found = Prompts.open(model).reasoning()
    assert found is not None
    assert (found.begins, found.ends, found.lasts_in_calls) == (begins, ends, True)
    assert [found.is_open(each) for each in ([begins], [begins, 5], [begins, ends], [5], [begins, *[5] * 99])] == [
        True, True, False, False, False,
    ]  # fmt: skip
    own = save_checkpoint(tmp_path, *WORDS)
    never = TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")
    left_out = with_template(own, never).reasoning()
    assert left_out is not None
    assert not left_out.lasts_in_calls
    for template in (TEMPLATE, "{{ raise_exception('no chat') }}"):
        assert with_template(own, template).reasoning() is None
    (tmp_path / "plain").mkdir()
    assert with_template(save_checkpoint(tmp_path / "plain"), never).reasoning() is None  # no such tokens
