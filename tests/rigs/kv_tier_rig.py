"""Calls of `generate` for stories of KVTier: tiny models, batches behind padding, and what a cache should hold."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from extent import brief
from tiny_models import SIZES, VOCAB, config_of
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, RwkvConfig

from kvtier.connector.models import cache_option
from kvtier.connector.transformers import tier_blocks
from kvtier.connector.transformers.adapter import KVTier
from kvtier.tiers.config.config import Config

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
KINDS = brief(("llama", "gemma3"), ("llama", "qwen3", "mistral-window", "gemma3"))  # windows nowhere, or in some
BLOCK = 16
Open = Callable[..., KVTier]


def model_of(kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """Random weights, the same for the same kind and dtype. Windows are 24 tokens; Gemma 3 has them in two of three."""
    if kind == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        sizes: dict[str, Any] = {**SIZES, "head_dim": 16, "sliding_window": 24, "layer_types": layers}
        config: Any = Gemma3TextConfig(**sizes)
    elif kind == "rwkv":
        config = RwkvConfig(vocab_size=VOCAB, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
    else:
        config = config_of(kind)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype, attn_implementation=None if kind == "rwkv" else attention).eval()


@contextmanager
def tiers_over(directory: Path) -> Iterator[Open]:
    """Opens patient tiers over a directory, with blocks of 16 tokens. At the end laws are checked."""
    opened: list[KVTier] = []

    def factory(
        model: Any, host: str = "16MiB", name: str | None = None, variant: str | None = None, **cache: Any
    ) -> KVTier:
        section = {"block_size": BLOCK, "load_or_recompute": "load", "prefetch_deadline": "60s", **cache}
        file = {"path": str(directory), "size": "64MiB", "deadline": "60s"}
        config = Config.load(host={"size": host}, file=file, cache=section)
        opened.append(KVTier(model, config, name=name, variant=variant))
        return opened[-1]

    with patch.object(tier_blocks, "_SEALED", 60.0):
        yield factory
        for kv in opened:
            assert kv.drain()
            if kv._opened is not None:
                kv._opened.check()
            kv.close()
            kv.close()


def restarted(kv: KVTier, open_tier: Open, **options: Any) -> KVTier:
    """Another tier over the same model and directory, as another process opens it."""
    assert kv.drain()
    kv.close()
    return open_tier(kv.model, **options)


def hits(
    kv: KVTier, tokens: torch.Tensor, expected: torch.Tensor | None = None, options: dict[str, Any] = GREEDY
) -> int:
    """How many tokens a call of `generate` finds; its text is what is expected, by default the model's own."""
    text = kv.generate(tokens, **options)
    assert torch.equal(text, kv.model.generate(tokens, **options) if expected is None else expected)
    return kv.num_cached_tokens


def left_padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, Any]:
    """A batch as a tokenizer makes it with `padding_side="left"`: `input_ids` and `attention_mask`."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def kv_of(model: Any, tokens: Sequence[int]) -> list[torch.Tensor]:
    """K and V of every layer, [heads, tokens, dim], as the model computes them of these tokens alone."""
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([list(tokens)]), **cache_option(model, cache))
    layers: Any = cache.layers
    return [states[0] for layer in layers for states in (layer.keys, layer.values)]


def held(kv: KVTier, tokens: Sequence[int]) -> list[torch.Tensor]:
    """K and V of every layer that the tiers hold of these tokens, [heads, tokens, dim]."""
    cache: Any = kv.load(torch.tensor([[*tokens, 1]]))[0]
    return [states[0] for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_exact(kv: KVTier, model: Any, tokens: Sequence[int]) -> int:
    """What the tiers hold of these tokens is their KV, up to the order of sums. Returns how many tokens that are."""
    found = held(kv, tokens)
    for states, expected in zip(found, kv_of(model, tokens), strict=False):
        part = expected[:, : states.shape[1]]
        assert torch.allclose(states, part, atol=2e-4 * float(part.abs().max()), rtol=1e-4)
    return found[0].shape[1] if found else 0


def ids(*rows: list[int]) -> torch.Tensor:
    """A batch of rows of one length."""
    return torch.tensor(rows)
