from .guard import Guard, is_loopback, read_body
from .hang_up import hang_up
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
    "hang_up",
    "is_loopback",
    "page",
    "read_body",
]
