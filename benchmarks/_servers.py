"""Servers that cost next to nothing, beside which ours are measured: `_servers.py relay PORT TO`, `… objects PORT`."""

import asyncio
import re
import sys
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_KEY: Final = re.compile(rb"<Key>([^<]*)</Key>")
_OBJECTS: Final[dict[str, bytearray]] = {}


class Side(asyncio.Protocol):
    """One side of a connection that is passed on; what it reads, the other writes."""

    transport: asyncio.Transport
    other: "Side"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.transport.close()


class Asking(Side):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self.connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        _, self.other = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", int(sys.argv[3]))
        self.other.other = self
        self.transport.resume_reading()


async def relay() -> None:
    """Only passes bytes on: what anything must pay that reads and writes each piece of a stream."""
    server = await asyncio.get_running_loop().create_server(Asking, "127.0.0.1", int(sys.argv[2]))
    print("ready on", sys.argv[2], flush=True)
    await server.serve_forever()


class ObjectRequests(BaseHTTPRequestHandler):
    """Keeps objects in memory. It knows PUT, also of what must be new, GET of a range, and bulk DELETE."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_PUT(self) -> None:
        content = bytearray(int(self.headers["Content-Length"]))
        view = memoryview(content)
        while view:
            view = view[self.rfile.readinto(view) :]
        if self.headers.get("If-None-Match") == "*" and self.path in _OBJECTS:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        _OBJECTS[self.path] = content
        self._answer(200)

    def do_GET(self) -> None:
        if (content := _OBJECTS.get(self.path)) is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, len(content))) if wanted else (0, len(content))
        status = 206 if wanted else 200
        self._answer(status, memoryview(content)[start:end], f"bytes {start}-{end - 1}/{len(content)}")

    def do_POST(self) -> None:
        bucket = self.path.partition("?")[0].rstrip("/")
        keys = _KEY.findall(self.rfile.read(int(self.headers["Content-Length"])))
        for key in keys:
            _OBJECTS.pop(f"{bucket}/{key.decode()}", None)
        deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
        self._answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)

    def log_message(self, format: str, *_: object) -> None:
        """Nobody reads it."""

    def _answer(self, status: int, body: bytes | memoryview = b"", content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        asyncio.run(relay())
    ThreadingHTTPServer.request_queue_size = 128
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), ObjectRequests) as objects:
        print("ready on", sys.argv[2], flush=True)
        objects.serve_forever()
