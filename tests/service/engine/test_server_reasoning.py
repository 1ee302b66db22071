"""A story of answers that reason: what the next turn lacks is not stored, and it finds no less."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import QWEN_3
from exact_engines import forget
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


def two_turns(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that the first turn stored, and tokens that the second one found in the slab alone; and of how many."""

    def sample(batch: Any, _: Any) -> list[SampledToken]:
        ids = [*tokenizer(*WORDS).encode(REASONED).ids, 257]
        return [SampledToken(ids[chunk.sequence.num_generated]) for chunk in batch.chunks if chunk.samples]

    monkeypatch.setattr(server.engine.runner, "sample", sample)
    connector = server.engine.connector
    assert isinstance(connector, LocalConnector)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
    said = server.post("chat/completions", **ask, messages=[QUESTION]).json()["choices"][0]["message"]
    assert said["content"] == REASONED
    server.settle()
    stored = connector.hierarchy.host.pool.check().ready * server.engine.shape.block_bytes
    forget(server.engine, "slab")  # and the tail in L2, as a restart does
    usage = server.post("chat/completions", **ask, messages=[QUESTION, said, NEXT]).json()["usage"]
    server.settle()
    return {"stored": stored, "found": usage["prompt_tokens_details"]["cached_tokens"], "of": usage["prompt_tokens"]}


def test_reasoning_is_not_stored_and_the_next_turn_finds_no_less(
    model: Path, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[bool | str, dict[str, int]] = {}
    for kept in (True, "answers", False):
        file = {"path": str(disk_dir / str(kept)), "size": "64MiB", "deadline": "60s"}
        with serving(model, cache={"store_generated": kept, "prefetch_deadline": "60s"}, file=file) as server:
            told[kept] = two_turns(server, monkeypatch)
    print(told)  # for whoever looks
    assert told["answers"]["found"] == told[True]["found"] > 0
    assert told["answers"]["stored"] < 0.6 * told[True]["stored"]


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
