from .disconnect_timer import disconnect_after
from .guard import Guard, page, read_body
from .http_client import HttpClient
from .http_server import HttpServer, HttpSocket
from .loop_file import LoopFile
from .operator_token import OperatorToken, token_at

__all__ = [
    "Guard",
    "HttpClient",
    "HttpServer",
    "HttpSocket",
    "LoopFile",
    "OperatorToken",
    "disconnect_after",
    "page",
    "read_body",
    "token_at",
]
