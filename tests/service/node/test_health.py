"""Health that looks: what an engine that attaches now would not get is said before one comes."""

import os
import socket as sockets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from command_rig import kvtier
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, wait_until
from http_rig import MODEL, ServedDaemon, ServePages
from msgspec.structs import astuple
from redis_rig import standalone
from service_rig import FINGERPRINT, Attach, DaemonProcess, attach, fill, load, records, store, wanted

from kvtier.connector.daemon import wire
from kvtier.connector.daemon.link import Peer
from kvtier.connector.daemon.wire import Hello, pack_frame
from kvtier.service.command_line import Exit
from kvtier.service.doctor.doctor import check_refused
from kvtier.service.node import daemon as daemons
from kvtier.service.node import health as healths
from kvtier.service.node.health import Refusals
from kvtier.tiers.config.config import Config
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.finding import Finding, Status


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "_LOOK", 0.05)
    monkeypatch.setattr(healths, "_ASK", 0.1)


def wanting_in(served: ServedDaemon) -> list[str]:
    wanting: list[str] = served.client.get("/readyz").json()["wanting"]
    return wanting


def test_settings_that_no_engine_could_use_are_said_before_one_comes(serve_pages: ServePages, attach: Attach) -> None:
    served = serve_pages(host={"size": 10 << 40})
    wait_until(lambda: served.client.get("/readyz").status_code == 503)
    (missing,) = served.client.get("/readyz").json()["missing"]
    assert missing.startswith('[host] size "10TiB": ')
    assert missing.endswith("; lower it, and restart the daemon")
    told = served.client.get("/status").json()
    assert (told["status"], [each["part"] for each in told["wanting"]]) == ("degraded", ["l2"])
    assert 'kvtier_wanting{part="l2"} 1.0' in served.client.get("/metrics").text
    shown = kvtier("status", "--http", served.http)
    assert shown.returncode == Exit.DEGRADED
    assert f"degraded: l2: {missing}" in shown.stdout
    tiers = attach()  # one that wants less gets it: the setting is wrong, not the daemon
    assert (tiers.num_slots, tiers.wanting) == (64, {})


def test_refused_stores_degrade_it(monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach) -> None:
    served = serve_pages(host={"size": 8 * SLOT_BYTES})
    tiers = attach()
    chains = [chain_of(8, first_token=1000 * number) for number in range(2)]
    (held, _) = tiers.reserve([wanted(chain) for chain in chains])
    assert held is not None
    why = "50% of 16 blocks in the last 5 minutes were not stored (no_slot 8); raise [host] size"
    fill(tiers, held)
    tiers.seal(held, records(held, chains[0]), tiers.epoch)
    assert tiers.drain(60)
    ready = served.client.get("/readyz")
    assert (ready.status_code, ready.json()["wanting"]) == (200, [f"model {MODEL}: {why}"])
    assert 'kvtier_wanting{part="l2 stores"} 1.0' in served.client.get("/metrics").text
    shown = kvtier("status", "--http", served.http)
    assert shown.returncode == Exit.DEGRADED
    assert f"degraded: l2 stores: model {MODEL}: {why}" in shown.stdout
    (namespace,) = served.daemon.call(served.daemon.namespaces)
    now = time.monotonic()
    monkeypatch.setattr(namespace.hierarchy.metrics.losses, "_clock", lambda: now + 360)
    assert served.client.get("/status").json()["status"] == "ok"


def test_a_slab_directory_that_became_a_file_is_named(disk_dir: Path, serve_pages: ServePages) -> None:
    served = serve_pages(host={"size": 1 << 20}, file={"path": disk_dir / "slabs"})
    assert wanting_in(served) == []
    (disk_dir / "slabs").write_text("in its place")
    wait_until(lambda: wanting_in(served))
    assert "no directory that this user can write in" in wanting_in(served)[0]


def test_a_hanging_directory_is_named(disk_dir: Path, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages) -> None:
    gate = Event()

    def answers(config: Config) -> list[Finding]:
        assert gate.wait(60)
        return []

    monkeypatch.setattr(healths, "_PATIENCE", 0.1)
    monkeypatch.setattr("kvtier.tiers.file.opening.answers", answers)
    with standalone() as redis:
        served = serve_pages(host={}, file={"path": disk_dir}, redis={"url": redis.url})
        wait_until(lambda: any("[file] hangs: no answer" in why for why in wanting_in(served)))
        redis.kill()
        wait_until(lambda: any("not reachable" in why for why in wanting_in(served)))
        redis.start()
        gate.set()
        wait_until(lambda: not wanting_in(served))


def test_a_slab_that_hangs_at_open_costs_its_model_alone(
    disk_dir: Path, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach
) -> None:
    gate, opening, open_slab = Event(), Event(), FileStore.open
    hung = FINGERPRINT

    def open_(directory: Path, fingerprint: bytes, **options: Any) -> FileStore:
        if fingerprint == hung:
            opening.set()
            assert gate.wait(60)
        return open_slab(directory, fingerprint, **options)

    monkeypatch.setattr(FileStore, "open", open_)
    file = {"path": disk_dir, "size": "4MiB", "deadline": "1s"}
    served = serve_pages(host={"size": 1 << 20}, file=file)
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(attach)
        assert opening.wait(60)
        attach(fingerprint=b"another".ljust(32, b"."))
        assert not attaching.done()  # its slab still has some seconds
        assert served.client.get("/readyz").json()["degraded"] == []
        tiers = attaching.result(60)
    degraded = served.client.get("/readyz").json()["degraded"]
    assert {(each["tier"], each["model"]) for each in degraded} == {("file", MODEL)}
    assert {each["why"] for each in degraded} == {"it has not opened within 5 s, and attaches once it has"}
    assert "has not opened within 5 s" in kvtier("status", "--http", served.http).stdout
    chain = chain_of(4)
    store(tiers, chain, below=False)
    assert load(tiers, chain) == 4  # host memory serves
    gate.set()
    wait_until(lambda: served.client.get("/readyz").json()["degraded"] == [])


def test_a_silent_server_is_named(caplog: pytest.LogCaptureFixture, serve_pages: ServePages, attach: Attach) -> None:
    with standalone() as redis:
        served = serve_pages(redis={"url": redis.url})
        attach()  # idle: no breaker would tell
        assert served.client.get("/readyz").json()["wanting"] == []
        redis.kill()
        wait_until(lambda: wanting_in(served))
        (why,) = wanting_in(served)
        assert f"redis 127.0.0.1:{redis.port}: not reachable" in why
        assert served.client.get("/readyz").status_code == 200  # an engine can attach: it has host memory
        assert [each.message for each in caplog.records if "not reachable" in each.message] == [why]
        assert kvtier("status", "--http", served.http).returncode == Exit.DEGRADED
        redis.start()
        wait_until(lambda: not wanting_in(served))
        assert kvtier("status", "--http", served.http).returncode == Exit.OK


# Engines that the daemon refused: /readyz, `kvtier status` and `kvtier doctor` say which, why, how often and when.


def say(socket: Path, frame: bytes) -> bytes:
    """What the daemon answers to this first frame, until it hangs up."""
    with sockets.socket(sockets.AF_UNIX) as client:
        client.connect(str(socket))
        client.sendall(frame)
        told = b""
        while more := client.recv(4096):
            told += more
        return told


def test_an_engine_that_was_refused_is_seen_everywhere_until_one_of_its_model_gets_in(home: Path) -> None:
    path = home / "s"
    served = ServedDaemon(path, host={"size": 1 << 20}, service={"socket": path})
    config = Config.load(service={"socket": path, "http": served.http}).service
    try:
        assert [each.found for each in check_refused(config)] == ["none in the last hour"]
        # An engine of an older kvtier, twice, and one whose blocks are too large for this daemon's memory.
        hello = Hello(FINGERPRINT, BLOCK_SIZE, SLOT_BYTES, 1 << 20, reset=False)
        old = pack_frame(["kvtier", wire.OLDEST - 1, "Hello", *astuple(hello)])
        for _ in range(2):
            assert b"protocol version" in say(path, old)
        without = attach(path, slot_bytes=1 << 20)
        assert "8 of its blocks take 8MiB; raise it there" in without.wanting["daemon"]

        ready = served.client.get("/readyz").json()
        assert ready["ready"]  # those that fit are served
        large, older = ready["refused"]
        assert (large["count"], large["model"], large["pid"], large["uid"]) == (1, MODEL, os.getpid(), os.geteuid())
        assert large["why"].startswith("[host] size: the daemon has 256KiB of 1MiB for this model")
        assert (older["count"], older["model"]) == (2, None)
        both = f"protocol version {wire.OLDEST - 1}, this side speaks {wire.OLDEST} to {wire.VERSION} "
        assert older["why"].startswith(both)
        assert 0 <= large["seconds_ago"] <= older["seconds_ago"] < 600
        lines = kvtier("status", "--http", served.http).stdout.splitlines()
        told = [line.split(None, 1)[1] for line in lines if line.startswith("  refused")]
        assert [line.partition(", last ")[0] for line in told] == ["once", "2 times"]
        assert [line.endswith(each["why"]) for line, each in zip(told, ready["refused"], strict=True)] == [True, True]
        findings = check_refused(config)
        assert {each.status for each in findings} == {Status.WARNING}
        assert [large["why"] in findings[0].found, older["why"] in findings[1].found] == [True, True]

        # The same model with blocks that fit gets in: what kept it out is over. The old engine is as it was.
        tiers = attach(path)
        (left,) = served.client.get("/status").json()["refused"]
        assert left["count"] == 2
        tiers.close()
        without.close()
    finally:
        served.close()
    wait_until(lambda: not path.exists())
    assert check_refused(config) == []  # that nothing answers is another line's matter


def test_reasons_are_bounded_and_short() -> None:
    refusals, peer = Refusals(), Peer(1, 2)
    for number in range(100):
        refusals.record(f"reason {number}", peer)
        refusals.record("the usual one", peer)
    refusals.record("x" * 5000, peer, b"model")
    kept = refusals.all()
    assert len(kept) == 16
    assert (len(kept[0].why), kept[0].model) == (500, b"model".hex())
    assert (kept[1].why, kept[1].count) == ("the usual one", 100)
    assert kept[2].why == "reason 99"
    refusals.welcomed(b"model")
    assert len(refusals.all()) == 15


# `kvtier serve` looks at what it will use before anybody waits for it: a wrong setting is one line and status 2.


SECRET = "hunter2"


def refused(home: Path, **options: str) -> str:
    """What `kvtier serve` says of these options."""
    done = kvtier("serve", "--socket", home / "s", "--http", "127.0.0.1:0", host__size="1MiB", **options)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    (line,) = done.stderr.splitlines()
    assert SECRET not in line
    assert not (home / "s").exists()  # nobody could have connected
    return line.removeprefix("kvtier: ")


def test_settings_that_no_model_could_use_end_the_start(home: Path, disk_dir: Path) -> None:
    (disk_dir / "file").write_text("mine")
    (disk_dir / "loop").symlink_to("loop")
    path = disk_dir / "file"
    name_another = "name a directory that this user can write in"
    in_its_place = f"a file is in its place; {name_another}"
    assert refused(home, file__path=str(path)) == f'[file] path "{path}": {in_its_place}'
    assert refused(home, file__path=str(path / "kv")) == f'[file] path "{path / "kv"}": {in_its_place}'
    assert refused(home, file__path=str(disk_dir / "loop")).startswith(f'[file] path "{disk_dir / "loop"}": ')
    assert refused(home, file__path="/proc/kv") == f'[file] path "/proc/kv": it cannot be made; {name_another}'
    assert path.read_text() == "mine"
    line = refused(home, file__path=str(disk_dir / "kv"), file__size="900TiB")
    assert line.startswith('[file] size "900TiB": the directory has ')
    assert line.endswith(" free; lower size or choose another path")
    assert refused(home, file__path=str(disk_dir), file__size="5") == (
        '[file] size "5": 5 bytes are less than a block of any model; did you mean "5GiB"?'
    )
    assert refused(home, redis__url=f"redis://:{SECRET}@cache:sixty") == (
        '[redis] url "redis://…@cache:…": its port is no number from 1 to 65535; '
        "write it as in redis://HOST:6379/0, and / and # of a password as %2F and %23"
    )
    assert refused(home, redis__url="redis://cache", redis__key_file=str(path)).startswith('[redis] key_file "')


def test_a_redis_server_that_is_away_ends_nothing_and_the_log_says_what_is_used(home: Path, disk_dir: Path) -> None:
    options = {"host__size": "1MiB", "file__path": str(disk_dir / "new" / "kv"), "file__size": "4m"}
    daemon = DaemonProcess(home / "s", redis__url="redis://127.0.0.1:1", **options)
    assert "ready on" in daemon.first_line
    assert daemon.end(15) == 0
    told = "".join(daemon.lines)
    assert f"INFO kvtier: [file] 0 slabs in {disk_dir / 'new' / 'kv'}, 0 B of [file] size 4MiB; " in told
    assert "INFO kvtier: [redis] standalone at 127.0.0.1:1\n" in told
