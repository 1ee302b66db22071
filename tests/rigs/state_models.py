"""Tiny random models of every kind that keeps recurrent states."""

from typing import Any

import torch
import transformers
from extent import brief
from tiny_models import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
BOTH = ["linear_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"intermediate_size": 128, "state_size": 8}),
    "mamba2": ("Mamba2Config", {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8,
         "use_mamba_kernels": False},
    ),
    "bamba": ("BambaConfig", {**MAMBA2, "mamba_expand": 2, "attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 16}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA2, "mamba_expand": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
         "num_experts_per_tok": 1, "shared_intermediate_size": 32},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16,
         "n_groups": 1, "head_dim": 16},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "layer_types": BOTH, "shared_expert_intermediate_size": 32, "head_dim": 16},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA, "layer_types": BOTH, "head_dim": 16}),
    "kimi-linear": (
        "KimiLinearConfig",
        {"layer_types": BOTH, "linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4,
         "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
         "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "minimax": (
        "MiniMaxConfig",
        {"layer_types": BOTH, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 32, "head_dim": 16},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "zamba2": (
        "Zamba2Config",
        {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 16, "mamba_expand": 2, "mamba_ngroups": 1,
         "n_mamba_heads": 4, "num_mem_blocks": 1, "attention_hidden_size": 128, "attention_head_dim": 32,
         "adapter_rank": 8, "use_mem_eff_path": False},
    ),
}  # fmt: skip
ONE_BY_ONE = ("mamba", "jamba", "minimax")  # transformers takes one token at a time behind a state
COARSE_STEPS = ("nemotron-h", "zamba2")  # … and these differ by 0.1 % between a step and a prompt
FROM_ZERO = ("bamba", "minimax")  # … and it counts positions from 0 in each pass
PURE = ("mamba", "mamba2")  # no K and V at all
SHOWN = brief(("mamba2", "qwen3.5", "minimax"), tuple(CONFIGS))  # one of each class


def config_of(kind: str) -> Any:
    name, options = CONFIGS[kind]
    return getattr(transformers, name)(**{**SIZES, **options})


def model_of(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Random weights, the same for the same kind, dtype and seed."""
    config = config_of(kind)
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    return auto.from_config(config, dtype=dtype).eval()
