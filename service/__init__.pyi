from .command_line import Exit, needing
from .json_text import Json, flat, shown, writable

__all__ = [
    "Exit",
    "Json",
    "flat",
    "needing",
    "shown",
    "writable",
]
