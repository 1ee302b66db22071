"""KVTier over an adversary's GPU: copies run late and in any order; bytes, names and answers are those of a CPU."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from extent import brief
from gpu_tier_rig import GpuBelow
from kv_tier_rig import GREEDY, Open, hits, left_padded, model_of
from lazy_cuda import LazyCuda
from tiny_models import VOCAB, prompt
from transformers import AutoModelForCausalLM

from kvtier.connector.models import cache_option

ROWS = torch.tensor([prompt(1, 150), prompt(2, 150)])


@pytest.fixture(params=brief([1], range(3)))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuBelow]:
    """Staging holds one, two or five blocks: fewer than a call has."""
    seed = int(request.param)
    cuda = LazyCuda(seed, eager=random.Random(seed).choice([0.0, 0.05, 0.3]))
    yield GpuBelow(cuda, monkeypatch, slots=[1, 2, 5][seed], batches=bool(seed % 2))
    cuda.finish()


def layers_of(cache: Any, num_tokens: int) -> list[torch.Tensor]:
    return [tensor[:, :, :num_tokens] for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("kind", ["llama", *brief([], ["qwen3"]), "gemma3"])
def test_what_a_gpu_stored_it_finds_and_so_does_a_cpu(
    gpu: GpuBelow, open_tier: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = model_of(kind, torch.bfloat16)
    kv = open_tier(model)
    cache: Any = kv.load(ROWS)[0]
    with torch.inference_mode():
        model(ROWS, **cache_option(model, cache))
    kv.store(ROWS, cache)
    expected = [tensor.clone() for tensor in layers_of(cache, 144)]
    with torch.inference_mode():
        for tensor in layers_of(cache, 150):
            tensor.fill_(7)  # the caller's own again: it was gathered before
    assert gpu.num_gathered == 18
    assert kv._blocks._stores == []  # settled: sealed, and found by the next call
    loaded, num_tokens = kv.load(ROWS)
    assert (num_tokens, gpu.num_scattered) == (144, 18)
    assert all(map(torch.equal, layers_of(loaded, 144), expected))
    assert gpu.num_streams == 1
    assert kv.drain()
    kv.close()
    gpu.cuda.finish()
    # The slab's bytes and names are those of a CPU.
    monkeypatch.undo()
    again = open_tier(model)
    loaded, num_tokens = again.load(ROWS)
    assert num_tokens == 144
    assert all(map(torch.equal, layers_of(loaded, 144), expected))


def test_answers_are_a_cpus_turn_after_turn_and_after_padding(gpu: GpuBelow, open_tier: Open) -> None:
    model = model_of("llama")
    texts = [prompt(3, 70), prompt(4, 101)]
    kv = open_tier(model)
    for turn in range(3):
        batch = left_padded(texts)
        expected = model.generate(**batch, **GREEDY)
        assert torch.equal(kv.generate(**batch, **GREEDY), expected)
        assert bool(kv.num_cached_tokens) == bool(turn)
        texts = [[*text, *row[-8:].tolist(), *prompt(9 + turn, 5)] for text, row in zip(texts, expected, strict=True)]
        gpu.cuda.require_clean()
    assert gpu.num_scattered > 0


@pytest.mark.parametrize("kind", ["Lfm2Config", "MambaConfig"])
def test_states_travel_beside_blocks_and_alone(gpu: GpuBelow, open_tier: Open, kind: str) -> None:
    options: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    if kind == "Lfm2Config":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        options |= {**heads, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    else:
        options |= {"state_size": 8}
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(getattr(transformers, kind)(**options, initializer_range=0.2)).eval()
    rows = torch.tensor([prompt(1, 100), prompt(2, 100)])
    expected = model.generate(rows, **GREEDY)
    kv = open_tier(model)
    for cached in (0, 96):
        assert hits(kv, rows, expected) == cached
    assert gpu.num_scattered > 0
    num_states = len(rows) * kv._states._records.num_slots if kv._states is not None else 0
    assert gpu.num_scattered == num_states + (12 if kind == "Lfm2Config" else 0)
