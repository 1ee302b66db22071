from .cache_option import cache_option, given_cache, returned_cache
from .checkpoint import FileStamp, config_digest_of, config_of, file_stamps, name_of, revision_of
from .hf_model import identity_of, weights_of
from .length_rope import SHORT_ROPE, rope_limit
from .tokenizer import load_tokenizer
from .tool_calls import ToolCalls

__all__ = [
    "SHORT_ROPE",
    "FileStamp",
    "ToolCalls",
    "cache_option",
    "config_digest_of",
    "config_of",
    "file_stamps",
    "given_cache",
    "identity_of",
    "load_tokenizer",
    "name_of",
    "returned_cache",
    "revision_of",
    "rope_limit",
    "weights_of",
]
