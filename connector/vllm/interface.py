"""The parts of vLLM's interface that kvtier uses, checked one by one in a newer release than it was tried with."""

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import vllm

from kvtier.tiers import ConfigError

_log = logging.getLogger(__name__)

TRIED: Final = ((0, 32), (0, 34))  # from, below: releases that the tests ran with

_FIELDS: Final = """
vllm.v1.core.sched.output:SchedulerOutput scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
vllm.v1.core.sched.output:SchedulerOutput scheduled_spec_decode_tokens total_num_scheduled_tokens
vllm.v1.core.sched.output:SchedulerOutput new_block_ids_to_zero kv_cache_block_copies kv_connector_block_state
vllm.v1.core.sched.output:NewRequestData req_id block_ids num_computed_tokens
vllm.v1.core.sched.output:CachedRequestData req_ids resumed_req_ids new_block_ids num_computed_tokens
vllm.v1.core.sched.output:KVConnectorBlockState get_block_ids
vllm.v1.core.kv_cache_utils:KVCacheBlockCopy dst_block_id
vllm.v1.core.kv_cache_manager:KVCacheBlocks get_block_ids
vllm.v1.request:Request request_id num_tokens num_prompt_tokens num_computed_tokens num_output_tokens all_token_ids
vllm.v1.request:Request output_token_ids block_hashes lora_request cache_salt mm_features prompt_embeds status
vllm.v1.request:Request kv_transfer_params skip_reading_prefix_cache arrival_time trace_headers num_in_flight_tokens
vllm.v1.request:Request prefill_stats resumable _block_hasher
vllm.v1.kv_cache_interface:KVCacheConfig num_blocks kv_cache_tensors kv_cache_groups hash_block_size kv_tp_replicas
vllm.v1.kv_cache_interface:KVCacheTensor layers layer_stride block_stride
vllm.v1.kv_cache_interface:KVCacheGroupSpec layer_names kv_cache_spec host_resident enable_kv_transfer
vllm.v1.kv_cache_interface:FullAttentionSpec block_size num_kv_heads head_size head_size_v dtype kv_quant_mode
vllm.v1.kv_cache_interface:FullAttentionSpec page_size_bytes unpadded_page_size_bytes prefix_cacheable
vllm.v1.kv_cache_interface:SlidingWindowSpec sliding_window extra_retained_tokens
vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec attention_chunk_size
vllm.v1.kv_cache_interface:MambaSpec shapes dtypes mamba_type mamba_cache_mode
vllm.v1.outputs:KVConnectorOutput invalid_block_ids kv_connector_worker_meta
vllm.v1.metrics.cache_hit_source:CacheHitSource HOST DISK
vllm.v1.engine.core:EngineCore add_lora remove_lora collective_rpc reset_prefix_cache
vllm.lora.request:LoRARequest lora_int_id lora_name lora_path load_inplace adapter_id
vllm.multimodal.inputs:MultiModalFeatureSpec identifier modality mm_position
vllm.multimodal.inputs:PlaceholderRange offset length
vllm.multimodal.processing.inputs:ProcessorInputs mm_uuid_items get_mm_hashes
vllm.platforms.interface:Platform device_type fp8_dtype is_cpu
vllm.config:ModelConfig model dtype revision hf_config hf_config_path hf_overrides quantization quantization_config
vllm.config:ModelConfig max_model_len multimodal_config is_encoder_decoder enable_sleep_mode skip_tokenizer_init
vllm.config:ModelConfig tokenizer tokenizer_revision use_mla using_transformers_backend
vllm.config:ModelConfig get_total_num_kv_heads get_total_num_hidden_layers
vllm.config:MultiModalConfig media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype video_pruning_rate
vllm.config:MultiModalConfig mm_processor_cache_gb
vllm.config:ParallelConfig tensor_parallel_size pipeline_parallel_size data_parallel_rank data_parallel_size
vllm.config:ParallelConfig decode_context_parallel_size prefill_context_parallel_size
vllm.config:SchedulerConfig max_num_batched_tokens enable_chunked_prefill
vllm.config:CacheConfig enable_prefix_caching prefix_caching_hash_algo cache_dtype
vllm.config:LoadConfig load_format download_dir
vllm.config:LoRAConfig max_loras max_cpu_loras lora_dtype target_modules
vllm.config:SpeculativeConfig method draft_model_config
vllm.config:KVEventsConfig enable_kv_cache_events
vllm.config:KVTransferConfig is_kv_producer kv_connector_extra_config kv_load_failure_policy
vllm.config:VllmConfig model_config cache_config parallel_config scheduler_config speculative_config lora_config
vllm.config:VllmConfig load_config kv_events_config kv_transfer_config attention_config max_concurrent_batches
vllm.config:VllmConfig compilation_config
vllm.config:CompilationConfig static_forward_context
vllm.v1.metrics.stats:PrefillStats set
"""
"""Classes, and attributes that are read of them."""

_FIELDS_OF: Final = {
    "KVTierECConnector": """
vllm.config:VllmConfig ec_transfer_config device_config
vllm.config:ECTransferConfig ec_connector_extra_config mm_encoder_output_widths
vllm.config:ModelConfig get_inputs_embeds_size
vllm.distributed.ec_transfer.ec_connector.base:ECConnectorBase is_consumer is_producer
vllm.v1.core.sched.output:SchedulerOutput free_encoder_mm_hashes
vllm.v1.outputs:ECConnectorOutput ec_connector_worker_meta
vllm.v1.request:Request get_num_encoder_embeds
""",
    "KVTierSecondaryTier": """
vllm.config:AttentionConfig backend backend_per_kind
vllm.config:ModelConfig get_head_size
vllm.platforms.interface:Platform get_device_capability
vllm.v1.kv_offload.base:LookupResult HIT MISS
vllm.v1.kv_offload.base:OffloadingSpec config extra_config kv_events_config replicated_layout
vllm.v1.kv_offload.base:ReqContext get_state set_state get_offload_key_position
vllm.v1.kv_offload.config:OffloadingCacheConfig tokens_per_hash blocks_per_chunk
vllm.v1.kv_offload.config:OffloadingConfig model cache parallel groups kv_cache_layout canonical_layout
vllm.v1.kv_offload.config:OffloadingConfig worker_kv_bytes_per_block
vllm.v1.kv_offload.config:OffloadingGroupConfig group_id tokens_per_block layer_names
vllm.v1.kv_offload.config:OffloadingParallelConfig tp_size pp_size pcp_size dcp_size world_size
vllm.v1.kv_offload.tiering.base:SecondaryTierManager block_size_bytes tier_type
vllm.v1.kv_offload.tiering.base:TransferJob job_id keys chunk_ids is_promotion req_context
""",
}
"""Those that only this connector reads."""

_CALLS: Final = """
vllm.v1.core.kv_cache_utils:hash_block_tokens hash_function parent_block_hash curr_block_token_ids extra_keys
vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys request start_token_idx end_token_idx start_mm_idx
vllm.v1.core.kv_cache_utils:resolve_none_hash_seed hash_fn
vllm.v1.core.kv_cache_utils:maybe_convert_block_hash hash_bytes
vllm.v1.core.kv_cache_utils:to_event_extra_keys extra_keys
vllm.v1.kv_cache_interface:get_kv_cache_spec_kind kv_cache_spec
vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window kv_cache_spec
vllm.utils.hashing:get_hash_fn_by_name hash_fn_name
vllm.model_executor.models.utils:extract_layer_index layer_name
vllm.distributed.utils:get_pp_indices num_hidden_layers pp_rank pp_size
vllm.distributed.kv_events:BlockStored block_hashes parent_block_hash token_ids block_size lora_id medium lora_name
vllm.distributed.kv_events:BlockRemoved block_hashes medium group_idx
"""
"""Functions and classes that are called, and their first parameters."""


def require_supported_version(own: type, *helpers: type) -> None:
    """Raise ConfigError if this vLLM is too old, or newer and changed in what the connector class `own` uses.

    `helpers`: its other classes that have a base of vLLM's.
    """
    numbers = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    oldest, below = (".".join(map(str, version)) for version in TRIED)
    if numbers < TRIED[0]:
        raise ConfigError(f"vLLM {vllm.__version__}: this kvtier needs {oldest} or newer; install one below {below}")
    if numbers >= TRIED[1] and (changed := list(changed_parts(own, *helpers))):
        fix = f"install one below {below}, or a newer kvtier"
        raise ConfigError(f"vLLM {vllm.__version__}: changed in what kvtier uses: {'; '.join(changed)}; {fix}")
    if numbers >= TRIED[1]:
        _warn(vllm.__version__, below)


@cache
def _warn(version: str, below: str) -> None:
    text = "vLLM %s: this kvtier was tried with releases below %s; every part of vLLM that it uses is there"
    _log.warning(text, version, below)


def changed_parts(own: type, *helpers: type) -> Iterator[str]:
    """What of vLLM's interface is not as `own` and its helpers need it, each in a few words."""
    for line in (_FIELDS + _FIELDS_OF.get(own.__name__, "")).split("\n"):
        if line:
            yield from _missing_fields(*line.split())
    for line in _CALLS.split("\n"):
        if line:
            yield from _changed_call(*line.split())
    for kind in (own, *helpers):
        yield from _changed_bases(kind)


def _changed_bases(own: type) -> Iterator[str]:
    """New abstract methods, and methods with other parameters than those that override them here."""
    for name in sorted(getattr(own, "__abstractmethods__", ())):
        yield f"{own.__name__} lacks the new method {name}"
    for name, method in inspect.getmembers(own, inspect.isroutine):
        ours = getattr(method, "__func__", method)  # of a class method
        for base in own.__mro__:
            theirs = vars(base).get(name) if base.__module__.startswith("vllm.") else None
            theirs = getattr(theirs, "__func__", theirs)
            if inspect.isfunction(theirs) and theirs is not ours and not _accepts(ours, theirs):
                yield f"{base.__name__}.{name}{inspect.signature(theirs)}"


def _missing_fields(path: str, *names: str) -> Iterator[str]:
    """Attributes that the class has neither by its body nor by an assignment to `self`."""
    kind = _found(path)
    if kind is None:
        yield f"{path} is gone"
        return
    known = set(dir(kind))
    for base in inspect.getmro(kind):
        if base.__module__.startswith("vllm."):
            known |= {*vars(base).get("__annotations__", ()), *re.findall(r"self\.(\w+)", inspect.getsource(base))}
    yield from (f"{path}.{name} is gone" for name in names if name not in known)


def _changed_call(path: str, *names: str) -> Iterator[str]:
    function = _found(path)
    if function is None:
        yield f"{path} is gone"
    elif (parameters := [*inspect.signature(function).parameters])[: len(names)] != [*names]:
        yield f"{path} takes {', '.join(parameters)}"


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether ours can be called as theirs is, by position and by name."""
    own, called = (list(inspect.signature(each).parameters.values()) for each in (ours, theirs))
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in own):
        return True
    more = own[len(called) :]
    is_alike = [each.name for each in own[: len(called)]] == [each.name for each in called]
    return is_alike and all(each.default is not each.empty for each in more)
