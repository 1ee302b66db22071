"""Statuses of a daemon, engine or router as text: whole pages, and `kvtier top`, one row for each look."""

import contextlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.service import Json
from kvtier.service.observe import statuses
from kvtier.tiers import L2, MISS, TIERS
from kvtier.tiers.config import show_size

if TYPE_CHECKING:
    from rich.table import Table

# --- a daemon --------------------------------------------------------------------------------------------------------

_MAX_CLIENTS: Final = 64  # listed
_STATES: Final = ("ready", "leased", "dirty", "tails", "filling", "quarantined", "free")  # of slots


def hit_share(lookups: Mapping[str, int]) -> float:
    total = sum(lookups.values())
    return (total - lookups.get(MISS, 0)) / total if total else 0.0


def daemon_lines(status: statuses.DaemonStatus) -> Iterable[str]:
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
            pids = ",".join(map(str, client.pids)) + ("" if client.connected else " (dead)")
            counts_held = client.claims, client.leases, client.reservations
            yield _CLIENT.format(pids or "-", client.model or "-", brief_time(client.seconds), *counts_held)
        if len(clients) > _MAX_CLIENTS:
            yield f"and {len(clients) - _MAX_CLIENTS} more"


_CLIENT: Final = "{:<24} {:<16} {:>10} {:>7} {:>7} {:>8}"


def _model(model: statuses.ModelStatus) -> Iterable[str]:
    l2 = model.l2
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
    yield from _figures(model)
    if model.saved is not None and model.saved.tokens:
        yield row("saved", _saved(model.saved))
    yield row("dropped", _by_tier(model.dropped, str))
    yield row("corrupted", counts(model.corrupted))
    yield row("moved", _by_tier(model.moved, show_size))


def _saved(saved: statuses.SavedFigures) -> str:
    net, price = brief_time(max(0.0, saved.prefill_s - saved.load_s)), ""
    if saved.million_loaded is not None:
        computed = "" if saved.million_computed is None else f", computed {saved.million_computed:.4g}"
        price = f"; a million cost {saved.million_loaded:.4g} loaded{computed}"
    return f"{saved.tokens:,} tokens, {net}{price}"


def _figures(blocks: statuses.BlockFigures) -> Iterable[str]:
    lookups = blocks.lookups
    yield row("lookups", f"{sum(lookups.values())} blocks, {hit_share(lookups):.1%} found; {counts(lookups)}")
    yield row("not served", counts(blocks.missed))
    yield row("stored", f"{counts(blocks.stored)}; evicted {counts(blocks.evicted)}")


def wanting(parts: Iterable[statuses.WantingPart]) -> Iterable[str]:
    return (f"  degraded: {each.part}: {each.why}" for each in parts)


def row(title: str, text: str) -> str:
    return f"  {title:<12} {text}"


def counts(found: Mapping[str, Any]) -> str:
    """The values that are not zero: "l2 3 · file 1"."""
    return " · ".join(f"{name} {count}" for name, count in found.items() if count) or "none"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _by_tier(tiers: Mapping[str, Mapping[str, Any]], shown: Any) -> str:
    parts = (f"{tier} {name} {shown(count)}" for tier, numbers in tiers.items() for name, count in numbers.items())
    return " · ".join(parts) or "none"


def brief_time(seconds: float) -> str:
    """A duration in the largest unit it fills: "2.5 min"."""
    whole = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= size:
            return f"{whole / size:.1f} {unit}"
    return f"{whole} s"


# --- an engine -------------------------------------------------------------------------------------------------------


def engine_lines(status: statuses.EngineStatus) -> Iterable[str]:
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
        yield from _figures(status.tiers)


# --- a router --------------------------------------------------------------------------------------------------------

_SHOWN: Final = 12  # decisions shown
_DECISION: Final = "{:<10} {:>7}  {:<22} {:<8} {}"


def router_lines(status: statuses.RouterStatus) -> Iterable[str]:
    replicas, tokens = status.replicas, status.tokens
    yield f"kvtier router, up {brief_time(status.uptime_s)}: {status.num_up} of {len(replicas)} replicas up"
    yield from wanting(status.wanting)
    yield row("requests", f"{counts(status.requests)}; retries {counts(status.retries)}")
    yield row("errors", counts(status.errors))
    yield row("prompts", f"{tokens.told_prompt:,} tokens, of which replicas had {tokens.told_cached:,} cached")
    if (price := status.million_price) is not None:
        yield row("price", f"{price:.4g} a million prompt tokens, {status.prompt_price:.4g} computed")
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
        left = ((each, "cannot take it" if each.work is None else f"{each.work:.0f}") for each in decision.scores)
        scores = " · ".join(f"{each.name} {each.cached}, {work}" for each, work in left)
        yield _DECISION.format(at, decision.prompt_blocks, decision.chosen or "none", decision.reason, scores)


# --- changes between two looks ---------------------------------------------------------------------------------------

_HEADER_EVERY: Final = 20  # lines, and rows of a table


class Column(NamedTuple):
    text: Callable[[Any], str]
    width: int


TopRow = dict[str, tuple[Any, Column]]
"""One look: counts and states as they are, events per second since the last look, shares of 1."""

TopView = tuple[type[statuses.StatusPart], Callable[[Any, Any, float], TopRow]]
"""A kind of status, and the row of two of them with the seconds between them."""


def watch(ask: Callable[[], Json], interval: float, count: int, *, as_json: bool) -> None:
    """Show the changes in /status every `interval` seconds, `count` times or until Ctrl-C; `as_json`: as lines."""
    from rich.console import Console  # a daemon has these pages too, and needs no terminal
    from rich.live import Live

    status, at = ask(), time.monotonic()
    kind, row_of = _ROUTER if "replicas" in status else _ENGINE if "steps" in status else _DAEMON
    before = kind.parse(status)
    console = Console()
    rows: deque[list[str]] = deque(maxlen=_HEADER_EVERY)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        for number in range(count) if count else itertools.count():
            time.sleep(max(0.0, at + interval - time.monotonic()))
            now, then = kind.parse(ask()), at
            at = time.monotonic()
            row = row_of(before, now, at - then)
            rows.append([column.text(value) for value, column in row.values()])
            if live is not None:
                live.update(_table(row, rows), refresh=True)
            elif as_json:
                print(json.dumps({name: value for name, (value, _) in row.items()}), flush=True)
            else:
                if number % _HEADER_EVERY == 0:
                    print(_line(row, row))
                print(_line(row, rows[-1]), flush=True)
            before = now


def _line(row: TopRow, cells: Iterable[str]) -> str:
    return " ".join(f"{cell:>{column.width}}" for cell, (_, column) in zip(cells, row.values(), strict=True))


def _table(names: Iterable[str], rows: Iterable[list[str]]) -> "Table":
    from rich.table import Table

    table = Table(*(name.replace("_", " ").capitalize() for name in names), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


_COUNT: Final = Column(str, 8)
_RATE: Final = Column("{:.0f}".format, 9)
_SHARE: Final = Column(lambda share: "-" if share is None else f"{share:.1%}", 7)
_BYTES: Final = Column(lambda rate: f"{show_size(rate, 1000)}/s", 12)
_PRICE: Final = Column(lambda price: "-" if price is None else f"{price:.4g}", 8)
_STATE: Final = Column(str, 9)


# --- what each shows


def daemon_row(before: statuses.DaemonStatus, after: statuses.DaemonStatus, seconds: float) -> TopRow:
    changed = _daemon_totals(after) - _daemon_totals(before)
    models = after.models
    return {
        "clients": (sum(client.connected for client in after.clients), _COUNT),
        "leased": (sum(model.l2.leased for model in models), _COUNT),
        "used": _share(sum(model.l2.ready_bytes for model in models), sum(model.l2.bytes for model in models)),
        "lookups": _rate(changed["lookups"], seconds),
        "hits": _share(changed["lookups"] - changed["misses"], changed["lookups"]),
        "stored": _rate(changed["stored"], seconds),
        "dropped": _rate(changed["dropped"], seconds),
        "read": _rate(changed["read"], seconds, _BYTES),
        "written": _rate(changed["written"], seconds, _BYTES),
        "saved": _rate(changed["saved"], seconds),
        "million": (_million_loaded(models), _PRICE),
        "state": (after.status, _STATE),
    }


def _million_loaded(models: Iterable[statuses.ModelStatus]) -> float | None:
    """What a million saved tokens have cost in the cache, over all models; None: no price is set."""
    known = [each.saved for each in models if each.saved is not None and each.saved.million_loaded is not None]
    total = sum(each.tokens for each in known)
    return round(sum(each.tokens * (each.million_loaded or 0.0) for each in known) / total, 6) if total else None


def _daemon_totals(status: statuses.DaemonStatus) -> Counter[str]:
    """Counters over all models; a model that closes takes its part away."""
    models = status.models
    moved = [by_direction for model in models for by_direction in model.moved.values()]
    return Counter(
        lookups=sum(sum(model.lookups.values()) for model in models),
        misses=sum(model.lookups.get(MISS, 0) for model in models),
        stored=sum(model.stored.get(L2, 0) for model in models),
        dropped=sum(sum(model.dropped.get(L2, {}).values()) for model in models),
        read=sum(directions.get("read", 0) for directions in moved),
        written=sum(directions.get("write", 0) for directions in moved),
        saved=sum(0 if model.saved is None else model.saved.tokens for model in models),
    )


def _router_row(before: statuses.RouterStatus, after: statuses.RouterStatus, seconds: float) -> TopRow:
    prompt_tokens = after.tokens.told_prompt - before.tokens.told_prompt
    return {
        "replicas": (len(after.replicas), _COUNT),
        "up": (after.num_up, _COUNT),
        "in_flight": (sum(replica.in_flight for replica in after.replicas), _RATE),
        "requests": _grown(before.requests, after.requests, seconds),
        "tokens": _rate(prompt_tokens, seconds),
        "cached": _share(after.tokens.told_cached - before.tokens.told_cached, prompt_tokens),
        "million": (after.million_price, _PRICE),
        "retries": _grown(before.retries, after.retries, seconds),
        "errors": _grown(before.errors, after.errors, seconds),
        "state": ("ok" if after.num_up == len(after.replicas) else "degraded", _STATE),
    }


def _engine_row(before: statuses.EngineStatus, after: statuses.EngineStatus, seconds: float) -> TopRow:
    prompt_tokens = after.tokens.prompt_tokens - before.tokens.prompt_tokens
    return {
        "running": (after.requests.running, _COUNT),
        "waiting": (after.requests.waiting + after.requests.loading, _COUNT),
        "used": _share(after.l1.blocks - after.l1.free, after.l1.blocks),
        "requests": _grown(before.outcomes, after.outcomes, seconds),
        "tokens": _rate(prompt_tokens, seconds),
        "cached": _share(_hits(after.cached_tokens) - _hits(before.cached_tokens), prompt_tokens),
        "generated": _rate(after.tokens.generated_tokens - before.tokens.generated_tokens, seconds),
        "refused": _grown(before.refused, after.refused, seconds),
        "state": (after.status, _STATE),
    }


def _hits(cached: Mapping[str, int]) -> int:
    return sum(number for tier, number in cached.items() if tier != MISS)


def _grown(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> tuple[float, Column]:
    return _rate(sum(after.values()) - sum(before.values()), seconds)


def _rate(number: int, seconds: float, column: Column = _RATE) -> tuple[float, Column]:
    return round(number / seconds, 3), column


def _share(part: int, whole: int) -> tuple[float | None, Column]:
    return round(part / whole, 4) if whole > 0 else None, _SHARE


_DAEMON: Final[TopView] = (statuses.DaemonStatus, daemon_row)
_ROUTER: Final[TopView] = (statuses.RouterStatus, _router_row)
_ENGINE: Final[TopView] = (statuses.EngineStatus, _engine_row)
