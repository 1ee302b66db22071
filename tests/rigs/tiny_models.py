"""Tiny random models of every family, and prompts, for the engine's stories."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # logits far enough apart that greedy text is a fair test
}

FAMILIES = ("llama", "qwen2", "qwen2-mixed", "qwen3", "mistral", "mistral-window")


def config_of(family: str) -> PretrainedConfig:
    """A fresh config; "-window" slides over 24 tokens, "-mixed" does so in two of three layers."""
    if family == "llama":
        return LlamaConfig(**SIZES)
    if family == "qwen2":
        return Qwen2Config(**SIZES)
    if family == "qwen2-mixed":
        return Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    if family == "qwen3":
        return Qwen3Config(**SIZES, head_dim=32)
    return MistralConfig(**SIZES, sliding_window=24 if family == "mistral-window" else None)


def plain(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The same weights as `Model.from_config(config_of(family), seed=seed)`, in transformers' own hands."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        module: torch.nn.Module = auto.from_config(config_of(family), dtype=dtype, attn_implementation="sdpa")
    return module.train(False)


@torch.inference_mode()
def plain_logits(module: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab], one forward over all of them."""
    logits: torch.Tensor = module(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return tokens
