from .chain import (
    HashCache,
    TokenChain,
    Tokens,
    chain_hashes,
    is_named_by,
    pack_tokens,
    pool_name,
    root_hash,
    state_name,
    token_array,
)
from .identity import FORMAT_VERSION, ModelIdentity, config_digest
from .key_schemes import VllmKeys, dynamo_local_hashes, dynamo_seed, dynamo_sequence_hashes, sglang_hashes
from .kv_probe import PROBE_BYTES, TOLERANCES, KVProbe
from .lossy import Lossy, with_lossy
from .shape import DTYPE_BYTES, FlatShape, KVLayout, KVShape

__all__ = [
    "DTYPE_BYTES",
    "FORMAT_VERSION",
    "PROBE_BYTES",
    "TOLERANCES",
    "FlatShape",
    "HashCache",
    "KVLayout",
    "KVProbe",
    "KVShape",
    "Lossy",
    "ModelIdentity",
    "TokenChain",
    "Tokens",
    "VllmKeys",
    "chain_hashes",
    "config_digest",
    "dynamo_local_hashes",
    "dynamo_seed",
    "dynamo_sequence_hashes",
    "is_named_by",
    "pack_tokens",
    "pool_name",
    "root_hash",
    "sglang_hashes",
    "state_name",
    "token_array",
    "with_lossy",
]
