from .forms import HINTS, TraceLine
from .reading import load_lines, read_trace
from .request_trace import RequestTrace, load_trace

__all__ = ["HINTS", "RequestTrace", "TraceLine", "load_lines", "load_trace", "read_trace"]
