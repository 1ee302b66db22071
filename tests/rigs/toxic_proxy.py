"""A TCP proxy whose connections sicken on request: late, slow, sliced, mute, cut off, or answered with forged bytes."""

import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

Cut = Literal["reset", "close"]

_CHUNK = 65536
_QUIET = 0.005  # seconds without a byte, after which the next one is the start of something new
_LINGER_NONE = struct.pack("ii", 1, 0)  # close() sends RST


class ToxicProxy:
    """Forwards a loopback port to `target`. Its toxics may be set at any time and hold for every connection.

    latency   seconds that each request and each answer waits
    rate      bytes per second of each direction of each connection
    piece     bytes per TCP segment
    refusing  new connections are closed at once
    `mute`, `cut_after` and `forge` are the others; `heal` takes them all away.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.latency = 0.0
        self.rate: float | None = None
        self.piece: int | None = None
        self.refusing = False
        self.num_connections = 0  # ever accepted and forwarded
        self.num_asked = 0  # bytes from clients
        self.num_answered = 0  # bytes to clients
        self._speaking = threading.Event()
        self._speaking.set()
        self._lock = threading.Lock()  # guards what follows
        self._cut: tuple[int, Cut, bool] | None = None  # bytes left, of requests or of answers
        self._forged: tuple[bytes, bool] | None = None
        self._pairs: list[_Pair] = []
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._acceptor.start()

    def mute(self) -> None:
        """From now on no answer arrives; what was held back does when `heal` is called."""
        self._speaking.clear()

    def cut_after(self, num_bytes: int, how: Cut = "reset", *, asked: bool = False) -> None:
        """Let so many more bytes of answers (or, `asked`, of requests) pass, then end every connection. Once."""
        with self._lock:
            self._cut = (num_bytes, how, asked)

    def forge(self, answer: bytes, *, before: bool = False) -> None:
        """The next bytes the target answers are replaced by `answer`, or come behind it. Once."""
        with self._lock:
            self._forged = (answer, before)

    def heal(self) -> None:
        """Forward faithfully."""
        self.latency, self.rate, self.piece, self.refusing = 0.0, None, None, False
        with self._lock:
            self._cut = self._forged = None
        self._speaking.set()

    def cut(self, how: Cut = "reset") -> None:
        """End every connection now."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.end(how)

    @property
    def num_open(self) -> int:
        """Connections forwarded now."""
        with self._lock:
            return len(self._pairs)

    def close(self) -> None:
        """End everything; idempotent."""
        self._closed.set()
        self._speaking.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(60)
        self._listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.end("close")
            for pump in pair.pumps:
                pump.join(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # the threads

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(client, server)
            with self._lock:
                self._pairs.append(pair)
                self.num_connections += 1
            pair.pumps = [
                threading.Thread(target=self._pump, args=(pair, asks), name="proxy-pump", daemon=True)
                for asks in (True, False)
            ]
            for pump in pair.pumps:
                pump.start()

    def _pump(self, pair: "_Pair", asks: bool) -> None:
        source, sink = (pair.client, pair.server) if asks else (pair.server, pair.client)
        last = 0.0
        try:
            while data := source.recv(_CHUNK):
                if asks:
                    self.num_asked += len(data)
                else:
                    self._speaking.wait()
                    data = self._tampered(data)
                if self.latency and time.monotonic() - last > _QUIET:
                    self._closed.wait(self.latency)
                self._send(sink, data, asks)
                last = time.monotonic()
        except OSError:
            pass
        pair.end("close")
        with self._lock:
            if pair in self._pairs:
                self._pairs.remove(pair)

    def _send(self, sink: socket.socket, data: bytes, asks: bool) -> None:
        while data:
            size = min(len(data), self.piece or _CHUNK, max(1, int(self.rate * 0.02)) if self.rate else _CHUNK)
            size, cut = self._take(size, asks)
            if not asks:
                self.num_answered += size
            sink.sendall(data[:size])
            data = data[size:]
            if cut:
                self.cut(cut)
                return
            if self.rate:
                self._closed.wait(size / self.rate)

    def _tampered(self, data: bytes) -> bytes:
        with self._lock:
            if self._forged is None:
                return data
            (answer, before), self._forged = self._forged, None
        return answer + data if before else answer

    def _take(self, size: int, asks: bool) -> tuple[int, Cut | None]:
        """How many of the next bytes may pass, and how everything ends behind them."""
        with self._lock:
            if self._cut is None or self._cut[2] != asks:
                return size, None
            left, how, _ = self._cut
            self._cut = (left - size, how, asks) if size < left else None
            return min(size, left), how if size >= left else None


class _Pair:
    """One forwarded connection."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.pumps: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False

    def end(self, how: Cut) -> None:
        """Close both ends; a reset throws away what the client has not read yet."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            with suppress(OSError):
                if how == "reset":
                    self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
                    self.client.shutdown(socket.SHUT_RD)  # wakes the pump that receives here, and says nothing yet
                else:
                    self.client.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                self.server.shutdown(socket.SHUT_RDWR)
            self.client.close()
            self.server.close()
