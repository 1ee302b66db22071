"""Every family the engine runs, by the configurations of docs/models.md: logits near transformers', and exact bits."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from _architectures import ARCHITECTURES, Architecture
from extent import ALL, brief
from tiny_models import prompt

from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import _NOT_EXACT, PAGED, Model
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.errors import ConfigError

KEEP = SamplingParams(max_tokens=6, ignore_eos=True, keep_logits=True)


def kind_of(architecture: Architecture) -> str:
    config = architecture.make_config()
    return str(config.model_type) if config is not None else ""


def run() -> dict[str, Architecture]:
    return {one.name: one for one in ARCHITECTURES if kind_of(one) in PAGED}


RUN = run() if ALL else {one.name: one for one in ARCHITECTURES}  # to ask for the kind of each takes a second
# Chunks, soft caps, shared layers, sinks, RoPE by length, latents, experts, heads repeated, no RoPE, positions learned.
NEAR = brief(["llama4", "gemma3n", "gpt-oss", "phi3-long", "deepseek-v3-moe", "falcon", "qwen2-vl"], RUN)
EXACT = [name for name, one in RUN.items() if kind_of(one) not in _NOT_EXACT] if ALL else []


def engine_of(name: str, dtype: str = "float32", **options: Any) -> Engine:
    """The weights of `RUN[name].make_model()` in our hands."""
    chosen: dict[str, Any] = {"num_blocks": 96, "max_num_seqs": 4, **options}
    settings = EngineConfig(**chosen)
    return Engine.from_config(RUN[name].make_config(), settings, dtype=dtype)


def test_every_family_has_a_row() -> None:
    assert {kind_of(one) for one in run().values()} == set(PAGED)


@pytest.mark.parametrize("name", NEAR)
def test_logits_and_text_are_those_of_plain_transformers(name: str) -> None:
    """Cut in chunks, beyond every window and chunk, and again from L1."""
    module = RUN[name].make_model()
    module.set_attn_implementation("eager")
    engine = engine_of(name, max_num_batched_tokens=53)
    tokens = prompt(1, 150)
    for num_l1_tokens in (0, 149):
        [answer] = engine.generate([tokens], KEEP)
        with torch.inference_mode():
            logits = module(torch.tensor([tokens + answer.token_ids[:-1]]), use_cache=False).logits[0, 149:]
        assert answer.num_l1_tokens == num_l1_tokens
        assert logits.argmax(-1).tolist() == answer.token_ids
        found = torch.stack([torch.from_numpy(row) for row in answer.logits])
        assert float((found - logits).abs().max()) < 1e-4 * max(1.0, float(logits.abs().max()))
    engine.pool.check()


@pytest.mark.parametrize(
    ("name", "dtype"),
    brief([("phi3-long", "float32"), ("gpt2", "bfloat16")], [*product(EXACT, ["float32", "bfloat16"])]),
)
def test_exact_bits_do_not_depend_on_the_packing(name: str, dtype: str) -> None:
    prompts = [prompt(1, 90), prompt(2, 17), [*prompt(1, 70), 5, 6, 7]]

    def bits(engine: Engine, texts: list[list[int]]) -> list[bytes]:
        return [np.stack(answer.logits).tobytes() for answer in engine.generate(texts, KEEP)]

    options: dict[str, Any] = {"exact": True, "exact_rows": 128}
    alone = engine_of(name, dtype, enable_prefix_caching=False, **options)
    cold = [bits(alone, [tokens])[0] for tokens in prompts]
    cut = engine_of(name, dtype, max_num_batched_tokens=37, block_size=8, **options)
    assert bits(cut, prompts) == cold
    assert bits(cut, prompts) == cold  # from L1
    assert cut.stats["l1_tokens"] > 150


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "an expert's rows depend on what is packed together"),
        ("deepseek-v3", "a context's latents are expanded together, and its length changes the last bits"),
        ("bloom", "transformers' own attention of this kind has no tiles"),
    ],
)
def test_what_has_no_exact_mode_says_why(name: str, reason: str) -> None:
    assert _NOT_EXACT[kind_of(RUN[name])] == reason
    with pytest.raises(ConfigError, match=f"{reason}; leave exact off"):
        engine_of(name, exact=True)


def test_llama_4_ends_where_far_queries_would_be_scaled() -> None:
    """transformers counts those positions by a cache of its own; below them the scale is 1."""
    row = RUN["llama4"]
    near = replace(row, options={**row.options, "floor_scale": 100})
    assert Model.from_config(near.make_config()).max_model_len == 99
    assert Model.from_config(row.make_config()).max_model_len == 2048


def test_phi_3_with_long_factors_ends_where_these_begin() -> None:
    assert Model.from_config(RUN["phi3-long"].make_config()).max_model_len == 1024


@pytest.mark.parametrize(("name", "kind"), [("gemma2", "gemma2"), ("llava", "llava"), ("deepseek-v3", "deepseek_v3")])
def test_segments_are_refused_for_layers_that_no_blend_supports(name: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"model kind '{kind}': a blend supports the layers of llama, .*; set them"):
        engine_of(name, segments="on")
