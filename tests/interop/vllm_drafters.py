"""Tiny drafters for the rig's Llama: random small models, EAGLE heads, and one that guesses mostly right."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm_rig import config_of, make_checkpoint


def let_vllm_register_its_cpu_kernels() -> None:
    """vLLM looks for kernels in all modules, and stumbles over functions of llvmlite, which n-gram drafting imports."""
    import vllm.triton_utils.dispatcher as dispatcher

    def variables(value: Any) -> dict[str, Any]:
        found = value.__dict__
        return dict(found) if isinstance(found, dict) or hasattr(found, "keys") else {}

    dispatcher.vars = variables


def make_drafter(method: str, path: Path, model: Path) -> dict[str, Any]:
    """vLLM's `speculative_config` with a drafter of this kind for the Llama checkpoint `model`.

    "near" is a draft model whose guesses are right more often than not. The others' are wrong nearly always.
    """
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "model": str(path)}
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if method == "draft_model":
        make_checkpoint("llama", path, seed=5)
        return asked
    if method == "near":
        transformers.LlamaConfig.from_pretrained(model).save_pretrained(path)
        weights = load_file(model / "model.safetensors")
        noise = torch.Generator().manual_seed(7)
        for name, tensor in weights.items():
            if "mlp" in name:
                tensor += 0.002 * torch.randn(tensor.shape, generator=noise)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return {**asked, "method": "draft_model"}
    _make_head(method, path)
    return asked


def _make_head(method: str, path: Path) -> None:
    """One decoder layer that reads the model's hidden states beside the embedding of the next token."""
    config = config_of("llama")
    config.num_hidden_layers = 1
    config.architectures = ["LlamaForCausalLM"]
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        weights = dict(transformers.LlamaForCausalLM(config).state_dict())
    hidden = config.hidden_size

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    kept = {name.removeprefix("model."): tensor.clone() for name, tensor in weights.items()}
    if method == "eagle":
        for name in ("layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"):
            del kept[name]
        kept["fc.weight"] = drawn(hidden, 2 * hidden)
    else:
        for part in "qkv":
            name = f"layers.0.self_attn.{part}_proj.weight"
            kept[name] = drawn(kept[name].shape[0], 2 * hidden)
        kept["layers.0.hidden_norm.weight"] = torch.ones(hidden)
        kept["fc.weight"] = drawn(hidden, 3 * hidden)
        del kept["embed_tokens.weight"]
        config.draft_vocab_size = config.vocab_size
        config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
    config.save_pretrained(path)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
