"""Families whose blocks are not K and V of every layer, or that compute one by one: through every tier, as plain text.

MLA's blocks hold latents, Gemma 3n's those layers that have K and V of their own, and Falcon's the repeated heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _architectures import ARCHITECTURES, VOCAB, Architecture
from extent import brief
from small_engines import end, settled

from kvtier.connector.local import LocalConnector
from kvtier.connector.transformers import KVTier
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Completion
from kvtier.tiers.config.config import Config

ROWS = {one.name: one for one in ARCHITECTURES}
LATENT = ("deepseek-v2", "deepseek-v3", "deepseek-v3-moe", "minicpm3", "glm4-moe-lite", "longcat-flash")
OWN = ("gemma4", "gemma4-shared", "deepseek-v3.2", "mimo-v2-flash")  # layers that differ: transformers' own cache
KINDS = (*LATENT, *OWN, "gemma3n", "falcon", "falcon-7b", "bloom", "mpt", "qwen2-vl")
# A latent, layers that differ and share, no RoPE and one by one; test_families.py has the others' texts.
SHOWN = [("deepseek-v3", "layerwise"), ("gemma4-shared", "async"), ("bloom", "layerwise")]
BLOCK = 16


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCAB - 16, length).tolist()  # no token of an image
    return tokens


@cache
def truth(name: str) -> Any:
    """The model by transformers alone."""
    return ROWS[name].make_model()


def said(name: str, tokens: list[int], num_tokens: int = 6) -> list[int]:
    """What transformers answers, without any cache: the whole text anew for every token."""
    texts = list(tokens)
    with torch.inference_mode():
        for _ in range(num_tokens):
            texts.append(int(truth(name)(torch.tensor([texts]), use_cache=False).logits[0, -1].argmax()))
    return texts[len(tokens) :]


def config_of(home: Path | None, **cache_options: Any) -> Config:
    sections: dict[str, Any] = {"host": {"size": "32MiB"}}
    if home is not None:
        sections["file"] = {"path": str(home), "size": "64MiB", "deadline": "60s"}
    cache_section = {"block_size": BLOCK, "load_or_recompute": "load", "prefetch_deadline": "60s", **cache_options}
    return Config(**sections, cache=cache_section)


@contextmanager
def engine_of(model: Architecture | Model, home: Path | None = None, **options: Any) -> Iterator[Engine]:
    chosen: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 96, "max_num_batched_tokens": 53, "max_num_seqs": 4}
    model = Model.from_config(model.make_config()) if isinstance(model, Architecture) else model
    engine = Engine(model, EngineConfig(**chosen | options), LocalConnector.connect(config_of(home)))
    yield engine
    end(engine)


def ask(engine: Engine, *prompts: list[int], num_tokens: int = 6) -> list[Completion]:
    return engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))


@pytest.mark.parametrize(("name", "loading"), brief(SHOWN, [*product(KINDS, ("async", "layerwise"))]))
def test_hits_of_l2_and_of_the_slab_say_what_transformers_says(name: str, loading: str, tmp_path: Path) -> None:
    prompts = [prompt(1, 150), prompt(2, 70)]
    parted = [*prompt(1, 90), *prompt(3, 9)]  # leaves the first prompt inside a block
    expected, parted_text = [said(name, tokens) for tokens in prompts], said(name, parted)
    assert len({tuple(text) for text in (*expected, parted_text)}) == 3  # else equal answers prove nothing
    with engine_of(ROWS[name], tmp_path, loading=loading) as engine:
        assert [answer.token_ids for answer in ask(engine, *prompts)] == expected
        settled(engine)
        engine.pool.reset()
        answers = ask(engine, *prompts)
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.num_external_tokens for answer in answers] == [149, 69]  # tails, too
    with engine_of(ROWS[name], tmp_path, loading=loading) as engine:
        answers = ask(engine, *prompts)
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.num_external_tokens for answer in answers] == [144, 64]  # the slab has whole blocks alone
        engine.pool.reset()
        [answer] = ask(engine, parted)
        assert answer.token_ids == parted_text
        assert answer.num_external_tokens == 90


@pytest.mark.parametrize("preemption", ["offload", *brief([], ["recompute"])])
@pytest.mark.parametrize("name", brief(["bloom"], ["deepseek-v3-moe", "gemma3n", "bloom"]))
def test_preempted_requests_say_the_same(name: str, preemption: str) -> None:
    prompts = [prompt(seed, 60) for seed in range(3)]
    with engine_of(ROWS[name], num_blocks=14, preemption=preemption, partial_blocks=False) as engine:
        answers = ask(engine, *prompts, num_tokens=24)
        assert engine.stats["preempted"]
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == said(name, tokens, 24)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "qwen3.5", *brief([], ["deepseek-v2", "falcon", "gemma3n", "mamba2", "jamba", "gemma4"])]
)
def test_kvtier_for_transformers_and_the_engine_find_each_others_blocks(name: str, tmp_path: Path) -> None:
    """One checkpoint, one slab: equal names, equal bytes."""
    ROWS[name].save(tmp_path / "model")
    theirs, ours = prompt(1, 150), prompt(2, 150)
    module: Any = type(truth(name)).from_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with KVTier(module, config_of(tmp_path / "slab")) as kv:
        kv.generate(torch.tensor([theirs]), **options)
        assert kv.drain()
    with engine_of(Model.from_pretrained(tmp_path / "model"), tmp_path / "slab") as engine:
        answers = ask(engine, theirs, ours)
        assert [answer.num_external_tokens for answer in answers] == [144, 0]
        assert [answer.token_ids for answer in answers] == [said(name, theirs), said(name, ours)]
    with KVTier(module, config_of(tmp_path / "slab")) as kv:
        text = kv.generate(torch.tensor([ours]), **options)[0].tolist()
        assert kv.num_cached_tokens == 144
        assert text == [*ours, *said(name, ours)]


@pytest.mark.parametrize("name", brief(["deepseek-v3", "longcat-flash"], LATENT))
def test_a_latent_is_what_a_block_holds_and_every_part_of_it_counts(name: str) -> None:
    with engine_of(ROWS[name]) as engine:
        config: Any = engine.model.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        assert engine.shape.block_shape == (4, 1, BLOCK, 1, width)
        assert engine.identity.kind == "mla"
        tokens = prompt(1, 64)
        [first] = engine.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True))
        blocks = engine.pool.tensor.clone()
        for part in (slice(0, config.kv_lora_rank), slice(config.kv_lora_rank, width)):
            engine.pool.tensor[:, :, :, :, :, part] *= 2  # L1's blocks: what is found there is wrong now
            [again] = engine.generate([tokens], SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True))
            assert again.num_l1_tokens == 63
            assert abs(again.logits[0] - first.logits[0]).max() > 1e-2
            engine.pool.tensor.copy_(blocks)


def test_a_family_one_by_one_has_the_same_bits_however_it_is_packed() -> None:
    """Nothing of other sequences is in a forward of its own."""
    keep = SamplingParams(max_tokens=5, ignore_eos=True, keep_logits=True)
    with engine_of(ROWS["bloom"], max_num_batched_tokens=512) as engine:
        prompts = [prompt(seed, 40 + seed) for seed in range(4)]
        together = engine.generate(prompts, keep)
        engine.pool.reset()
        engine.reset_cache()
        for tokens, answer in zip(prompts, together, strict=True):
            [alone] = engine.generate([tokens], keep)
            assert alone.num_l1_tokens == alone.num_external_tokens == 0
            assert all((a == b).all() for a, b in zip(alone.logits, answer.logits, strict=True))
    assert VOCAB == len(answer.logits[0])
