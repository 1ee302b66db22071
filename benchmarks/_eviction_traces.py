"""The traces that `eviction.py` replays: made-up ones and recorded ones, with hints as right as one wants.

Made-up ones press an eviction order: scans, loops, drift, shared beginnings, agents, lonely requests. Agents' lengths
and gaps are those of the recorded sessions (shared/traces/README.md): quantiles, and no block of them. Each is a
function of a seed. Blocks are numbers: two requests that share a number share its block, and a request's blocks form a
chain. The hint is the truth about the conversation; whoever replays may hide or spoil it.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from _report import SHARED
from numpy.typing import NDArray

from kvtier.service.traces import HINTS, RequestTrace, TraceLine, load_trace
from kvtier.tiers.reuse import Hint

PRODUCTION: Final = "production conversations"
AGENTS: Final = "agent sessions"
_FILES: Final = SHARED / "traces"
BLOCK_SIZE: Final = 512  # tokens
_GOES_ON, _FINISHED = (1 + HINTS.index(name) for name in ("goes_on", "finished"))
_HINTS: Final = {1 + HINTS.index(hint.value): hint for hint in Hint}

Blocks = tuple[int, ...]


@dataclass(frozen=True)
class SyntheticRequest:
    arrival: float  # seconds since the trace's start
    blocks: Blocks  # full blocks in chain order, the prompt's and then the answer's
    num_prompt: int  # so many of `blocks` are the prompt's
    num_output_tokens: int
    hint: Hint
    client: int = 0


class _NextTurn(NamedTuple):
    arrival: float
    number: int  # breaks ties
    history: Blocks
    turns_left: int
    kind: int


class _ChatManner(NamedTuple):
    num_turns: Callable[[random.Random, float], int]  # given the time of its start
    gap: Callable[[random.Random], float]  # seconds between two turns
    asks: int  # blocks a turn adds before its answer
    answers: int  # blocks of the answer
    tokens: int  # of the answer
    waits_for_tools: bool = False


class _TraceMaker:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._blocks, self._numbers = count(), count()
        self._turns: list[_NextTurn] = []

    def new(self, number: int) -> Blocks:
        return tuple(next(self._blocks) for _ in range(number))

    def push(self, arrival: float, beginning: Blocks, num_turns: int, kind: int) -> None:
        heapq.heappush(self._turns, _NextTurn(arrival, next(self._numbers), beginning, num_turns, kind))

    def until(self, arrival: float, manners: list[_ChatManner]) -> Iterator[SyntheticRequest]:
        while self._turns and self._turns[0].arrival <= arrival:
            turn = heapq.heappop(self._turns)
            manner, goes_on = manners[turn.kind], turn.turns_left > 1
            prompt = turn.history + self.new(manner.asks)
            blocks = prompt + self.new(manner.answers)
            hint = Hint.FINISHED if not goes_on else Hint.TOOL if manner.waits_for_tools else Hint.GOES_ON
            yield SyntheticRequest(turn.arrival, blocks, len(prompt), manner.tokens, hint, turn.kind)
            if goes_on:
                self.push(turn.arrival + manner.gap(self.dice), blocks, turn.turns_left - 1, turn.kind)


def _turns(mean: float) -> Callable[[random.Random, float], int]:
    return lambda dice, _: 1 + int(dice.expovariate(1.0) * (mean - 1.0) + 0.5)


def _gap(median: float, spread: float) -> Callable[[random.Random], float]:
    return lambda dice: median * dice.lognormvariate(0.0, spread)


def _conversations(
    seed: int,
    manners: list[_ChatManner],
    shares: list[float] | None = None,
    *,
    rate: float = 0.5,
    seconds: float = 2400.0,
) -> list[SyntheticRequest]:
    """Conversations of these manners start at `rate` a second, behind one of eight system prompts."""
    story = _TraceMaker(seed)
    systems = [story.new(2) for _ in range(8)]
    requests: list[SyntheticRequest] = []
    now = 0.0
    while now < seconds:
        now += story.dice.expovariate(rate)
        requests += story.until(now, manners)
        kind = story.dice.choices(range(len(manners)), shares)[0]
        beginning = story.dice.choice(systems)
        story.push(now, beginning, manners[kind].num_turns(story.dice, now), kind)
    return requests


_CHAT: Final = _ChatManner(_turns(3.0), _gap(60.0, 0.8), asks=2, answers=1, tokens=300)
_ONCE: Final = _ChatManner(lambda *_: 1, _gap(1.0, 0.0), asks=8, answers=1, tokens=80)
_AGENT: Final = _ChatManner(_turns(12.0), _gap(4.0, 0.5), asks=2, answers=1, tokens=60, waits_for_tools=True)


def _asked(
    pick: Callable[[random.Random, Sequence[Blocks]], Iterable[Blocks]],
    num_documents: int,
    num_blocks: int,
    every: float,
    tokens: int,
    asks: int = 1,
    answers: int = 1,
    hint: Hint = Hint.GOES_ON,
) -> Callable[[int], list[SyntheticRequest]]:
    """Documents of so many blocks, one picked for each request, with new blocks behind it."""

    def make(seed: int) -> list[SyntheticRequest]:
        story = _TraceMaker(seed)
        documents, requests = [story.new(num_blocks) for _ in range(num_documents)], []
        for number, document in enumerate(pick(story.dice, documents)):
            prompt = document + story.new(asks)
            requests.append(SyntheticRequest(every * number, prompt + story.new(answers), len(prompt), tokens, hint))
        return requests

    return make


def _by_zipf(power: float, count: int) -> Callable[[random.Random, Sequence[Blocks]], Iterable[Blocks]]:
    return lambda dice, documents: dice.choices(
        documents, [(i + 1.0) ** -power for i in range(len(documents))], k=count
    )


def _drift(change: Callable[[float], float]) -> Callable[[int], list[SyntheticRequest]]:
    """Two kinds of requests of which one returns and the other does not, and then the other way round.

    `change`: seconds → how likely the second kind is the one that returns.
    """

    def make(seed: int) -> list[SyntheticRequest]:
        def first(dice: random.Random, at: float) -> int:
            return 1 if dice.random() < change(at) else 1 + int(dice.expovariate(0.4) + 0.5)

        def second(dice: random.Random, at: float) -> int:
            return 1 + int(dice.expovariate(0.4) + 0.5) if dice.random() < change(at) else 1

        short = _ChatManner(first, _gap(120.0, 0.5), asks=4, answers=1, tokens=40)
        long = _ChatManner(second, _gap(120.0, 0.5), asks=4, answers=1, tokens=700)
        return _conversations(seed, [short, long], rate=0.8, seconds=7200.0)

    return make


# Quantiles of the recorded agents: seconds between two requests of a session, and blocks that a prompt adds.
_QUANTILES: Final = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_STEP_GAPS: Final = (0.0, 8.0, 13.0, 19.0, 37.0, 117.0, 290.0, 2440.0)
_STEP_BLOCKS: Final = (0.0, 0.0, 0.0, 1.0, 4.0, 14.0, 25.0, 226.0)
_STEP_TOKENS: Final = (0.0, 98.0, 151.0, 245.0, 452.0, 909.0, 1389.0, 3255.0)


class _AgentStep(NamedTuple):
    arrival: float
    number: int  # breaks ties
    context: Blocks
    num_head: int  # leading blocks of the context that never change: instructions and tools
    steps_left: int
    is_child: bool


def _agents(
    seed: int,
    *,
    steps: float = 30.0,
    compacts_at: int = 1_000_000,
    pauses: float = 0.0,
    delegates: float = 0.0,
    rate: float = 0.03,
    seconds: float = 2700.0,
) -> list[SyntheticRequest]:
    """Sessions of tool calls, each behind one of three heads of instructions and tools.

    A context of more than `compacts_at` blocks is replaced by a summary behind its head. In so many of its steps,
    `pauses`, a session waits minutes for its user. In so many, `delegates`, it starts three children, which share its
    head and the begin of its context, and goes on when they have ended.
    """
    story, numbers = _TraceMaker(seed), count()
    dice, heads = story.dice, [story.new(size) for size in (16, 24, 40)]

    def drawn(values: Sequence[float]) -> float:
        return float(np.interp(dice.random(), _QUANTILES, values))

    coming: list[_AgentStep] = []
    start = 0.0
    while (start := start + dice.expovariate(rate)) < seconds:
        head = dice.choice(heads)
        num_steps = 1 + int(dice.expovariate(1.0 / steps))
        task = story.new(10 + int(dice.expovariate(0.02)))
        heapq.heappush(coming, _AgentStep(start, next(numbers), head + task, len(head), num_steps, False))
    requests: list[SyntheticRequest] = []
    while coming:
        step = heapq.heappop(coming)
        tokens, is_last = int(drawn(_STEP_TOKENS)), step.steps_left <= 1
        prompt = step.context + story.new(int(drawn(_STEP_BLOCKS)))
        blocks = prompt + story.new(tokens // BLOCK_SIZE)
        hint = Hint.FINISHED if is_last else Hint.TOOL
        requests.append(SyntheticRequest(step.arrival, blocks, len(prompt), tokens, hint))
        if is_last:
            continue
        gap, context = drawn(_STEP_GAPS), blocks
        if len(context) > compacts_at:
            context = context[: step.num_head] + story.new(8)
        if not step.is_child and dice.random() < pauses:
            gap += dice.lognormvariate(5.7, 0.8)  # 300 s in the median
        elif not step.is_child and dice.random() < delegates:
            num_steps = 3 + int(dice.expovariate(0.2))
            for _ in range(3):
                child = context[: step.num_head + 8] + story.new(4)
                at = step.arrival + drawn(_STEP_GAPS)
                heapq.heappush(coming, _AgentStep(at, next(numbers), child, step.num_head, num_steps, True))
            gap += 20.0 * num_steps
        following = _AgentStep(
            step.arrival + gap, next(numbers), context, step.num_head, step.steps_left - 1, step.is_child
        )
        heapq.heappush(coming, following)
    return requests


def _mixture(seed: int) -> list[SyntheticRequest]:
    """Conversations and scans, in rushes of ten minutes with half an hour between them."""
    requests = _conversations(seed, [_CHAT, _ONCE], [0.6, 0.4], rate=0.8)
    return [replace(each, arrival=each.arrival + 1800.0 * (each.arrival // 600.0)) for each in requests]


TRACES: Final[dict[str, Callable[[int], list[SyntheticRequest]]]] = {
    # of three turns on average, a minute apart; then with as many long documents that are read once
    "chats": partial(_conversations, manners=[_CHAT]),
    "scans": partial(_conversations, manners=[_CHAT, _ONCE], rate=0.8),
    # agents wait for their tools for seconds, beside conversations and what is asked once
    "agents": partial(_conversations, manners=[_CHAT, _ONCE, _AGENT], shares=[0.4, 0.4, 0.2]),
    "one-shot": partial(_conversations, manners=[_ONCE], rate=1.0),  # nothing ever returns but the system prompts
    # questions behind forty long beginnings, some asked for far more often than others
    "shared": _asked(_by_zipf(1.0, 3000), 40, 12, every=1.0, tokens=120, hint=Hint.FINISHED),
    # forty documents of ten blocks, asked one after the other, round and round
    "loop": _asked(lambda _, documents: [*documents] * 60, 40, 10, every=1.5, tokens=120, asks=0),
    "documents": _asked(
        _by_zipf(0.9, 4000), 1500, 8, every=0.8, tokens=40, answers=0
    ),  # each asked about again and again
    "drift": _drift(lambda at: float(at > 3600.0)),
    "flips": _drift(lambda at: float(at // 900.0 % 2)),
    "slow-drift": _drift(lambda at: min(1.0, at / 7200.0)),
    "rushes": _mixture,
    "tool-loops": _agents,
    "compaction": partial(_agents, compacts_at=150),
    "pauses": partial(_agents, pauses=0.1),
    "sub-agents": partial(_agents, delegates=0.1, rate=0.02),
}
AGENT_TRACES: Final = ("tool-loops", "compaction", "pauses", "sub-agents")  # of these


def production_trace(limit: int | None = None) -> RequestTrace | None:
    """The conversations of a production service, its hints the truth; None if the file is not here."""
    return _recorded("conversation_trace.jsonl.gz", limit)


def agent_sessions(limit: int | None = None) -> RequestTrace | None:
    """Recorded sessions of coding agents, its hints the truth; None if the file is not here."""
    return _recorded("agent_sessions.jsonl.gz", limit)


def cut(trace: RequestTrace, seed: int, share: float = 0.5) -> RequestTrace:
    """So many of a trace's sessions, which begin with different blocks, each started at another time."""
    sessions: dict[int, list[int]] = {}
    for request in range(len(trace)):
        sessions.setdefault(int(trace.chain(request)[0]), []).append(request)
    dice, begun = random.Random(seed), trace.begun
    chosen = dice.sample(list(sessions.values()), round(share * len(sessions)))
    span = share * float(begun[-1] - begun[0])
    shifts = [dice.uniform(0.0, span) - float(begun[each[0]]) for each in chosen]
    times = {request: float(begun[request]) + by for each, by in zip(chosen, shifts, strict=True) for request in each}
    made = []
    for request in sorted(times, key=times.__getitem__):
        num_prompt, num_output = int(trace.num_prompt[request]), int(trace.num_output[request])
        blocks, hint = tuple(trace.chain(request).tolist()), _HINTS[int(trace.hints[request])]
        made.append(SyntheticRequest(times[request], blocks, num_prompt, num_output, hint))
    return _as_trace(made)


def _recorded(name: str, limit: int | None) -> RequestTrace | None:
    if not (_FILES / name).exists():
        return None
    trace = load_trace(_FILES / name, limit=limit)
    return replace(trace, hints=_goes_on(trace))


def made_up(name: str, seed: int = 1, limit: int | None = None) -> RequestTrace:
    """One of `TRACES`; its hints are the truth, too."""
    return _as_trace(TRACES[name](seed)[:limit])


def lines_of(trace: RequestTrace) -> list[TraceLine]:
    """Its prompts in Mooncake's form, lengths of answers beside them."""
    prompts = [trace.chain(i)[:number].tolist() for i, number in enumerate(trace.num_prompt)]
    columns = zip(trace.begun.tolist(), trace.num_tokens.tolist(), trace.num_output.tolist(), prompts, strict=True)
    return [TraceLine(int(1000 * at), tokens, out, tuple(ids), trace.block_size) for at, tokens, out, ids in columns]


def without_hints(trace: RequestTrace) -> RequestTrace:
    return replace(trace, hints=np.zeros_like(trace.hints))


def spoiled(trace: RequestTrace, share: float, seed: int = 0) -> RequestTrace:
    wrong = np.random.default_rng(seed).random(len(trace)) < share
    opposite = np.where(trace.hints == _FINISHED, _GOES_ON, _FINISHED)
    return replace(trace, hints=np.where(wrong, opposite, trace.hints).astype(np.int8))


def _goes_on(trace: RequestTrace) -> NDArray[np.int8]:
    """Whether a later prompt has the last full block of a request's prompt."""
    hints = np.full(len(trace), _FINISHED, np.int8)
    asked_later: set[int] = set()
    for request in reversed(range(len(trace))):
        prompt = trace.chain(request)[: trace.num_prompt[request]].tolist()
        if prompt and prompt[-1] in asked_later:
            hints[request] = _GOES_ON
        asked_later.update(prompt)
    return hints


def _as_trace(requests: Sequence[SyntheticRequest]) -> RequestTrace:
    columns = [(len(r.blocks), r.num_prompt, r.num_output_tokens, r.client) for r in requests]
    lengths, num_prompt, num_output, clients = np.array(columns, np.int64).T.copy()
    _, blocks = np.unique([block for each in requests for block in each.blocks], return_inverse=True)
    starts, begun = np.concatenate([[0], np.cumsum(lengths)]), np.array([each.arrival for each in requests])
    hints = np.array([1 + HINTS.index(Hint(each.hint).value) for each in requests], np.int8)
    tokens = num_prompt, BLOCK_SIZE * num_prompt, num_output
    return RequestTrace(BLOCK_SIZE, blocks.astype(np.int64), starts, *tokens, begun, hints, clients)
