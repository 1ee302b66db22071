"""Prometheus's rules and Grafana's panels: all they name is really told. `make lint` asks whether they are valid."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from doubles import chain_of
from http_rig import ServedDaemon
from monitoring_rig import asked, labels_of, strays_in, words_in
from node_rig import free_port
from router_rig import replicas, routed, until
from server_rig import MODEL, save_checkpoint, serving
from service_rig import attach, load, store

from kvtier.service.events.publisher import Publisher
from kvtier.service.observe.statuses import LatencyFigures
from kvtier.service.router.fleet import Latencies
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.reuse import RequestEnd

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
# What is not ours: Prometheus's own, and what it adds to every series.
GIVEN = {"up": {"job", "instance"}}


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]
    ]


def expressions() -> list[str]:
    """Of all rules, and of all panels of daemons, routers and engines."""
    return [*(rule["expr"] for rule in rules()), *asked("kvtier")]


def told(home: Path) -> dict[str, set[str]]:
    """Labels by series of a daemon, an engine and a router to whom everything has happened."""
    return labels_of([_daemon_page(), _engine_page(home), _router_page()])


def _daemon_page() -> str:
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/var/tmp") as name:
        file = {"path": name, "size": "4MiB"}
        daemon = ServedDaemon(Path(name) / "s", host={"size": 1 << 20}, file=file, service={"gpu_hour": 2.5})
        tiers = attach(Path(name) / "s")
        try:
            store(tiers, chain_of(6))
            load(tiers, chain_of(8))
            tiers.computed(100, 1.0)
            for num_blocks in (6, 8):  # a conversation's turn, and the next one
                tiers.ended(RequestEnd(chain_of(num_blocks).hashes, num_blocks, 1))
            load(tiers, chain_of(8))  # what was told goes with it
            (namespace,) = daemon.daemon.call(daemon.daemon.namespaces)
            metrics = namespace.hierarchy.metrics  # what is not easily brought about
            metrics.corrupted("file", 1)
            metrics.dropped("file", "queue_full", 1)
            metrics.moved("file", "read", 1, 0.001)
            until(lambda: "kvtier_optimum_share{" in daemon.client.get("/metrics").text)
            daemon.daemon.health.socket_is("removed")
            return daemon.client.get("/metrics").text
        finally:
            tiers.close()
            daemon.close()


def _engine_page(home: Path) -> str:
    with serving(save_checkpoint(home), cache={"segments": "on"}) as engine:
        for _ in range(2):  # the second time its prompt is cached
            assert engine.post("completions", model=MODEL, prompt="x" * 64, max_tokens=4).status_code == 200
            engine.settle()
        assert engine.post("completions", model="another", prompt="x").status_code == 404
        return engine.http.get("/metrics").text


def _router_page() -> str:
    """One replica that answers and tells of its blocks, one that breaks, and a client who sends rubbish."""
    ports = {"publish": f"tcp://127.0.0.1:{free_port()}", "replay": f"tcp://127.0.0.1:{free_port()}"}
    publisher = Publisher(EventsConfig.model_validate(ports))
    try:
        with replicas(2) as (one, other):
            events = f"{one.url},events={ports['publish']},replay={ports['replay']}"
            with routed(events, other.url) as router:
                until(lambda: router.status()["replicas"][0]["events"]["state"] == "live")
                other.behave(die=True)
                until(lambda: router.complete().status_code == 200 and router.status()["retries"])
                assert router.client.post("/v1/completions", json={"model": "another"}).status_code == 404
                until(lambda: router.status()["replicas"][1]["state"] == "down")
                waits = LatencyFigures(num=3, p50_s=0.25, p95_s=1.5)  # told after seconds only
                with patch.object(Latencies, "figures", lambda _: {"ttft": waits, "itl": waits}):
                    return router.client.get("/metrics").text
    finally:
        publisher.close()


def recorded(known: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Labels of what rules record: those they are summed by, or all of what they are made of."""
    found: dict[str, set[str]] = {}
    for rule in rules():
        if "record" in rule:
            by = re.search(r"by \(([^)]*)\)", rule["expr"])
            names = re.findall(r"\bkvtier_\w+", rule["expr"])
            found[rule["record"]] = set(words_in(by[1])) if by else set().union(*(known[name] for name in names))
    return found


def test_what_they_name_is_told(tmp_path: Path) -> None:
    series = told(tmp_path)
    known = {**series, **GIVEN, **recorded(series)}
    strays = {stray: expression for expression in expressions() for stray in strays_in(expression, known)}
    assert not strays
    # The test can fail: a name, a selector's label and a sum's label that nobody tells.
    for wrong in ("kvtier_lookups", 'kvtier_miss_total{tier="l2"}', "sum by (why) (kvtier_miss_total)"):
        assert list(strays_in(wrong, known)), wrong
