"""Stories of KVTier with other ways to call `generate`: answers, beams, assistants, chunks, quantized caches."""

import contextlib
import functools
import importlib.util
from typing import Any

import pytest
import torch
import transformers
from extent import brief
from kv_tier_rig import BLOCK, GREEDY, KINDS, Open, assert_exact, left_padded, model_of
from server_rig import tokenizer
from tiny_models import VOCAB, prompt
from transformers import PreTrainedTokenizerFast

from kvtier.connector.models import given_cache
from kvtier.connector.transformers import adapter, calls
from kvtier.connector.transformers.adapter import KVTier

NEW: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}


def answer(generate: Any, batch: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """The same sampling in every call."""
    torch.manual_seed(11)
    result: torch.Tensor = generate(**batch, **options)
    return result


def without_kvtier(model: Any, batch: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """What `model.generate` says; a skip where this transformers cannot do so by itself."""
    try:
        expected: torch.Tensor = model.generate(**batch, **options)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__} alone: {error}")
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_several_answers_share_their_prompt_and_each_is_kept(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    rows = [prompt(1, 70), prompt(2, 50)]
    batch = left_padded(rows)
    options = {**NEW, "do_sample": True, "temperature": 3.0, "num_return_sequences": 3}
    expected = answer(model.generate, batch, options)
    answers = {tuple(row) for row in expected[:, 70:].tolist()}
    assert len(answers) == 6  # sampling tells them apart
    kv = open_tier(model)
    assert torch.equal(answer(kv.generate, batch, options), expected)
    assert kv.cached_tokens_by_row == [0, 0]
    assert torch.equal(answer(kv.generate, batch, options), expected)
    assert kv.cached_tokens_by_row == [64, 44]
    for number, row in enumerate(expected):
        tokens = row[0 if number < 3 else 20 :].tolist()
        assert assert_exact(kv, model, tokens) == (len(tokens) - 1) // BLOCK * BLOCK
    # Each prompt was asked for once a call, however many answers it has.
    stats = kv.stats()
    assert stats['kvtier_lookup_blocks_total{tier="miss"}'] == 4 + 3


@pytest.mark.parametrize("returned", brief([2], [1, 2]))
@pytest.mark.parametrize("kind", KINDS)
def test_beams_continue_from_a_loaded_prompt_and_store_prompts(open_tier: Open, kind: str, returned: int) -> None:
    model = model_of(kind)
    rows = [prompt(1, 70), prompt(2, 50)]
    batch = left_padded(rows)
    options = NEW | {"do_sample": False, "num_beams": 3, "num_return_sequences": returned}
    expected = model.generate(**batch, **options)
    assert not torch.equal(expected[::returned], model.generate(**batch, **NEW, do_sample=False))
    kv = open_tier(model)
    for by_row in ([0, 0], [64, 44]):
        assert torch.equal(kv.generate(**batch, **options), expected)
        assert kv.cached_tokens_by_row == by_row
    # The prompts are kept, the answers are not: rows of the cache are not those of the answers.
    for number, row in enumerate(rows):
        tokens = expected[number * returned, 70 - len(row) :].tolist()
        assert assert_exact(kv, model, tokens) == len(row) // BLOCK * BLOCK


@pytest.mark.parametrize("place", ["argument", "model"])
def test_settings_count_wherever_they_stand(open_tier: Open, place: str) -> None:
    model = model_of("llama")
    batch = left_padded([prompt(1, 70), prompt(2, 50)])
    make: Any = transformers.GenerationConfig
    settings = make(num_beams=3, **NEW)
    options: dict[str, Any] = {"generation_config": settings}
    if place == "model":
        model.generation_config, options = settings, {}
    expected = model.generate(**batch, **options)
    assert not torch.equal(expected, model.generate(**batch, **NEW, num_beams=1))
    kv = open_tier(model)
    for by_row in ([0, 0], [64, 44]):
        assert torch.equal(kv.generate(**batch, **options), expected)
        assert kv.cached_tokens_by_row == by_row


def test_an_answer_ends_at_a_stop_string_after_a_hit(open_tier: Open) -> None:
    """The tokenizer that `generate` needs for it is no input of the model."""
    model, words = model_of("llama"), PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    tokens = torch.tensor([prompt(1, 70)])
    whole = model.generate(tokens, **GREEDY)
    at, letter = next((at, text) for at in range(70, 78) if (text := str(words.decode(whole[0, at]))).isascii())
    kv = open_tier(model)
    for num_cached in (0, 64):
        answered = kv.generate(tokens, **GREEDY, stop_strings=[letter], tokenizer=words)
        assert torch.equal(answered, whole[:, : at + 1])
        assert kv.num_cached_tokens == num_cached


def test_an_assistant_may_guess_past_the_length_of_a_models_rope() -> None:
    """Its guesses count for RoPE that depends on the text's length, and leave rotated KV behind that is never right."""
    model = model_of("llama")
    tokens = torch.tensor([prompt(1, 40)])
    assert calls.read_call(model, tokens, {"prompt_lookup_num_tokens": 4}).is_assisted
    with pytest.raises(calls.UnheldCallError, match=r"past 60 tokens.*leave it out, greedy and sampled decoding work"):
        calls.read_call(model, tokens, {"prompt_lookup_num_tokens": 4}, limit=60)
    with pytest.raises(calls.UnheldCallError, match="40 tokens: this model's RoPE is another for texts above 39"):
        calls.read_call(model, tokens, {}, limit=39)


def lengths_of_passes(model: Any, seen: list[int]) -> contextlib.AbstractContextManager[Any]:
    """Notes how many tokens each pass of the model has."""
    handle = model.model.register_forward_pre_hook(
        lambda _, arguments, options: seen.append((options.get("input_ids", *arguments[:1])).shape[1]), with_kwargs=True
    )
    return contextlib.closing(_Removed(handle))


class _Removed:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def close(self) -> None:
        self._handle.remove()


@pytest.mark.parametrize("way", ["lookup", "assistant"])
@pytest.mark.parametrize("kind", KINDS)
def test_assisted_decoding_continues_after_loaded_tokens(open_tier: Open, kind: str, way: str) -> None:
    model = model_of(kind)
    pattern = prompt(1, 12)
    row = (pattern * 8)[:90]
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[0] * 5 + row]),
        "attention_mask": torch.tensor([[0] * 5 + [1] * 90]),
    }
    options = NEW | {"do_sample": False, "eos_token_id": 9999}  # no token; transformers 5.0 needs one to look up
    if way == "lookup":
        options["prompt_lookup_num_tokens"] = 4
    else:
        torch.manual_seed(3)
        options["assistant_model"] = model_of(kind)  # its guesses are right …
        with torch.no_grad():
            options["assistant_model"].get_output_embeddings().weight[3 : VOCAB // 2] *= 0.9  # … often
    expected = without_kvtier(model, batch, options)
    assert torch.equal(expected, model.generate(**batch, **NEW, do_sample=False))
    kv = open_tier(model, variant="passes are noted")
    assert kv._why_padding_shows is None  # has passes of its own, once
    prepare = model.prepare_inputs_for_generation
    for num_cached in (0, 80):
        seen: list[int] = []
        with lengths_of_passes(model, seen):
            assert torch.equal(kv.generate(**batch, **options), expected)
        assert kv.num_cached_tokens == num_cached
        rest = 90 - num_cached  # columns of padding need no pass, either
        assert rest <= seen[0] < rest + 30  # and guesses
        assert len(seen) > 1
    assert model.prepare_inputs_for_generation == prepare
    # What was rejected is not in the cache any more: the answer is kept, too.
    assert assert_exact(kv, model, expected[0, 5:].tolist()) == (90 + 24 - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_an_assisted_answer_after_a_hit_is_kept_without_a_variant(open_tier: Open, way: str) -> None:
    model = model_of("llama")
    tokens = torch.tensor([(prompt(1, 12) * 8)[:90]])
    options: dict[str, Any] = NEW | {"do_sample": False, "eos_token_id": 9999}
    options |= {"prompt_lookup_num_tokens": 4} if way == "lookup" else {"assistant_model": model_of("llama")}
    kv = open_tier(model)
    kv.generate(tokens[:, :50], **NEW, do_sample=False)
    answer = kv.generate(tokens, **options)
    assert kv.num_cached_tokens == 50 // BLOCK * BLOCK
    assert kv._is_sure  # what is put on the model for the call is no change of it
    assert assert_exact(kv, model, answer[0].tolist()) == (90 + 24 - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("ignores", [False, True])
def test_a_models_own_way_to_prepare_inputs_continues_after_a_hit_or_begins_anew(
    open_tier: Open, ignores: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Phi-3's and Gemma 3's, among others, take the length as one of many options."""
    model = model_of("llama")
    own = type(model).prepare_inputs_for_generation

    def prepare(self: Any, input_ids: Any, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if ignores and kwargs.get("is_first_iteration"):
            kwargs["next_sequence_length"] = None
        return own(self, input_ids, cache=cache, attention_mask=attention_mask, **kwargs)

    tokens = torch.tensor([(prompt(1, 12) * 8)[:90]])
    options: dict[str, Any] = NEW | {"do_sample": False, "eos_token_id": 9999, "prompt_lookup_num_tokens": 4}
    expected = model.generate(tokens, **options)
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    kv = open_tier(model, variant="with its own way")
    kv.generate(tokens[:, :50], max_new_tokens=1, do_sample=False)
    assert torch.equal(kv.generate(tokens, **options), expected)
    assert kv.num_cached_tokens == (0 if ignores else 48)
    assert ("begins at a prompt's start" in caplog.text) == ignores
    assert assert_exact(kv, model, expected[0].tolist()) == (48 if ignores else (90 + 24 - 1) // BLOCK * BLOCK)


def test_what_an_adapter_library_put_on_the_model_stays_there(open_tier: Open) -> None:
    model = model_of("llama")
    own, num_prepared = model.prepare_inputs_for_generation, 0

    @functools.wraps(own)
    def adapted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_prepared
        num_prepared += 1
        return own(*arguments, **options)

    model.prepare_inputs_for_generation = adapted
    tokens = torch.tensor([prompt(1, 90)])
    kv = open_tier(model, variant="adapted")
    for num_cached in (0, 80):
        kv.generate(tokens, **NEW, do_sample=False, prompt_lookup_num_tokens=4)
        assert kv.num_cached_tokens == num_cached
        assert num_prepared > 0
    assert model.prepare_inputs_for_generation is adapted


@pytest.mark.parametrize("padded", brief([True], [False, True]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_computed_in_chunks_is_found_and_kept(open_tier: Open, kind: str, padded: bool) -> None:
    model = model_of(kind)
    rows = [prompt(1, 90), prompt(2, 61 if padded else 90)]
    batch = left_padded(rows)
    options = GREEDY | {"prefill_chunk_size": 7}
    expected = without_kvtier(model, batch, options)
    assert torch.equal(expected, model.generate(**batch, **GREEDY))
    kv = open_tier(model)
    goes_on = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
    hit = [77, 48] if padded else [80, 80]
    for by_row in ([0, 0], hit if goes_on else []):
        assert torch.equal(kv.generate(**batch, **options), expected)
        assert kv.cached_tokens_by_row in (by_row, [])
    for row in rows:
        assert assert_exact(kv, model, row) == len(row) // BLOCK * BLOCK
    assert torch.equal(kv.generate(**batch, **GREEDY), expected)
    assert kv.cached_tokens_by_row == hit


WAYS = [{}, *brief([], [{"num_beams": 3}]), {"num_return_sequences": 2, "do_sample": True}]


def backends() -> list[Any]:
    """The quantized caches of this transformers that can run here."""
    found = []
    for backend, package, settings in (
        ("fp8", "torch", {}),
        ("quanto", "optimum.quanto", {"nbits": 4, "q_group_size": 16, "residual_length": 16}),
        ("hqq", "hqq", {"nbits": 4, "q_group_size": 16, "residual_length": 16, "axis_key": 1, "axis_value": 1}),
    ):
        is_old = backend == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer")
        missing = is_old or importlib.util.find_spec(package.partition(".")[0]) is None
        reason = f"needs {package}" if not is_old else "needs a newer transformers"
        marks = [pytest.mark.skip(reason=reason)] if missing else []
        found.append(pytest.param({"backend": backend, **settings}, id=backend, marks=marks))
    return found


@pytest.mark.parametrize("settings", backends())
@pytest.mark.parametrize("kind", brief(["llama"], ["llama", "qwen3"]))
@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_a_quantized_cache_is_made_of_loaded_tokens_and_gives_away_exact_ones(
    open_tier: Open, kind: str, settings: dict[str, Any], ways: dict[str, Any]
) -> None:
    model = model_of(kind)
    rows = [prompt(1, 90), prompt(2, 90)]
    batch = {"input_ids": torch.tensor(rows)}
    plain = {**NEW, "do_sample": False, **ways}
    options = {**plain, "cache_implementation": "quantized", "cache_config": settings}
    expected = answer(model.generate, batch, options)
    # Rounding changes the text: exact KV in place of rounded ones would show.
    assert not torch.equal(expected, answer(model.generate, batch, plain))
    kv = open_tier(model)
    for num_cached in (0, 80):
        assert torch.equal(answer(kv.generate, batch, options), expected)
        assert kv.num_cached_tokens == num_cached
        # What is kept is the prompt, exact. Of the answer nothing is.
        for row in expected[:: len(expected) // 2].tolist():
            assert assert_exact(kv, model, row) == 80
    # Calls with a plain cache find it, and calls with a quantized cache find theirs.
    other = {"input_ids": torch.tensor([prompt(3, 90), rows[1]])}
    assert torch.equal(answer(kv.generate, other, plain), answer(model.generate, other, plain))
    assert torch.equal(answer(kv.generate, other, options), answer(model.generate, other, options))
    assert kv.num_cached_tokens == 80


REFUSED = [
    ({"cache_implementation": "static"}, "a dynamic and a quantized cache work"),
    ({"use_cache": False}, "leave it out, the text is the same"),
    ({"past_key_values": transformers.DynamicCache()}, "leave it out, or use load() and store()"),
    ({"cache": transformers.DynamicCache()}, "leave it out, or use load() and store()"),
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "or call model.generate() for such outputs"),
    ({"custom_generate": "x"}, "greedy, sampled, beam, assisted and prompt lookup decoding work"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "greedy, sampled, beam, assisted and prompt lookup decoding work"),
    ({"num_beam_groups": 2, "num_beams": 2}, "leave it at 1, num_beams alone works"),
    ({"pixel_values": torch.ones(1, 3, 4, 4)}, "pixel_values: KV that depends on more than the tokens; leave it out"),
    ({"mm_encoder_outputs": {"image": [torch.ones(1)]}}, "prompts of tokens alone work"),
    ({"is_causal": False}, "is_causal: KV that depends on more than the tokens; leave it out"),
    ({"position_ids": torch.arange(40)[None]}, "leave it out if it changes nothing; prompts of tokens alone work"),
    (
        {"cache_implementation": "quantized", "prefill_chunk_size": 8},
        "prefill_chunk_size rounds parts of a prompt in a quantized cache; leave one of both out",
    ),
    (
        {"cache_implementation": "quantized", "attention_mask": torch.tensor([[0] * 5 + [1] * 35])},
        "pass rows of one length together, or leave cache_implementation out",
    ),
]


@pytest.mark.parametrize(("options", "way_out"), REFUSED, ids=lambda value: "-".join(value)[:40])
def test_what_is_refused_is_named_with_the_way_out(
    open_tier: Open,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    way_out: str,
) -> None:
    model = model_of("llama")
    tokens = torch.tensor([prompt(1, 40)])
    kv: KVTier = open_tier(model)
    kv.generate(tokens, **GREEDY)
    given: list[Any] = []
    monkeypatch.setattr(model, "generate", lambda ids, **options: given.append((ids, options)))
    for _ in range(2):
        kv.generate(tokens, **{**GREEDY, **options})
    # `model.generate` had the call as it was, twice; one line told why nothing of it is kept.
    assert [ids is tokens for ids, _ in given] == [True, True]
    assert all(one.keys() == {**GREEDY, **options}.keys() for _, one in given)
    assert given_cache(options)[1] or not any(given_cache(one)[1] for _, one in given)
    [warning] = [record.message for record in caplog.records if record.name == adapter._log.name]
    assert way_out in warning
    assert kv.stats()['kvtier_miss_total{reason="unsupported"}'] == 2 * (40 // BLOCK)
