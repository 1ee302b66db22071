"""KV events in vLLM's words: which blocks are in kvtier's tiers, said beside what vLLM says of its own GPU blocks."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtier.tiers.events import EventSource, Removed, Stored
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.tier import ChainHash

MOST: Final = 512  # blocks of one tier told in a step: what a slab held at start is told over as many steps as it takes
_REMEMBERED: Final = 65_536  # chain roots, and blocks of adapters, known from requests


class VllmEvents:
    """What `take_events` returns. Called from the scheduler's thread.

    A reset is told as the removal of everything: vLLM's `AllBlocksCleared` names no medium, and vLLM publishes a
    connector's events behind those of its GPU blocks, so it would wipe out what a step has just stored there.
    """

    def __init__(self, hierarchy: Hierarchy, root: ChainHash, groups: Sequence[Any], *, canonical: bool) -> None:
        """`root` is where chains begin by default, `groups` are vLLM's KV groups; `canonical`: names are our own."""
        self._source = EventSource(hierarchy)
        self._canonical = canonical
        self._root = root
        self._roots: dict[ChainHash, None] = {}  # of other tenants and adapters, where names are our own
        self._adapters: dict[ChainHash, Any] = {}
        self._group: dict[str, Any] = {}
        if len(groups) == 1:  # a block of several groups is all of theirs together
            spec = groups[0].kv_cache_spec
            self._group = {
                "group_idx": 0,
                "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
            }

    @property
    def due(self) -> bool:
        """Whether there is something to tell."""
        return self._source.waiting

    @property
    def coming(self) -> bool:
        """Whether there will be, once what is under way has ended."""
        return self._source.coming

    def note(self, root: ChainHash, names: Sequence[ChainHash], adapter: Any | None) -> None:
        """Blocks of a live request are going to be stored; `adapter` is its LoRA request."""
        _remember(self._roots, [root], None)
        if adapter is not None:
            _remember(self._adapters, names, adapter)

    def take(self) -> Iterator[BlockStored | BlockRemoved]:
        """What changed since the last time."""
        for event in self._source.take(MOST):
            if isinstance(event, Removed):
                names = [self._external(name) for name in event.hashes]
                group = self._group.get("group_idx")
                yield BlockRemoved(block_hashes=names, medium=_medium(event.tier), group_idx=group)
            else:
                yield self._stored(event)

    def _stored(self, event: Stored) -> BlockStored:
        first, last = event.blocks[0], event.blocks[-1]
        is_first = first.parent == self._root or first.parent in self._roots
        tokens = np.frombuffer(b"".join(block.tokens for block in event.blocks), "<u4")
        adapter = self._adapters.get(last.chain_hash)
        return BlockStored(
            block_hashes=[self._external(block.chain_hash) for block in event.blocks],
            parent_block_hash=None if is_first else self._external(first.parent),
            token_ids=tokens.tolist(),
            block_size=len(first.tokens) // 4,
            lora_id=None if adapter is None else adapter.adapter_id,
            medium=_medium(event.tier),
            lora_name=None if adapter is None else adapter.lora_name,
            **self._group,
        )

    def _external(self, name: ChainHash) -> bytes | int:
        """The name as vLLM publishes it; its xxh3 hashes of 16 bytes are kept twice over (`VllmChain`)."""
        half = len(name) // 2
        if not self._canonical and name[:half] == name[half:]:
            name = name[:half]
        external: bytes | int = maybe_convert_block_hash(name)
        return external


def _medium(tier: str) -> str:
    return {"l2": str(MEDIUM_CPU), "file": str(MEDIUM_STORAGE), "redis": "EXTERNAL"}[tier]


def _remember(known: dict[ChainHash, Any], names: Sequence[ChainHash], what: Any) -> None:
    """Note names, and forget the oldest beyond what is remembered."""
    for name in names:
        known[name] = what
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
