"""An S3 server that follows a script: it answers each request with what a broken or hostile one would say."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

S3Script = Callable[[socket.socket, str, str], object]
"""Told a connection, a verb and a path: says something there, or hangs up by an OSError."""

_METADATA = 'ETag: "x"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n'


def reply(connection: socket.socket, status: str, body: bytes = b"", **headers: object) -> None:
    """A whole answer."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\n{_METADATA}{more}content-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


def refusal(code: str, message: str = "") -> bytes:
    """The body of an error."""
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


class ScriptedS3:
    """Listens on loopback; a thread for each connection. `asked` has every request's verb and path."""

    def __init__(self, answer: S3Script, tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[bytes] = []  # `x-amz-security-token` of each that had one
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http{'s' * (tls is not None)}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                return
        with connection, connection.makefile("rb") as lines:
            try:
                while request := lines.readline():
                    verb, path, _ = request.decode().split()
                    num_bytes = 0
                    while (line := lines.readline().lower()) not in (b"\r\n", b""):
                        if line.startswith(b"x-amz-security-token:"):
                            self.tokens.append(line.partition(b":")[2].strip())
                        if line.startswith(b"content-length:"):
                            num_bytes = int(line.partition(b":")[2])
                    lines.read(num_bytes)
                    self.asked.append((verb, path))
                    self._answer(connection, verb, path)
            except OSError:
                return


@contextmanager
def scripted_s3(answer: S3Script, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedS3]:
    server = ScriptedS3(answer, tls)
    try:
        yield server
    finally:
        server.close()
