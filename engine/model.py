"""A causal language model by transformers, its attention redirected to our paged pool by one registered function."""

import copy
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvtier.connector.models import identity_of, kv_shape, name_of
from kvtier.connector.segments import PAGED_ATTENTION, Attention
from kvtier.engine.config import EngineConfig
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import DTYPE_BYTES, KVShape, ModelIdentity

_DENSE: Final = (
    "cohere", "cohere2", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "llama",
    "ministral", "mistral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
_EXPERTS: Final = ("gpt_oss", "llama4_text", "mixtral", "olmoe", "phimoe", "qwen3_moe")
SUPPORTED: Final = (*_DENSE, *_EXPERTS)  # config.model_type


class Model:
    """Weights and config on one device, in inference mode. The families of `SUPPORTED`, unquantised."""

    def __init__(self, module: PreTrainedModel, name: str) -> None:
        self.module = module.train(False).requires_grad_(False)
        self.config: PretrainedConfig = module.config
        self.name = name
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = self.config.num_hidden_layers
        self.num_heads: int = self.config.num_attention_heads
        self.num_kv_heads: int = getattr(self.config, "num_key_value_heads", None) or self.num_heads
        self.head_dim: int = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.num_heads
        self.max_model_len: int = self.config.max_position_embeddings
        if getattr(self.config, "attn_temperature_tuning", False):
            self.max_model_len = min(self.max_model_len, _without_temperature(module))

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: str = "auto", device: str = "cpu") -> Self:
        """Load a local checkpoint directory; nothing is ever fetched. ConfigError where it cannot be served.

        `device` is torch's name of one, or "auto": a GPU where there is one.
        """
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model {str(path)!r}: no config.json there; give a local checkpoint directory")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            _require_supported(config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=_dtype_of(config, dtype),
                attn_implementation=PAGED_ATTENTION,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"model {str(path)!r}: {reason}") from error
        module, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(f"model {str(path)!r}: the checkpoint lacks {len(missing)} weights, {missing[0]} first")
        return cls(module.to(_device_of(device)), name_of(directory))

    @classmethod
    def from_config(cls, config: PretrainedConfig, *, seed: int = 0, dtype: str = "auto", device: str = "cpu") -> Self:
        """Random weights: equal for equal config, seed and dtype. ConfigError for an unsupported model kind."""
        _require_supported(config)
        config = copy.deepcopy(config)  # the caller's next model would switch our attention off
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auto: Any = AutoModelForCausalLM  # untyped
            module = auto.from_config(config, dtype=_dtype_of(config, dtype), attn_implementation=PAGED_ATTENTION)
        return cls(module.to(_device_of(device)), f"{config.model_type}-random-{seed}")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        generation = getattr(self.module, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    def shape(self, block_size: int) -> KVShape:
        return kv_shape(self.module, block_size)

    def identity(self, config: EngineConfig) -> ModelIdentity:
        """What this model's KV depends on. Reads all weights once.

        ConfigError for RoPE that depends on the length, and for experts in `exact` mode.
        """
        if config.exact and (kind := self.config.model_type) in _EXPERTS:
            fix = "an expert's rows depend on what is packed together; leave exact off"
            raise ConfigError(f"exact, model kind {kind!r}: {fix}")
        return identity_of(
            self.module,
            self.name,
            self.shape(config.block_size),
            hash_scheme=config.hash_scheme,
            epoch=config.epoch,
            exact_rows=config.exact_rows if config.exact else None,
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged: Attention
    ) -> torch.Tensor:
        """Logits `[len(rows), vocab]` of those rows; `token_ids` and `positions` are `[1, T]`, packed sequences."""
        output = self.module(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows, paged=paged
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _without_temperature(module: PreTrainedModel) -> int:
    """Switch off Llama 4's scaling of queries at far positions; the tokens up to which it is 1 in any case.

    transformers counts these positions by its own cache, which is not used here.
    """
    parts: Any = module.modules()
    for part in parts:
        if hasattr(part, "attn_temperature_tuning"):
            part.attn_temperature_tuning = False
    floor: int = module.config.floor_scale
    return floor - 1


def _require_supported(config: PretrainedConfig) -> None:
    if config.model_type not in SUPPORTED:
        fix = "use one of docs/models.md here, or KVTier for transformers, vLLM or SGLang, which take more"
        raise ConfigError(f"model kind {config.model_type!r}: this engine does not run it; {fix}")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError("quantization_config: this engine runs unquantised weights; choose such a checkpoint")


def _device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigError(f'device {name!r}: {str(error).partition(chr(10))[0]}; use "auto"') from error
    return device


def _dtype_of(config: PretrainedConfig, dtype: str) -> torch.dtype:
    if dtype == "auto":
        return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r}: use one of auto, {', '.join(DTYPE_BYTES)}")
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen
