"""Stories of KVTier: transformers' generate() beside the tiers, kind by kind, and shared with our engine."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_tier_rig import BLOCK, GREEDY, Open, ids, left_padded, model_of, tiers_over
from server_rig import save_checkpoint, tokenizer
from tiny_models import VOCAB, prompt
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast, T5Config

from kvtier.connector.models import cache_option
from kvtier.connector.transformers import adapter as transformers_connector
from kvtier.connector.transformers.adapter import KVTier
from kvtier.tiers.copies.transfer import BlockCopier
from kvtier.tiers.errors import MissingPackages, RequestError
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd


def test_a_model_in_training_is_named_with_the_fix(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama").train()
    kv = open_tier(model)
    assert kv.load(ids(prompt(1, 70)))[1] == 0
    assert "training mode; call model.eval()" in caplog.text
    assert kv.load(torch.tensor(prompt(1, 70)))[1] == 0
    model.eval()
    assert kv.load(torch.tensor(prompt(1, 70)))[1] == 0
    assert "shape (70,); pass [rows, tokens]" in caplog.text


def test_what_an_encoder_reads_names_no_blocks(open_tier: Open, caplog: pytest.LogCaptureFixture) -> None:
    """T5's KV are of the answer, its tokens of the question: one must not be found under the other."""
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    sizes |= {"vocab_size": VOCAB, "decoder_start_token_id": 0}
    auto: Any = AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    model = auto.from_config(T5Config(**sizes)).eval()
    kv = open_tier(model)
    assert "K and V also depend on the encoder's text" in caplog.text
    tokens = ids(prompt(1, 20))
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens, **options)
    for _ in range(2):
        assert torch.equal(kv.generate(tokens, **options), expected)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "KVTier needs transformers: pip install 'transformers>=5.0'"),
        ("4.57.6", "transformers 5.0 or newer, here is 4.57.6: pip install 'transformers>=5.0'"),
    ],
)
def test_without_transformers_or_with_an_old_one_the_import_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    # As in a process that has imported torch, and nothing of ours that needs transformers.
    face = sys.modules["kvtier.connector.transformers"]
    monkeypatch.setattr("kvtier.connector.transformers", face)  # what the import exchanges is put back
    for name in (face.__name__, transformers_connector.__name__):
        monkeypatch.delitem(sys.modules, name)
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(MissingPackages, match=re.escape(said)):
        import_module("kvtier.connector.transformers").KVTier  # noqa: B018


def test_a_cache_computed_with_gradients_is_kept(open_tier: Open) -> None:
    model = model_of("llama")
    tokens = ids(prompt(1, 70), prompt(1, 70))  # and one prompt twice in a batch
    kv = open_tier(model)
    cache, _ = kv.load(tokens)
    model(tokens, **cache_option(model, cache))
    kv.store(tokens, cache)
    assert kv.load(tokens)[1] == 64


def test_a_copy_that_fails_keeps_nothing_and_costs_no_slots(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    tokens = ids(prompt(1, 70))
    kv = open_tier(model)
    expected = model.generate(tokens, **GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(BlockCopier, "copy", lambda *_: "the copy failed")
        assert torch.equal(kv.generate(tokens, **GREEDY), expected)
    assert kv.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] == 4
    assert kv.load(tokens)[1] == 0
    assert torch.equal(kv.generate(tokens, **GREEDY), expected)
    with monkeypatch.context() as broken:
        broken.setattr(BlockCopier, "copy", lambda *_: "the copy failed")
        assert kv.load(tokens)[1] == 0
    assert kv.stats()['kvtier_miss_total{reason="copy_failed"}'] == 4
    assert kv.load(tokens)[1] == 64


def test_blocks_computed_before_a_reset_are_not_stored_after_it(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    tokens = ids(prompt(1, 70))
    kv = open_tier(model)
    assert kv._opened is not None
    tiers, generate = kv._opened, model.generate

    def reset_meanwhile(*arguments: Any, **options: Any) -> Any:
        result = generate(*arguments, **options)
        tiers.reset()
        return result

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(model, "generate", reset_meanwhile)
        kv.generate(tokens, **GREEDY)
    assert kv.load(tokens)[1] == 0
    assert kv.stats()['kvtier_store_dropped_total{tier="l2",reason="epoch"}'] == 4
    kv.generate(tokens, **GREEDY)
    assert kv.load(tokens)[1] == 64


def test_only_prompts_are_stored_if_configured(open_tier: Open) -> None:
    kv = open_tier(model_of("llama"), store_generated=False)
    answer = kv.generate(ids(prompt(1, 60)), **GREEDY)
    assert kv.drain()
    assert kv.load(torch.cat([answer, answer], dim=1))[1] == 48


def test_chats_that_mean_the_same_find_each_other(tmp_path: Path) -> None:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(save_checkpoint(tmp_path)).eval()
    template = "{{ tools | tojson }}\n{{ messages[0].content }}"
    tokens: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template)  # type: ignore[no-untyped-call]
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    found = []
    for chat in ({}, {"sort_tools": True}, {"sort_tools": True, "drop_lines": ["billing"]}):
        with KVTier(model, {"cache": {"block_size": 16}, "host": {"size": "8MiB"}, "chat": chat}) as kv:
            for number in (1, 2):
                parameters = dict(sorted(schema.items(), reverse=number > 1))
                tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
                said = f"x-anthropic-billing-header: cch={number};\nYou know the weather of all towns."
                prompt = kv.chat(tokens, [{"role": "system", "content": said}], tools)
                kv.generate(prompt, **GREEDY)
                assert kv.drain()
            found.append((kv.num_cached_tokens, prompt.shape[1]))
    print(found)  # for whoever looks
    (as_sent, whole), (sorted_keys, _), (all_of_it, shorter) = found
    assert as_sent < 80 < sorted_keys < whole - 30
    assert all_of_it == (shorter - 1) // 16 * 16


# What KVTier tells the tiers of its calls' ends, and the hints that callers give it.


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    with tiers_over(tmp_path) as factory:
        yield factory


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RequestEnd]:
    ends: list[RequestEnd] = []
    monkeypatch.setattr(Hierarchy, "ended", lambda _, end: ends.append(end))
    return ends


def test_a_call_reports_one_finished_request_per_prompt(open_tier: Open, told: list[RequestEnd]) -> None:
    kv = open_tier(model_of("llama"))
    rows = left_padded([range(3, 43), range(50, 70)])
    kv.generate(**rows, **GREEDY | {"do_sample": True, "num_return_sequences": 2}, hint="tool")
    assert [(end.num_prompt, end.num_output_tokens, end.hint, end.is_derived) for end in told] == [
        (40 // BLOCK, 8, Hint.TOOL, False),
        (20 // BLOCK, 8, Hint.TOOL, False),
    ]
    assert all(len(end.names) >= end.num_prompt and end.seconds > 0 for end in told)
    # Nobody has to say anything; and what a cache is stored of ends, too.
    kv.generate(torch.tensor([list(range(3, 43))]), **GREEDY)
    tokens = torch.tensor([list(range(100, 140))])
    cache = kv.load(tokens)[0]
    kv.model(tokens, **cache_option(kv.model, cache))
    kv.store(tokens, cache, hint=Hint.FINISHED)
    assert [(end.num_prompt, end.num_output_tokens, end.hint) for end in told[2:]] == [
        (2, 8, None),
        (2, 0, Hint.FINISHED),
    ]


def test_a_word_that_is_no_hint_is_refused_before_anything_is_computed(open_tier: Open, told: list[RequestEnd]) -> None:
    kv = open_tier(model_of("llama"))
    tokens = torch.tensor([[3, 4, 5]])
    with pytest.raises(RequestError, match="hint 'maybe': use one of goes_on, tool, finished"):
        kv.generate(tokens, hint="maybe")
    with pytest.raises(RequestError, match="hint 'maybe'"):
        kv.store(tokens, kv.load(tokens)[0], hint="maybe")
    assert not told
