"""Reads a model's KV layout from vLLM's configuration: what a slot holds of each layer, and in which order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.platforms import current_platform

from kvtier.connector.vllm.drafts import has_kv, lookahead
from kvtier.connector.vllm.layer_specs import (
    is_mla,
    is_packed,
    is_sliding,
    is_state,
    layer_index,
    layer_sizes,
    layer_specs,
    specs_of_group,
)
from kvtier.connector.vllm.model import require_supported
from kvtier.connector.vllm.slots import LEAVE_OUT, GroupLane, SlotPlan, StateGroup
from kvtier.connector.vllm.stages import bytes_around
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import DTYPE_BYTES

_SPECS: Final = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    "ChunkedLocalAttentionSpec",
)


def slot_plan(vllm_config: Any, kv_cache_config: Any, *, canonical: bool) -> SlotPlan:
    """Raises ConfigError for a model or a set-up that cannot be kept right. Both halves make the same plan."""
    require_supported(vllm_config)
    kept = _kept_groups(kv_cache_config)
    specs, sizes = layer_specs(kv_cache_config), layer_sizes(kv_cache_config)
    names = [name for group in kept.values() for name in group.layer_names if not is_state(specs[name])]
    for name in names:
        _require_plain(name, specs[name])
    layers = tuple(sorted(names, key=lambda name: (layer_index(name), name)))
    size = _block_size(kv_cache_config, kept)
    lanes = tuple(lane for number, group in kept.items() for lane in _lanes(number, group, size))
    replicas = kv_cache_config.kv_tp_replicas
    plan = SlotPlan(
        block_size=size,
        hash_size=kv_cache_config.hash_block_size or size,
        groups=tuple(tuple(group.layer_names) for group in kv_cache_config.kv_cache_groups),
        group_sizes=tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups),
        lanes=lanes,
        layers=layers,
        layer_bytes=tuple(sizes[name] for name in layers),
        num_parts=vllm_config.parallel_config.tensor_parallel_size // replicas,
        replicas=replicas,
        content=_contents([specs[name] for name in layers], vllm_config.model_config.dtype),
        canonical=canonical,
        states=_states(kept, lanes, sizes),
        lookahead=lookahead(vllm_config),
    )
    plan = replace(plan, around=bytes_around(vllm_config, dict(zip(layers, plan.slot_bytes, strict=True))))
    if plan.states and vllm_config.speculative_config is not None:
        fix = "leave --speculative-config out"
        raise ConfigError(f"KV layout: recurrent states under speculative decoding are not kept; {fix}")
    if canonical and has_kv(vllm_config.speculative_config):
        raise ConfigError('keys "kvtier": a draft model\'s KV has no canonical form; use keys "vllm"')
    if canonical:
        _require_canonical(plan, [specs[name] for name in layers])
    return plan


def is_uneven(plan: SlotPlan) -> bool:
    """Whether layers differ in size, or in tokens of a block, or several have one index."""
    kinds = {*plan.layer_bytes}, {lane.count for _, lane in plan.attention}
    return max(map(len, kinds)) > 1 or len({layer_index(name) for name in plan.layers}) < len(plan.layers)


def _kept_groups(kv_cache_config: Any) -> dict[int, Any]:
    """The groups whose blocks are kept, by vLLM's numbers: all but those that vLLM itself finds no prefix in.

    Such a group is a request's scratch memory. vLLM computes it anew behind every prefix.
    """
    groups = dict(enumerate(kv_cache_config.kv_cache_groups))
    for number, group in groups.items():
        if group.host_resident or not group.enable_kv_transfer:
            raise ConfigError(f"KV layout: group {number} is kept in host memory by vLLM (HiSparse); {LEAVE_OUT}")
        if not group.layer_names:
            raise ConfigError(f"KV layout: group {number} has no layers on this rank; {LEAVE_OUT}")
    return {number: group for number, group in groups.items() if group.kv_cache_spec.prefix_cacheable}


def _block_size(kv_cache_config: Any, kept: Mapping[int, Any]) -> int:
    """Tokens in one of kvtier's blocks: the least number that every kept group's blocks divide."""
    sizes = [group.kv_cache_spec.block_size for group in kept.values()]
    if not sizes:
        raise ConfigError(f"KV layout: no layer keeps anything for a next prompt; {LEAVE_OUT}")
    size, unit = math.lcm(*sizes), kv_cache_config.hash_block_size
    if unit is not None and size % unit:
        raise ConfigError(f"prefix_match_unit {unit}: it does not divide blocks of {size} tokens; unset it")
    return size


def _lanes(number: int, group: Any, size: int) -> list[GroupLane]:
    spec = specs_of_group(group)[group.layer_names[0]]  # of others vLLM's scheduler sees none; windows are equal
    if is_state(spec):
        return [GroupLane(number)]  # one state at the end of a block, however many blocks of the group that is
    count = size // spec.block_size
    window = spec.sliding_window + spec.extra_retained_tokens if is_sliding(spec) else 0
    chunk = spec.attention_chunk_size if type(spec).__name__ == "ChunkedLocalAttentionSpec" else 0
    return [GroupLane(number, place, count, window, chunk) for place in range(count)]


def _states(kept: Mapping[int, Any], lanes: Sequence[GroupLane], sizes: Mapping[str, int]) -> tuple[StateGroup, ...]:
    """The groups of layers with a recurrent state. ConfigError if vLLM keeps no state at the end of blocks."""
    states = []
    for number, group in kept.items():
        specs = {name: spec for name, spec in specs_of_group(group).items() if is_state(spec)}
        if not specs:
            continue
        if len(specs) != len(group.layer_names):
            raise ConfigError(f"KV layout: a KV group of layers with and without a state; {LEAVE_OUT}")
        for spec in specs.values():
            if spec.mamba_cache_mode != "align":
                raise ConfigError(
                    f"mamba_cache_mode {spec.mamba_cache_mode!r}: states are kept where vLLM has them, at the end of a "
                    "block; start with --enable-prefix-caching --mamba-cache-mode align"
                )
            if fails_behind_prefix(spec):
                fix = "use a GPU, or start vLLM without kvtier"
                raise ConfigError(f"KV layout: vLLM's CPU kernels for Mamba's states fail behind a prefix; {fix}")
        lane = next(index for index, lane in enumerate(lanes) if lane.group == number)
        of_layers = tuple(sizes[name] for name in specs)
        states.append(StateGroup(number, lane, tuple(specs), of_layers, group.kv_cache_spec.block_size))
    return tuple(states)


def fails_behind_prefix(spec: Any) -> bool:
    """Whether vLLM has no kernel here that goes on from such a state."""
    return current_platform.is_cpu() and str(getattr(spec.mamba_type, "name", "")).startswith("MAMBA")


def _require_canonical(plan: SlotPlan, specs: Sequence[Any]) -> None:
    """Raise ConfigError if the canonical layout cannot hold this KV."""
    if any(map(is_packed, specs)):
        raise ConfigError('keys "kvtier": this attention backend packs its blocks in its own way; use keys "vllm"')
    if any(spec.kv_quant_mode for spec in specs):
        raise ConfigError('keys "kvtier": quantised KV has no canonical form; use keys "vllm"')
    if plan.states:
        raise ConfigError('keys "kvtier": a recurrent state has no canonical form; use keys "vllm"')
    if is_uneven(plan):
        raise ConfigError('keys "kvtier": layers whose KV differs in size have no canonical form; use keys "vllm"')
    if plan.content not in ("plain", "cpu-vec") or any(map(is_mla, specs)):
        raise ConfigError(f'keys "kvtier": KV of kind {plan.content!r} has no canonical form; use keys "vllm"')


def _contents(specs: Sequence[Any], dtype: torch.dtype) -> str:
    """`block_content` of all layers; of those that differ, each one's name."""
    return "+".join(sorted({block_content(spec, dtype) for spec in specs})) or "none"


def block_content(spec: Any, dtype: torch.dtype) -> str:
    """How the platform's kernels arrange a block's inside. Kernels of one name cannot read blocks of another."""
    if not current_platform.is_cpu():
        return "plain"
    if is_mla(spec):
        return "cpu-mla-amx" if torch.cpu._is_amx_tile_supported() else "cpu-mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    quantised = "fp8" if spec.kv_quant_mode else None
    return f"cpu-{_get_attn_isa(dtype, spec.block_size, spec.head_size, quantised)}"


def _require_plain(name: str, spec: Any) -> None:
    kind, dtype = type(spec).__name__, str(getattr(spec, "dtype", "")).removeprefix("torch.")
    if kind not in _SPECS:
        raise ConfigError(f"KV layout: layer {name} is of kind {kind}, which kvtier does not keep; {LEAVE_OUT}")
    if spec.kv_quant_mode or is_mla(spec):  # opaque: scales are the checkpoint's, or lie among the bytes
        return
    if dtype not in DTYPE_BYTES:
        fix = "leave --kv-cache-dtype at auto"
        raise ConfigError(f"KV layout: layer {name} keeps {dtype}; kvtier keeps {', '.join(DTYPE_BYTES)}: {fix}")
    item = DTYPE_BYTES[dtype] * (spec.head_size + (spec.head_size_v or 0))
    if math.prod((spec.num_kv_heads, spec.block_size, item)) != spec.unpadded_page_size_bytes:
        raise ConfigError(f"KV layout: layer {name} packs its blocks in an unknown way; {LEAVE_OUT}")
