"""What the stories of the daemon's pages share: a daemon thread with pages, raw sockets."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
from service_rig import FINGERPRINT, PATIENCE, DaemonThread
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from kvtier.service.admin.http_app import Pages
from kvtier.service.observe import live_page
from kvtier.service.observe.live_page import LivePage
from kvtier.service.web.http_server import HttpServer, HttpSocket, page

MODEL = FINGERPRINT.hex()[:16]
_CLOSE = b"Connection: close\r\n"
ServePages = Callable[..., "ServedDaemon"]  # the fixture `serve_pages` of tests/service/conftest.py


class ServedDaemon(DaemonThread):
    """A daemon of this process with its pages, as `kvtier serve` puts them together."""

    def __init__(self, socket: Path, *, lease_deadline: float = 60.0, **sections: Mapping[str, object]) -> None:
        service = {"archives": socket.parent, **sections.pop("service", {})}
        super().__init__(socket, lease_deadline=lease_deadline, service=service, **sections)
        self.pages = Pages(self.daemon, HttpSocket("127.0.0.1:0"))
        self.http = self.pages.address
        self.pages.start()
        operator = {"authorization": f"Bearer {self.pages.token.secret.get_secret_value()}"}
        self.client = httpx2.Client(base_url=f"http://{self.http}", timeout=60, headers=operator)

    def post(self, path: str, **body: object) -> httpx2.Response:
        return self.client.post(f"/admin/{path}", json=body)

    def close(self, timeout: float = PATIENCE) -> None:
        self.client.close()
        self.pages.stop()
        super().close(timeout)


class ServedStatus:
    """The live page of a status that the test makes up; `num_asked` counts how often it was asked for."""

    def __init__(
        self, status: Callable[[], dict[str, Any]], *remembered: str, memory: Mapping[str, Any] | None = None
    ) -> None:
        """`remembered`: fields whose numbers are, of a status looked at now and then from `start` on."""

        async def ask() -> dict[str, Any]:
            self.num_asked += 1
            return status()

        self.num_asked = 0
        self._stopping = threading.Event()
        live = LivePage(ask, self._stopping, remembered)
        remembering = (lambda app: live.remembering()) if remembered else None
        app = Starlette(
            routes=[*live.routes(), page("/memory", lambda: JSONResponse(memory or {}))], lifespan=remembering
        )
        self._server = HttpServer(app, HttpSocket("127.0.0.1:0"))
        self.url = f"http://{self._server.address}/"

    def __enter__(self) -> "ServedStatus":
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._server.stop()

    def watch(self) -> AbstractContextManager[httpx2.Response]:
        """A stream of it."""
        return httpx2.stream("GET", f"{self.url}stream", timeout=60)

    def is_asked(self) -> bool:
        """Whether somebody looks: it is asked for again within some periods."""
        before = self.num_asked
        time.sleep(5 * live_page._PERIOD)
        return self.num_asked > before


def talk(http: str, data: bytes, *, more: bool = False) -> bytes:
    """Send bytes, whatever they are, and read until the other end hangs up; `more`: as if more were to come."""
    host, _, port = http.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(data)
            if not more:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            raise
        except OSError:  # it hangs up on what it has not read: a reset, or nobody there any more to shut down for
            pass
    return answer


def pester(http: str, path: str) -> None:
    """Send a thousand malformed requests to a page that takes JSON, eight at a time; no answer is another than 4xx."""
    wrong = _malformed(path)

    def send(number: int) -> bytes:
        data = wrong[number % len(wrong)]
        return talk(http, data, more=_CLOSE in data)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(send, range(72 * len(wrong))))
    assert all(not answer or answer.startswith(b"HTTP/1.1 4") for answer in answers)
    assert sum(map(bool, answers)) > len(answers) // 2


def _malformed(path: str) -> list[bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode()
    whole = head + _CLOSE
    return [
        b"",
        b"\x00\xff" * 100,
        b"GET /nowhere HTTP/9.9\r\n\r\n",
        f"POST {path}\r\n\r\n".encode(),
        b"BREW /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        head + b"Content-Length: x\r\n\r\n{}",
        head + b"Content-Length: -1\r\n\r\n{}",
        head + b"Content-Length: 99999999999999\r\n\r\n{}",
        head + b"Content-Length: 100\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        whole + b"Content-Length: 2\r\n\r\n[]",
        whole + b"Content-Length: 15\r\n\r\n" + b'{"model": null,',
        head + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        f"POST {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
    ]
