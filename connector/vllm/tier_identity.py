"""Names the KV bytes of vLLM's own offloading by everything in its configuration that they depend on."""

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from kvtier.connector.models import revision_of
from kvtier.connector.vllm.identity import checkpoint_path, hash_scheme
from kvtier.connector.vllm.model import require_supported_version
from kvtier.connector.vllm.rope import rope_factor
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import ModelIdentity, config_digest

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec


def engine_config(spec: "OffloadingSpec") -> VllmConfig:
    """The configuration of the engine that made `spec`; vLLM hands a tier only a part of it.

    That part leaves out settings that change KV bytes: weights, overrides, compute dtype, hash algorithm. So the whole
    is searched for in the variables of the callers, and identified by the options it shares with `spec`.
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
    """Everything the chunks of `spec` depend on. `revision` names the weights, so that their files need not be read.

    Raises ConfigError for block hashes that no other process could reproduce, and for weights without a name.
    """
    require_supported_version()
    model: Any = config.model_config
    digest = config_digest(model.hf_config.to_dict())
    parallel, heads = spec.config.parallel, model.get_total_num_kv_heads()
    return ModelIdentity(
        model=Path(model.model).name,
        revision=revision or _revision(config),
        config_digest=digest,
        dtype=_plain(model.dtype),
        kv_dtype=spec.config.model.dtype,
        compute_dtype=_plain(model.dtype),
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
        layout=_layout(config, spec),
        hash_scheme=hash_scheme(config.cache_config.prefix_caching_hash_algo),
        epoch=epoch,
    )


def _layout(config: VllmConfig, spec: "OffloadingSpec") -> str:
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
        "groups": [[group.group_id, group.tokens_per_block, group.layer_names] for group in offload.groups],
        "world": [offload.parallel.world_size, offload.parallel.pcp_size, offload.parallel.dcp_size],
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"vllm-offload-{vllm_version}-{digest}"


def _revision(config: VllmConfig) -> str:
    """The commit or digest of the weights, and of a draft model's, whose KV is in the same chunks."""
    if config.load_config.load_format == "dummy":
        raise ConfigError('load_format "dummy": random weights have no name; give the tier a "revision" in hex')
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    models = [model for model in (config.model_config, drafter) if model is not None]
    revisions = list(dict.fromkeys(revision_of(checkpoint_path(model)) for model in models))
    return revisions[0] if len(revisions) == 1 else hashlib.sha256(" ".join(revisions).encode()).hexdigest()


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")
