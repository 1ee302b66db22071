"""Formats the router's status as text, for /summary: its replicas, and its last decisions."""

import time
from collections.abc import Iterable
from typing import Final

from kvtier.service.observe import RouterStatus, brief_time, counts, row, statuses

_SHOWN: Final = 12  # decisions shown
_DECISION: Final = "{:<10} {:>7}  {:<22} {:<8} {}"


def page(status: RouterStatus) -> str:
    """The page for a `Router.status`. Ends with a newline."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: RouterStatus) -> Iterable[str]:
    replicas, tokens = status.replicas, status.tokens
    yield f"kvtier router, up {brief_time(status.uptime_s)}: {status.num_up} of {len(replicas)} replicas up"
    yield row("requests", f"{counts(status.requests)}; retries {counts(status.retries)}")
    yield row("errors", counts(status.errors))
    yield row("prompts", f"{tokens.told_prompt:,} tokens, of which replicas had {tokens.told_cached:,} cached")
    yield row("index", f"{status.indexed_blocks:,} blocks of {status.block_size} tokens")
    for replica in replicas:
        yield ""
        why = f" ({replica.why})" if replica.why else ""
        yield f"replica {replica.name}: {replica.state}{why}"
        yield row("load", f"{replica.load:.0f} blocks of work in {replica.in_flight} requests")
        yield row("served", f"{replica.requests} requests; errors {counts(replica.errors)}")
        yield row("holds", counts(replica.blocks))
        feeds = (("engine", replica.events), ("node", replica.node_events))
        events = [f"{name} {feed.state}" for name, feed in feeds if feed is not None]
        yield row("events", " · ".join(events) or "none")
    if status.decisions:
        yield ""
        yield _DECISION.format("at", "blocks", "sent to", "because", "blocks held, work left")
    for decision in status.decisions[:_SHOWN]:
        at = time.strftime("%H:%M:%S", time.localtime(decision.time))
        scores = " · ".join(map(_score, decision.scores))
        yield _DECISION.format(at, decision.prompt_blocks, decision.chosen or "nobody", decision.reason, scores)


def _score(score: statuses.ReplicaScore) -> str:
    work = "cannot take it" if score.work is None else f"{score.work:.0f}"
    return f"{score.name} {score.cached}, {work}"
