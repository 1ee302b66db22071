from .alike import num_alike
from .command_line import Exit
from .crowd import Crowd
from .json_text import Json, first_error, harmless, object_in, shown, writable
from .logs import REQUEST_ID, LogFormat, LogLevel, begin_request, log_to_stderr, request_id

__all__ = [
    "REQUEST_ID",
    "Crowd",
    "Exit",
    "Json",
    "LogFormat",
    "LogLevel",
    "begin_request",
    "first_error",
    "harmless",
    "log_to_stderr",
    "num_alike",
    "object_in",
    "request_id",
    "shown",
    "writable",
]
