from .cli_options import ConfigOption, Exit, JsonOption, log_to_stderr, needing, use_all_descriptors
from .json_text import Json, flat, shown, writable

__all__ = [
    "ConfigOption",
    "Exit",
    "Json",
    "JsonOption",
    "flat",
    "log_to_stderr",
    "needing",
    "shown",
    "use_all_descriptors",
    "writable",
]
