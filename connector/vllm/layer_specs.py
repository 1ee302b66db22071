"""Reads vLLM's KV groups: the spec of each layer, its bytes, its index, and of what kind it is."""

from typing import Any

from vllm.model_executor.models.utils import extract_layer_index


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
    """Bytes of each layer in one block of its group, of one rank. Both halves of the connector get the same answer.

    vLLM shows its scheduler one spec of a group, its first layer's. Layers with another spec are laid out apart, and
    vLLM tells both halves how: a layer's bytes are then those between it and the next layer or block, padding included.
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
    """Bytes of one block of a layer, without what vLLM pads it with."""
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def is_packed(spec: Any) -> bool:
    """Whether the attention backend keeps K and V otherwise than side by side for each head."""
    return getattr(spec, "num_head_slots", None) is not None or getattr(spec, "state_content_bytes", None) is not None


def is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def is_mla(spec: Any) -> bool:
    return type(spec).__name__ in ("MLAAttentionSpec", "SlidingWindowMLASpec")


def is_sliding(spec: Any) -> bool:
    """Whether vLLM gives up blocks behind the layer's window. Of a uniform group's specs any one may be asked."""
    return type(spec).__name__ in ("SlidingWindowSpec", "SlidingWindowMLASpec")


def layer_index(name: str) -> int:
    return int(extract_layer_index(name))
