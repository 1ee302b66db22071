"""Derives from vLLM's configuration whether a model can be kept, and the layout of a slot."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from kvtier.connector.vllm.keys import has_kv, lookahead, require_known_method
from kvtier.connector.vllm.options import Order
from kvtier.connector.vllm.slots import LEAVE_OUT, GroupLane, SlotPlan, StateGroup
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import DTYPE_BYTES


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """The KV of each layer, by name."""
    specs = dict[str, Any]()
    for group in kv_cache_config.kv_cache_groups:
        specs |= specs_of_group(group)
    return specs


def specs_of_group(group: Any) -> dict[str, Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return {name: inner[name] if inner else group.kv_cache_spec for name in group.layer_names}


def layer_sizes(kv_cache_config: Any) -> dict[str, int]:
    """Bytes of each layer in one block of its group, of one rank. Both halves of the connector compute the same.

    vLLM gives its scheduler only the spec of a group's first layer. Layers with another spec have a layout of their
    own, known to both halves: a layer's bytes are those up to the next layer or block, padding included.
    """
    sizes = dict[str, int]()
    shown = set()
    for group in kv_cache_config.kv_cache_groups:
        if not group.layer_names:
            continue
        first = group.layer_names[0]
        shown.add(first)
        sizes |= dict.fromkeys(group.layer_names, real_bytes(specs_of_group(group)[first]))
    for tensor in kv_cache_config.kv_cache_tensors:
        if shown.isdisjoint(tensor.layers):
            sizes |= dict.fromkeys(tensor.layers, min(tensor.layer_stride, tensor.block_stride))
    return sizes


def real_bytes(spec: Any) -> int:
    """Bytes of one block of a layer, without vLLM's padding."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def is_packed(spec: Any) -> bool:
    """Whether the attention backend stores K and V other than side by side for each head."""
    return getattr(spec, "num_head_slots", None) is not None or getattr(spec, "state_content_bytes", None) is not None


def is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def is_mla(spec: Any) -> bool:
    return type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")


def is_sliding(spec: Any) -> bool:
    """Whether vLLM frees blocks before the layer's window. Any spec of a uniform group will do."""
    return type(spec).__name__ in ("SlidingWindowSpec", "SlidingWindowMLASpec")


def layer_index(name: str) -> int:
    return int(extract_layer_index(name))


def require_supported(vllm_config: Any) -> None:
    """Raise ConfigError, which ends with an alternative, for a set-up that kvtier cannot serve correctly."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            fix = "set it to 1, and divide the model by tensor_parallel_size or pipeline_parallel_size"
            raise ConfigError(f"{name} {size}: a rank's blocks would not hold consecutive tokens; {fix}")
    require_known_method(vllm_config.speculative_config)
    require_named(vllm_config.load_config.load_format)
    if model.is_encoder_decoder:
        fix = "start it without --kv-transfer-config; decoder-only models are kept"
        raise ConfigError(f"model {model.model!r}: vLLM has no KV connectors for encoder-decoder models; {fix}")


_UNNAMED: Final = {
    "dummy": "random weights have",
    **dict.fromkeys(("ipc_cache", "modelexpress", "tensorizer"), "weights from elsewhere than the checkpoint have"),
}


def require_named(load_format: str) -> None:
    """Raise ConfigError if the weights that vLLM loads are not the checkpoint's files."""
    if (why := _UNNAMED.get(load_format)) is not None:
        raise ConfigError(f'load_format "{load_format}": {why} no name for their blocks; load a checkpoint')


def why_none(vllm_config: Any) -> str | None:
    """Why loaded KV could not be used with this configuration; None if it can."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if vllm_config.model_config.use_mla and not (cache.enable_prefix_caching or scheduler.enable_chunked_prefill):
        fix = "use a GPU, or a CPU with AMX"
        return f"vLLM's MLA kernel on this platform computes whole prompts, and cannot go on after a prefix; {fix}"
    return None


def why_unnamed(vllm_config: Any) -> str | None:
    """Why another process may take one image for another; None if vLLM names each by its content."""
    images, caches = vllm_config.model_config.multimodal_config, vllm_config.cache_config
    if images is None or caches.enable_prefix_caching or images.mm_processor_cache_gb > 0:
        return None
    fix = "leave out --no-enable-prefix-caching or --mm-processor-cache-gb 0"
    return f"without a processor cache and prefix caching vLLM names an image by its request, not by its content; {fix}"


_FIX: Final = "use pipeline_parallel_size 1, and divide the model by tensor_parallel_size"


def bytes_around(vllm_config: Any, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of the other stages' layers in a rank's part of a slot: those before this stage's layers, and after them.

    `sizes`: bytes of this stage's layers in a slot. A slot has all of a model's layers in order of index, whatever
    stage computes them. So engines with different numbers of stages read each other's blocks.

    A process sees only its own layers, and the scheduler the first stage's. So ConfigError unless the model has one
    layer of K and V for each index, all of one size.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return 0, 0
    if vllm_config.speculative_config is not None:  # vLLM's first stages have no hook after a step's compute is issued
        fix = "leave --speculative-config out, or use pipeline_parallel_size 1"
        raise ConfigError(f"pipeline_parallel_size {stages} with speculative decoding: nothing is kept; {fix}")
    total = vllm_config.model_config.get_total_num_hidden_layers()
    own = sorted(layer_index(name) for name in sizes)
    borders = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    if len({*sizes.values()}) != 1 or own not in [list(range(*border)) for border in borders]:
        raise ConfigError(
            f"pipeline_parallel_size {stages}: then kvtier keeps models whose {total} layers all have K and V of one "
            f"size, with layers of every kind in each stage; {_FIX}"
        )
    [size] = {*sizes.values()}
    return own[0] * size, (total - own[-1] - 1) * size


_log = logging.getLogger(__name__)

_TOKENS_FIRST: Final = ("LBNHC", "BLNHC")  # vLLM's names of layouts whose blocks are [tokens, heads, content]


def slot_order(order: Order, vllm_config: Any, kv_cache_config: Any) -> str:
    """The name of the order of bytes in slots, the same in both halves: it is part of the blocks' identity.

    If vLLM's memory has the same order, a layer of a block is one contiguous run. ConfigError if vLLM's own order is
    requested, and this vLLM does not name it.
    """
    if order == "head-token":
        return order
    layout = _layout_of(vllm_config, kv_cache_config)
    if layout is None:
        fix = "leave order out"
        raise ConfigError(f"kv_connector_extra_config, order {order!r}: this vLLM does not name its KV layout; {fix}")
    return "token-head" if layout in _TOKENS_FIRST else "head-token"


def warn_of_order(plan: SlotPlan, vllm_config: Any, kv_cache_config: Any) -> None:
    """Log once how a transpose of every block could be avoided."""
    layout = _layout_of(vllm_config, kv_cache_config)
    if layout in _TOKENS_FIRST and plan.order == "head-token" and not plan.canonical:
        spared = 'every block is transposed; "order": "physical" keeps it so, under other names'
        _log.info("vLLM keeps KV as %s, so %s", layout, spared)


def _layout_of(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """vLLM's name of its KV layout. Its engine core chooses one for all layers before it makes any connector."""
    for config in (kv_cache_config, vllm_config.cache_config):
        if (layout := getattr(config, "kv_cache_layout", None)) is not None:
            return str(getattr(layout, "name", layout))
    return None


_SPECS: Final = (
    *("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"),
    "ChunkedLocalAttentionSpec",
)


def slot_plan(vllm_config: Any, kv_cache_config: Any, *, canonical: bool) -> SlotPlan:
    """Raises ConfigError for a model or a set-up that cannot be kept correctly. Both halves make the same plan."""
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


def divided(plan: SlotPlan, share: int | None, vllm_config: Any, kv_cache_config: Any) -> SlotPlan:
    """The plan with slots laid out for `share` ranks ([cache] share_across_tp), however many there are.

    ConfigError if slots of this model cannot be cut by heads, or not into so many pieces.
    """
    if share is None:
        return plan
    problem = f"[cache] share_across_tp {share}"
    tp, specs = vllm_config.parallel_config.tensor_parallel_size, layer_specs(kv_cache_config)
    visible = [specs[name] for name in plan.layers]
    if all(map(is_mla, visible)) and plan.num_parts == 1 and not plan.states:
        return plan  # every rank has the same bytes
    if (why := _whole(plan, visible, vllm_config)) is not None:
        raise ConfigError(f"{problem}: {why}, so ranks' parts of a block cannot be cut; leave it out")
    heads = vllm_config.model_config.get_total_num_kv_heads()
    parts, pieces = min(tp, heads), min(share, heads)
    if heads % parts or tp % parts or {spec.num_kv_heads * parts for spec in visible} != {heads}:
        raise ConfigError(f"{problem}: {tp} ranks do not have equal parts of the {heads} KV heads; leave it out")
    if heads % pieces:
        raise ConfigError(f"{problem}: the model has {heads} KV heads; use a number that divides them")
    if pieces % parts and parts % pieces:
        raise ConfigError(f"{problem}: {parts} ranks would cut its pieces; use a divisor or a multiple of {parts}")
    return replace(plan, num_parts=parts, replicas=tp // parts, num_pieces=pieces)


def _whole(plan: SlotPlan, specs: Sequence[Any], vllm_config: Any) -> str | None:
    """Why a rank's part of a slot is more than heads in a row; None if it is not."""
    if plan.states:
        return "this model keeps recurrent states"
    if has_kv(vllm_config.speculative_config):
        return "a draft model's KV is in the same blocks"
    if any(map(is_packed, specs)) or any(spec.kv_quant_mode not in _WITHOUT_SCALES for spec in specs):
        return "this attention backend packs its blocks in its own way"
    return "layers differ in what they keep of a block" if is_uneven(plan) or any(map(is_mla, specs)) else None


_WITHOUT_SCALES: Final = (0, 1)  # vLLM's `KVQuantMode`: none, and fp8 with scales that the checkpoint has


def is_uneven(plan: SlotPlan) -> bool:
    """Whether layers differ in size, or in tokens of a block, or several have one index."""
    kinds = {*plan.layer_bytes}, {lane.count for _, lane in plan.attention}
    return max(map(len, kinds)) > 1 or len({layer_index(name) for name in plan.layers}) < len(plan.layers)


def _kept_groups(kv_cache_config: Any) -> dict[int, Any]:
    """The groups whose blocks are kept, by vLLM's numbers: all in which vLLM itself looks up prefixes.

    Other groups are a request's scratch memory, which vLLM recomputes after every prefix.
    """
    groups = dict(enumerate(kv_cache_config.kv_cache_groups))
    for number, group in groups.items():
        if group.host_resident or not group.enable_kv_transfer:
            raise ConfigError(f"KV layout: group {number} is kept in host memory by vLLM (HiSparse); {LEAVE_OUT}")
        if not group.layer_names:
            raise ConfigError(f"KV layout: group {number} has no layers on this rank; {LEAVE_OUT}")
    return {number: group for number, group in groups.items() if group.kv_cache_spec.prefix_cacheable}


def _block_size(kv_cache_config: Any, kept: Mapping[int, Any]) -> int:
    """Tokens in one of kvtier's blocks: the least common multiple of all kept groups' blocks."""
    sizes = [group.kv_cache_spec.block_size for group in kept.values()]
    if not sizes:
        raise ConfigError(f"KV layout: no layer keeps anything for a next prompt; {LEAVE_OUT}")
    size, unit = math.lcm(*sizes), kv_cache_config.hash_block_size
    if unit is not None and size % unit:
        raise ConfigError(f"prefix_match_unit {unit}: it does not divide blocks of {size} tokens; unset it")
    return size


def _lanes(number: int, group: Any, size: int) -> list[GroupLane]:
    spec = specs_of_group(group)[group.layer_names[0]]  # vLLM's scheduler sees no others; windows are equal
    if is_state(spec):
        return [GroupLane(number)]  # one state at the end of a block, whatever the group's block size
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
    """Whether vLLM has no kernel here that continues from such a state."""
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
    """`block_content` of all layers, joined if they differ."""
    return "+".join(sorted({block_content(spec, dtype) for spec in specs})) or "none"


def block_content(spec: Any, dtype: torch.dtype) -> str:
    """How the platform's kernels arrange a block. Kernels with different names cannot read each other's blocks."""
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
    if spec.kv_quant_mode or is_mla(spec):  # opaque: scales are in the checkpoint, or among the bytes
        return
    if dtype not in DTYPE_BYTES:
        fix = "leave --kv-cache-dtype at auto"
        raise ConfigError(f"KV layout: layer {name} keeps {dtype}; kvtier keeps {', '.join(DTYPE_BYTES)}: {fix}")
    item = DTYPE_BYTES[dtype] * (spec.head_size + (spec.head_size_v or 0))
    if math.prod((spec.num_kv_heads, spec.block_size, item)) != spec.unpadded_page_size_bytes:
        raise ConfigError(f"KV layout: layer {name} packs its blocks in an unknown way; {LEAVE_OUT}")
