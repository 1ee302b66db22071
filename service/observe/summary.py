"""Statuses as pages of text, of a daemon, an engine or a router: for /summary and `kvtier status`."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvtier.service.observe.statuses import (
    BlockFigures,
    DaemonStatus,
    EngineStatus,
    ModelStatus,
    ReplicaScore,
    RouterStatus,
    WantingPart,
)
from kvtier.tiers import L2, MISS, TIERS
from kvtier.tiers.config import show_size

# --- a daemon --------------------------------------------------------------------------------------------------------

_MAX_CLIENTS: Final = 64  # listed
_STATES: Final = ("ready", "leased", "dirty", "tails", "filling", "quarantined", "free")  # of slots


def daemon_page(status: DaemonStatus) -> str:
    """The whole daemon_page. Ends with a newline."""
    return "\n".join(_daemon_lines(status)) + "\n"


def hit_share(lookups: Mapping[str, int]) -> float:
    """The share of blocks asked for that some tier had; 0 if none was asked for."""
    asked = sum(lookups.values())
    return (asked - lookups.get(MISS, 0)) / asked if asked else 0.0


def _daemon_lines(status: DaemonStatus) -> Iterable[str]:
    budget, clients = status.budget, status.clients
    yield (
        f"kvtier {status.version}, pid {status.pid}, up {brief_time(status.uptime_s)}: "
        f"{status.status}; engines connect to {status.socket}"
    )
    for each in status.degraded:
        why = "" if each.why is None else f": {each.why}"
        yield f"  degraded: {each.tier} of {each.model}, {each.direction} breaker {each.breaker}{why}"
    yield from wanting(status.wanting)
    models = _many(len(status.models), "model")
    yield row("host memory", f"{show_size(budget.given)} of {show_size(budget.bytes)} given to {models}")
    yield row("clients", f"{sum(client.connected for client in clients)} connected; {counts(status.events)}")
    for refused in status.refused:
        whom = f"pid {refused.pid}" + (f", model {refused.model}" if refused.model else "")
        times = "once" if refused.count == 1 else f"{refused.count} times"
        yield row("refused", f"{times}, last {brief_time(refused.seconds_ago)} ago ({whom}): {refused.why}")
    for model in status.models:
        yield ""
        yield from _model(model)
    if clients:
        yield ""
        yield _CLIENT.format("client pids", "model", "for", "claims", "leases", "filling")
        for client in clients[:_MAX_CLIENTS]:
            pids = ",".join(map(str, client.pids)) + ("" if client.connected else " (gone)")
            held = client.claims, client.leases, client.reservations
            yield _CLIENT.format(pids or "-", client.model or "-", brief_time(client.seconds), *held)
        if len(clients) > _MAX_CLIENTS:
            yield f"and {len(clients) - _MAX_CLIENTS} more"


_CLIENT: Final = "{:<24} {:<16} {:>10} {:>7} {:>7} {:>8}"


def _model(model: ModelStatus) -> Iterable[str]:
    l2, lookups = model.l2, model.lookups
    yield (
        f"model {model.model}: blocks of {model.block_size} tokens in {show_size(model.block_bytes)}, "
        f"{_many(model.clients, 'client')}"
    )
    states = {state: getattr(l2, state) for state in _STATES}
    yield row(TIERS[L2].label, f"{l2.slots} slots in {show_size(l2.bytes)}: {counts(states)}")
    if l2.pinned or l2.quotas:
        yield row("kept", f"{_many(l2.pinned, 'block')} pinned, {_many(l2.quotas, 'quota')}")
    for name, tier in model.tiers.items():
        breakers = ", ".join(f"{direction} {state}" for direction, state in tier.breakers.items())
        saved = {way: show_size(num_bytes) for way, num_bytes in tier.saved.items() if num_bytes}
        less = f"; compression saved {counts(saved)}" if tier.saved else ""
        yield row(name, f"slots {counts(tier.slots)}; breakers {breakers}{less}")
    found = counts(lookups)
    yield row("lookups", f"{sum(lookups.values())} blocks, {hit_share(lookups):.1%} found; {found}")
    yield row("not served", counts(model.missed))
    yield row("stored", f"{counts(model.stored)}; evicted {counts(model.evicted)}")
    yield row("dropped", _by_tier(model.dropped, str))
    yield row("corrupted", counts(model.corrupted))
    yield row("moved", _by_tier(model.moved, show_size))


def wanting(parts: Iterable[WantingPart]) -> Iterable[str]:
    """A line for each."""
    return (f"  degraded: {each.part}: {each.why}" for each in parts)


def row(title: str, text: str) -> str:
    return f"  {title:<12} {text}"


def counts(found: Mapping[str, Any]) -> str:
    """What is not nought: "l2 3 · file 1"."""
    return " · ".join(f"{name} {count}" for name, count in found.items() if count) or "none"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _by_tier(tiers: Mapping[str, Mapping[str, Any]], shown: Any) -> str:
    parts = (f"{tier} {name} {shown(count)}" for tier, numbers in tiers.items() for name, count in numbers.items())
    return " · ".join(parts) or "none"


def brief_time(seconds: float) -> str:
    """In the largest unit it fills: "2.5 min"."""
    whole = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= size:
            return f"{whole / size:.1f} {unit}"
    return f"{whole} s"


# --- an engine -------------------------------------------------------------------------------------------------------


def engine_page(status: EngineStatus) -> str:
    """The whole engine_page. Ends with a newline."""
    return "\n".join(_engine_lines(status)) + "\n"


def _engine_lines(status: EngineStatus) -> Iterable[str]:
    requests, tokens, l1 = status.requests, status.tokens, status.l1
    yield f"kvtier {status.version} engine of {status.model}, pid {status.pid}: {status.status}"
    yield from wanting(status.wanting)
    size = f"blocks of {status.block_size} tokens, requests of up to {status.max_model_len:,}"
    yield row("model", f"{status.fingerprint[:16]}: {size}")
    waiting = f"{requests.running} running, {requests.loading} loading, {requests.waiting} waiting"
    yield row("requests", f"{requests.live} of {requests.capacity}: {waiting}; ended {counts(status.outcomes)}")
    yield row("refused", f"{counts(status.refused)}; preempted {status.preempted}")
    yield row("L1", f"{l1.blocks - l1.free} of {l1.blocks} blocks used")
    yield row("tokens", f"{tokens.prompt_tokens:,} of prompts, {tokens.computed_tokens:,} computed")
    yield row("answers", f"{tokens.generated_tokens:,} tokens")
    yield row("cached", f"tokens {counts(status.cached_tokens)}")
    yield row("steps", f"{status.steps.done:,}, {status.steps.failed} failed")
    if status.tiers is not None:
        yield from _engine_tiers(status.tiers)


def _engine_tiers(tiers: BlockFigures) -> Iterable[str]:
    """Of the tiers that are the engine's own, or as it sees its daemon's."""
    lookups = tiers.lookups
    yield row("lookups", f"{sum(lookups.values())} blocks, {hit_share(lookups):.1%} found; {counts(lookups)}")
    yield row("not served", counts(tiers.missed))
    yield row("stored", f"{counts(tiers.stored)}; evicted {counts(tiers.evicted)}")


# --- a router --------------------------------------------------------------------------------------------------------

_SHOWN: Final = 12  # decisions shown
_DECISION: Final = "{:<10} {:>7}  {:<22} {:<8} {}"


def router_page(status: RouterStatus) -> str:
    """The router_page for a `Router.status`. Ends with a newline."""
    return "\n".join(_router_lines(status)) + "\n"


def _router_lines(status: RouterStatus) -> Iterable[str]:
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


def _score(score: ReplicaScore) -> str:
    work = "cannot take it" if score.work is None else f"{score.work:.0f}"
    return f"{score.name} {score.cached}, {work}"
