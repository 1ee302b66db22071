"""How the tier in other nodes' memory fares, and what is lent to them: for statuses and Prometheus."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric

from kvtier.service.node.daemon import Daemon
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.observe import counter, gauge
from kvtier.tiers.hierarchy import TierPort

_FAILED: Final = "failed_"


class Borrowed(NamedTuple):
    """What one model's tier says of other nodes."""

    num_answering: int
    failures: dict[str, int]  # by reason
    num_sure: int  # of those that answer, whose events tell all that they hold
    num_told: int  # blocks known by events
    questions: int  # by name, each to one node
    hints: dict[str, int]  # flights that events sent: right, or wrong


def borrowed_by(port: TierPort) -> Borrowed | None:
    """None of a tier that is not in other nodes' memory, or is detached."""
    tier = port.tier  # a probe may detach it meanwhile
    stats = tier.stats() if tier is not None else {}
    if "answering" not in stats:
        return None
    failures = {name.removeprefix(_FAILED): n for name, n in stats.items() if name.startswith(_FAILED)}
    hints = {name: stats.get(f"hints_{name}", 0) for name in ("right", "wrong")}
    return Borrowed(stats["answering"], failures, stats["sure"], stats["told"], stats.get("questions", 0), hints)


def peers_series(daemon: Daemon, namespaces: Sequence[Namespace]) -> Iterator[Metric]:
    """Nothing if no node is borrowed from and nothing is lent."""
    told = {
        name_of(namespace.fingerprint): borrowed
        for namespace in namespaces
        for port in namespace.hierarchy.ports
        if (borrowed := borrowed_by(port)) is not None
    }
    if told:
        failures, hints = Counter[str](), Counter[str]()
        for borrowed in told.values():
            failures.update(borrowed.failures)
            hints.update(borrowed.hints)
        yield counter("kvtier_peer_failures", "Failures of other nodes to lend, by reason", dict(failures), "reason")
        text = "Batches asked of a node because its KV events name their blocks; wrong: one was not there"
        yield counter("kvtier_peer_hints", text, {name: hints[name] for name in ("right", "wrong")}, "result")
        asked = sum(borrowed.questions for borrowed in told.values())
        yield counter("kvtier_peer_questions", "Questions to other nodes which blocks they hold", asked)
        for name, text, values in (
            ("answering", "Other nodes that answer", {model: each.num_answering for model, each in told.items()}),
            ("sure", "Of these, whose KV events tell all", {model: each.num_sure for model, each in told.items()}),
            ("told_blocks", "Blocks of theirs known by events", {model: each.num_told for model, each in told.items()}),
        ):
            yield gauge(f"kvtier_peers_{name}", text, values, "fingerprint")
    if (lender := daemon.lender) is not None:
        text = "Blocks and bytes lent to other nodes, and why connections were ended"
        yield counter("kvtier_lent", text, dict(lender.counts), "event")
        yield gauge("kvtier_lending_connections", "Connections of other nodes", lender.num_connections)
