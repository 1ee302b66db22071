"""Describes a rank's KV tensors as parts of slots: which bytes of vLLM's memory lie where in a slot."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import torch

from kvtier.connector.vllm.slots import LEAVE_OUT, SlotPlan
from kvtier.tiers import ConfigError
from kvtier.tiers.copies import BlockPart, EngineBlocks

# of [blocks, kernel blocks, heads, tokens, content]
_ORDERS: Final = {"head-token": (0, 2, 1, 3, 4), "token-head": (0, 1, 3, 2, 4)}
_CPU_TILE: Final = 32  # vLLM's CPU kernels keep the keys of this many tokens transposed


def engine_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor], rank: int) -> EngineBlocks:
    """A rank's KV tensors, by layer name, as parts of slots. Each tensor is `[blocks, heads, tokens, content]`.

    If kernel blocks are smaller than vLLM's blocks, a block is several consecutive entries. What `EngineBlocks` calls a
    group is a lane. ConfigError if vLLM's tensors are not as large as the plan says.
    """
    part, num_blocks = rank // plan.replicas, _num_blocks(plan, kv_caches)
    starts = dict(zip(plan.layers, accumulate((0, *plan.slot_bytes)), strict=False))
    sizes = dict(zip(plan.layers, plan.layer_bytes, strict=True))
    parts = list[BlockPart]()
    for number, name in enumerate(plan.layers):
        tensor = _split(kv_caches[name], 0, num_blocks, -1)  # [blocks, kernel blocks, heads, tokens, content]
        if tensor[0].nbytes > sizes[name]:
            raise ConfigError(
                f"KV layout: a block of {name} has {tensor[0].nbytes} bytes, not {sizes[name]}; {LEAVE_OUT}"
            )
        start = part * plan.part_bytes + plan.around[0] + starts[name]
        for lane_number, lane in plan.attention:
            if name not in plan.groups[lane.group]:
                continue
            offset = start + lane.place * sizes[name]
            if not plan.canonical:
                view = tensor.permute(*_ORDERS[plan.order])
                parts.append(BlockPart(view, number, offset, lane_number))
                continue
            for view in _keys_and_values(tensor, plan.content):
                parts.append(BlockPart(view, number, offset, lane_number))
                offset += parts[-1].num_bytes
    for record, state in enumerate(plan.states, 1):
        offset = part * state.part_bytes
        for number, (name, size) in enumerate(zip(state.layers, state.layer_bytes, strict=True)):
            parts.append(BlockPart(kv_caches[name], number, offset, state.lane, record))
            offset += size
    return EngineBlocks(parts, plan.block_bytes)


def _num_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor]) -> int:
    """vLLM's number of blocks. Its kernels may count others, and only of a group's first layer the size is exact."""
    sizes = dict(zip(plan.layers, plan.layer_bytes, strict=True))
    for state in plan.states:
        sizes |= dict(zip(state.layers, state.layer_bytes, strict=True))
    first = plan.groups[plan.lanes[0].group][0]
    return kv_caches[first].nbytes // sizes[first]


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
