"""Names a vLLM model's KV by everything its bytes depend on: the checkpoint, and how vLLM computes and stores KV."""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens, resolve_none_hash_seed
from vllm.version import __version__ as vllm_version

from kvtier.connector.models import config_digest_of, name_of, revision_of
from kvtier.connector.vllm import slot_plan
from kvtier.connector.vllm.keys import NameInstead, has_kv
from kvtier.connector.vllm.slots import SlotPlan
from kvtier.tiers import ConfigError
from kvtier.tiers.config import CacheConfig, engine_variables
from kvtier.tiers.naming import DTYPE_BYTES, ModelIdentity, config_digest, root_hash, with_lossy

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec


_LENGTH_ROPE: Final = "length-rope:"  # before a configuration's digest


def rope_factor(model: Any, digest: str) -> float | None:
    """`rope_factor` of an identity: vLLM builds one RoPE for all texts, by the configuration and max_model_len.

    Raises ConfigError if transformers' own code computes RoPE, which then depends on the longest text of each batch.
    """
    if not digest.startswith(_LENGTH_ROPE):
        return None
    if model.using_transformers_backend():
        problem = "RoPE that depends on the text's length, in transformers' own code, follows each batch"
        raise ConfigError(f"model {model.model!r}: {problem}; start with --model-impl vllm")
    return float(model.max_model_len)


def name_instead(algorithm: str, block_size: int) -> NameInstead:
    """A `NameInstead` from vLLM's own functions. `algorithm` is its hash algorithm for blocks."""
    hash_function = get_hash_fn_by_name(algorithm)

    def name(request: Any, block: int, tokens: Sequence[int]) -> bytes:
        parent = request.block_hashes[block - 1] if block else None
        extra, _ = generate_block_hash_extra_keys(request, block * block_size, (block + 1) * block_size, 0)
        hashed: bytes = hash_block_tokens(hash_function, parent, tokens, extra)
        return hashed

    return name


def fingerprint(identity: ModelIdentity, plan: SlotPlan, cache: CacheConfig) -> bytes:
    """32 bytes that name the KV of the model that `identity` describes."""
    named = identity.fingerprint()
    if plan.canonical or cache.cache_salt is None:  # kvtier's own keys include the salt
        return named
    return root_hash(named, cache_salt=cache.cache_salt)


def identity(vllm_config: Any, kv_cache_config: Any, plan: SlotPlan, cache: CacheConfig) -> ModelIdentity:
    """Everything the KV depends on: the checkpoint, and vLLM's settings for computing and storing it.

    Raises ConfigError if the model cannot be distinguished from another, or `[cache] lossy` does not apply.
    """
    model = vllm_config.model_config
    path = checkpoint_path(model)
    digest = _config_digest(model, path)
    specs = slot_plan.layer_specs(kv_cache_config)
    spec = specs[plan.layers[0]] if plan.layers else None
    dtype = str(model.dtype).removeprefix("torch.")
    draft = _draft_layout(vllm_config, plan)
    num_ranks = plan.num_pieces or plan.num_parts  # those that a slot is laid out for
    exact = ModelIdentity(
        model=name_of(path),
        revision=_weights(model, vllm_config.load_config),
        config_digest=digest,
        rope_factor=rope_factor(model, digest),
        dtype=dtype,
        kv_dtype=dtype if spec is None else _kv_dtype(vllm_config, spec),
        compute_dtype=dtype + _computes(model),
        quantization=_quantization(model),
        num_kv_heads=1 if spec is None else spec.num_kv_heads * plan.num_parts,
        head_dim=1 if spec is None else spec.head_size,
        block_size=plan.block_size,
        layers=_layers(vllm_config, plan),
        kind="state" if plan.states else "mla" if slot_plan.is_mla(spec) else "full",
        tp_ranks=(0, num_ranks),
        tp_size=num_ranks,
        layout="block-first"
        if plan.canonical
        else _layout(vllm_config, kv_cache_config, plan) + draft + _inputs(model),
        hash_scheme=cache.hash if plan.canonical else hash_scheme(vllm_config.cache_config.prefix_caching_hash_algo),
        epoch=cache.epoch,
    )
    return with_lossy(exact, cache.lossy, plan.block_bytes, unlike=_unlike(vllm_config, plan, spec))


def encoder_identity(vllm_config: Any, width: int, rows: int, cache: CacheConfig) -> ModelIdentity:
    """Everything that the outputs of a model's encoders depend on, besides the item that is encoded.

    `width` is that of the widest output, in numbers; `rows` of it are a block.
    """
    model = vllm_config.model_config
    if model.multimodal_config is None:
        raise ConfigError(f"model {model.model!r}: it has no encoder; leave --ec-transfer-config out")
    path, dtype = checkpoint_path(model), str(model.dtype).removeprefix("torch.")
    return ModelIdentity(
        model=name_of(path),
        revision=_weights(model, vllm_config.load_config),
        config_digest=config_digest(model.hf_config.to_dict()),
        rope_factor=float(model.max_model_len),
        dtype=dtype,
        kv_dtype=dtype,
        compute_dtype=dtype + _computes(model),
        quantization=_quantization(model),
        num_kv_heads=1,
        head_dim=width,
        block_size=rows,
        layers=(0,),
        kind="encoder",
        layout=f"encoder rows{_inputs(model)}",
        epoch=cache.epoch,
    )


_SHAPING: Final = (
    *("media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype"),
    *("mm_encoder_fp8_scale_path", "video_pruning_rate", "video_pruning_method"),
)


def _inputs(model: Any) -> str:
    """The server's settings that change what becomes of an image, clip or video; vLLM's hash of it has a request's.

    Empty for a model without such inputs. The checkpoint's own settings are in its revision.
    """
    if (parts := model.multimodal_config) is None:
        return ""
    settings = [f"{name} {getattr(parts, name, None)}" for name in _SHAPING]
    return "/inputs " + ", ".join([*settings, f"videos by {envs.VLLM_VIDEO_LOADER_BACKEND}"])


def _unlike(vllm_config: Any, plan: SlotPlan, spec: Any) -> str | None:
    """Why a slot has other values than numbers of the first layer's dtype; None if it has not."""
    if spec is not None and slot_plan.is_packed(spec):
        return "this attention backend packs its blocks in its own way"
    if has_kv(vllm_config.speculative_config):
        return "a draft model's KV is in the same blocks"
    return "layers differ in what they keep of a block" if slot_plan.is_uneven(plan) else None


def _layers(vllm_config: Any, plan: SlotPlan) -> tuple[int, ...]:
    """The indices of a slot's layers, of all pipeline stages."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return tuple(range(vllm_config.model_config.get_total_num_hidden_layers()))
    return tuple(sorted({slot_plan.layer_index(name) for name in _kept_layers(plan)}))


def _draft_layout(vllm_config: Any, plan: SlotPlan) -> str:
    """An identifier of a draft model's KV in a slot: the method, its checkpoint and settings. Empty without such KV."""
    speculative = vllm_config.speculative_config
    if not has_kv(speculative):
        return ""
    model = speculative.draft_model_config
    weights, digest = _weights(model, vllm_config.load_config), _config_digest(model, checkpoint_path(model))
    parts = (
        *(speculative.method, plan.lookahead, plan.layers, weights, digest),
        *(model.dtype, model.quantization, model.quantization_config),
    )
    return f"/draft:{hashlib.sha256(' '.join(map(str, parts)).encode()).hexdigest()}"


def _kept_layers(plan: SlotPlan) -> Iterable[str]:
    """The layers whose indices are in the identity: those with K and V, or states if there are no others."""
    return plan.layers or (name for state in plan.states for name in state.layers)


def _layout(vllm_config: Any, kv_cache_config: Any, plan: SlotPlan) -> str:
    """The layout of a slot in vLLM's own form: its order, and what distinguishes kernels and models that differ."""
    layout = f"vllm-layer-{plan.order}" + ("" if plan.content == "plain" else f"/{plan.content}")
    specs = slot_plan.layer_specs(kv_cache_config)
    packed = [spec for spec in (specs[name] for name in plan.layers) if slot_plan.is_packed(spec)]
    if packed:
        spec, backend = packed[0], getattr(vllm_config.attention_config, "backend", None)
        platform = f"{current_platform.device_type}:{getattr(backend, 'name', backend)}"
        layout += f"/{spec.num_head_slots}x{spec.state_content_bytes}/{platform}"
    if slot_plan.is_uneven(plan):
        layout += _uneven_layout(vllm_config, kv_cache_config, plan)
    for state in plan.states:
        if len({*state.layer_bytes}) > 1 or state.block_size != plan.block_size:
            layout += f"/states {state.group}:{state.block_size}:{','.join(map(str, state.layer_bytes))}"
    return layout + _state_layout(kv_cache_config)


def _uneven_layout(vllm_config: Any, kv_cache_config: Any, plan: SlotPlan) -> str:
    """Each group's blocks and visible spec, and each layer's bytes. Some layers' specs are hidden.

    Those follow from the model's configuration, vLLM's KV dtype and the platform.
    """
    kinds = []
    for number, names in enumerate(plan.groups):
        count = next((lane.count for lane in plan.lanes if lane.group == number), 0)
        spec = slot_plan.specs_of_group(kv_cache_config.kv_cache_groups[number])[names[0]]
        if count and not slot_plan.is_state(spec):
            shown = f"{type(spec).__name__}:{spec.num_kv_heads}:{spec.head_size}:{spec.head_size_v}:{spec.dtype}"
            kinds.append(f"/{number}:{count}x{plan.group_sizes[number]}:{shown}")
    indices = map(slot_plan.layer_index, plan.layers)
    layers = ",".join(f"{index}:{size}" for index, size in zip(indices, plan.layer_bytes, strict=True))
    platform = f"{current_platform.device_type}:{current_platform.fp8_dtype()}:{vllm_config.cache_config.cache_dtype}"
    return "".join(kinds) + f"/{layers}/{platform}"


def _kv_dtype(vllm_config: Any, spec: Any) -> str:
    """The dtype of a stored number, with vLLM's quantisation if there is one."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if not spec.kv_quant_mode and dtype in DTYPE_BYTES:
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


def adapter_settings(vllm_config: Any) -> str:
    """The server's settings that change what an adapter does: the parts it is applied to, and the weights' dtype."""
    lora, dtype = vllm_config.lora_config, str(vllm_config.model_config.dtype).removeprefix("torch.")
    given = str(lora.lora_dtype).removeprefix("torch.")
    text = "" if given in ("auto", dtype) else f" {given}"
    return text if lora.target_modules is None else f"{text} on {sorted(lora.target_modules)}"


def _computes(model: Any) -> str:
    """What else than the checkpoint and its dtype decides what vLLM computes: variables, and classes in its place."""
    text, classes = engine_variables("VLLM_"), getattr(model, "model_class_overrides", None)
    if classes:
        text += f" classes {sorted(classes.items())}"
    if isinstance(model.hf_overrides, dict) and (file := model.hf_overrides.get("quantization_config_file")):
        text += f" quantised by {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"
    return text


def _weights(model: Any, load: Any) -> str:
    """The name of the weights that vLLM loads. ConfigError if those are not files of the checkpoint."""
    slot_plan.require_named(load.load_format)
    return revision_of(checkpoint_path(model, load.download_dir), load.load_format)


def hash_scheme(algorithm: str) -> str:
    """How vLLM names blocks: its hash algorithm and the chains' root. Raises ConfigError if that is random."""
    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        fix = "set PYTHONHASHSEED to one value for every process, or use --prefix-caching-hash-algo sha256"
        raise ConfigError(f"prefix_caching_hash_algo {algorithm!r}: its chains begin at a random value; {fix}")
    return f"vllm-{algorithm}-{function(seed).hex()}"


def checkpoint_path(model_config: Any, downloads: str | None = None) -> Path:
    """The local directory from which vLLM reads the model; its weights are in `downloads`, if that is set.

    Raises ConfigError if there is none.
    """
    path = Path(model_config.model)
    if path.is_dir():
        return path.resolve()
    try:
        name, revision = model_config.model, model_config.revision
        return Path(snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise ConfigError(f"model {model_config.model!r}: no local checkpoint to name blocks after ({error})") from None


def _state_layout(kv_cache_config: Any) -> str:
    """The layout of states, for the identity: each group's layers, and shape and dtype of all their parts."""
    kinds = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in slot_plan.specs_of_group(group).items():
            if slot_plan.is_state(spec):
                kinds.append(f"/{number}:{slot_plan.layer_index(name)}:{spec.mamba_type}:{spec.shapes}:{spec.dtypes}")
    return "".join(kinds)


def engine_config(spec: "OffloadingSpec") -> VllmConfig:
    """The configuration of the engine that made `spec`; vLLM passes a tier only a part of it.

    That part lacks settings that change KV bytes: weights, overrides, compute dtype, hash algorithm. So this searches
    the callers' variables for the whole, and identifies it by the options it shares with `spec`.
    """
    frame = sys._getframe()
    while caller := frame.f_back:
        frame = caller
        for value in frame.f_locals.values():
            transfer = value.kv_transfer_config if isinstance(value, VllmConfig) else None
            if transfer is not None and transfer.kv_connector_extra_config is spec.extra_config:
                return value
    fix = "use a version that docs/vllm.md names"
    raise ConfigError(f"vLLM {vllm_version}: a tier cannot find the engine's configuration there; {fix}")


def native_identity(config: VllmConfig, spec: "OffloadingSpec", revision: str | None, epoch: int) -> ModelIdentity:
    """Everything that the chunks of `spec` depend on. `revision` names the weights, so that they need not be read.

    Raises ConfigError for block hashes that no other process can reproduce, and for weights without a name.
    """
    model: Any = config.model_config
    digest = config_digest(model.hf_config.to_dict())
    parallel, heads = spec.config.parallel, model.get_total_num_kv_heads()
    return ModelIdentity(
        model=Path(model.model).name,
        revision=revision or _revision(config),
        config_digest=digest,
        dtype=_plain(model.dtype),
        kv_dtype=spec.config.model.dtype,
        compute_dtype=_plain(model.dtype) + _computes(model),
        num_kv_heads=max(1, heads),
        head_dim=model.get_head_size(),
        block_size=spec.config.cache.tokens_per_hash,
        layers=tuple(range(model.get_total_num_hidden_layers())),
        quantization=_plain((model.quantization, model.quantization_config)),
        rope_factor=rope_factor(model, digest),
        tp_ranks=(0, parallel.tp_size),
        tp_size=parallel.tp_size,
        pp_stages=(0, parallel.pp_size),
        pp_size=parallel.pp_size,
        layout=_native_layout(config, spec),
        hash_scheme=hash_scheme(config.cache_config.prefix_caching_hash_algo),
        epoch=epoch,
    )


def _native_layout(config: VllmConfig, spec: "OffloadingSpec") -> str:
    """A name for the layout of vLLM's own bytes. It includes everything that may change them, since they are opaque."""
    offload = spec.config
    parts = {
        "vllm": vllm_version,
        "device": [current_platform.device_type, str(current_platform.get_device_capability())],
        "attention": _plain((config.attention_config.backend, config.attention_config.backend_per_kind)),
        "kv_cache_layout": offload.kv_cache_layout,
        "canonical": offload.canonical_layout,
        "replicated": spec.replicated_layout,
        "blocks_per_chunk": offload.cache.blocks_per_chunk,
        "bytes_per_block": offload.worker_kv_bytes_per_block,
        "inputs": _inputs(config.model_config),
        "groups": [[group.group_id, group.tokens_per_block, group.layer_names] for group in offload.groups],
        "world": [offload.parallel.world_size, offload.parallel.pcp_size, offload.parallel.dcp_size],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"vllm-offload-{vllm_version}-{digest}"


def _revision(config: VllmConfig) -> str:
    """The commit or digest of the weights, and of a draft model's, whose KV is in the same chunks."""
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    models = [model for model in (config.model_config, drafter) if model is not None]
    revisions = list(dict.fromkeys(_weights(model, config.load_config) for model in models))
    return revisions[0] if len(revisions) == 1 else hashlib.sha256(" ".join(revisions).encode()).hexdigest()


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")
