"""What hints are worth: traces through the real pool with `predicted`, by who says what, and how often it is right.

The truth of each request is known: it goes on after an answer, after a tool, or it is finished. A client may say all
three words, or only one of them, as many do: `cache_control` and priorities say that a conversation goes on, a tool
call that a tool answers, a closed session that it is finished. Of ten hints nine, five or none are right; a wrong
"finished" is a "goes_on", and all others are a "finished". A figure is the share of prompt blocks found.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from _eviction_traces import agent_sessions, cut, made_up, production_trace, spoiled, without_hints
from _report import Given, Result, Row, Target, program, progress

from kvtier.service.simulation import Capacity, TraceReplay, sweep
from kvtier.service.traces import HINTS, RequestTrace

BLOCK_BYTES: Final = 64 << 20
RIGHT: Final = (9, 5, 0)  # of ten hints
SAID: Final = {"all": HINTS, "goes_on": ("goes_on",), "tool": ("tool",), "finished": ("finished",)}
MADE_UP: Final = {"chats": 800, "agents": 800, "tool-loops": 680, "sub-agents": 680}  # blocks of L2
MOST_LOST: Final = -0.5  # points


def traces(*, quick: bool) -> Iterator[tuple[str, RequestTrace, int]]:
    for name, size in MADE_UP.items():
        yield name, made_up(name, limit=400 if quick else None), size
        if quick:
            return
    if (agents := agent_sessions()) is not None:
        yield "recorded agents, cut 11", cut(agents, 11), 1600
    if (production := production_trace()) is not None:
        yield "production conversations", production, 4096


def only(trace: RequestTrace, words: tuple[str, ...]) -> RequestTrace:
    """Without the hints of other words. The truth decides, so that wrong words are said as often as right ones."""
    kept = np.isin(trace.hints, [1 + HINTS.index(word) for word in words])
    return replace(trace, hints=np.where(kept, trace.hints, 0).astype(np.int8))


def wrong(trace: RequestTrace, share: float) -> RequestTrace:
    """With that share of the hints that are said wrong; what is not said stays so."""
    return replace(trace, hints=np.where(trace.hints == 0, 0, spoiled(trace, share).hints).astype(np.int8))


def found(trace: RequestTrace, size: int, policy: str = "predicted") -> float:
    [run] = sweep(TraceReplay(trace, BLOCK_BYTES), [Capacity(size * BLOCK_BYTES, policy=policy)], lambda *_: None)
    return 100 * float(run.found.sum()) / float(trace.num_prompt.sum())


def worth(name: str, trace: RequestTrace, size: int) -> Iterator[Row]:
    bare = without_hints(trace)
    none, lru = found(bare, size), found(bare, size, "lru")
    for said, words in SAID.items():
        told = only(trace, tuple(words))
        if not told.hints.any():
            continue
        row: Row = {"trace": name, "blocks": size, "said": said, "lru %": lru, "no hints %": none}
        for right in RIGHT:
            progress(f"{name}: {said}, {right} of 10 right")
            row[f"{right} of 10 right, points"] = found(wrong(told, 1 - right / 10), size) - none
        yield row


@program()
def main(chosen: Given) -> Result:
    rows = [row for each in traces(quick=chosen.quick) for row in worth(*each)]
    goals = [
        Target(f"{row['trace']}, {row['said']}: {right} of 10 right, points more than none", MOST_LOST, row[key], False)
        for row in rows
        for right, key in ((right, f"{right} of 10 right, points") for right in RIGHT)
    ]
    return rows, goals
