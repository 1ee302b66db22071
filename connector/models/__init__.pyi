from .answers import REASONING_MARKS, Reasoning, ToolCalls, load_tokenizer
from .checkpoint import (
    FileStamp,
    config_digest_of,
    config_of,
    file_stamps,
    name_of,
    require_checkpoint,
    revision_of,
)
from .computes import LiveModel, without_adapters
from .hf_model import dtype_of, identity_of, live_model, weights_of
from .hf_versions import SHORT_ROPE, cache_option, given_cache, returned_cache, rope_limit

__all__ = [
    "REASONING_MARKS",
    "SHORT_ROPE",
    "FileStamp",
    "LiveModel",
    "Reasoning",
    "ToolCalls",
    "cache_option",
    "config_digest_of",
    "config_of",
    "dtype_of",
    "file_stamps",
    "given_cache",
    "identity_of",
    "live_model",
    "load_tokenizer",
    "name_of",
    "require_checkpoint",
    "returned_cache",
    "revision_of",
    "rope_limit",
    "weights_of",
    "without_adapters",
]
