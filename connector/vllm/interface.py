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
vllm.v1.core.sched.output:SchedulerOutput new_block_ids_to_zero preempted_req_ids finished_req_ids
vllm.v1.core.sched.output:NewRequestData req_id num_computed_tokens
vllm.v1.core.sched.output:CachedRequestData req_ids resumed_req_ids new_block_ids num_computed_tokens
vllm.v1.request:Request request_id num_tokens num_prompt_tokens num_computed_tokens num_output_tokens all_token_ids
vllm.v1.request:Request output_token_ids block_hashes lora_request cache_salt mm_features prompt_embeds status
vllm.v1.request:Request kv_transfer_params skip_reading_prefix_cache arrival_time trace_headers
vllm.v1.kv_cache_interface:KVCacheConfig num_blocks kv_cache_tensors kv_cache_groups
vllm.v1.kv_cache_interface:KVCacheGroupSpec layer_names kv_cache_spec
vllm.v1.kv_cache_interface:FullAttentionSpec block_size num_kv_heads head_size dtype page_size_bytes
vllm.v1.kv_cache_interface:MambaSpec shapes dtypes mamba_type mamba_cache_mode
vllm.v1.core.kv_cache_manager:KVCacheBlocks get_block_ids
vllm.v1.outputs:KVConnectorOutput finished_sending finished_recving invalid_block_ids kv_connector_worker_meta
vllm.config:ModelConfig get_total_num_kv_heads get_total_num_hidden_layers multimodal_config
vllm.config:MultiModalConfig media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype video_pruning_rate
vllm.config:VllmConfig model_config cache_config parallel_config scheduler_config speculative_config lora_config
vllm.config:VllmConfig load_config kv_events_config kv_transfer_config attention_config
"""
"""Classes, and attributes that are read of them."""

_CALLS: Final = """
vllm.v1.core.kv_cache_utils:hash_block_tokens hash_function parent_block_hash curr_block_token_ids extra_keys
vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys request start_token_idx end_token_idx start_mm_idx
vllm.utils.hashing:get_hash_fn_by_name hash_fn_name
vllm.model_executor.models.utils:extract_layer_index layer_name
vllm.distributed.utils:get_pp_indices num_hidden_layers pp_rank pp_size
"""
"""Functions, and their first parameters."""


def require_supported_version(own: type) -> None:
    """Raise ConfigError if this vLLM is too old, or newer and changed in what the connector class `own` uses."""
    numbers = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    oldest, below = (".".join(map(str, version)) for version in TRIED)
    if numbers < TRIED[0]:
        raise ConfigError(f"vLLM {vllm.__version__}: this kvtier needs {oldest} or newer; install one below {below}")
    if numbers >= TRIED[1] and (changed := list(changed_parts(own))):
        fix = f"install one below {below}, or a newer kvtier"
        raise ConfigError(f"vLLM {vllm.__version__}: changed in what kvtier uses: {'; '.join(changed)}; {fix}")
    if numbers >= TRIED[1]:
        _warn(vllm.__version__, below)


@cache
def _warn(version: str, below: str) -> None:
    text = "vLLM %s: this kvtier was tried with releases below %s; every part of vLLM that it uses is there"
    _log.warning(text, version, below)


def changed_parts(own: type) -> Iterator[str]:
    """What of vLLM's interface is not as `own` needs it, each in a few words."""
    for line in _FIELDS.split("\n"):
        if line:
            yield from _missing_fields(*line.split())
    for line in _CALLS.split("\n"):
        if line:
            yield from _changed_call(*line.split())
    for name in sorted(getattr(own, "__abstractmethods__", ())):
        yield f"{own.__name__} lacks the new method {name}"
    for name, ours in inspect.getmembers(own, inspect.isfunction):
        for base in own.__mro__:
            theirs = vars(base).get(name) if base.__module__.startswith("vllm.") else None
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
