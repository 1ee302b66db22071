"""The layout of vLLM's KV in a slot, as data: which bytes of a rank's tensors lie where in it. Needs no vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Final

import torch

from kvtier.tiers import ConfigError
from kvtier.tiers.copies import BlockPart, EngineBlocks

LEAVE_OUT: Final = "docs/models.md lists the models it keeps; start vLLM without kvtier for this one"


@dataclass(frozen=True, slots=True)
class GroupLane:
    """One of the blocks that a KV group has within one of kvtier's blocks. A slot has a place for each lane.

    Groups whose blocks have fewer tokens than kvtier's have several lanes.
    """

    group: int  # vLLM's number of it
    place: int = 0  # among the group's blocks within one of kvtier's
    count: int = 1  # of the group's blocks within one of kvtier's
    window: int = 0  # tokens of the sliding window of the group's layers; 0: full attention
    chunk: int = 0  # tokens of a chunk, for layers with chunked local attention

    def position(self, block: int) -> int:
        """The position of vLLM's block in the group's table; `block` is the number of kvtier's."""
        return block * self.count + self.place

    def is_needed(self, block: int, block_size: int) -> bool:
        """Whether a prompt that continues after kvtier's block, of `block_size` tokens, needs this part of it.

        A prompt that continues later needs less of it. vLLM may have freed a part that no prompt needs before the block
        was full: a window may have fewer tokens than kvtier's block.
        """
        if self.count == 1:  # a full block: prompts may continue inside it
            return True
        border, end = (block + 1) * block_size, (self.position(block) + 1) * (block_size // self.count)
        unseen = border // self.chunk * self.chunk if self.chunk else border - self.window + 1 if self.window else 0
        return end > unseen


@dataclass(frozen=True, slots=True)
class StateGroup:
    """A KV group of layers with a recurrent state. Its content at a block's end is a record of its own."""

    group: int  # vLLM's number of it
    lane: int
    layers: tuple[str, ...]
    layer_bytes: tuple[int, ...]  # of one rank
    block_size: int  # tokens: the state after token `t` is at position `t // block_size` of the group's table

    @property
    def part_bytes(self) -> int:
        return sum(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The layout of one slot with `block_size` tokens: every rank's part, and in it every layer in order of index.

    With `num_pieces` it is the layout of so many ranks: a rank has several of their pieces, or some heads of one.

    In native form a layer is `[heads, tokens, content]`, as vLLM presents it, or `[tokens, heads, content]` (`order`).
    For a group with smaller blocks that is repeated, block by block. In canonical form a layer is
    `[2 (K, V), tokens, heads, dim]`. A slot with a group's state instead of a block has vLLM's state of each layer in
    turn.
    """

    block_size: int  # tokens: the least common multiple of all groups' blocks
    hash_size: int  # tokens from one of vLLM's hashes to the next
    groups: tuple[tuple[str, ...], ...]  # layer names of each KV group
    group_sizes: tuple[int, ...]  # tokens in a block of each KV group
    lanes: tuple[GroupLane, ...]  # in order of groups. Block `b` of lane `l` is the workers' block `l * num_blocks + b`
    layers: tuple[str, ...]  # all with K and V, in the order of a slot
    layer_bytes: tuple[int, ...]  # in one block of the layer's group, of one rank
    num_parts: int  # tensor-parallel ranks that hold different heads
    replicas: int  # consecutive ranks that hold the same
    content: str  # how vLLM's kernels arrange a block: "plain", or the name of another layout
    canonical: bool
    states: tuple[StateGroup, ...] = ()
    around: tuple[int, int] = (0, 0)  # bytes of other pipeline stages' layers in a part, before these and after them
    lookahead: int = 0  # tokens after a block that its draft KV depends on
    order: str = "head-token"  # dimensions of a layer in native form; or "token-head"
    num_pieces: int | None = None  # None: num_parts

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer in a slot, of one rank."""
        counts = {name: lane.count for lane in self.lanes for name in self.groups[lane.group]}
        return tuple(counts[name] * size for name, size in zip(self.layers, self.layer_bytes, strict=True))

    @property
    def part_bytes(self) -> int:
        return self.around[0] + sum(self.slot_bytes) + self.around[1]

    @property
    def block_bytes(self) -> int:
        """A slot's bytes: the largest kind of record."""
        return self.num_parts * max(self.part_bytes, *(state.part_bytes for state in self.states), 0)

    @property
    def attention(self) -> tuple[tuple[int, GroupLane], ...]:
        """The lanes of groups that keep K and V, with their numbers."""
        of_states = {state.group for state in self.states}
        return tuple((number, lane) for number, lane in enumerate(self.lanes) if lane.group not in of_states)

    @property
    def rows(self) -> int:
        """How many rows a layer of a block has in a slot, with all heads of a piece in each."""
        if self.canonical:
            return 2 * self.block_size
        return 1 if self.order == "head-token" else self.block_size

    @property
    def has_one_table(self) -> bool:
        """Whether a request has one table, of K and V: then each block that failed to load can be reported to vLLM.

        Otherwise a block's number is ambiguous, or the state of an earlier block is missing.
        """
        return len(self.groups) == 1 and not self.states


# of [blocks, kernel blocks, heads, tokens, content]
_ORDERS: Final = {"head-token": (0, 2, 1, 3, 4), "token-head": (0, 1, 3, 2, 4)}
_CPU_TILE: Final = 32  # vLLM's CPU kernels store the keys of this many tokens transposed


def engine_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor], rank: int) -> EngineBlocks:
    """A rank's KV tensors, by layer name, as parts of slots. Each tensor is `[blocks, heads, tokens, content]`.

    If kernel blocks are smaller than vLLM's blocks, a block is several consecutive entries. A group of `EngineBlocks`
    is a lane. ConfigError if vLLM's tensors differ in size from the plan.
    """
    part = rank // plan.replicas
    pieces = plan.num_pieces or plan.num_parts
    piece_bytes = plan.num_parts * plan.part_bytes // pieces
    cuts = max(1, pieces // plan.num_parts)  # pieces that this rank has
    sharing = max(1, plan.num_parts // pieces)  # parts that lie in one piece, side by side in each layer
    starts = dict(zip(plan.layers, accumulate((0, *plan.slot_bytes)), strict=False))
    sizes = dict(zip(plan.layers, plan.layer_bytes, strict=True))
    parts = list[BlockPart]()
    for number, name in enumerate(plan.layers):
        tensor = split_blocks(plan, kv_caches, name)
        if tensor[0].nbytes > sizes[name]:
            raise ConfigError(
                f"KV layout: a block of {name} has {tensor[0].nbytes} bytes, not {sizes[name]}; {LEAVE_OUT}"
            )
        if plan.num_pieces is not None and (tensor.shape[2] % cuts or tensor[0].nbytes != sizes[name]):
            fix = "leave [cache] share_across_tp out"
            raise ConfigError(f"KV layout: {tensor.shape[2]} heads of {name} cannot be cut into {cuts}; {fix}")
        start = (plan.around[0] + starts[name]) * plan.num_parts // pieces + part % sharing * sizes[name] // plan.rows
        for cut, heads in enumerate(tensor.chunk(cuts, 2)):
            piece = (part * cuts + cut) // sharing
            for lane_number, lane in plan.attention:
                if name not in plan.groups[lane.group]:
                    continue
                offset = piece * piece_bytes + start + lane.place * sizes[name] // cuts
                native = [heads.permute(*_ORDERS[plan.order])]
                for view in keys_and_values(heads, plan.content) if plan.canonical else native:
                    for row in _rows(view) if sharing > 1 and plan.rows > 1 else [view]:
                        parts.append(BlockPart(row, number, offset, lane_number))
                        offset += parts[-1].num_bytes * (sharing if plan.rows > 1 else 1)
    for record, state in enumerate(plan.states, 1):
        offset = part * state.part_bytes
        for number, (name, size) in enumerate(zip(state.layers, state.layer_bytes, strict=True)):
            parts.append(BlockPart(kv_caches[name], number, offset, state.lane, record))
            offset += size
    return EngineBlocks(parts, plan.block_bytes)


def _num_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor]) -> int:
    """vLLM's number of blocks. Kernels may count others, and only the size of a group's first layer is exact."""
    sizes = dict(zip(plan.layers, plan.layer_bytes, strict=True))
    for state in plan.states:
        sizes |= dict(zip(state.layers, state.layer_bytes, strict=True))
    first = plan.groups[plan.lanes[0].group][0]
    return kv_caches[first].nbytes // sizes[first]


def split_blocks(plan: SlotPlan, kv_caches: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A layer's tensor as `[blocks, kernel blocks, heads, tokens, content]`."""
    return _split(kv_caches[name], 0, _num_blocks(plan, kv_caches), -1)


def _split(tensor: torch.Tensor, dimension: int, *sizes: int) -> torch.Tensor:
    split: torch.Tensor = tensor.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]
    return split


def _rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """`[blocks, …tokens, heads, content]`, token by token: between two tokens of a rank lie other ranks' heads."""
    for token in product(*map(range, tensor.shape[1:-2])):
        index: tuple[slice | int, ...] = (slice(None), *token)
        yield tensor[index]


def keys_and_values(tensor: torch.Tensor, content: str) -> Sequence[torch.Tensor]:
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
