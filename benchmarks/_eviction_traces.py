"""The traces that `eviction.py` replays: made-up ones and the production trace, with hints as right as one wants.

Made-up ones press an eviction order: scans, loops, drift, shared beginnings, agents, lonely requests. Each is a
function of a seed. Blocks are numbers: two requests that share a number share its block, and a request's blocks form a
chain. The hint is the truth about the conversation; whoever replays may hide or spoil it.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.service.traces import HINTS, RequestTrace, load_trace
from kvtier.tiers.reuse import Hint

PRODUCTION: Final = "production conversations"
_FILE: Final = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl.gz"
BLOCK_SIZE: Final = 512  # tokens
_GOES_ON, _FINISHED = (1 + HINTS.index(name) for name in ("goes_on", "finished"))


Blocks = tuple[int, ...]


@dataclass(frozen=True)
class SyntheticRequest:
    """One request, by the blocks of its prompt and of its answer."""

    arrival: float  # seconds since the trace's start
    blocks: Blocks  # full blocks in chain order, the prompt's and then the answer's
    num_prompt: int  # so many of `blocks` are the prompt's
    num_output_tokens: int
    hint: Hint
    client: int = 0


class _NextTurn(NamedTuple):
    """A conversation's next request, in the queue of what is to come."""

    arrival: float
    number: int  # breaks ties
    history: Blocks
    turns_left: int
    kind: int


class _ChatManner(NamedTuple):
    """How one kind of conversation goes."""

    num_turns: Callable[[random.Random, float], int]  # given the time of its start
    gap: Callable[[random.Random], float]  # seconds between two turns
    asks: int  # blocks a turn adds before its answer
    answers: int  # blocks of the answer
    tokens: int  # of the answer
    waits_for_tools: bool = False


class _TraceMaker:
    """Makes the requests of conversations in the order of their arrival."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._blocks, self._numbers = count(), count()
        self._turns: list[_NextTurn] = []

    def new(self, number: int) -> Blocks:
        """So many blocks that nobody has yet."""
        return tuple(next(self._blocks) for _ in range(number))

    def push(self, arrival: float, beginning: Blocks, num_turns: int, kind: int) -> None:
        """A conversation starts, or goes on."""
        heapq.heappush(self._turns, _NextTurn(arrival, next(self._numbers), beginning, num_turns, kind))

    def until(self, arrival: float, manners: list[_ChatManner]) -> Iterator[SyntheticRequest]:
        """The turns that come up to then."""
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


def _some_often(dice: random.Random, beginnings: Sequence[Blocks]) -> Iterator[Blocks]:
    weights = [1.0 / (rank + 1) for rank in range(len(beginnings))]
    return (dice.choices(beginnings, weights)[0] for _ in range(3000))


def _by_zipf(dice: random.Random, documents: Sequence[Blocks]) -> list[Blocks]:
    return dice.choices(documents, [(rank + 1.0) ** -0.9 for rank in range(len(documents))], k=4000)


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
    "shared": _asked(_some_often, 40, 12, every=1.0, tokens=120, hint=Hint.FINISHED),
    # forty documents of ten blocks, asked one after the other, round and round
    "loop": _asked(lambda _, documents: [*documents] * 60, 40, 10, every=1.5, tokens=120, asks=0),
    "documents": _asked(_by_zipf, 1500, 8, every=0.8, tokens=40, answers=0),  # each asked about again and again
    "drift": _drift(lambda at: float(at > 3600.0)),
    "flips": _drift(lambda at: float(at // 900.0 % 2)),
    "slow-drift": _drift(lambda at: min(1.0, at / 7200.0)),
    "rushes": _mixture,
}


def production_trace(limit: int | None = None) -> RequestTrace | None:
    """The conversations of a production service, its hints the truth; None if the file is not here."""
    if not _FILE.exists():
        return None
    trace = load_trace(_FILE, limit=limit)
    return replace(trace, hints=_goes_on(trace))


def made_up(name: str, seed: int = 1, limit: int | None = None) -> RequestTrace:
    """One of `TRACES`; its hints are the truth, too."""
    return _as_trace(TRACES[name](seed)[:limit])


def without_hints(trace: RequestTrace) -> RequestTrace:
    return replace(trace, hints=np.zeros_like(trace.hints))


def spoiled(trace: RequestTrace, share: float, seed: int = 0) -> RequestTrace:
    """So many of its hints say the opposite."""
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
    lengths, num_prompt, num_output, clients = (
        np.array(each, np.int64)
        for each in zip(*((len(r.blocks), r.num_prompt, r.num_output_tokens, r.client) for r in requests), strict=True)
    )
    _, blocks = np.unique([block for each in requests for block in each.blocks], return_inverse=True)
    return RequestTrace(
        BLOCK_SIZE,
        blocks.astype(np.int64),
        np.concatenate([[0], np.cumsum(lengths)]),
        num_prompt,
        BLOCK_SIZE * num_prompt,
        num_output,
        np.array([each.arrival for each in requests]),
        np.array([1 + HINTS.index(Hint(each.hint).value) for each in requests], np.int8),
        clients,
    )
