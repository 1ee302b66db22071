"""The HTTP client of the commands: one request each, with a deadline, and one line for every error."""

import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Timer
from time import monotonic
from typing import Any, Final

import httpx2
from pydantic import SecretStr

from kvtier.service import Json
from kvtier.tiers import ConfigError, FormatError, KVTierError, TierUnavailable

_CONNECT: Final = 2.0  # seconds
_ANSWER: Final = 60.0  # seconds for an answer, or between two lines of a long verb; some wait for lower tiers
_STATUS: Final = 7.0  # seconds for /status: a daemon whose loop hangs says so after five
_MOST_ANSWER: Final = 64 << 20  # bytes
_MOST_LINE: Final = 2000  # characters of an error that is passed on
_JSON: Final = {"content-type": "application/json"}


# A deadline for answers that come byte by byte, since a socket's timeout restarts at each; and one GET under it.


@contextmanager
def disconnect_after(connected: Callable[[], socket.socket | None], seconds: float) -> Iterator[Event]:
    """Shut the connection down after so many seconds, and set the event. `connected` is called only then."""
    late = Event()

    def end() -> None:
        late.set()
        if (found := connected()) is not None:
            with suppress(OSError):
                socket.socket.shutdown(found, socket.SHUT_RDWR)  # that of TLS would say goodbye first

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def get_page(address: str, path: str, seconds: float, most: int = 1 << 20) -> tuple[int, bytes]:
    """Status and body at HOST:PORT: no proxy, no redirect, one deadline. OSError, HTTPException, ValueError."""
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)) as connection:
        connection.connect()
        connected = connection.sock
        with disconnect_after(lambda: connected, seconds) as late:
            connection.request("GET", path)
            answer = connection.getresponse()
            status, body = answer.status, answer.read(most)
        if late.is_set():  # otherwise a cut-off head or body would count as whole
            raise TimeoutError(f"no whole answer within {seconds:g} s")
        return status, body


class HttpClient:
    """Requests to the daemon at HOST:PORT, or to a URL. TierUnavailable: down; ConfigError: refused."""

    def __init__(
        self,
        address: str,
        token: SecretStr | None,
        url: str | None = None,
        find_token: Callable[[Path, str], SecretStr] | None = None,
    ) -> None:
        """`url`: of an engine or a router instead. ConfigError. `find_token` reads a daemon's from a file."""
        self._address = address
        self._no_token: ConfigError | None = None  # why the daemon's own could not be read
        self._find_token = find_token if url is None and token is None else None
        self._where = f'[service] http "{address}"' if url is None else f'--url "{url}"'
        self._is_daemon = url is None
        self._socket: socket.socket | None = None  # of the connection made last
        self._patience = _ANSWER  # seconds, of the request under way
        headers = {} if token is None else _carrying(token)
        # most URLs are plain HTTP; the default context reads certificates for 20 ms
        is_plain = url is None or not url.startswith("https://")
        trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if is_plain else ssl.create_default_context()
        try:
            base = httpx2.URL(f"http://{address}" if url is None else url)
        except httpx2.InvalidURL as error:
            fix = "HOST:PORT, as in 127.0.0.1:9400" if url is None else "it as in http://127.0.0.1:8000"
            raise ConfigError(f"{self._where}: {error}; write {fix}") from None
        self._client = httpx2.Client(
            base_url=base, headers=headers, trust_env=False, verify=trusted, follow_redirects=False
        )

    def get(self, path: str, *fields: str) -> Json:
        """The answer. FormatError unless it has all these fields: then another program answers there."""
        return self._asked("GET", path, None, fields)

    def status(self, *fields: str) -> Json:
        """Get /status. FormatError if it has none of these fields: then another program answers there."""
        status = self.get("/status")
        if fields and status.keys().isdisjoint(fields):
            raise self._not_a_daemon
        return status

    def post(self, path: str, body: Mapping[str, Any], *fields: str) -> Json:
        return self._asked("POST", path, body, fields)

    def lines(self, path: str, body: Mapping[str, Any]) -> Iterator[Json]:
        """Run a long verb, and yield its JSON lines as they come. The last one is its result."""
        with self._answer("POST", path, body) as answer:
            for line in answer.iter_lines():
                yield self._object(line.encode())

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx2.Response]:
        content = None if body is None else _encoded(body)
        if self._find_token is not None and path.startswith("/admin/"):
            find, self._find_token = self._find_token, None
            with suppress(KVTierError):  # errors there are reported by the request itself
                file = self.status("clients").get("token_file")
                if isinstance(file, str):
                    try:
                        self._client.headers.update(_carrying(find(Path(file), self._address)))
                    except ConfigError as error:
                        self._no_token = error
        watched = {"trace": self._watch}
        self._patience = _STATUS if path == "/status" else _ANSWER
        timeout = httpx2.Timeout(self._patience, connect=_CONNECT)
        try:
            with ExitStack() as opened:
                with disconnect_after(lambda: self._socket, self._patience) as late:
                    try:
                        stream = self._client.stream(
                            method, path, content=content, headers=_JSON, timeout=timeout, extensions=watched
                        )
                        answer = opened.enter_context(stream)
                    except httpx2.TransportError:
                        if late.is_set():
                            raise self._late from None
                        raise
                if answer.is_error:
                    raise self._refusal(answer)
                yield answer
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            fix = "start `kvtier serve`, or give its --http HOST:PORT" if self._is_daemon else "is it running there?"
            raise self._unavailable(f"no answer; {fix}") from None
        except httpx2.TimeoutException:
            raise self._late from None
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise self._unavailable(str(error) or type(error).__name__) from None

    def _watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep each new connection's socket. The names are those of httpx2's `trace` extension."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")

    def _refusal(self, answer: httpx2.Response) -> KVTierError:
        if answer.status_code == 401 and self._no_token is not None:
            return self._no_token
        if answer.status_code == 401 and self._is_daemon:
            fix = "give the daemon's, by --token or the file"
            return ConfigError(f"[service] token: the daemon does not take it; {fix}")
        if answer.status_code == 401:
            return ConfigError(f"{self._where}: the token is not taken; give its own, by --token")
        why = self._object(self._whole(answer)).get("error")
        if not self._is_daemon and isinstance(why, dict):
            why = why.get("message")
        if not isinstance(why, str):  # an engine's or a router's error
            return self._not_a_daemon
        kind = (
            TierUnavailable if answer.status_code >= 500 else KVTierError if answer.status_code == 404 else ConfigError
        )
        return kind(" ".join(why.split())[:_MOST_LINE])

    def _whole(self, answer: httpx2.Response) -> bytes:
        """The answer's body. TierUnavailable if it takes too long, also in pieces, or is too large."""
        until = monotonic() + self._patience
        data = bytearray()
        for piece in answer.iter_bytes():
            data += piece
            if len(data) > _MOST_ANSWER:
                raise self._unavailable(f"its answer has more than {_MOST_ANSWER} bytes; is it kvtier?")
            if monotonic() > until:
                raise self._late
        return bytes(data)

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None, fields: Iterable[str]) -> Json:
        with self._answer(method, path, body) as answer:
            found = self._object(self._whole(answer))
        if not found.keys() >= {*fields}:
            raise self._not_a_daemon
        return found

    def _object(self, data: bytes) -> Json:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self._not_a_daemon
        return value

    def _unavailable(self, why: str) -> TierUnavailable:
        return TierUnavailable(f"{self._where}: {why}")

    @property
    def _late(self) -> TierUnavailable:
        return self._unavailable(f"no answer within {self._patience:g} s: it is stopped or hangs; see its log")

    @property
    def _not_a_daemon(self) -> FormatError:
        no_server = "no engine and no router of kvtier answers there; give one's address"
        no_daemon = "no kvtier daemon answers there; give the daemon's --http HOST:PORT"
        return FormatError(f"{self._where}: {no_daemon if self._is_daemon else no_server}")


def _carrying(token: SecretStr) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + token.get_secret_value().encode(errors="surrogateescape")}


def _encoded(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. ConfigError names a field that JSON cannot represent: bytes of a command line, NaN."""
    for name, value in body.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            shown = f"{json.dumps(value):.60}"
            raise ConfigError(f"{name} {shown}: neither UTF-8 text nor a number; give another") from None
    return json.dumps(body, ensure_ascii=False).encode()
