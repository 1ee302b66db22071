"""Stories of KVTier with rows of different length: padding in front, answers that end early, hits by row."""

from typing import Any

import pytest
import torch
from extent import brief
from kv_tier_rig import BLOCK, GREEDY, KINDS, Open, assert_exact, held, left_padded, model_of, restarted
from tiny_models import prompt

from kvtier.connector.models import given_cache
from kvtier.connector.transformers import padding
from kvtier.connector.transformers.cache_form import CacheForm


@pytest.mark.parametrize("attention", brief(["sdpa"], ["sdpa", "eager"]))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_length_are_found_each_by_its_own_tokens(open_tier: Open, kind: str, attention: str) -> None:
    model = model_of(kind, attention=attention)
    rows = [prompt(1, 90), prompt(2, 61), prompt(3, 23), prompt(4, 40)]
    batch = left_padded(rows)
    expected = model.generate(**batch, **GREEDY)
    kv = open_tier(model)
    assert torch.equal(kv.generate(**batch, **GREEDY), expected)
    assert kv.cached_tokens_by_row == [0, 0, 0, 0]
    # All rows go on from column 77, where the second one's known blocks end. Of others a part of a block is loaded.
    assert torch.equal(kv.generate(**batch, **GREEDY), expected)
    assert kv.cached_tokens_by_row == [77, 48, 10, 27]
    assert kv.num_cached_tokens == 77
    # Names and KV are those of the rows without padding.
    for row in rows:
        assert assert_exact(kv, model, row) == len(row) // BLOCK * BLOCK
    # In another order, behind more padding and beside a row that nobody knows: it has the least padding of all.
    other = left_padded([rows[2], rows[0], prompt(5, 120), rows[1]])
    assert torch.equal(kv.generate(**other, **GREEDY), model.generate(**other, **GREEDY))
    assert kv.cached_tokens_by_row == [0, 0, 0, 0]
    # Now all are known. The unknown one is shorter here: what the others have in front of it is loaded.
    last = left_padded([rows[2], rows[0], prompt(6, 30), prompt(5, 120)])
    assert torch.equal(kv.generate(**last, **GREEDY), model.generate(**last, **GREEDY))
    assert kv.cached_tokens_by_row == [0, 60, 0, 90]
    # So it is after a restart.
    again = restarted(kv, open_tier)
    assert torch.equal(again.generate(**batch, **GREEDY), expected)
    assert again.cached_tokens_by_row == [77, 48, 10, 27]
    assert again.stats()['kvtier_lookup_blocks_total{tier="file"}'] == 5 + 3 + 1 + 2


@pytest.mark.parametrize("dtype", brief([torch.bfloat16], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("kind", KINDS)
def test_kv_loaded_after_padding_is_what_was_stored_bit_for_bit(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    model = model_of(kind, dtype)
    rows = [prompt(1, 90), prompt(2, 61), prompt(3, 23)]
    kv = open_tier(model)
    for row in rows:
        kv.generate(torch.tensor([row]), **GREEDY)
    batch = left_padded(rows)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    generate = model.generate

    def look(*arguments: Any, **options: Any) -> Any:
        cache = given_cache(options)[1]
        if cache.get_seq_length():  # else it is the check of how the model takes padding
            seen.extend((layer.keys.clone(), layer.values.clone()) for layer in cache.layers)
        return generate(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(model, "generate", look)
        kv.generate(**batch, **GREEDY)
    columns = 29 + 48
    assert kv.cached_tokens_by_row == [columns, 48, columns - 67]
    states = [tensor for pair in seen for tensor in pair]
    assert len(states) == 2 * model.config.num_hidden_layers
    for number, tokens in enumerate(rows):
        num_pads = 90 - len(tokens)
        for loaded, stored in zip(states, held(kv, tokens), strict=True):
            assert loaded.shape[2] == columns
            assert not loaded[number, :, :num_pads].any()
            assert torch.equal(loaded[number, :, num_pads:], stored[:, : columns - num_pads])


def test_a_mask_that_transformers_infers_is_heeded(open_tier: Open) -> None:
    model = model_of("llama")
    rows = [prompt(1, 70), prompt(2, 50)]
    tokens = left_padded(rows)["input_ids"]
    kv = open_tier(model)
    expected = model.generate(tokens, **GREEDY)  # pad_token_id=0 stands in front of the second row
    for by_row in ([0, 0], [64, 44]):
        assert torch.equal(kv.generate(tokens, **GREEDY), expected)
        assert kv.cached_tokens_by_row == by_row
    assert assert_exact(kv, model, rows[1]) == 48
    # If the padding token ends an answer too, transformers infers no mask: the padding is tokens like all others.
    ending = GREEDY | {"eos_token_id": 0}
    assert torch.equal(kv.generate(tokens, **ending), model.generate(tokens, **ending))
    assert kv.cached_tokens_by_row == [0, 0]
    assert assert_exact(kv, model, tokens[1].tolist()) == 64


@pytest.mark.parametrize("pad", [0, "eos"])
def test_padding_after_an_answer_that_ended_is_not_named(open_tier: Open, pad: int | str) -> None:
    model = model_of("llama")
    rows = [prompt(1, 40), prompt(2, 33)]
    batch = left_padded(rows)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    free = model.generate(**batch, **options, eos_token_id=None, pad_token_id=0)
    # One of the first row's tokens ends it, and the other row never says it.
    answers = free[0, 40:47].tolist(), free[1, 40:].tolist()
    length = next(n for n in range(2, 7) if answers[0][n] not in (*answers[0][:n], *answers[1])) + 1
    eos = answers[0][length - 1]
    options |= {"eos_token_id": eos, "pad_token_id": eos if pad == "eos" else pad}
    expected = model.generate(**batch, **options)
    padding_token = options["pad_token_id"]
    assert expected[0, 40 + length :].eq(padding_token).all()
    kv = open_tier(model)
    assert torch.equal(kv.generate(**batch, **options), expected)
    assert kv.drain()
    # 40 tokens and an answer of less than 8 are two blocks; a third would hold padding.
    assert assert_exact(kv, model, expected[0].tolist()) == 32
    # The other row is kept to its end.
    answer = expected[1, 7:].tolist()
    assert len(answer) - 1 >= 64
    assert assert_exact(kv, model, answer) == (len(answer) - 1) // BLOCK * BLOCK
    # A chat goes on from the answers, each as long as it is.
    turn = left_padded([[*expected[0, : 40 + length].tolist(), *prompt(8, 20)], [*answer, *prompt(9, 12)]])
    assert torch.equal(kv.generate(**turn, **GREEDY), model.generate(**turn, **GREEDY))
    width = turn["input_ids"].shape[1]
    pads = [width - 60 - length, width - len(answer) - 12]
    column = min(pads[0] + 32, pads[1] + (len(answer) - 1) // BLOCK * BLOCK)
    assert kv.cached_tokens_by_row == [column - pad for pad in pads]


@pytest.mark.parametrize(
    "mask",
    [
        [[1] * 40, [1] * 30 + [0] * 10],
        [[1] * 40, [1] * 10 + [0] + [1] * 29],
        [[1] * 40, [0] * 40],
        [[1] * 40, [0] * 5 + [2] * 35],
        [[1] * 41, [1] * 41],
    ],
    ids=["right", "hole", "no-token", "weights", "longer"],
)
def test_other_masks_are_refused_with_the_way_out(
    open_tier: Open, caplog: pytest.LogCaptureFixture, mask: list[list[int]]
) -> None:
    model = model_of("llama")
    tokens = torch.tensor([prompt(1, 40), prompt(2, 40)])
    kv = open_tier(model)
    kv.generate(tokens, **GREEDY)
    options = GREEDY | {"attention_mask": torch.tensor(mask)}
    try:
        expected = model.generate(tokens, **options)
    except (ValueError, RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            kv.generate(tokens, **options)
    else:
        assert torch.equal(kv.generate(tokens, **options), expected)
    assert kv.cached_tokens_by_row == []
    [warning] = [record.message for record in caplog.records if record.name == "kvtier.connector.transformers"]
    assert "pad on the left alone (tokenizer.padding_side = 'left'), and leave rows" in warning


def test_a_model_that_takes_padding_for_tokens_is_refused(
    open_tier: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing told a model where a row begins, its KV behind padding would not be that of the row's tokens."""
    model = model_of("llama")
    rows = [prompt(1, 70), prompt(2, 50)]
    batch = left_padded(rows)
    forward = model.model.forward

    def unaware(*arguments: Any, **options: Any) -> Any:
        options.pop("position_ids", None)  # positions are counted from the first column
        return forward(*arguments, **options)

    monkeypatch.setattr(model.model, "forward", unaware)
    kv = open_tier(model, variant="unaware of masks")
    for _ in range(2):
        assert torch.equal(kv.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))
        assert kv.cached_tokens_by_row == []
    [warning] = [record.message for record in caplog.records if record.name == "kvtier.connector.transformers"]
    assert "KV that depends on the padding; pass rows of one length together" in warning
    # Rows of one length are kept.
    kv.generate(torch.tensor([rows[0]]), **GREEDY)
    kv.generate(torch.tensor([rows[0]]), **GREEDY)
    assert kv.cached_tokens_by_row == [64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_heed_masks_pass_the_check(kind: str, dtype: torch.dtype) -> None:
    model = model_of(kind, dtype)
    assert padding.why_padding_shows(model, CacheForm.of(model, BLOCK)) is None
