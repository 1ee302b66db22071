"""KVTierStorage without an engine: SGLang's own host pools on CPU tensors, and the storage opened over them."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host import mamba, mha, mla
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo
from sglang.srt.mem_cache.storage import StorageBackendFactory
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtier.connector.sglang.storage import KVTierStorage

TOKENS, PAGES = 4, 64
CPU = torch.device("cpu")


def save_model(path: Path, seed: int = 0) -> Path:
    """A checkpoint: what it is counts, not what it computes."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(path)
    return path


def server_arguments(model: Path, **changes: Any) -> SimpleNamespace:
    """SGLang's own, as it was started."""
    told: dict[str, Any] = {
        "model_path": str(model),
        "revision": None,
        "context_length": None,
        "download_dir": None,
        "load_format": "auto",
        "dtype": "auto",
        "quantization": None,
        "quantization_param_path": None,
        "kv_cache_dtype": "auto",
        "json_model_override_args": "{}",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
        "speculative_draft_model_revision": None,
        "speculative_draft_kv_cache_dtype": None,
    }
    return SimpleNamespace(**{**told, **changes})


def storage_config(extra: Mapping[str, Any], **changes: Any) -> HiCacheStorageConfig:
    """What SGLang tells a storage of itself."""
    options: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "served",
        **changes,
    }
    named = {"backend_name": "kvtier", "module_path": "kvtier.connector.sglang", "class_name": "KVTierStorage"}
    return HiCacheStorageConfig(**options, extra_config={**named, "host": {"size": "1MiB", "pin": False}, **extra})


def open_storage(config: HiCacheStorageConfig, pools: Mapping[PoolName, Any]) -> KVTierStorage:
    """As SGLang's controller does it: the factory, the first pool, all pools by name, the end of it."""
    made: KVTierStorage = StorageBackendFactory.create_backend("dynamic", config, None)
    try:
        made.register_mem_pool_host(next(iter(pools.values())))
        for name, pool in pools.items():
            made.register_mem_host_pool_v2(pool, name)
        made.on_host_pools_registered()
    except BaseException:
        made.close()
        raise
    return made


def keys_and_values(
    layout: str = "page_first_direct",
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """SGLang's host pool of K and V, full of random numbers."""
    v_head_dim = v_head_dim or head_dim
    sizes = [(head_dim, "k"), (v_head_dim, "v")]
    rows = {name: tuple(torch.zeros(TOKENS, heads, size, dtype=dtype) for _ in range(layers)) for size, name in sizes}
    pointers = {name: torch.tensor([row.data_ptr() for row in rows[name]], dtype=torch.uint64) for name in rows}
    buffers = KVBuffers(
        k=rows["k"], v=rows["v"], k_data_ptrs=pointers["k"], v_data_ptrs=pointers["v"], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=TOKENS,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        device=CPU,
    )
    made = mha.get_mha_host_pool_cls(info)(
        info, 1.0, 0, TOKENS, layout, False, **_capacity(), start_layer=0, end_layer=layers
    )
    return filled(made)


def latents(layout: str = "page_first_direct", *, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """SGLang's host pool of latents (MLA)."""
    rows = tuple(torch.zeros(TOKENS, 1, 12, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([row.data_ptr() for row in rows], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=TOKENS,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        kv_cache_dim=12,
        dtype=dtype,
        device=CPU,
    )
    made = mla.MLATokenToKVPoolHost(
        info, 1.0, 0, TOKENS, layout, False, **_capacity(), start_layer=0, end_layer=layers, target_layer_num=layers
    )
    return filled(made)


def states(layout: str = "page_first_direct", *, layers: int = 3, size: int = 300) -> Any:
    """SGLang's host pool of recurrent states: one float32 matrix and one bf16 window a layer."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(layers, PAGES, 2, size), conv=(torch.zeros(layers, PAGES, 5, 3, dtype=torch.bfloat16),)
    )
    return filled(mamba.MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout))


def indexes(first: Any, *, layers: int = 2) -> Any:
    """SGLang's host pool of DeepSeek V3.2's index keys, beside the pool of latents."""
    width = 20  # bytes of a token
    device = SimpleNamespace(
        store_dtype=torch.uint8,
        device="cpu",
        start_layer=0,
        end_layer=layers,
        layer_num=layers,
        layer_shard_enabled=False,
        index_k_with_scale_buffer=[torch.zeros(PAGES, width * TOKENS, dtype=torch.uint8) for _ in range(layers)],
    )
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=width, dtype=torch.uint8),
        host_pool_builder=None,
    )
    return filled(DSAIndexerPoolHost(decl, first, pin_memory=False))


def buffers_of(pool: Any) -> list[torch.Tensor]:
    """All of a host pool's memory, as bytes."""
    if hasattr(pool, "index_k_with_scale_buffer"):
        kept = [pool.index_k_with_scale_buffer]
    else:
        kept = list(pool.kv_buffer) if isinstance(pool.kv_buffer, (tuple, list)) else [pool.kv_buffer]
    return [buffer.view(torch.uint8) for buffer in kept]


def filled(pool: Any) -> Any:
    """The pool, its memory full of random bytes."""
    for buffer in buffers_of(pool):
        buffer.random_(0, 256)
    return pool


def _capacity() -> dict[str, int]:
    return {"device_capacity_tokens": PAGES * TOKENS}
