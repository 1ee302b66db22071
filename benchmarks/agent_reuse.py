"""Agents' prompts: what exact prefixes, partial blocks and segments find of them, in a cache that evicts nothing.

Generated sessions of tool calls behind one of three heads of instructions and tools. Answers have the lengths of
recorded ones. "tool loop": a context only grows. "edited": a result older than four steps becomes a line that says so.
"compacted": a context beyond a bound becomes its head, a summary and the last two steps as they were. "sub-agents": one
step in ten starts three agents with the same head and tasks of their own.

Blocks have 64 tokens. "marked segments": exact prefixes, and behind them the whole blocks of each answer and result
that came before, if the caller marks each as a segment. "any offset": tokens in a run of 64 or more that an earlier
prompt or answer had anywhere. That is the most that segments could find; they are approximate, prefixes are exact.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from _eviction_traces import _QUANTILES, _STEP_TOKENS
from _prefix_reuse import Exchange, PrefixReuse, replay
from _report import Given, Result, Row, Target, program, progress
from numpy.typing import NDArray

BLOCK: Final = 64  # tokens
HEADS: Final = (900, 1600, 2600)  # tokens
KEPT: Final = 4  # steps whose results are not edited
MAX_STEPS: Final = 40
MOST: Final = 6000  # tokens of a context before it is compacted
SUMMARY: Final = 300  # tokens
WORDS: Final = 50_000
KINDS: Final = ("tool loop", "edited", "compacted", "sub-agents")
Text = list[int]


Step = tuple[Text, Text]  # what it adds to its session's context: an answer, a tool's result
Request = tuple[Exchange, list[Text]]  # with the parts of its prompt


class Sessions:
    """Sessions of one kind, one after another: none shares more than a head with another."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._draw = kind, np.random.default_rng(seed)
        self._heads = [self._text(size) for size in HEADS]
        self._cleared = self._text(12)

    def make(self, count: int) -> Iterator[Request]:
        for number in range(count):
            head = self._heads[number % len(HEADS)]
            yield from self._session(head, self._text(60 + int(self._draw.exponential(200))), delegates=True)

    def _session(self, head: Text, task: Text, *, delegates: bool) -> Iterator[Request]:
        before = [head, task]
        steps: list[Step] = []
        for _ in range(min(MAX_STEPS, 3 + int(self._draw.exponential(12)))):
            parts = [*before, *self._shown(steps)]
            if self._kind == "compacted" and sum(map(len, parts)) > MOST:
                before, steps = [head, task, self._text(SUMMARY)], steps[-2:]
                parts = [*before, *self._shown(steps)]
            prompt = [token for part in parts for token in part]
            answer = self._text(max(8, int(np.interp(self._draw.random(), _QUANTILES, _STEP_TOKENS))))
            held = len(prompt) + len(answer) - 1
            yield Exchange(prompt + answer, 1, len(prompt), held, held + 1), parts
            steps.append((answer, self._text(20 + int(self._draw.lognormal(5.0, 1.0)))))
            if self._kind == "sub-agents" and delegates and self._draw.random() < 0.1:
                for _ in range(3):
                    yield from self._session(head, self._text(150), delegates=False)

    def _shown(self, steps: Sequence[Step]) -> list[Text]:
        shown: list[Text] = []
        for number, (answer, result) in enumerate(steps):
            is_old = self._kind == "edited" and number < len(steps) - KEPT
            shown += [answer, self._cleared if is_old else result]
        return shown

    def _text(self, length: int) -> Text:
        drawn: Text = self._draw.integers(0, WORDS, length).tolist()
        return drawn


_WEIGHTS: Final = np.random.default_rng(0).integers(1, 1 << 63, BLOCK, np.uint64) * np.uint64(2) + np.uint64(1)


def runs_of(tokens: Sequence[int]) -> NDArray[np.uint64]:
    """A number for each run of 64 tokens."""
    if len(tokens) < BLOCK:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(tokens, np.uint64) + np.uint64(1), BLOCK)
    found: NDArray[np.uint64] = (windows * _WEIGHTS).sum(axis=1, dtype=np.uint64)
    return found


def anywhere(exchanges: Sequence[Exchange]) -> int:
    """Prompt tokens that are in a run that came before, at any offset."""
    seen: set[int] = set()
    num_found = 0
    for exchange in exchanges:
        runs = runs_of(exchange.symbols)
        of_prompt = runs[: max(0, exchange.num_prompt - BLOCK + 1)].tolist()
        marks = np.zeros(exchange.num_prompt + 1, np.int64)
        for at in [at for at, run in enumerate(of_prompt) if run in seen]:
            marks[at] += 1
            marks[at + BLOCK] -= 1
        num_found += int((marks.cumsum()[: exchange.num_prompt - 1] > 0).sum())
        seen.update(runs.tolist())
    return num_found


def by_marks(requests: Sequence[Request]) -> int:
    """Prompt tokens that are in the whole blocks of the prefix, or of a later part that came before."""
    blocks: set[int] = set()
    seen: set[int] = set()
    num_found = 0
    for exchange, parts in requests:
        names = [hash(tuple(exchange.symbols[:end])) for end in range(BLOCK, exchange.num_held + 1, BLOCK)]
        held = next((number for number, name in enumerate(names) if name not in blocks), len(names))
        prefix = min(held, (exchange.num_prompt - 1) // BLOCK) * BLOCK
        num_found += prefix
        blocks.update(names)
        start = 0
        for part in parts:
            whole = min(start + len(part) // BLOCK * BLOCK, exchange.num_prompt - 1)
            if hash(tuple(part)) in seen:
                num_found += max(0, whole - max(start, prefix))
            start += len(part)
        seen.update(hash(tuple(part)) for part in parts)
    return num_found


def measured(kind: str, count: int) -> Row:
    requests = list(Sessions(kind, seed=1).make(count))
    exchanges = [exchange for exchange, _ in requests]
    progress(f"{kind}: {len(exchanges)} requests")
    ways = {way: replay(exchanges, BLOCK, way) for way in PrefixReuse}
    tokens = ways[PrefixReuse.WHOLE].prompt_tokens
    row: Row = {"agents": kind, "requests": len(exchanges), "tokens a prompt": tokens // len(exchanges)}
    titles = {PrefixReuse.WHOLE: "whole blocks", PrefixReuse.PARTIAL: "partial", PrefixReuse.TAILS: "and unfinished"}
    row |= {f"{title} %": 100 * ways[way].cached_tokens / tokens for way, title in titles.items()}
    row["marked segments %"] = 100 * by_marks(requests) / tokens
    return row | {"any offset %": 100 * anywhere(exchanges) / tokens}


@program()
def main(chosen: Given) -> Result:
    rows = [measured(kind, 2 if chosen.quick else 20) for kind in KINDS]
    name = "tokens found by partial and unfinished blocks ÷ at any offset"
    goals = [
        Target(f"{row['agents']}: {name}", 0.9, row["and unfinished %"] / row["any offset %"], at_most=False)
        for row in rows
    ]
    return rows, goals
