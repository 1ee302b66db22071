"""An engine's server whose tiers are a daemon's: it says so when that one is gone, and goes on."""

from pathlib import Path

from command_rig import kvtier
from server_rig import MODEL, serving, wait_for
from service_rig import DaemonThread, attach

from kvtier.connector.local import LocalConnector
from kvtier.service.command_line import Exit
from kvtier.tiers.tier import Outcome


def test_an_engine_refused_by_a_full_daemon_starts_and_attaches_later(home: Path, model: Path) -> None:
    daemon = DaemonThread(home / "s", host={"size": 16 << 20})
    try:
        other = attach(home / "s", size=16 << 20)  # takes all of it
        with serving(model, service={"socket": home / "s"}) as server:
            (part,) = server.status()["wanting"]
            assert part["part"] == "daemon"
            assert "[host] size: the daemon has 0 of 16MiB for this model" in part["why"]
            ready = server.http.get("/readyz")
            assert (ready.status_code, ready.json()["wanting"]) == (200, [part["why"]])
            assert 'kvtier_wanting{part="daemon"} 1.0' in server.http.get("/metrics").text
            assert kvtier("status", "--url", str(server.http.base_url)).returncode == Exit.DEGRADED
            assert server.client.completions.create(model=MODEL, prompt="on its own", max_tokens=2).choices
            other.close()
            wait_for(lambda: server.status()["status"] == "ok")
            # Loads that find no slot are a reason, too; the engine serves all the same.
            assert isinstance(server.engine.connector, LocalConnector)
            server.engine.connector.tiers.metrics.missed(Outcome.NO_SLOT, 1000)
            (part,) = server.status()["wanting"]
            assert (part["part"], server.status()["status"]) == ("l2 slots", "degraded")
            ready = server.http.get("/readyz")
            assert (ready.status_code, ready.json()["wanting"]) == (200, [part["why"]])
            assert 'kvtier_wanting{part="l2 slots"} 1.0' in server.http.get("/metrics").text
    finally:
        daemon.close()


def test_an_engine_whose_daemon_is_gone_says_so_until_it_is_back(home: Path, model: Path) -> None:
    daemon = DaemonThread(home / "s", host={"size": 64 << 20})
    try:
        with serving(model, service={"socket": home / "s"}) as server:
            assert (server.status()["status"], server.status()["wanting"]) == ("ok", [])
            daemon.close()
            wait_for(lambda: server.status()["status"] == "degraded")
            (part,) = server.status()["wanting"]
            assert part["part"] == "daemon"
            assert f'[service] socket "{home / "s"}"' in part["why"]
            ready = server.http.get("/readyz")
            assert (ready.status_code, ready.json()["wanting"]) == (200, [part["why"]])  # it serves all the same
            assert 'kvtier_wanting{part="daemon"} 1.0' in server.http.get("/metrics").text
            shown = kvtier("status", "--url", str(server.http.base_url))
            assert shown.returncode == Exit.DEGRADED
            assert f"degraded: daemon: {part['why']}" in shown.stdout
            answer = server.client.completions.create(model=MODEL, prompt="on its own", max_tokens=2)
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
            daemon = DaemonThread(home / "s", host={"size": 64 << 20})
            wait_for(lambda: server.status()["status"] == "ok")
    finally:
        daemon.close()
