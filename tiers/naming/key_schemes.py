"""The schemes by which other engines name blocks: Dynamo's xxh3-64, vLLM's sha256_cbor, SGLang's pages.

Each is tested with golden vectors of the engine itself. Tokens as in `chain.py`, with its errors; only full blocks
count. Under such an engine its own hashes are the keys, in our fingerprint's namespace: `hash_scheme` names the scheme.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import xxhash

from kvtier.tiers.naming.chain import Tokens, compiled, pack_tokens, token_array

# --- Dynamo: a local hash of each block by itself, and a sequence hash chained over the local ones -------------------

_DYNAMO_SEED: Final = 1337
_U64: Final = 2**64 - 1


def dynamo_seed(lora_name: str | None = None, namespace: str | None = None) -> int:
    """The seed of local hashes: 1337 plus what the adapter and the namespace add, modulo 2**64."""
    lora = 0 if lora_name is None else xxhash.xxh3_64_intdigest(lora_name.encode(), 0)
    tenant = 0 if namespace is None else xxhash.xxh3_64_intdigest(namespace.encode(), 1)
    return (_DYNAMO_SEED + lora + tenant) & _U64


def dynamo_local_hashes(tokens: Tokens, block_size: int, seed: int = _DYNAMO_SEED) -> list[int]:
    """Each full block's hash by itself, unsigned 64-bit; `seed` from `dynamo_seed`."""
    return [xxhash.xxh3_64_intdigest(block, seed) for block in _packed_blocks(tokens, block_size)]


def dynamo_sequence_hashes(local_hashes: Sequence[int], parent: int | None = None) -> list[int]:
    """The chained hashes behind a parent's one. Without, of a prefix: the first equals its local hash."""
    hashes = list[int]()
    for local in local_hashes:
        linked = local if parent is None else xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent, local), _DYNAMO_SEED)
        hashes.append(parent := linked)
    return hashes


def dynamo_block_hashes(
    tokens: Tokens, block_size: int, seed: int = _DYNAMO_SEED, parent: int | None = None
) -> list[int]:
    """The full blocks' sequence hashes, from their tokens: both of the above in one, compiled where it was built."""
    if (module := compiled()) is None:
        return dynamo_sequence_hashes(dynamo_local_hashes(tokens, block_size, seed), parent)
    hashes: list[int] = module.linked(token_array(tokens), block_size, seed, _DYNAMO_SEED, parent)
    return hashes


# --- vLLM: SHA-256 of the canonical CBOR of (parent, tokens, extra keys) ---------------------------------------------

CborItem: TypeAlias = "int | str | bytes | Sequence[CborItem] | None"
"""The values in vLLM's keys. Other types are a TypeError."""

VLLM_DEFAULT_SEED: Final = "vllm-none-hash"


class VllmKeys:
    """vLLM's `sha256_cbor` block hashes, 32 bytes each.

    `seed` is the engine's `$PYTHONHASHSEED`, or None if that is not set. Releases before mid-2026 then took random
    bytes: such keys name nothing in another process, so that engine must be given the variable.
    """

    def __init__(self, seed: str | None = None) -> None:
        self.none_hash: Final = _cbor_digest(VLLM_DEFAULT_SEED if seed is None else seed)

    def hashes(
        self, tokens: Tokens, block_size: int, extra_keys: Mapping[int, Sequence[CborItem]] | None = None
    ) -> list[bytes]:
        """Hashes of full blocks; `extra_keys`: block index → its keys (LoRA, images, salt, embeddings, in this order).

        Releases before mid-2026 had the keys untagged: `("t1",)` for `(("cache_salt", "t1"),)`.
        """
        _check_block_size(block_size)
        ids = token_array(tokens)
        extra = extra_keys or {}
        parent, hashes = self.none_hash, []
        for block in range(len(ids) // block_size):
            words = ids[block * block_size : (block + 1) * block_size]
            parent = _cbor_digest((parent, words, extra.get(block) or None))
            hashes.append(parent)
        return hashes


def _cbor_digest(item: CborItem) -> bytes:
    return hashlib.sha256(cbor(item)).digest()


def cbor(item: CborItem) -> bytes:
    """Canonical CBOR (RFC 8949 §4.2.1) of the few types vLLM hashes: None, integers, text, bytes, arrays of these."""
    if item is None:
        return b"\xf6"
    if isinstance(item, bool):
        raise TypeError("cbor: no bool in a block's keys")
    if isinstance(item, int):
        return _cbor_head(0, item) if item >= 0 else _cbor_head(1, -1 - item)
    if isinstance(item, bytes):
        return _cbor_head(2, len(item)) + item
    if isinstance(item, str):
        text = item.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(item, Sequence):
        return _cbor_head(4, len(item)) + b"".join(map(cbor, item))
    raise TypeError(f"cbor: no {type(item).__name__} in a block's keys")


def _cbor_head(major: int, value: int) -> bytes:
    """Major type and value in the fewest bytes."""
    if value < 24:
        return bytes((major << 5 | value,))
    for code, num_bytes in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * num_bytes:
            return bytes((major << 5 | code,)) + value.to_bytes(num_bytes, "big")
    raise ValueError(f"cbor: {value} does not fit in 64 bits")


# --- SGLang: SHA-256 of (prior digest ‖ tokens), without a prior for the first page ----------------------------------


def sglang_hashes(tokens: Tokens, page_size: int) -> list[bytes]:
    """Hashes of the full pages of a request without salt and extra key, 32 bytes each; SGLang writes them as hex."""
    prior, hashes = b"", []
    for page in _packed_blocks(tokens, page_size):
        prior = hashlib.sha256(prior + page).digest()
        hashes.append(prior)
    return hashes


def _packed_blocks(tokens: Tokens, block_size: int) -> Iterator[bytes]:
    """The full blocks' tokens, u32 little-endian."""
    _check_block_size(block_size)
    packed = pack_tokens(tokens)
    num_bytes = 4 * block_size
    return (packed[i : i + num_bytes] for i in range(0, len(packed) - num_bytes + 1, num_bytes))


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: must be at least 1")
