"""What a server says when it ends: what was under way, what was written, dropped and kept, and how long that took."""

import re
import signal
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from doubles import MemoryTier, chain_of, hand_in, hierarchy_of
from doubles import wait_until as until
from router_rig import PATIENCE, RouteProcess, replicas
from service_rig import DaemonProcess, attach, store, take_last

from kvtier.service.observe.metrics import LastStores

MODEL = b"f" * 32  # of `chain_of`


def last(line: str) -> str:
    """A line about the end, from "stopped" on, its times as T."""
    return re.sub(r"[\d.]+ (s|min)\b", "T", line.partition("kvtier: ")[2].strip())


def test_a_daemon_with_stores_under_way(home: Path, disk_dir: Path) -> None:
    daemon = DaemonProcess(home / "s", file__path=str(disk_dir), file__size="64MiB")
    with closing(attach(home / "s", fingerprint=MODEL)) as tiers:
        assert store(tiers, chain_of(8, first_token=100)) == 8
        assert store(tiers, chain_of(24, first_token=900), below=False) == 24
        assert daemon.end(signal.SIGTERM) == 0
    line = last(daemon.last_line)
    written = int(re.findall(r"(\d+) blocks written", line)[0])
    assert 0 <= written <= 24
    assert line == (
        f"stopped after T: models 1, clients 1; {written} blocks written below in T, 0 dropped, 32 kept in slabs"
    )


def test_what_could_not_be_written_is_counted() -> None:
    tier = MemoryTier()
    hierarchy = hierarchy_of(32, tier)
    assert hand_in(hierarchy, chain_of(4)) == 4
    assert hierarchy.drain(60)
    tier.broken = True
    assert hand_in(hierarchy, chain_of(8, first_token=500)) == 8
    stores = LastStores([hierarchy])
    until(lambda: bool(tier.writes[4:]))  # the tier has refused some
    hierarchy.close(2.0)
    line = stores.line()
    assert re.fullmatch(r"0 blocks written below in [\d.]+ s, \d+ dropped, 4 kept in slabs", line), line
    assert int(re.findall(r"(\d+) dropped", line)[0]) > 0


def test_a_router_whose_answer_goes_on_too_long(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    with replicas(1) as [replica]:
        file.write_text(f'[router]\nreplicas = ["{replica.url}"]\ndrain = "500ms"\n')
        with closing(RouteProcess(file)) as router:
            for _ in range(2):
                assert router.complete("none").status_code == 200
            replica.behave(events=1000, pause=0.05)
            body = {"model": "m", "prompt": "x", "stream": True}
            url = f"{router.url}/v1/completions"
            with httpx2.stream("POST", url, json=body, timeout=PATIENCE, trust_env=False) as answer:
                pieces = answer.iter_bytes()
                next(pieces)
                router.process.send_signal(signal.SIGTERM)
                assert router.process.wait(PATIENCE) == 0
            line = last(take_last(router.log.read_text().splitlines()))
            assert line == (
                "stopped after T: 3 requests given to replicas (only 3), the last in T, 1 cut off; errors client_gone 1"
            )


def test_a_router_of_two_processes_says_it_once(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    with replicas(1) as [replica]:
        file.write_text(f'[router]\nreplicas = ["{replica.url}"]\n')
        with closing(RouteProcess(file, "--processes", "2")) as router:
            assert [router.complete("none").status_code for _ in range(12)] == [200] * 12
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(PATIENCE) == 0
            line = last(take_last(router.log.read_text().splitlines()))
            assert line == "stopped after T: 12 requests given to replicas (only 12), the last in T; errors none"


@pytest.mark.slow
def test_an_engine(model: Path, disk_dir: Path) -> None:
    from server_rig import ServerProcess  # takes torch along

    server = ServerProcess(model, file__path=str(disk_dir), file__size="64MiB")
    for number in range(2):
        server.client.completions.create(model="tiny", prompt=[5 + number] * 40, max_tokens=2, temperature=0)
    assert server.end(signal.SIGTERM) == 0
    line = last(server.last_line)
    written = int(re.findall(r"(\d+) blocks written", line)[0])
    rest = rf"{written} blocks written below in T, 0 dropped, \d+ kept in slabs"
    assert re.fullmatch(rf"stopped after T: ended length 2, the last in T; {rest}", line), line
    assert int(re.findall(r"(\d+) kept", line)[0]) >= 4
