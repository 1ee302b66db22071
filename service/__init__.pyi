from .command_line import Exit, needing
from .json_text import Json, first_error, harmless, object_in, shown, writable

__all__ = [
    "Exit",
    "Json",
    "first_error",
    "harmless",
    "needing",
    "object_in",
    "shown",
    "writable",
]
