"""Publishes as vLLM's KV events which blocks are in kvtier's tiers, beside vLLM's own events of its GPU blocks."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtier.connector import BlockChain
from kvtier.tiers import TIERS, BlockRecord, ChainHash
from kvtier.tiers.hierarchy import EventSource, Hierarchy, Removed
from kvtier.tiers.naming import is_named_by

T = TypeVar("T")

MOST: Final = 512  # blocks of one tier reported in a step; a slab's blocks at start take several steps
_REMEMBERED: Final = 65_536  # chain roots and adapters' blocks remembered from requests


class VllmEvents:
    """The events that `take_events` returns. Called from the scheduler's thread.

    A reset is reported as the removal of every block. vLLM's `AllBlocksCleared` names no medium, and vLLM publishes a
    connector's events after those of its GPU blocks. So it would also clear what the same step stored there.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        root: ChainHash,
        groups: Sequence[Any],
        hashed: tuple[str, int] | None,
        *,
        shared: bool = True,
    ) -> None:
        """`root` is the chains' default root; `groups` are vLLM's KV groups; `shared`: `[events] shared`.

        `hashed` is vLLM's algorithm, and how many tokens there are from one hash to the next; None if names are
        kvtier's own.
        """
        self.source = EventSource(hierarchy)
        self._tiers = {kind.name for kind in TIERS.values() if shared or not kind.is_shared}
        algorithm, self._hash_size = hashed or (None, 0)
        self._hash = None if algorithm is None else get_hash_fn_by_name(algorithm)
        self._root = root
        self._roots: dict[ChainHash, None] = {}  # roots of other tenants and adapters, if names are kvtier's own
        self._adapters: dict[ChainHash, Any] = {}
        self._keys: dict[ChainHash, tuple[Any, ...] | None] = {}  # extra keys of requests' blocks
        self._withheld: dict[tuple[str, ChainHash], None] = {}  # (tier, block) pairs that are not published
        self._group: dict[str, Any] = {}
        if len(groups) == 1:  # a block of several groups is all of theirs together
            spec = groups[0].kv_cache_spec
            self._group = {
                "group_idx": 0,
                "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
            }

    def record(self, request: Any, chain: BlockChain, run: range) -> None:
        """Record that blocks `run` of a live request are going to be stored."""
        _remember(self._roots, [chain.parent(0)], None)
        names = chain.hashes[run.start : run.stop]
        if request.lora_request is not None:
            _remember(self._adapters, names, request.lora_request)
        keys: list[tuple[Any, ...] | None] = [None] * len(run)
        if request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None:
            size = chain.block_size
            tagged = [generate_block_hash_extra_keys(request, i * size, (i + 1) * size, 0)[0] for i in run]
            keys = to_event_extra_keys(tagged) or keys
        for name, one in zip(names, keys, strict=True):
            _remember(self._keys, [name], one)

    def take(self) -> Iterator[BlockStored | BlockRemoved]:
        for event in self.source.take(MOST):
            if event.tier not in self._tiers:
                continue
            if isinstance(event, Removed):
                gone = [name for name in event.hashes if self._withheld.pop((event.tier, name), self) is self]
                names = [self._external(name) for name in gone]
                group = self._group.get("group_idx")
                if names:
                    yield BlockRemoved(block_hashes=names, medium=TIERS[event.tier].medium, group_idx=group)
                continue
            known = [block for block in event.blocks if self._is_known(event.tier, block)]
            if known:  # without a withheld block the blocks after it cannot be published either
                yield self._stored(event.tier, known)

    def _is_known(self, tier: str, block: BlockRecord) -> bool:
        """Whether everything that shapes the block's KV is known: from a live request, or from its own tokens.

        A block that was in the slab at start may be a tenant's. Published without its salt, it would be taken for
        everyone's.
        """
        if block.chain_hash in self._keys:
            return True
        is_known = block.parent in self._keys or (tier, block.parent) not in self._withheld
        if is_known and self._hash is None:
            is_known = is_named_by(block)
        elif is_known:
            name: Any = self._short(block.parent) if block.parent != self._root else None
            tokens = np.frombuffer(block.tokens, "<u4").tolist()
            for start in range(0, len(tokens), self._hash_size):
                name = hash_block_tokens(self._hash, name, tokens[start : start + self._hash_size])
            is_known = bool(name == self._short(block.chain_hash))
        if not is_known:
            _remember(self._withheld, [(tier, block.chain_hash)], None)
        return is_known

    def _stored(self, tier: str, blocks: Sequence[BlockRecord]) -> BlockStored:
        first, last = blocks[0], blocks[-1]
        is_first = first.parent == self._root or first.parent in self._roots
        tokens = np.frombuffer(b"".join(block.tokens for block in blocks), "<u4")
        keys = [self._keys.get(block.chain_hash) for block in blocks]
        adapter = self._adapters.get(last.chain_hash)
        return BlockStored(
            block_hashes=[self._external(block.chain_hash) for block in blocks],
            parent_block_hash=None if is_first else self._external(first.parent),
            token_ids=tokens.tolist(),
            block_size=len(first.tokens) // 4,
            lora_id=None if adapter is None else adapter.adapter_id,
            medium=TIERS[tier].medium,
            lora_name=None if adapter is None else adapter.lora_name,
            extra_keys=keys if any(keys) else None,
            **self._group,
        )

    def _external(self, name: ChainHash) -> bytes | int:
        """The name as vLLM publishes it."""
        external: bytes | int = maybe_convert_block_hash(self._short(name))
        return external

    def _short(self, name: ChainHash) -> bytes:
        """The name as vLLM has it. Its 16-byte xxh3 hashes are stored twice in a row (`VllmChain`)."""
        half = len(name) // 2
        return name[:half] if self._hash is not None and name[:half] == name[half:] else name


def _remember(known: dict[T, Any], names: Sequence[T], what: Any) -> None:
    """Remember names, up to `_REMEMBERED`; the oldest are dropped."""
    for name in names:
        known[name] = what
    while len(known) > _REMEMBERED:
        del known[next(iter(known))]
