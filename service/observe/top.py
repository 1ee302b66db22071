"""`kvtier top`: what the daemon did between two looks, a row each."""

import contextlib
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvtier.service.observe.statuses import DaemonStatus
from kvtier.service.observe.summary import hit_share
from kvtier.tiers import L2, MISS
from kvtier.tiers.config import show_size

_HEADER_EVERY: Final = 20  # lines, and rows of a table


class TopRow(NamedTuple):
    """One look, rates since the one before."""

    clients: int
    leased: int  # blocks in L2 that copies are made from, or pins keep
    used: str  # of L2's bytes
    lookups: str  # blocks a second
    hits: str  # of the blocks asked for
    stored: str  # blocks a second
    dropped: str  # blocks a second
    read: str  # from the tiers below, a second
    written: str  # to them
    state: str


Show = Callable[[TopRow, int], None]
"""Shows a row; the number counts from 0."""


def watch(look: Callable[[], DaemonStatus], interval: float, count: int, *, as_json: bool) -> None:
    """Look every `interval` seconds, `count` times or for ever, and show what changed; ends quietly on Ctrl-C."""
    console = Console()
    show: Show = print_json if as_json else print_line
    before, at = look(), time.monotonic()
    rows: deque[TopRow] = deque(maxlen=_HEADER_EVERY)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
            show = lambda row, number: live.update(_table(rows), refresh=True)  # noqa: E731
        for number in range(count) if count else itertools.count():
            time.sleep(max(0.0, at + interval - time.monotonic()))
            now, then = look(), at
            at = time.monotonic()
            rows.append(row_of(before, now, at - then))
            show(rows[-1], number)
            before = now


def print_json(row: TopRow, number: int) -> None:
    print(json.dumps(row._asdict()), flush=True)


def print_line(row: TopRow, number: int) -> None:
    if number % _HEADER_EVERY == 0:
        print(_LINE.format(*TopRow._fields))
    print(_LINE.format(*row), flush=True)


def row_of(before: DaemonStatus, after: DaemonStatus, seconds: float) -> TopRow:
    changed = _totals(after) - _totals(before)
    models = after.models
    size = sum(model.l2.bytes for model in models)
    used = sum(model.l2.ready_bytes for model in models)
    found = {"hit": changed["lookups"] - changed["misses"], "miss": changed["misses"]}
    return TopRow(
        sum(client.connected for client in after.clients),
        sum(model.l2.leased for model in models),
        f"{used / size:.0%}" if size else "-",
        f"{changed['lookups'] / seconds:.0f}",
        f"{hit_share(found):.1%}" if changed["lookups"] else "-",
        f"{changed['stored'] / seconds:.0f}",
        f"{changed['dropped'] / seconds:.0f}",
        f"{show_size(changed['read'] / seconds, 1000)}/s",
        f"{show_size(changed['written'] / seconds, 1000)}/s",
        after.status,
    )


def _totals(status: DaemonStatus) -> Counter[str]:
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


def _table(rows: deque[TopRow]) -> Table:
    table = Table(*(name.title() for name in TopRow._fields), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    return table


_LINE: Final = "{:>7} {:>7} {:>5} {:>8} {:>7} {:>7} {:>8} {:>12} {:>12} {:>9}"
