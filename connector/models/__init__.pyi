from .checkpoint import config_digest_of, config_of, name_of, revision_of
from .hf_model import identity_of, kv_shape
from .tokenizer import load_tokenizer

__all__ = [
    "config_digest_of",
    "config_of",
    "identity_of",
    "kv_shape",
    "load_tokenizer",
    "name_of",
    "revision_of",
]
