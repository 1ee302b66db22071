"""Asks vLLM what it would call a block with other tokens: so a held block is told from a tenant's or an image's."""

from collections.abc import Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from kvtier.connector.vllm.keys import NameInstead


def name_instead(algorithm: str, block_size: int) -> NameInstead:
    """`VllmChain`'s question, answered by vLLM's own functions. `algorithm` is the one by which it hashes blocks."""
    hash_function = get_hash_fn_by_name(algorithm)

    def name(request: Any, block: int, tokens: Sequence[int]) -> bytes:
        parent = request.block_hashes[block - 1] if block else None
        extra, _ = generate_block_hash_extra_keys(request, block * block_size, (block + 1) * block_size, 0)
        hashed: bytes = hash_block_tokens(hash_function, parent, tokens, extra)
        return hashed

    return name
