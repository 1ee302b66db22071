from .guard import Guard, read_body
from .http_client import HttpClient
from .http_server import HttpServer, HttpSocket
from .loop_file import LoopFile
from .routes import page

__all__ = [
    "Guard",
    "HttpClient",
    "HttpServer",
    "HttpSocket",
    "LoopFile",
    "page",
    "read_body",
]
