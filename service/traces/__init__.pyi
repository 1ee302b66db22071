from .reading import read_trace
from .trace_line import TraceLine

__all__ = ["TraceLine", "read_trace"]
