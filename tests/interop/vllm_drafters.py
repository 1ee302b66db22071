"""Tiny drafters: random small models, EAGLE and Medusa heads, one that guesses mostly right, and a model with MTP."""

import json
from pathlib import Path
from types import SimpleNamespace
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


class SuffixCache:
    """Drafts what followed the last two tokens before: in place of Arctic Inference's, which is not installed here."""

    def __init__(self, **_: Any) -> None:
        self.active_requests = dict[str, list[int]]()
        self.cached_requests = set[str]()

    def start_request(self, request: str, tokens: Any) -> None:
        self.active_requests[request] = [int(token) for token in tokens]

    def add_active_response(self, request: str, tokens: list[int]) -> None:
        self.active_requests[request] += tokens

    def stop_request(self, request: str) -> None:
        del self.active_requests[request]

    def speculate(self, request: str, pattern: Any, max_spec_tokens: int, **_: Any) -> SimpleNamespace:
        """Up to so many tokens; none if the pattern has no like."""
        said, last = self.active_requests[request], [int(token) for token in pattern[-2:]]
        found = (end for end in range(len(said) - 1, 1, -1) if said[end - 2 : end] == last)
        end = next(found, len(said))
        return SimpleNamespace(token_ids=said[end : end + max_spec_tokens])


def make_drafter(method: str, path: Path, model: Path) -> dict[str, Any]:
    """vLLM's `speculative_config` with a drafter of this kind for the Llama checkpoint `model`.

    "near" is a draft model whose guesses are right more often than not. The others' are wrong nearly always.
    """
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "model": str(path)}
    if method == "suffix":
        return {"method": "suffix", "num_speculative_tokens": 3}
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
    if method == "medusa":
        _make_medusa(path)
    else:
        _make_head(method, path)
    return asked


def make_mtp_checkpoint(path: Path) -> Path:
    """A MiMo: a Qwen 2 with one more layer that drafts (MTP), in the same checkpoint. Its weights are random."""
    llama = config_of("llama").to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "initializer_range")
    shape = {name: llama[name] for name in (*sizes, *more)}
    config = transformers.Qwen2Config(**shape, tie_word_embeddings=False)
    longer = transformers.Qwen2Config(**shape | {"num_hidden_layers": config.num_hidden_layers + 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        weights = dict(transformers.Qwen2ForCausalLM(longer).state_dict())
    config.num_nextn_predict_layers = 1
    config.architectures = ["MiMoForCausalLM"]
    moved = f"model.layers.{config.num_hidden_layers}."
    kept = {name.replace(moved, "model.mtp_layers.0."): tensor.clone() for name, tensor in weights.items()}
    ones, hidden = torch.ones(config.hidden_size), config.hidden_size
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        kept[f"model.mtp_layers.0.{norm}.weight"] = ones.clone()
    drawn = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(4))
    kept["model.mtp_layers.0.input_proj.weight"] = 0.2 * drawn
    config.save_pretrained(path)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def _make_medusa(path: Path) -> None:
    """Three heads that guess from the model's last hidden state. They keep no KV."""
    config, generator = config_of("llama"), torch.Generator().manual_seed(3)
    hidden, heads = config.hidden_size, range(3)
    weights = dict[str, torch.Tensor]()
    for head in heads:
        weights[f"blocks.{head}.layers.0.weight"] = 0.2 * torch.randn(hidden, hidden, generator=generator)
        weights[f"lm_heads.{head}.weight"] = 0.2 * torch.randn(config.vocab_size, hidden, generator=generator)
    sizes = {"hidden_size": hidden, "vocab_size": config.vocab_size, "num_heads": len(heads), "num_hidden_layers": 1}
    asked = {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes}
    (path / "config.json").write_text(json.dumps(asked))
    save_file(weights, path / "model.safetensors", {"format": "pt"})


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
