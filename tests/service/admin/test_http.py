"""Stories of the daemon's pages over real HTTP: what they say, who may ask, and what rubbish does to them (nothing)."""

import asyncio
import contextlib
import json
import signal
import socket as sockets
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Event

import httpx2
import pytest
from command_rig import kvtier
from doubles import SLOT_BYTES, chain_of, wait_until
from extent import brief
from http_rig import MODEL, ServedDaemon, ServePages, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from service_rig import Attach, DaemonProcess, load, store
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvtier.service.admin import http_app
from kvtier.service.command_line import Exit
from kvtier.service.web import http_client, http_server
from kvtier.service.web.http_server import HttpServer, HttpSocket
from kvtier.tiers.errors import ConfigError

TOKEN = "a secret nobody sees"
HEAD = b"POST /admin/reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PAGES = ("/metrics", "/healthz", "/readyz", "/summary", "/status")


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """One daemon process for the stories that must leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        daemon = DaemonProcess(Path(name) / "s", host__size="1MiB")
        yield daemon
        assert daemon.end(signal.SIGTERM) == 0
        assert daemon.lines == []  # whatever was sent, there is no traceback and no flood of log lines


@pytest.fixture
def guarded(home: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(home / "s", host__size="1MiB", service__token=TOKEN)
    yield daemon
    assert daemon.end(signal.SIGTERM) == 0
    assert TOKEN not in "".join(daemon.lines)


def url(daemon: DaemonProcess, path: str) -> str:
    return f"http://{daemon.http}{path}"


def healthy(daemon: DaemonProcess) -> bool:
    told: object = httpx2.get(url(daemon, "/healthz"), timeout=60, verify=False).json()
    return told == {"status": "ok"}


# what they say


def test_the_pages_of_a_daemon_that_works(home: Path, attach: Attach) -> None:
    daemon = DaemonProcess(home / "s", host__size="1MiB", file__path=str(home), file__size="4MiB")
    try:
        tiers, chain = attach(), chain_of(6)
        store(tiers, chain)
        assert load(tiers, chain) == 6
        status = httpx2.get(url(daemon, "/status")).json()
        assert (status["status"], status["pid"]) == ("ok", daemon.process.pid)
        (model,) = status["models"]
        assert model["model"] == MODEL
        assert model["l2"] | {"slots": 64, "ready": 6, "ready_bytes": 6 * SLOT_BYTES} == model["l2"]
        assert model["lookups"] == {"l1": 0, "l2": 6, "file": 0, "peers": 0, "redis": 0, "objects": 0, "miss": 0}
        assert model["moved"]["file"]["write"] == 6 * SLOT_BYTES
        assert status["budget"] == {"bytes": 1 << 20, "given": 64 * SLOT_BYTES}
        (client,) = status["clients"]
        assert client["pids"]
        # The same, for people.
        text = httpx2.get(url(daemon, "/summary")).text
        assert f"pid {daemon.process.pid}" in text
        assert "256 KiB of 1 MiB given to 1 model" in text
        assert f"model {MODEL}: blocks of 4 tokens in 4 KiB, 1 client" in text
        assert "6 blocks, 100.0% found; l2 6" in text
        assert str(client["pids"][0]) in text
        # And for Prometheus: every family once, each series with its model.
        families = {
            each.name: each for each in text_string_to_metric_families(httpx2.get(url(daemon, "/metrics")).text)
        }
        found = {
            s.labels["tier"]: s.value for s in families["kvtier_lookup_blocks"].samples if s.name.endswith("_total")
        }
        assert found["l2"] == 6
        assert {s.labels["fingerprint"] for s in families["kvtier_lookup_blocks"].samples} == {MODEL}
        assert families["kvtier_clients"].samples[0].value == 1
        tiers.close()
        wait_until(lambda: "kvtier_clients 0.0" in httpx2.get(url(daemon, "/metrics")).text)
        assert 'kvtier_client_events_total{event="bye"} 1.0' in httpx2.get(url(daemon, "/metrics")).text
    finally:
        assert daemon.end(signal.SIGTERM) == 0


def test_two_models_are_two_series(served: ServedDaemon, attach: Attach) -> None:
    one, other = attach(size=8 * SLOT_BYTES), attach(size=8 * SLOT_BYTES, fingerprint=b"o" * 32)
    store(one, chain_of(2))
    store(other, chain_of(3))
    text = served.client.get("/metrics").text
    assert f'kvtier_store_blocks_total{{fingerprint="{MODEL}",tier="l2"}} 2.0' in text
    assert f'kvtier_store_blocks_total{{fingerprint="{(b"o" * 8).hex()}",tier="l2"}} 3.0' in text
    assert text.count("# TYPE kvtier_store_blocks_total counter") == 1


def test_an_engine_that_asks_again_while_it_waits_is_one_lookup(served: ServedDaemon, attach: Attach) -> None:
    tiers, chain = attach(), chain_of(4)
    for _ in range(3):
        assert load(tiers, chain) == 0
    store(tiers, chain)
    for _ in range(3):
        assert load(tiers, chain) == 4
    (model,) = served.client.get("/status").json()["models"]
    assert model["lookups"] | {"miss": 4} == model["lookups"]
    assert model["lookups"]["l2"] in (8, 12)  # the first of them may still be the question that was in vain


def test_a_daemon_whose_loop_hangs_answers_at_once(served: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "_HEALTHY", 0.2)
    stuck = Event()
    served.daemon.submit(lambda: stuck.wait(30))
    try:
        for path in ("/healthz", "/readyz"):
            answer = served.client.get(path)
            assert answer.status_code == 503
            assert "loop has not answered within 0.2 s" in answer.text
        assert served.client.get("/readyz").json()["ready"] is False
    finally:
        stuck.set()
    wait_until(lambda: served.client.get("/healthz").status_code == 200)


def test_a_detached_tier_is_named_and_is_no_outage(disk_dir: Path, serve_pages: ServePages, attach: Attach) -> None:
    file, breaker = {"path": str(disk_dir), "size": "4MiB"}, {"retry_after": "60s"}
    served = serve_pages(host={"size": 1 << 20}, file=file, breaker=breaker)
    attach()
    well: dict[str, object] = {"ready": True, "missing": [], "wanting": [], "degraded": [], "refused": []}
    assert served.client.get("/readyz").json() == well
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    namespace.hierarchy.ports[0].breakers["read"].trip()
    answer = served.client.get("/readyz")
    assert answer.status_code == 200
    expected = {"model": MODEL, "tier": "file", "direction": "read", "breaker": "open"}
    assert answer.json()["degraded"] == [expected]
    shown = kvtier("status", "--http", served.http)
    assert shown.returncode == 3
    assert f"degraded: file of {MODEL}, read breaker" in shown.stdout


def test_a_mistake_that_is_found_late_is_one_all_the_same(
    home: Path, served: ServedDaemon, monkeypatch: pytest.MonkeyPatch, attach: Attach
) -> None:
    monkeypatch.setattr(http_app, "PERIOD", 0.0)  # nothing is refused at once
    attach()
    *_, last = served.post("import", file=str(home / "none")).text.splitlines()
    told = {"error": f"{home / 'none'}: not a file; name a file that an export wrote", "mistake": True}
    assert json.loads(last) == told
    ended = kvtier("import", str(home / "none"), "--http", served.http)
    assert (ended.returncode, ended.stderr) == (2, f"kvtier: {told['error']}\n")


# who may


def test_admin_routes_want_the_token_and_pages_do_not(guarded: DaemonProcess) -> None:
    for path in PAGES:
        assert httpx2.get(url(guarded, path)).status_code == 200
    for credentials in (
        None,
        "Bearer wrong",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
    ):
        headers = {} if credentials is None else {"authorization": credentials}
        for answer in (
            httpx2.post(url(guarded, "/admin/reset"), json={"all": True}, headers=headers),
            httpx2.get(url(guarded, "/admin/pins"), headers=headers),
            httpx2.post(url(guarded, "/admin/export"), content=b"rubbish", headers=headers),
        ):
            assert (answer.status_code, answer.json()) == (401, {"error": "not allowed"})
    allowed = httpx2.post(
        url(guarded, "/admin/reset"), json={"all": True}, headers={"authorization": f"Bearer {TOKEN}"}
    )
    assert (allowed.status_code, allowed.json()) == (200, {"reset": []})
    # By the commands: the option, the environment, and neither.
    assert kvtier("quota", "--http", guarded.http, "--token", TOKEN).returncode == 0
    assert kvtier("quota", "--http", guarded.http, service__token=TOKEN).returncode == 0
    refused = kvtier("quota", "--http", guarded.http)
    assert refused.returncode == 2
    assert refused.stderr == (
        "kvtier: [service] token: the daemon does not take it; give the daemon's, by --token or the file\n"
    )


def test_without_a_token_of_the_operators_one_is_made_that_its_user_alone_finds(home: Path) -> None:
    daemon, file = DaemonProcess(home / "s", host__size="1MiB"), home / "s.token"
    try:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        # Another user of this machine reaches the address, and no verb.
        for path, body in (("reset", {"all": True}), ("export", {"file": "x"}), ("import", {"file": "x"})):
            assert httpx2.post(url(daemon, f"/admin/{path}"), json=body).status_code == 401
        assert httpx2.get(url(daemon, "/admin/pins")).status_code == 401
        assert httpx2.get(url(daemon, "/status")).json()["token_file"] == str(file)
        # Its own finds the token: by the name 127.0.0.1, and by localhost.
        port = daemon.http.rpartition(":")[2]
        for http in (daemon.http, f"localhost:{port}"):
            assert kvtier("quota", "--http", http).returncode == 0
        # A file that others read, or that is of other pages, is sent to nobody.
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "http": "127.0.0.1:1"}))
        assert (
            f"the token of the daemon at 127.0.0.1:1, not of {daemon.http}"
            in kvtier("quota", "--http", daemon.http).stderr
        )
        file.write_text(json.dumps(told))
        file.chmod(0o644)
        assert "readable by others" in kvtier("quota", "--http", daemon.http).stderr
        for content in ("", "[]", '{"http": 1}'):
            file.chmod(0o600)
            file.write_text(content)
            refused = kvtier("quota", "--http", daemon.http)
            assert (refused.returncode, "not a daemon's token; give --token" in refused.stderr) == (2, True)
        file.unlink()  # by a cleaner of temporary files: the same token is there again
        wait_until(file.exists)
        assert json.loads(file.read_text()) == told
    finally:
        assert daemon.end(signal.SIGTERM) == 0
    assert not file.exists()


def test_files_lie_below_one_directory(home: Path, attach: Attach) -> None:
    archives, outside = home / "archives", home / "outside"
    outside.mkdir()
    daemon = DaemonProcess(home / "s", host__size="1MiB", service__archives=str(archives))
    tiers = attach()
    try:
        store(tiers, chain_of(2))
        assert kvtier("export", "all.kva", "--http", daemon.http).returncode == 0
        assert kvtier("export", str(archives / "again.kva"), "--http", daemon.http).returncode == 0
        assert (archives / "all.kva").exists()
        (archives / "link").symlink_to(outside)
        for verb in ("export", "import", "trace"):
            for name in (str(outside / "x"), "../x", "link/x", "/etc/passwd", "..", "/"):
                refused = kvtier(verb, name, "--http", daemon.http, *(["--force"] if verb == "export" else []))
                assert refused.returncode == 2
                assert f'not below [service] archives "{archives}"' in refused.stderr, refused.stderr
        assert not list(outside.iterdir())
    finally:
        tiers.close()
        assert daemon.end(signal.SIGTERM) == 0


def test_no_web_page_of_a_browser_here_gets_in(shared: DaemonProcess) -> None:
    address, own = url(shared, "/admin/reset"), shared.operator
    assert httpx2.post(address, json={"all": True}, headers=own).status_code == 200
    # A page may only send what needs no permission: no JSON. And one that calls our address its own is not believed.
    plain = {**own, "content-type": "text/plain"}
    assert httpx2.post(address, content=b'{"all": true}', headers=plain).status_code == 415
    for host in ("rebound.example:9400", "rebound.example", ""):
        assert httpx2.post(address, json={"all": True}, headers={"host": host}).status_code in (400, 401, 421)
    assert httpx2.post(address, json={"all": True}, headers={**own, "x-forwarded-for": "192.0.2.1"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({}, 'http "0.0.0.0:0": other machines reach it; use 127.0.0.1 or set allow_remote'),
        ({"service__allow_remote": "true"}, 'http "0.0.0.0:0": other machines reach it; set a token'),
    ],
)
def test_an_address_others_reach_needs_leave_and_a_token(home: Path, options: dict[str, str], mistake: str) -> None:
    ended = kvtier("serve", "--socket", str(home / "s"), "--http", "0.0.0.0:0", **options)
    assert ended.returncode == 2
    assert ended.stderr == f"kvtier: [service] {mistake}\n"


def test_with_leave_and_a_token_it_serves_there(home: Path) -> None:
    options = {"service__http": "0.0.0.0:0", "service__allow_remote": "true", "service__token": TOKEN}
    daemon = DaemonProcess(home / "s", host__size="1MiB", **options)
    port = daemon.http.rpartition(":")[2]
    assert httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    assert httpx2.get(f"http://127.0.0.1:{port}/admin/pins").status_code == 401
    assert daemon.end(signal.SIGTERM) == 0


def test_a_port_in_use_is_one_line(home: Path, shared: DaemonProcess) -> None:
    ended = kvtier("serve", "--socket", str(home / "s"), "--http", shared.http)
    assert ended.returncode == 2
    assert ended.stderr == (
        f'kvtier: [service] http "{shared.http}": Address already in use; choose another address or port\n'
    )
    assert not (home / "s").exists()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:9400.*choose another address"):
        HttpSocket("192.0.2.1:9400")


def test_nobody_there_is_one_line_and_status_1() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    for command in ("status", "top", "pin"):
        ended = kvtier(command, "--http", free)
        assert ended.returncode == 1
        assert ended.stderr == (
            f'kvtier: [service] http "{free}": no answer; start `kvtier serve`, or give its --http HOST:PORT\n'
        )


def test_a_stopped_daemon_is_one_line_long_before_a_long_verb_ends(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_client._STATUS < http_client._ANSWER / 5
    monkeypatch.setattr(http_client, "_STATUS", 0.5)
    daemon = DaemonProcess(home / "s")
    daemon.process.send_signal(signal.SIGSTOP)
    ended = kvtier("status", "--http", daemon.http)
    daemon.process.send_signal(signal.SIGCONT)
    why = "no answer within 0.5 s: it is stopped or hangs; see its log"
    assert (ended.returncode, ended.stderr) == (Exit.FAILED, f'kvtier: [service] http "{daemon.http}": {why}\n')
    assert daemon.end(signal.SIGTERM) == 0


# rubbish


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("reset", "", "body: not JSON (Expecting value: line 1 column 1 (char 0)); send an object"),
        ("reset", "[1]", "body [1]: not a JSON object; send one"),
        ("reset", "{}", "model, all: give a model, or all"),
        ("reset", '{"all": true, "aII": 1}', "aII 1: unknown field; known are model, all"),
        ("reset", '{"all": true, "=all": 1}', "=all 1: unknown field; known are model, all"),
        (
            "reset",
            '{"model": "Zz"}',
            'model "Zz": not the first 4 to 64 hexadecimal digits of a fingerprint; `kvtier status` shows them',
        ),
        ("evict", "{}", "no model is open; an engine has to attach first"),
        ("pin", '{"tokens": [1]}', "ttl: missing; the fields are model, hashes, tokens, cache_salt, ttl"),
        ("pin", '{"hashes": ["ab"], "ttl": 1}', 'hashes.0 "ab": not a block\'s name; write 64 hexadecimal digits'),
        (
            "pin",
            '{"tokens": [1], "ttl": "soon"}',
            'ttl "soon": not a time; write seconds, or a number with a unit, as in "50ms"',
        ),
        ("quota", '{"cache_salt": "a", "size": -1}', "size -1: outside 1 byte to 1PiB; choose a size in that range"),
        ("quota", '{"cache_salt": "\\ud800"}', 'cache_salt "\\ud800": not a text that UTF-8 can write'),
        (
            "export",
            '{"file": ""}',
            'file "": not a file on the daemon\'s machine; write its name below [service] archives',
        ),
        ("evict", '{"cache_salt": "a"}', "cache_salt: only for tokens; names of blocks include it"),
        ("reset", "[" * 100_000, "body: not JSON (maximum recursion depth exceeded"),
    ],
)
def test_bad_bodies_are_one_line_with_the_fix(shared: DaemonProcess, path: str, body: str, error: str) -> None:
    answer = httpx2.post(
        url(shared, f"/admin/{path}"),
        content=body.encode(),
        headers={**shared.operator, "content-type": "application/json"},
    )
    assert answer.status_code == (404 if error.startswith("no model") else 400), answer.text
    assert answer.json()["error"].startswith(error)
    assert "\n" not in answer.json()["error"]


def test_an_oversized_body_is_refused_before_it_is_read(shared: DaemonProcess) -> None:
    too_much = b"[" + b" " * (1 << 20) + b"]"
    json_type = {**shared.operator, "content-type": "application/json"}
    said = httpx2.post(url(shared, "/admin/reset"), content=too_much, headers=json_type)
    assert (said.status_code, said.json()) == (413, {"error": "body: more than 1048576 bytes; send less at a time"})
    # Only announced: refused at once. Not announced, in pieces: refused where it passes the limit.
    head = HEAD + f"Authorization: {shared.operator['authorization']}\r\n".encode()
    assert talk(shared.http, head + b"Content-Length: 9999999999\r\n\r\n", more=True).startswith(b"HTTP/1.1 413")
    pieces = b"".join(b"10000\r\n" + b" " * 0x10000 + b"\r\n" for _ in range(18))
    assert talk(shared.http, head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces, more=True).startswith(
        b"HTTP/1.1 413"
    )
    assert healthy(shared)


def test_unknown_pages_and_methods_are_json(shared: DaemonProcess) -> None:
    for method, path, code in (
        ("GET", "/nope", 404),
        ("POST", "/admin/nope", 404),
        ("GET", "/admin/reset", 405),
        ("DELETE", "/metrics", 405),
        ("GET", "/../../etc/passwd", 404),
    ):
        answer = httpx2.request(method, url(shared, path))
        assert answer.status_code == code
        assert set(answer.json()) == {"error"}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fields = st.sampled_from(
    ["model", "all", "hashes", "tokens", "cache_salt", "ttl", "pin", "size", "force", "duration", "file"]
)


@settings(max_examples=brief(30, 100))
@given(
    st.sampled_from(["reset", "evict", "pin", "unpin", "quota", "export", "import", "trace"]),
    st.dictionaries(fields.filter(lambda name: name != "file") | st.text(max_size=8), values, max_size=5) | values,
    st.binary(max_size=40),
)
def test_a_hundred_wrong_bodies_leave_it_well(shared: DaemonProcess, verb: str, body: object, tail: bytes) -> None:
    content = json.dumps(body).encode() + tail
    told, where = {**shared.operator, "content-type": "application/json"}, url(shared, f"/admin/{verb}")
    answer = httpx2.post(where, content=content, headers=told, verify=False)  # no certificates are read for each
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert "\n" not in answer.json()["error"]
    assert healthy(shared)


@settings(max_examples=brief(30, 100))
@given(
    st.sampled_from(
        [b"", b"GET /status HTTP/1.1\r\n", b"POST /admin/reset HTTP/1.1\r\nHost: localhost\r\n", b"\x16\x03\x01"]
    ),
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from(
            [b"\r\n", b"\r\n\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"ffffffffff\r\n"]
        )
        | st.integers(1, 40_000).map(lambda n: b"X: " + b"a" * n + b"\r\n"),
        max_size=6,
    ),
)
def test_a_hundred_streams_of_bytes_leave_it_well(shared: DaemonProcess, start: bytes, rest: list[bytes]) -> None:
    answer = talk(shared.http, start + b"".join(rest))
    assert answer == b"" or answer.startswith(b"HTTP/1.")
    assert not answer.startswith(b"HTTP/1.1 500")
    assert healthy(shared)


def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages) -> None:
    monkeypatch.setattr(http_server, "_IDLE", 0.3)
    monkeypatch.setattr(http_server, "_HEAD", 0.3)
    monkeypatch.setattr(http_server, "_BODY", 0.3)
    served = serve_pages(host={"size": 1 << 20})
    host, _, port = served.http.rpartition(":")
    silent = [sockets.create_connection((host, int(port)), timeout=60) for _ in range(70)]
    for connection in silent[::2]:
        with contextlib.suppress(ConnectionError):  # a busy machine: it was hung up on before
            connection.sendall(b"GET /healthz HTT")  # half a request is as good as none
    for connection in silent:
        with contextlib.suppress(ConnectionError):
            while connection.recv(4096):  # those beyond the limit are told so, if they asked at all
                pass
        connection.close()
    assert served.client.get("/healthz").status_code == 200
    # A body that does not come.
    head = HEAD + f"Authorization: {served.client.headers['authorization']}\r\n".encode()
    head += b"Content-Length: 9\r\n\r\n"
    with sockets.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + b"{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_who_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_IDLE", 0.3)
    monkeypatch.setattr(http_server, "_HEAD", 0.3)
    ended = Event()

    async def zeros() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)
                await asyncio.sleep(0)
        finally:
            ended.set()

    app = Starlette(routes=[Route("/", lambda request: StreamingResponse(zeros()))])
    server = HttpServer(app, HttpSocket("127.0.0.1:0"))
    server.start()
    try:
        host, _, port = server.address.rpartition(":")
        with sockets.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
            assert ended.wait(60)  # the answer is given up, though the connection is open
    finally:
        server.stop()


def test_it_stops_within_seconds_whatever_is_under_way(home: Path, attach: Attach) -> None:
    daemon = DaemonProcess(home / "s", host__size="1MiB")
    tiers, chain = attach(), chain_of(4)
    store(tiers, chain)
    names = [name.hex() for name in chain.hashes]
    assert (
        httpx2.post(url(daemon, "/admin/pin"), json={"hashes": names, "ttl": "1h"}, headers=daemon.operator).status_code
        == 200
    )
    trace = {"file": str(home / "trace.jsonl")}
    with httpx2.stream(
        "POST", url(daemon, "/admin/trace"), json=trace, timeout=60, headers=daemon.operator
    ) as recording:
        lines = recording.iter_lines()
        next(lines)
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert "error" in list(lines)[-1]  # the recording says that it was cut short
        assert daemon.process.wait(60) == 0
        assert time.monotonic() - began < 30  # the pin would have stayed for an hour
    daemon.end(signal.SIGTERM)
    assert daemon.lines == []


def test_answers_on_a_kept_connection_leave_at_once() -> None:
    listening = HttpSocket("127.0.0.1:0")
    with sockets.create_connection(("127.0.0.1", int(listening.address.rpartition(":")[2]))):
        accepted, _ = listening.socket.accept()
        assert accepted.proto == sockets.IPPROTO_TCP  # what asyncio looks at before it switches Nagle's algorithm off
        accepted.close()
    listening.close()
