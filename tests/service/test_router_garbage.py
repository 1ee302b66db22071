"""The router before a replica that speaks raw bytes: what it says unasked, of itself or not to the end harms nobody."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from router_rig import MODEL, RoutedReplicas, routed, until

Says = Callable[[str, dict[str, str]], bytes | None]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def page(value: object, *lines: str) -> bytes:
    body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    head = [*lines, "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(["HTTP/1.1 200 OK", *head, "", ""]).encode() + body


class RawReplica:
    """Answers each request by what `says` makes of its path and headers; hangs up where that is None or has no end."""

    def __init__(self, says: Says) -> None:
        self.pages: dict[str, object] = {"/v1/models": {"object": "list", "data": [MODEL]}, "/readyz": {}}
        self.asked: Counter[str] = Counter()
        self._says = says
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.name = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def hang_up(self) -> None:
        while self._open:
            with suppress(OSError):  # it has ended
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes who waits for the next
        self._accepting.join(60)
        self._listening.close()
        self.hang_up()

    def _accept(self) -> None:
        try:
            while True:
                self._open.append(self._listening.accept()[0])
                threading.Thread(target=self._serve, args=(self._open[-1],), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while first := lines.readline():
                    path = first.split()[1].decode()
                    self.asked[path] += 1
                    headers: dict[str, str] = {}
                    while (line := lines.readline().decode().strip()) != "":
                        name, _, value = line.partition(":")
                        headers[name.lower()] = value.strip()
                    lines.read(int(headers.get("content-length", 0)))
                    known = path in self.pages or not path.startswith("/v1/")
                    answer = page(self.pages.get(path, {})) if known else self._says(path, headers)
                    if answer is not None:
                        connection.sendall(answer)
                    if answer is None or b"length" not in answer:
                        return
            except OSError:
                return


@contextmanager
def before(says: Says) -> Iterator[tuple[RawReplica, RoutedReplicas]]:
    replica = RawReplica(says)
    try:
        with routed(f"http://{replica.name}") as router:
            until(lambda: state(router) == "up")
            yield replica, router
    finally:
        replica.close()


def state(router: RoutedReplicas) -> str:
    return str(router.status()["replicas"][0]["state"])


def test_what_follows_an_answer_is_nobodys() -> None:
    with before(lambda path, headers: page("mine") + page("of somebody else")) as (_, router):
        for _ in range(5):
            assert router.complete().text == "mine"


def test_a_stream_that_only_breaks_off_is_no_whole_one() -> None:
    def half(path: str, headers: dict[str, str]) -> bytes:
        return STREAM + b'\r\ndata: {"choices": []}\n\n'

    with before(half) as (_, router):
        *_, last, rest = router.complete(stream=True).text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "mid_stream_broken"
        assert rest == ""
    with before(lambda path, headers: half(path, headers) + b"data: [DONE]\n\n") as (_, router):
        assert router.complete(stream=True).text.endswith("data: [DONE]\n\n")
        assert router.status()["errors"] == {}


def test_headers_of_one_hop_stay_there() -> None:
    seen: list[dict[str, str]] = []

    def says(path: str, headers: dict[str, str]) -> bytes:
        seen.append(headers)
        return page("{}", "connection: x-inner", "x-inner: 1", "x-outer: 2")

    with before(says) as (_, router):
        asked = {"connection": "keep-alive, X-Hop", "x-hop": "1", "x-end": "2", "te": "trailers"}
        answer = router.client.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=asked)
        assert answer.headers["x-outer"] == "2"
        assert "x-inner" not in answer.headers
    assert seen[0]["x-end"] == "2"
    assert not seen[0].keys() & {"x-hop", "te"}


@pytest.mark.parametrize("live", ["1e999", "1" + "0" * 400, "-1e999", "[" * 10_000, '"a"', "null"])
def test_a_load_that_is_none_is_looked_at_again(live: str) -> None:
    with before(lambda path, headers: page("{}")) as (replica, router):
        replica.pages["/status"] = f'{{"requests": {{"live": {live}}}}}'
        replica.asked.clear()
        until(lambda: replica.asked["/status"] >= 2)
        assert state(router) == "up"


@pytest.mark.parametrize("size", [0, -1, 10**30, True, "16", 16.0])
def test_a_block_size_that_is_none_is_refused(size: object) -> None:
    replica = RawReplica(lambda path, headers: None)
    replica.pages["/v1/models"] = {"data": [{**MODEL, "kvtier": {"block_size": size}}]}
    try:
        with routed(f"http://{replica.name}") as router:
            until(lambda: "block_size" in router.status()["replicas"][0]["why"])
            assert state(router) == "down"
            replica.pages["/v1/models"] = {"data": [MODEL]}
            until(lambda: state(router) == "up")
    finally:
        replica.close()


def test_who_hung_up_is_asked_anew_who_it_is() -> None:
    with before(lambda path, headers: page("{}")) as (replica, router):
        replica.pages["/v1/models"] = {"data": [{**MODEL, "id": "another"}]}
        replica.hang_up()  # and listens as before: what is there is another by now
        until(lambda: state(router) == "refused")
