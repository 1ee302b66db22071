from .breakeven import Breakeven, breakeven_from, measured_by
from .charts import Chart, Line, Table, html_page, save_png
from .command_line import REQUEST_ID, Exit, LogFormat, LogLevel, begin_request, log_to_stderr, request_id
from .crowd import Crowd
from .json_text import Json, first_error, harmless, object_in, shown, writable
from .sizing import sizing_of

__all__ = [
    "REQUEST_ID",
    "Breakeven",
    "Chart",
    "Crowd",
    "Exit",
    "Json",
    "Line",
    "LogFormat",
    "LogLevel",
    "Table",
    "begin_request",
    "breakeven_from",
    "first_error",
    "harmless",
    "html_page",
    "log_to_stderr",
    "measured_by",
    "object_in",
    "request_id",
    "save_png",
    "shown",
    "sizing_of",
    "writable",
]
