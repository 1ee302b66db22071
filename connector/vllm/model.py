"""Reads a model's KV layout from vLLM's configuration: how a slot holds its layers, and what names its blocks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvtier.connector.models import config_digest_of, name_of, revision_of
from kvtier.tiers import ConfigError
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.copies import BlockPart, EngineBlocks
from kvtier.tiers.naming import DTYPE_BYTES, ModelIdentity, config_digest, root_hash

SUPPORTED: Final = ((0, 32), (0, 34))  # from, below: releases whose connector interface this code is written for
_SPECS: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_LEAVE_OUT: Final = "docs/models.md lists the models it keeps; start vLLM without kvtier for this one"
_CPU_TILE: Final = 32  # vLLM's CPU kernels keep the keys of this many tokens transposed


def require_supported_version() -> None:
    """Raise ConfigError if this version of vLLM is not supported."""
    numbers = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        oldest, newest = (".".join(map(str, version)) for version in SUPPORTED)
        raise ConfigError(f"vLLM {vllm.__version__}: this kvtier works with {oldest} up to below {newest}; install one")


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A KV group of layers with a recurrent state. What they hold at a block's end is a record of its own."""

    group: int  # vLLM's number of it
    layers: tuple[str, ...]
    layer_bytes: tuple[int, ...]  # of one rank

    @property
    def part_bytes(self) -> int:
        return sum(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What one slot holds for `block_size` tokens: every rank's part, and in it every layer in order of index.

    In native form a layer is `[heads, tokens, content]`, as in vLLM. In canonical form it is `[2 (K, V), tokens, heads,
    dim]`. A slot that has a group's state instead of a block holds layer by layer what vLLM keeps of it.
    """

    block_size: int  # tokens
    groups: tuple[tuple[str, ...], ...]  # layer names of each KV group
    layers: tuple[str, ...]  # all that keep K and V, in the order of a slot
    layer_bytes: tuple[int, ...]  # of one rank
    num_parts: int  # tensor-parallel ranks that hold different heads
    replicas: int  # consecutive ranks that hold the same
    content: str  # how vLLM's kernels arrange a block's inside: "plain", or the name of another way
    canonical: bool
    states: tuple[StateGroup, ...] = ()

    @property
    def part_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def block_bytes(self) -> int:
        """A slot's bytes: what the largest kind of record takes."""
        return self.num_parts * max(self.part_bytes, *(state.part_bytes for state in self.states), 0)

    @property
    def attention(self) -> tuple[int, ...]:
        """vLLM's numbers of the groups that keep K and V."""
        of_states = {state.group for state in self.states}
        return tuple(group for group in range(len(self.groups)) if group not in of_states)


def slot_plan(vllm_config: Any, kv_cache_config: Any, *, canonical: bool) -> SlotPlan:
    _require_supported(vllm_config)
    every = _specs(kv_cache_config)
    specs = {name: spec for name, spec in every.items() if not _is_state(spec)}
    if not specs:
        raise ConfigError(f"KV layout: no layer keeps K and V, only states; {_LEAVE_OUT}")
    states = _states(kv_cache_config)
    for name, spec in specs.items():
        _require_plain(name, spec)
    layers = tuple(sorted(specs, key=_index))
    if len({_index(name) for name in layers}) != len(layers):
        raise ConfigError(f"KV layout: {len(layers)} layers share indices, a layer has several; {_LEAVE_OUT}")
    if len({spec.block_size for spec in every.values()}) != 1:
        raise ConfigError(f"KV layout: KV groups with blocks of different sizes; {_LEAVE_OUT}")
    if len({spec.page_size_bytes for spec in specs.values()}) != 1:  # the scheduler's half would see only one of them
        raise ConfigError(f"KV layout: layers whose KV differs in size; {_LEAVE_OUT}")
    parallel, spec = vllm_config.parallel_config, specs[layers[0]]
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        unit = kv_cache_config.hash_block_size
        raise ConfigError(f"prefix_match_unit {unit}: kvtier keeps whole blocks of {spec.block_size} tokens; unset it")
    replicas = kv_cache_config.kv_tp_replicas
    plan = SlotPlan(
        block_size=spec.block_size,
        groups=tuple(tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        layers=layers,
        layer_bytes=tuple(specs[name].unpadded_page_size_bytes for name in layers),
        num_parts=parallel.tensor_parallel_size // replicas,
        replicas=replicas,
        content=_content(spec, vllm_config.model_config.dtype),
        canonical=canonical,
        states=states,
    )
    if canonical and _is_packed(spec):
        raise ConfigError('keys "kvtier": this attention backend packs its blocks in its own way; use keys "vllm"')
    if canonical and spec.kv_quant_mode:
        raise ConfigError('keys "kvtier": quantised KV has no canonical form; use keys "vllm"')
    if canonical and plan.states:
        raise ConfigError('keys "kvtier": a recurrent state has no canonical form; use keys "vllm"')
    if canonical and (plan.content not in ("plain", "cpu-vec") or len(set(plan.layer_bytes)) > 1 or _is_mla(spec)):
        raise ConfigError(f'keys "kvtier": KV of kind {plan.content!r} has no canonical form; use keys "vllm"')
    return plan


def why_none(vllm_config: Any) -> str | None:
    """Why loaded KV could not be used with this configuration; None if it can."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if vllm_config.model_config.use_mla and not (cache.enable_prefix_caching or scheduler.enable_chunked_prefill):
        fix = "use a GPU, or a CPU with AMX"
        return f"vLLM's MLA kernel on this platform computes whole prompts, and cannot go on after a prefix; {fix}"
    return None


def engine_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor], rank: int) -> EngineBlocks:
    """A rank's KV tensors, by layer name, as parts of slots. Each tensor is `[blocks, heads, tokens, content]`.

    If kernel blocks are smaller than vLLM's blocks, a block is several consecutive entries.
    """
    part = rank // plan.replicas
    start = part * plan.part_bytes
    num_blocks = kv_caches[plan.layers[0]].nbytes // plan.layer_bytes[0]
    parts = list[BlockPart]()
    for number, name in enumerate(plan.layers):
        group = next(index for index, names in enumerate(plan.groups) if name in names)
        tensor = _split(kv_caches[name], 0, num_blocks, -1)  # [blocks, kernel blocks, heads, tokens, content]
        offset = start + sum(plan.layer_bytes[:number])
        if not plan.canonical:
            parts.append(BlockPart(tensor.transpose(1, 2), number, offset, group))
            continue
        for view in _keys_and_values(tensor, plan.content):
            parts.append(BlockPart(view, number, offset, group))
            offset += parts[-1].num_bytes
    for record, state in enumerate(plan.states, 1):
        offset = part * state.part_bytes
        for number, name in enumerate(state.layers):
            parts.append(BlockPart(kv_caches[name], number, offset, state.group, record))
            offset += parts[-1].num_bytes
    return EngineBlocks(parts, plan.block_bytes)


def _states(kv_cache_config: Any) -> tuple[StateGroup, ...]:
    """The groups of layers with a recurrent state. ConfigError if vLLM keeps no state at the end of blocks."""
    states = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = {name: spec for name, spec in _specs_of(group).items() if _is_state(spec)}
        if not specs:
            continue
        if len(specs) != len(group.layer_names):
            raise ConfigError(f"KV layout: a KV group of layers with and without a state; {_LEAVE_OUT}")
        for spec in specs.values():
            if spec.mamba_cache_mode != "align":
                raise ConfigError(
                    f"mamba_cache_mode {spec.mamba_cache_mode!r}: states are kept where vLLM has them, at the end of a "
                    "block; start with --enable-prefix-caching --mamba-cache-mode align"
                )
        sizes = tuple(spec.real_page_size_bytes for spec in specs.values())
        states.append(StateGroup(number, tuple(specs), sizes))
    return tuple(states)


def _split(tensor: torch.Tensor, dimension: int, *sizes: int) -> torch.Tensor:
    split: torch.Tensor = tensor.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]
    return split


def _keys_and_values(tensor: torch.Tensor, content: str) -> Sequence[torch.Tensor]:
    """Keys and values of `[blocks, kernel blocks, heads, tokens, 2 * dim]`, each as `[blocks, …tokens, heads, dim]`."""
    tokens, both = tensor.shape[3:]
    dim = both // 2
    if content == "plain":
        return [tensor[..., half].permute(0, 1, 3, 2, 4) for half in (slice(dim), slice(dim, both))]
    # vLLM's CPU kernels keep, per head, all keys in transposed tiles of 32 tokens, and then all values.
    flat = tensor.flatten(3)
    keys = _split(flat[..., : tokens * dim], 3, tokens // _CPU_TILE, dim, _CPU_TILE)
    values = _split(flat[..., tokens * dim :], 3, tokens, dim)
    return [keys.permute(0, 1, 3, 5, 2, 4), values.permute(0, 1, 3, 2, 4)]


def fingerprint(vllm_config: Any, kv_cache_config: Any, plan: SlotPlan, cache: CacheConfig) -> bytes:
    """32 bytes that name this model's KV. Raises ConfigError if it could not be told from another's."""
    named = identity(vllm_config, kv_cache_config, plan, cache).fingerprint()
    if plan.canonical or cache.cache_salt is None:  # kvtier's own keys include the salt
        return named
    return root_hash(named, cache_salt=cache.cache_salt)


def identity(vllm_config: Any, kv_cache_config: Any, plan: SlotPlan, cache: CacheConfig) -> ModelIdentity:
    """Everything the KV depends on: the checkpoint, and vLLM's settings for computing and storing it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    path = checkpoint_path(model)
    spec = _specs(kv_cache_config)[plan.layers[0]]
    dtype = str(model.dtype).removeprefix("torch.")
    native = "vllm-layer-head-token" if plan.content == "plain" else f"vllm-layer-head-token/{plan.content}"
    if _is_packed(spec):
        native += f"/{spec.num_head_slots}x{spec.state_content_bytes}"
    return ModelIdentity(
        model=name_of(path),
        revision=revision_of(path),
        config_digest=_config_digest(model, path),
        dtype=dtype,
        kv_dtype=_kv_dtype(vllm_config, spec),
        compute_dtype=dtype,
        quantization=_quantization(model),
        num_kv_heads=spec.num_kv_heads * plan.num_parts,
        head_dim=spec.head_size,
        block_size=plan.block_size,
        layers=tuple(_index(name) for name in plan.layers),
        kind="state" if plan.states else "mla" if _is_mla(spec) else "full",
        tp_ranks=(0, parallel.tensor_parallel_size),
        tp_size=parallel.tensor_parallel_size,
        layout="block-first" if plan.canonical else native + _state_layout(kv_cache_config),
        hash_scheme=cache.hash if plan.canonical else hash_scheme(vllm_config.cache_config.prefix_caching_hash_algo),
        epoch=cache.epoch,
    )


def _kv_dtype(vllm_config: Any, spec: Any) -> str:
    """What a stored number is; of quantised KV, how vLLM quantises it, too."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if not spec.kv_quant_mode:
        return dtype
    return f"{vllm_config.cache_config.cache_dtype}/{dtype}/{current_platform.fp8_dtype()}"  # two platforms' fp8 differ


def _config_digest(model: Any, path: Path) -> str:
    """The digest of the checkpoint's configuration, or of the one that overrides it in vLLM."""
    if model.hf_overrides or model.hf_config_path:
        return config_digest(model.hf_config.to_dict())
    return config_digest_of(path)


def _quantization(model: Any) -> str | None:
    """Quantization method and settings given to vLLM; the checkpoint's own are in its configuration."""
    settings = model.quantization_config
    return model.quantization if settings is None else f"{model.quantization} {settings}"


def hash_scheme(algorithm: str) -> str:
    """How vLLM names blocks: its hash algorithm, and where chains begin. Raises ConfigError if that is random."""
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        fix = "set PYTHONHASHSEED to one value for every process, or use --prefix-caching-hash-algo sha256"
        raise ConfigError(f"prefix_caching_hash_algo {algorithm!r}: its chains begin at a random value; {fix}")
    return f"vllm-{algorithm}-{function(seed).hex()}"


def checkpoint_path(model_config: Any) -> Path:
    """The local directory from which vLLM reads the model. Raises ConfigError if there is none."""
    path = Path(model_config.model)
    if path.is_dir():
        return path.resolve()
    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(f"model {model_config.model!r}: no local checkpoint to name blocks after ({error})") from None


def _specs(kv_cache_config: Any) -> dict[str, Any]:
    """The KV of each layer, by name."""
    specs = dict[str, Any]()
    for group in kv_cache_config.kv_cache_groups:
        specs |= _specs_of(group)
    return specs


def _specs_of(group: Any) -> dict[str, Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: inner[name] if inner else group.kv_cache_spec for name in group.layer_names}


def _state_layout(kv_cache_config: Any) -> str:
    """What states are, for the identity: each group's layers, and shape and dtype of all that vLLM keeps of one."""
    kinds = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in _specs_of(group).items():
            if _is_state(spec):
                kinds.append(f"/{number}:{_index(name)}:{spec.mamba_type}:{spec.shapes}:{spec.dtypes}")
    return "".join(kinds)


def _is_packed(spec: Any) -> bool:
    """Whether the attention backend keeps K and V otherwise than side by side for each head."""
    return getattr(spec, "num_head_slots", None) is not None or getattr(spec, "state_content_bytes", None) is not None


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _index(name: str) -> int:
    return int(extract_layer_index(name))


def _is_mla(spec: Any) -> bool:
    return type(spec).__name__ == "MLAAttentionSpec"


def _content(spec: Any, dtype: torch.dtype) -> str:
    """How the platform's kernels arrange a block's inside. Kernels of one name cannot read blocks of another."""
    if not current_platform.is_cpu():
        return "plain"
    if _is_mla(spec):
        return "cpu-mla-amx" if torch.cpu._is_amx_tile_supported() else "cpu-mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    quantised = "fp8" if spec.kv_quant_mode else None
    return f"cpu-{_get_attn_isa(dtype, spec.block_size, spec.head_size, quantised)}"


def _require_supported(vllm_config: Any) -> None:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigError(f"{name} {size}: kvtier keeps KV of tensor-parallel engines only; use 1")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method != "ngram":
        raise ConfigError(f"speculative method {speculative.method!r}: a draft model's KV is not kept yet; use ngram")
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError('load_format "dummy": random weights have no name for their blocks; load a checkpoint')
    if model.is_encoder_decoder:
        raise ConfigError(f"model {model.model!r}: an encoder's KV is not kept; leave kvtier out")


def _require_plain(name: str, spec: Any) -> None:
    kind, dtype = type(spec).__name__, str(getattr(spec, "dtype", "")).removeprefix("torch.")
    if kind not in _SPECS:
        raise ConfigError(f"KV layout: layer {name} is of kind {kind}, which kvtier does not keep; {_LEAVE_OUT}")
    if spec.kv_quant_mode:  # opaque: its scales are the checkpoint's, or lie among the bytes
        return
    if dtype not in DTYPE_BYTES:
        fix = "leave --kv-cache-dtype at auto"
        raise ConfigError(f"KV layout: layer {name} keeps {dtype}; kvtier keeps {', '.join(DTYPE_BYTES)}: {fix}")
    item = DTYPE_BYTES[dtype] * (spec.head_size + (spec.head_size_v or 0))
    if math.prod((spec.num_kv_heads, spec.block_size, item)) != spec.unpadded_page_size_bytes:
        raise ConfigError(f"KV layout: layer {name} packs its blocks in an unknown way; {_LEAVE_OUT}")
