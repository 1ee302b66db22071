"""`KVTier.generate` with options drawn at random says what `model.generate` says: text, scores, or the same error."""

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from extent import brief
from kv_tier_rig import KINDS, Open, left_padded, model_of
from tiny_models import VOCAB, prompt

STEMS = [prompt(70 + i, 90) for i in range(3)]
NUM_DRAWS = brief(24, 700)


class Lot:
    """One draw: a batch and options of `generate`, by its seed alone."""

    def __init__(self, seed: int) -> None:
        self.seed, self._random = seed, random.Random(seed)
        self.kind = self._random.choice(KINDS)
        self.options: dict[str, Any] = {"max_new_tokens": self._random.randint(1, 20), "pad_token_id": 0}
        self.batch = self._batch()
        self._draw()

    def __str__(self) -> str:
        shape = tuple(self.batch["input_ids"].shape)
        return f"draw {self.seed}, {self.kind}, prompts {shape}: {self.options}"

    def _may(self, name: str, *values: Any, often: float = 0.2) -> None:
        """Give the option with one of the values, that often."""
        if self._random.random() < often:
            self.options[name] = self._random.choice(values)

    def _batch(self) -> dict[str, torch.Tensor]:
        """One to three prompts that begin like others; of one length, or behind padding."""
        lot, length = self._random, self._random.randint(2, 100)
        lengths = [length] * lot.randint(1, 3)
        if lot.random() < 0.4:
            lengths = [lot.randint(1, 100) for _ in lengths]
        rows = []
        for each in lengths:
            kept = lot.randint(0, min(each, 90))
            rows.append((lot.choice(STEMS)[:kept] + prompt(lot.randint(0, 5), 100))[:each])
        batch = left_padded(rows)
        if lot.random() < 0.1:
            del batch["attention_mask"]  # transformers makes its own of the pad token
        return batch

    def _draw(self) -> None:
        lot, options, may = self._random, self.options, self._may
        tokens = [lot.randrange(1, VOCAB) for _ in range(8)]
        options["do_sample"] = lot.random() < 0.5
        options["eos_token_id"] = lot.choice([None, None, tokens[0], tokens[1:5]])
        may("num_beams", 2, 3, 4)
        may("num_return_sequences", 2, 3)
        may("temperature", 0.7, 1.5, 4.0)
        may("top_k", 1, 5, 40)
        may("top_p", 0.3, 0.95)
        may("min_p", 0.02, 0.3)
        may("typical_p", 0.4, 0.9)
        may("epsilon_cutoff", 3e-4)
        may("eta_cutoff", 3e-4)
        may("top_h", 0.4, often=0.05)
        may("repetition_penalty", 0.8, 1.3, 3.0)
        may("encoder_repetition_penalty", 0.7, 1.5, often=0.1)
        may("no_repeat_ngram_size", 1, 3)
        may("length_penalty", -1.0, 0.0, 2.0)
        may("early_stopping", True, "never")
        may("min_new_tokens", 1, 12)
        may("min_length", 10, 110)
        may("max_length", 40, 130, often=0.1)
        may("bad_words_ids", [[tokens[5]], [tokens[6], tokens[7]]])
        may("suppress_tokens", tokens[2:4])
        may("begin_suppress_tokens", tokens[4:])
        may("sequence_bias", [[[tokens[0]], 4.0], [[tokens[1], tokens[2]], -4.0]], often=0.1)
        may("forced_bos_token_id", tokens[3], often=0.05)
        may("forced_eos_token_id", tokens[4], often=0.1)
        may("exponential_decay_length_penalty", (4, 1.3), often=0.1)
        may("renormalize_logits", True)
        may("remove_invalid_values", True, often=0.1)
        may("guidance_scale", 1.5, often=0.07)
        may("watermarking_config", transformers.WatermarkingConfig(bias=3.0), often=0.07)
        may("prompt_lookup_num_tokens", 2, 5, often=0.12)
        may("num_assistant_tokens", 2, 7, often=0.1)
        may("prefill_chunk_size", 1, 7, 64, often=0.1)
        may("use_cache", True, False, often=0.1)
        may("cache_implementation", "dynamic", "hybrid", "static", "quantized", often=0.25)
        may("logits_to_keep", 1, often=0.05)
        if lot.random() < 0.12:
            options["assistant_model"] = model_of(self.kind)
        if lot.random() < 0.25:
            options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": lot.random() < 0.5}
        if lot.random() < 0.1:
            stop = transformers.StoppingCriteriaList([_StopAt(lot.randrange(VOCAB))])
            options["stopping_criteria"] = stop
        if options.get("cache_implementation") == "quantized":
            quanto = {"backend": "fp8"}
            options["cache_config"] = quanto


class _StopAt(transformers.StoppingCriteria):
    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self._token


def outcome(generate: Any, lot: Lot) -> Any:
    """The output as (text, scores), or the name of the error that the call raises."""
    torch.manual_seed(lot.seed)
    options = {
        name: value if name == "assistant_model" else copy.deepcopy(value) for name, value in lot.options.items()
    }
    try:
        output = generate(**{name: rows.clone() for name, rows in lot.batch.items()}, **options)
    except (
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        IndexError,
        ImportError,
        KeyError,
    ) as error:
        return type(error).__name__, str(error)[:200]
    if isinstance(output, torch.Tensor):
        return output, ()
    return output.sequences, (*output.scores, *(output.logits or ()))


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected[0], str):
        assert found[0] == expected[0], (found, expected)  # of two mistakes in one call either may be named
        return
    assert not isinstance(found[0], str), found
    assert torch.equal(found[0], expected[0])
    assert len(found[1]) == len(expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.allclose(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")  # transformers warns of options without effect
@pytest.mark.timeout(900)
def test_options_drawn_at_random(open_tier: Open) -> None:
    tiers = {kind: open_tier(model_of(kind), variant=kind) for kind in KINDS}
    found = failed = 0
    for seed in range(NUM_DRAWS):
        lot = Lot(seed)
        kv = tiers[lot.kind]
        before = kv.model.generation_config.to_dict()
        expected = outcome(kv.model.generate, lot)
        failed += isinstance(expected[0], str)
        try:
            for _ in range(2):
                assert_same(outcome(kv.generate, lot), expected)
            assert kv.model.generation_config.to_dict() == before
        except Exception as error:
            raise AssertionError(str(lot)) from error
        found += kv.num_cached_tokens
    assert found > 0
    assert failed < NUM_DRAWS / 2  # options that transformers itself refuses
