"""A causal language model of transformers, with its attention redirected to the paged pool."""

import copy
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from kvtier.connector.models import cache_option, dtype_of, identity_of, live_model, name_of, rope_limit, weights_of
from kvtier.connector.segments import PAGED_ATTENTION, PackedAttention
from kvtier.connector.transformers import CacheForm, GoingOn, how_it_goes_on, probe_of, require_causal
from kvtier.engine.config import EngineConfig
from kvtier.tiers import ConfigError, RequestError
from kvtier.tiers.naming import KVProbe, KVShape, ModelIdentity, with_lossy

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's expansion: latents and rotated keys, `[1, 1, T, dim]` each, to K and V, `[1, heads, T, head dim]` each."""


class LatentAttention(PackedAttention):
    """Attention over a pool of latents (MLA). transformers' layers pass theirs to `update`, as to a cache.

    A layer expands what `update` returns: this step's tokens. Earlier ones are expanded here, chunk by chunk.
    """

    writes: ClassVar[bool] = False  # `update` did

    def __init__(self, expand: Mapping[int, Expand], *packed: Any) -> None:
        """`expand` has one for each layer; the rest as in `PackedAttention`."""
        super().__init__(*packed)
        self.context = self._expanded
        self._expand = expand
        self._rank = 0  # of a latent; the rest of a row is the rotated key

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's latents and rotated keys, `[1, 1, T, dim]` each, and return them unchanged."""
        self._rank = latent.shape[-1]
        self.write(layer, torch.cat((latent, rotated), -1))
        return latent, rotated

    def _expanded(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        [rows] = self.kv.gather(layer, blocks, num_tokens)
        rows = rows.transpose(0, 1)[None]
        expanded = self._expand[layer](rows[..., : self._rank], rows[..., self._rank :])
        return tuple(states[0].transpose(0, 1) for states in expanded)


class SequenceCache:
    """One sequence's KV in the pool, in place of transformers' cache: for layers that call no attention function.

    `step` has only this sequence's chunk.
    """

    def __init__(self, step: PackedAttention) -> None:
        self._step = step
        [self._span] = step.spans

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's K and V, `[1, kv heads, T, head dim]` each. Returns those of the whole sequence so far."""
        self._step.write(layer, key, value)
        if not self._span.start:
            return key, value
        key, value = self._step.context(layer, self._span.blocks, self._span.end)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._span.start

    def get_query_offset(self, layer: int = 0) -> int:
        """The position of the chunk's first token."""
        return self._span.start

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        return self._span.end, 0


_DENSE: Final = (
    "cohere", "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "glm4", "gpt2", "gpt_neox", "granite",
    "llama", "ministral", "mistral", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
_WITH_VISION: Final = ("gemma3", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")  # prompts are text alone
_EXPERTS: Final = ("gpt_oss", "llama4_text", "mixtral", "olmoe", "phimoe", "qwen3_moe")
_LATENT: Final = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3")  # MLA
_ONE_BY_ONE: Final = ("bloom", "falcon", "mpt")  # their layers call no attention function, so sequences are not packed
PAGED: Final = (*_DENSE, *_WITH_VISION, *_EXPERTS, *_LATENT, *_ONE_BY_ONE)  # config.model_type
_NOT_EXACT: Final = {
    **dict.fromkeys(_EXPERTS, "an expert's rows depend on what is packed together"),
    **dict.fromkeys(_LATENT, "a context's latents are expanded together, and its length changes the last bits"),
    **dict.fromkeys(_ONE_BY_ONE, "transformers' own attention of this kind has no tiles"),
}
_OWN_CACHE: Final = "transformers computes it over a cache of its own, token by token or in chunks"
_TEMPERATURE: Final = "attn_temperature_tuning"
_ENDLESS: Final = 1 << 20  # tokens of a model without K and V, whose memory does not grow with the text


class Model:
    """Weights and config on one device, in inference mode, unquantised.

    Families of `PAGED` attend over blocks of L1. Any other decoder computes each sequence over transformers' own cache.
    """

    def __init__(self, module: PreTrainedModel, name: str) -> None:
        """ConfigError for weights that cannot be read (`weights_of`), and for an unsupported cache."""
        weights_of(module)
        self.module = module.train(False).requires_grad_(False)
        self.config: PretrainedConfig = module.config.get_text_config(decoder=True)
        self.kind: str = module.config.model_type
        self.name = name
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self.vocab_size: int = self.config.vocab_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_model_len: int = min(_longest(self.config), rope_limit(self.config) or sys.maxsize)
        self.has_own_cache = self.kind not in PAGED  # a sequence's rows are also in a transformers cache
        self.one_by_one = self.has_own_cache or self.kind in _ONE_BY_ONE  # `forward` takes one sequence alone
        parts: Any = () if self.has_own_cache else module.modules()
        self.expand: dict[int, Expand] = {
            part.layer_idx: part.expand_kv for part in parts if hasattr(part, "expand_kv")
        }
        self._form, self.probe = _form_of(module, self.kind)
        self._named: tuple[str, str] | None = None  # its weights and configuration, whose KV `probe` is
        self.going_on: GoingOn | None = how_it_goes_on(module, self._form) if self.has_own_cache else None
        if not self._form.layers:
            self.max_model_len = max(self.max_model_len, _ENDLESS)
        if getattr(self.config, _TEMPERATURE, False):
            self.max_model_len = min(self.max_model_len, _without_temperature(module))

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: str = "auto", device: str = "cpu") -> Self:
        """Load a local checkpoint directory, without any download. ConfigError if it cannot be served.

        `device`: torch's name, or "auto": a GPU if there is one.
        """
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model {str(path)!r}: no config.json there; give a local checkpoint directory")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            _require_decoder(config)
            loaded: Any = _auto_of(config).from_pretrained(
                directory,
                config=config,
                dtype=dtype_of(config, dtype),
                attn_implementation=_attention_of(config),
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
        _require_decoder(config)
        config = copy.deepcopy(config)  # the caller's next model would reset our attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auto, attention = _auto_of(config), _attention_of(config)
            module = auto.from_config(config, dtype=dtype_of(config, dtype), attn_implementation=attention)
        return cls(module.to(_device_of(device)), f"{config.model_type}-random-{seed}")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        generation = getattr(self.module, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent states: a prompt continues only at a stored state."""
        return self._form.states is not None

    def usable(self, config: EngineConfig) -> EngineConfig:
        """The settings for this model: without a state there, parts of a prompt are useless."""
        return replace(config, partial_blocks=False, loading="async") if self.has_states else config

    def room(self, num_blocks: int, block_size: int) -> int:
        """Tokens of one sequence that fit such an L1."""
        return num_blocks * block_size if self._form.layers else self.max_model_len

    def form(self, block_size: int) -> CacheForm:
        return replace(self._form, block_size=block_size)

    def shape(self, block_size: int) -> KVShape:
        """A block's shape: K and V of each layer that has its own, MLA's latents, or a flat row of what layers keep."""
        form = self.form(block_size)
        if form.shape is None and not self.has_own_cache:
            kept = "its layers keep rows of different kinds, and where attention is ours a block has one"
            raise ConfigError(f"model kind {self.kind!r}: {kept}; use KVTier for transformers, which keeps them")
        return form.pool_shape

    def identity(self, config: EngineConfig) -> ModelIdentity:
        """Everything that this model's KV depends on. Reads all weights once.

        ConfigError for RoPE of an unknown kind, for a kind without `exact` mode, for hooks and foreign code, and as
        `with_lossy`.
        """
        reason = _OWN_CACHE if self.has_own_cache else _NOT_EXACT.get(self.kind)
        if config.exact and reason is not None:
            raise ConfigError(f"exact, model kind {self.kind!r}: {reason}; leave exact off")
        form = self.form(config.block_size)
        if self.one_by_one:  # else attention is ours
            require_causal(self.module)
        self._live = live_model(self.module, settled=[_TEMPERATURE])
        if self._live.refusal is not None:
            raise ConfigError(f"model {self.name!r}: {self._live.refusal}")
        identity = identity_of(
            self._live,
            self.name,
            form.outline,
            hash_scheme=config.hash_scheme,
            epoch=config.epoch,
            exact_rows=config.exact_rows if config.exact else None,
        )
        self._variant = self._live.variant
        if self._variant is not None:  # adapters that were loaded with it
            digest = hashlib.sha256(identity.revision.encode() + self._variant)
            identity = replace(identity, revision=f"sha256:{digest.hexdigest()}")
        if self._named == (named := (identity.revision, identity.config_digest)):
            self._require_same_kv()
        elif self._named is not None:
            _, self.probe = _form_of(self.module, self.kind)
        self._named = named
        return with_lossy(form.named(identity), config.lossy, form.block_bytes)

    def require_same(self, *, in_pass: bool = False) -> None:
        """RequestError unless the model computes the same as at the last call of `identity`.

        `in_pass`: do not wait for a device.
        """
        live = self._live
        if not live.watch.holds(in_pass=in_pass):
            live.look()
            if live.refusal is None and live.variant == self._variant:
                self._require_same_kv()  # something changed that no name covers
        if live.refusal is not None:
            raise RequestError(f"the engine's model was changed: {live.refusal}")
        if live.variant != self._variant:
            raise RequestError("the engine's weights or adapters are others now; call reset_cache() first")

    def _require_same_kv(self) -> None:
        """RequestError, until it changes again, if the model computes other KV than it did under its name."""
        _, probe = _form_of(self.module, self.kind)
        if self.probe.is_finite and (apart := probe.distance(self.probe)) > probe.tolerance:
            self._live.refuse(f"it computes other KV than when it was named (by {apart:.2g}); start another engine")
            raise RequestError(f"the engine's model was changed: {self._live.refusal}")

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, paged: PackedAttention
    ) -> torch.Tensor:
        """Logits `[len(rows), vocab]` of those rows; `token_ids` and `positions` are `[1, T]`, packed sequences."""
        options: dict[str, Any] = {"input_ids": token_ids, "logits_to_keep": rows, "use_cache": False}
        if self.one_by_one:
            options |= cache_option(self.module, SequenceCache(paged))
        else:
            options |= {"position_ids": positions, "paged": paged}
            if self.expand:
                options |= cache_option(self.module, paged)
        output = self.module(**options)
        logits: torch.Tensor = output.logits[0]
        return logits


def _without_temperature(module: PreTrainedModel) -> int:
    """Switch off Llama 4's scaling of queries at far positions. Returns the tokens up to which it is 1 in any case.

    transformers counts these positions by its own cache, which is not used here.
    """
    parts: Any = module.modules()
    for part in parts:
        if hasattr(part, _TEMPERATURE):
            setattr(part, _TEMPERATURE, False)
    floor: int = module.config.floor_scale
    return floor - 1


def _form_of(module: PreTrainedModel, kind: str) -> tuple[CacheForm, KVProbe]:
    """The form and the probe of transformers' own cache of this model, so that blocks are named as `KVTier`'s."""
    is_packed = kind in PAGED and kind not in _ONE_BY_ONE
    try:
        if is_packed:
            module.set_attn_implementation("eager")
        form = CacheForm.of(module, 1)
        return form, probe_of(module, form)
    finally:
        if is_packed:
            module.set_attn_implementation(PAGED_ATTENTION)


def _longest(config: PretrainedConfig) -> int:
    """Tokens of the longest sequence; without a limit (BLOOM), its training length."""
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    return next((int(length) for name in names if (length := getattr(config, name, None))), 2048)


def _auto_of(config: PretrainedConfig) -> Any:
    """transformers' loader of this kind; for a model with a vision part, of the whole."""
    return AutoModelForCausalLM if config.get_text_config(decoder=True) is config else AutoModelForImageTextToText


def _attention_of(config: PretrainedConfig) -> str | None:
    is_packed = config.model_type in PAGED and config.model_type not in _ONE_BY_ONE
    return PAGED_ATTENTION if is_packed else None


def _require_decoder(config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        problem = "K and V also depend on the encoder's text, and this engine has decoders alone"
        raise ConfigError(f"model kind {config.model_type!r}: {problem}; use transformers alone for it")
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
