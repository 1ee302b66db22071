"""A story of answers that reason: what the next turn lacks is not stored, and it finds no less."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import QWEN_3
from server_rig import MODEL, TEMPLATE, ServerThread, save_checkpoint, serving, tokenizer

from kvtier.connector.local import LocalConnector
from kvtier.engine.sequence import SampledToken
from kvtier.service.openai.prompts import Prompts

WORDS = ("<think>", "</think>")
REASONED = "<think>\nThey ask for a town, and I go through all the towns that I know.\n</think>\n\nRome is the town."
QUESTION = {"role": "user", "content": "Which town is the capital of Italy?"}
NEXT = {"role": "user", "content": "And which one is that of France?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_checkpoint(tmp_path_factory.mktemp("model"), *WORDS)
    with_template(directory, QWEN_3)
    return directory


def with_template(directory: Path, template: str) -> Prompts:
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return Prompts.open(directory)


def two_turns(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """What the second turn found in L2, and of how many tokens; blocks that the first one stored."""

    def sample(batch: Any, _: Any) -> list[SampledToken]:
        ids = [*tokenizer(*WORDS).encode(REASONED).ids, 257]
        return [SampledToken(ids[chunk.sequence.num_generated]) for chunk in batch.chunks if chunk.samples]

    monkeypatch.setattr(server.engine.runner, "sample", sample)
    connector = server.engine.connector
    assert isinstance(connector, LocalConnector)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
    answer = server.post("chat/completions", **ask, messages=[QUESTION]).json()
    said = answer["choices"][0]["message"]
    assert said["content"] == REASONED
    server.settle()
    yield "stored", connector.hierarchy.host.pool.state.num_ready
    server.engine.pool.reset()
    usage = server.post("chat/completions", **ask, messages=[QUESTION, said, NEXT]).json()["usage"]
    server.settle()
    yield "found", usage["prompt_tokens_details"]["cached_tokens"]
    yield "of", usage["prompt_tokens"]


def test_reasoning_is_not_stored_and_the_next_turn_finds_no_less(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}
    for kept in (True, "answers", False):
        with serving(model, cache={"store_generated": kept}) as server:
            told[kept] = dict(two_turns(server, monkeypatch))
    print(told)  # for whoever looks
    assert told["answers"]["found"] == told[True]["found"] > 0
    assert told["answers"]["stored"] < told[True]["stored"] / 2


def test_the_template_says_what_becomes_of_reasoning(model: Path, tmp_path: Path) -> None:
    begins, ends = (tokenizer(*WORDS).token_to_id(word) for word in WORDS)
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
