"""How engines keep KV, as parts of slots: of layers `[blocks, heads, tokens, keys and values]`, from a byte `at` on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvtier.connector.vllm.slots import GroupLane, SlotPlan
from kvtier.tiers.copies.transfer import BlockPart

Layout = Callable[[list[torch.Tensor]], list[BlockPart]]


def slot_plan_of(layers: tuple[str, ...], tokens: int, layer_bytes: int, **changed: Any) -> SlotPlan:
    """One KV group of these layers, all of it on one rank; `changed` are other fields."""
    size: dict[str, Any] = {"block_size": tokens, "hash_size": tokens, "group_sizes": (tokens,)}
    group: dict[str, Any] = {"groups": (layers,), "lanes": (GroupLane(0),), "layers": layers}
    of_rank: dict[str, Any] = {"layer_bytes": (layer_bytes,) * len(layers), "num_parts": 1, "replicas": 1}
    return replace(SlotPlan(**size, **group, **of_rank, content="plain", canonical=False), **changed)


def layer_bytes(tensors: list[torch.Tensor]) -> int:
    """Of one layer in a block."""
    return tensors[0][0].numel() * tensors[0].itemsize


def whole_layers(tensors: list[torch.Tensor], at: int = 0) -> list[BlockPart]:
    return [BlockPart(tensor, layer, at + layer * layer_bytes(tensors)) for layer, tensor in enumerate(tensors)]


def tokens_first(tensors: list[torch.Tensor], at: int = 0) -> list[BlockPart]:
    return whole_layers([tensor.transpose(1, 2) for tensor in tensors], at)


def dimension_first(tensors: list[torch.Tensor], at: int = 0) -> list[BlockPart]:
    """Every element by itself: the innermost dimension of the slot is not the engine's."""
    return whole_layers([tensor.transpose(2, 3) for tensor in tensors], at)


def keys_and_values(tensors: list[torch.Tensor], at: int = 0) -> list[BlockPart]:
    """Head-major in the engine, token-major in the slot with keys before values, as our own blocks are."""
    dim = tensors[0].shape[3] // 2
    halves = [tensor[..., kv * dim : (kv + 1) * dim].transpose(1, 2) for tensor in tensors for kv in (0, 1)]
    return [BlockPart(half, i // 2, at + i * layer_bytes(tensors) // 2) for i, half in enumerate(halves)]


def one_rank(tensors: list[torch.Tensor], at: int | None = None) -> list[BlockPart]:
    """Half of the heads: this rank owns the second half of every slot."""
    half = [tensor[:, tensor.shape[1] // 2 :] for tensor in tensors]
    return whole_layers(half, len(half) * layer_bytes(half) if at is None else at)


def one_rank_tokens_first(tensors: list[torch.Tensor]) -> list[BlockPart]:
    return [BlockPart(part.tensor.transpose(1, 2), part.layer, part.offset) for part in one_rank(tensors)]


def two_groups(tensors: list[torch.Tensor]) -> list[BlockPart]:
    """Layers by turns, as engines group full and sliding ones."""
    return [BlockPart(part.tensor, part.layer, part.offset, part.layer % 2) for part in whole_layers(tensors)]
