"""What hints are worth: traces through the real pool with `predicted`, by who says what, and how often it is right.

The truth of each request is known: it goes on after an answer, after a tool, or it is finished. A client may say all
three words, or only one of them, as many do: `cache_control` and priorities say that a conversation goes on, a tool
call that a tool answers, a closed session that it is finished. Of ten hints nine, five or none are right; a wrong
"finished" is a "goes_on", and all others are a "finished". A figure is the share of prompt blocks found.

What can be known at most: recorded agents in a large L2, beside the optimum. "whether": all hints are right. "when":
they say of each request whether it returns within two minutes, later, or never.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from _eviction_traces import agent_sessions, cut, made_up, production_trace, spoiled, without_hints
from _report import Given, Result, Row, Target, program, progress

from kvtier.service.simulation import Capacity, TraceReplay, optimum_of, sweep
from kvtier.service.traces import HINTS, RequestTrace
from kvtier.tiers.reuse import Hint

BLOCK_BYTES: Final = 64 << 20
RIGHT: Final = (9, 5, 0)  # of ten hints
SAID: Final = {"all": HINTS, "goes_on": ("goes_on",), "tool": ("tool",), "finished": ("finished",)}
MADE_UP: Final = {"chats": 800, "agents": 800, "tool-loops": 680, "sub-agents": 680}  # blocks of L2
MOST_LOST: Final = -0.5  # points
LARGE: Final = 2720  # blocks of L2
CUTS: Final = (3, 5, 7, 11)  # seeds, as of eviction.py
SOON: Final = 120.0  # seconds


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


def with_times(trace: RequestTrace) -> RequestTrace:
    """Its hints: a request returns within `SOON` ("goes_on"), later ("tool"), or never."""
    soon, later, never = (1 + HINTS.index(each) for each in (Hint.GOES_ON, Hint.TOOL, Hint.FINISHED))
    hints = np.full(len(trace), never, np.int8)
    asked_at: dict[int, float] = {}
    for request in reversed(range(len(trace))):
        prompt, begun = trace.chain(request)[: trace.num_prompt[request]].tolist(), float(trace.begun[request])
        if prompt and (again := asked_at.get(prompt[-1])) is not None:
            hints[request] = soon if again - begun <= SOON else later
        asked_at.update(dict.fromkeys(prompt, begun))
    return replace(trace, hints=hints)


def known(name: str, trace: RequestTrace) -> Row:
    """How far `predicted` comes from LRU to the optimum, by what is known of each request."""
    lru, best = found(trace, LARGE, "lru"), 100 * optimum_of(trace).share(LARGE)
    row: Row = {"trace": name, "blocks": LARGE, "lru %": lru, "optimum %": best}
    for what, told in (("nothing", without_hints(trace)), ("whether", trace), ("when", with_times(trace))):
        progress(f"{name}, {LARGE} blocks: {what} is known")
        row[f"{what} known: % of the way"] = 100 * (found(told, LARGE) - lru) / (best - lru)
    return row


@program()
def main(chosen: Given) -> Result:
    rows = [row for each in traces(quick=chosen.quick) for row in worth(*each)]
    goals = [
        Target(f"{row['trace']}, {row['said']}: {right} of 10 right, points more than none", MOST_LOST, row[key], False)
        for row in rows
        for right, key in ((right, f"{right} of 10 right, points") for right in RIGHT)
    ]
    if (agents := agent_sessions()) is not None and not chosen.quick:
        rows.append(known("recorded agents", agents))
        rows += [known(f"recorded agents, cut {seed}", cut(agents, seed)) for seed in CUTS]
    return rows, goals
