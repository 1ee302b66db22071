"""Names of blocks: chain hashes of their tokens, rooted in the model's fingerprint."""

from kvtier.tiers.naming.chain import (
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
    unpack_tokens,
)
from kvtier.tiers.naming.identity import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    FlatShape,
    KVLayout,
    KVShape,
    Lossy,
    ModelIdentity,
    config_digest,
    with_lossy,
)
from kvtier.tiers.naming.key_schemes import (
    VllmKeys,
    dynamo_block_hashes,
    dynamo_local_hashes,
    dynamo_seed,
    dynamo_sequence_hashes,
    sglang_hashes,
)
from kvtier.tiers.naming.kv_probe import PROBE_BYTES, KVProbe
