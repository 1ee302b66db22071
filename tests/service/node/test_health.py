"""Health that looks: what an engine that attaches now would not get is said before one comes."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from command_rig import kvtier
from doubles import SLOT_BYTES, chain_of, wait_until
from http_rig import MODEL, ServedDaemon, ServePages
from redis_rig import standalone
from service_rig import FINGERPRINT, Attach, fill, load, records, store, wanted

from kvtier.service.command_line import Exit
from kvtier.service.node import daemon as daemons
from kvtier.service.node import health as healths
from kvtier.tiers.config.config import Config
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.finding import Finding


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
