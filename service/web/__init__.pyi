from .guard import Guard, read_body
from .hang_up import hang_up
from .http_client import HttpClient
from .http_server import HttpServer, HttpSocket
from .loop_file import LoopFile
from .operator_token import OperatorToken, token_at
from .routes import page

__all__ = [
    "Guard",
    "HttpClient",
    "HttpServer",
    "HttpSocket",
    "LoopFile",
    "OperatorToken",
    "hang_up",
    "page",
    "read_body",
    "token_at",
]
