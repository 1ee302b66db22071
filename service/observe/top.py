"""`kvtier top`: what a daemon, an engine or a router did between two looks, a row each: figures, or text of them."""

import contextlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvtier.service import Json
from kvtier.service.observe.statuses import DaemonStatus, EngineStatus, RouterStatus
from kvtier.tiers import L2, MISS
from kvtier.tiers.config import show_size

_HEADER_EVERY: Final = 20  # lines, and rows of a table

TopRow = dict[str, int | float | str | None]
"""One look, by column: counts and states as they are, what happened since the look before a second, shares of 1."""


class Column(NamedTuple):
    """How a figure is shown."""

    text: Callable[[Any], str]
    width: int


class TopView(NamedTuple):
    """What `kvtier top` shows of one kind of program."""

    parse: Callable[[Json], Any]
    row_of: Callable[[Any, Any, float], TopRow]  # of two statuses, and the seconds between them
    columns: Mapping[str, Column]


def watch(ask: Callable[[], Json], interval: float, count: int, *, as_json: bool) -> None:
    """Ask for /status every `interval` seconds, `count` times or for ever, and show what changed.

    Ends quietly on Ctrl-C. With `as_json` a row is a line of JSON.
    """
    told, at = ask(), time.monotonic()
    view = view_of(told)
    before = view.parse(told)
    console = Console()
    rows: deque[list[str]] = deque(maxlen=_HEADER_EVERY)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        for number in range(count) if count else itertools.count():
            time.sleep(max(0.0, at + interval - time.monotonic()))
            now, then = view.parse(ask()), at
            at = time.monotonic()
            row = view.row_of(before, now, at - then)
            rows.append([column.text(row[name]) for name, column in view.columns.items()])
            if live is not None:
                live.update(_table(view, rows), refresh=True)
            elif as_json:
                print(json.dumps(row), flush=True)
            else:
                if number % _HEADER_EVERY == 0:
                    print(_line(view, view.columns))
                print(_line(view, rows[-1]), flush=True)
            before = now


def view_of(told: Json) -> TopView:
    """By what a status has: a router's names replicas, an engine's counts steps, else it is a daemon's."""
    return _ROUTER if "replicas" in told else _ENGINE if "steps" in told else _DAEMON


def _line(view: TopView, cells: Any) -> str:
    return " ".join(f"{cell:>{column.width}}" for cell, column in zip(cells, view.columns.values(), strict=True))


def _table(view: TopView, rows: deque[list[str]]) -> Table:
    table = Table(*(name.replace("_", " ").capitalize() for name in view.columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


# --- what each shows


def _daemon_row(before: DaemonStatus, after: DaemonStatus, seconds: float) -> TopRow:
    changed = _daemon_totals(after) - _daemon_totals(before)
    models = after.models
    return {
        "clients": sum(client.connected for client in after.clients),
        "leased": sum(model.l2.leased for model in models),
        "used": _share(sum(model.l2.ready_bytes for model in models), sum(model.l2.bytes for model in models)),
        "lookups": _rate(changed["lookups"], seconds),
        "hits": _share(changed["lookups"] - changed["misses"], changed["lookups"]),
        "stored": _rate(changed["stored"], seconds),
        "dropped": _rate(changed["dropped"], seconds),
        "read": _rate(changed["read"], seconds),
        "written": _rate(changed["written"], seconds),
        "state": after.status,
    }


def _daemon_totals(status: DaemonStatus) -> Counter[str]:
    """What only ever grows, over all models; a model that was closed takes its part along."""
    models = status.models
    moved = [by_direction for model in models for by_direction in model.moved.values()]
    return Counter(
        lookups=sum(sum(model.lookups.values()) for model in models),
        misses=sum(model.lookups.get(MISS, 0) for model in models),
        stored=sum(model.stored.get(L2, 0) for model in models),
        dropped=sum(sum(model.dropped.get(L2, {}).values()) for model in models),
        read=sum(directions.get("read", 0) for directions in moved),
        written=sum(directions.get("write", 0) for directions in moved),
    )


def _router_row(before: RouterStatus, after: RouterStatus, seconds: float) -> TopRow:
    asked = after.tokens.told_prompt - before.tokens.told_prompt
    cached = after.tokens.told_cached - before.tokens.told_cached
    return {
        "replicas": len(after.replicas),
        "up": after.num_up,
        "in_flight": sum(replica.in_flight for replica in after.replicas),
        "requests": _grown(before.requests, after.requests, seconds),
        "tokens": _rate(asked, seconds),
        "cached": _share(cached, asked),
        "retries": _grown(before.retries, after.retries, seconds),
        "errors": _grown(before.errors, after.errors, seconds),
        "state": "ok" if after.num_up == len(after.replicas) else "degraded",
    }


def _engine_row(before: EngineStatus, after: EngineStatus, seconds: float) -> TopRow:
    asked = after.tokens.prompt_tokens - before.tokens.prompt_tokens
    cached = _hits(after.cached_tokens) - _hits(before.cached_tokens)
    return {
        "running": after.requests.running,
        "waiting": after.requests.waiting + after.requests.loading,
        "used": _share(after.l1.blocks - after.l1.free, after.l1.blocks),
        "requests": _grown(before.outcomes, after.outcomes, seconds),
        "tokens": _rate(asked, seconds),
        "cached": _share(cached, asked),
        "generated": _rate(after.tokens.generated_tokens - before.tokens.generated_tokens, seconds),
        "refused": _grown(before.refused, after.refused, seconds),
        "state": after.status,
    }


def _hits(cached: Mapping[str, int]) -> int:
    return sum(number for tier, number in cached.items() if tier != MISS)


def _grown(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> float:
    return _rate(sum(after.values()) - sum(before.values()), seconds)


def _rate(number: int, seconds: float) -> float:
    return round(number / seconds, 3)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


_COUNT: Final = Column(str, 8)
_RATE: Final = Column("{:.0f}".format, 9)
_SHARE: Final = Column(lambda share: "-" if share is None else f"{share:.1%}", 7)
_BYTES: Final = Column(lambda rate: f"{show_size(rate, 1000)}/s", 12)
_STATE: Final = Column(str, 9)
_DAEMON: Final = TopView(
    DaemonStatus.parse,
    _daemon_row,
    {"clients": _COUNT, "leased": _COUNT, "used": _SHARE, "lookups": _RATE, "hits": _SHARE}
    | {"stored": _RATE, "dropped": _RATE, "read": _BYTES, "written": _BYTES, "state": _STATE},
)
_ROUTER: Final = TopView(
    RouterStatus.parse,
    _router_row,
    {"replicas": _COUNT, "up": _COUNT, "in_flight": _RATE, "requests": _RATE, "tokens": _RATE}
    | {"cached": _SHARE, "retries": _RATE, "errors": _RATE, "state": _STATE},
)
_ENGINE: Final = TopView(
    EngineStatus.parse,
    _engine_row,
    {"running": _COUNT, "waiting": _COUNT, "used": _SHARE, "requests": _RATE, "tokens": _RATE}
    | {"cached": _SHARE, "generated": _RATE, "refused": _RATE, "state": _STATE},
)
