from .request_trace import HINTS, RequestTrace, TraceLine, load_lines, load_trace, read_trace

__all__ = ["HINTS", "RequestTrace", "TraceLine", "load_lines", "load_trace", "read_trace"]
