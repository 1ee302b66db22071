"""Made-up traces that press an eviction order: scans, loops, drift, shared beginnings, agents, lonely requests.

Each is a function of a seed. Blocks are numbers: two requests that share a number share its block, and a request's
blocks form a chain. The hint is the truth about the conversation; whoever replays may hide or spoil it.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvtier.tiers.reuse import Hint


@dataclass(frozen=True)
class SyntheticRequest:
    """One request, by the blocks of its prompt and of its answer."""

    arrival: float  # seconds since the trace's start
    blocks: tuple[int, ...]  # full blocks in chain order, the prompt's and then the answer's
    num_prompt: int  # so many of `blocks` are the prompt's
    num_output_tokens: int
    hint: Hint
    client: int = 0


@dataclass(frozen=True)
class _NextTurn:
    """A conversation's next request, in the queue of what is to come."""

    arrival: float
    number: int  # breaks ties
    history: tuple[int, ...]
    turns_left: int
    kind: int


@dataclass(frozen=True)
class _ChatManner:
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
        self._blocks = count()
        self._turns: list[tuple[float, int, _NextTurn]] = []
        self._numbers = count()

    def new(self, number: int) -> tuple[int, ...]:
        """So many blocks that nobody has yet."""
        return tuple(next(self._blocks) for _ in range(number))

    def begin(self, arrival: float, kind: int, manner: _ChatManner, beginning: tuple[int, ...] = ()) -> None:
        """A conversation starts."""
        self._push(_NextTurn(arrival, next(self._numbers), beginning, manner.num_turns(self.dice, arrival), kind))

    def until(self, arrival: float, manners: list[_ChatManner]) -> Iterator[SyntheticRequest]:
        """The turns that come up to then."""
        while self._turns and self._turns[0][0] <= arrival:
            turn = heapq.heappop(self._turns)[2]
            manner = manners[turn.kind]
            prompt = turn.history + self.new(manner.asks)
            blocks = prompt + self.new(manner.answers)
            goes_on = turn.turns_left > 1
            hint = Hint.FINISHED if not goes_on else Hint.TOOL if manner.waits_for_tools else Hint.GOES_ON
            yield SyntheticRequest(turn.arrival, blocks, len(prompt), manner.tokens, hint, turn.kind)
            if goes_on:
                later = turn.arrival + manner.gap(self.dice)
                self._push(_NextTurn(later, next(self._numbers), blocks, turn.turns_left - 1, turn.kind))

    def _push(self, turn: _NextTurn) -> None:
        heapq.heappush(self._turns, (turn.arrival, turn.number, turn))


def _turns(mean: float) -> Callable[[random.Random, float], int]:
    return lambda dice, _: 1 + int(dice.expovariate(1.0) * (mean - 1.0) + 0.5)


def _gap(median: float, spread: float) -> Callable[[random.Random], float]:
    return lambda dice: median * dice.lognormvariate(0.0, spread)


def _conversations(
    seed: int, manners: list[_ChatManner], shares: list[float], *, rate: float, seconds: float, shared: int = 2
) -> list[SyntheticRequest]:
    """Conversations of these manners start at `rate` a second, behind one of eight system prompts."""
    story = _TraceMaker(seed)
    systems = [story.new(shared) for _ in range(8)]
    requests: list[SyntheticRequest] = []
    now = 0.0
    while now < seconds:
        now += story.dice.expovariate(rate)
        requests += story.until(now, manners)
        kind = story.dice.choices(range(len(manners)), shares)[0]
        story.begin(now, kind, manners[kind], story.dice.choice(systems))
    return requests


_CHAT: Final = _ChatManner(_turns(3.0), _gap(60.0, 0.8), asks=2, answers=1, tokens=300)
_ONCE: Final = _ChatManner(lambda *_: 1, _gap(1.0, 0.0), asks=8, answers=1, tokens=80)
_AGENT: Final = _ChatManner(_turns(12.0), _gap(4.0, 0.5), asks=2, answers=1, tokens=60, waits_for_tools=True)


def _chats(seed: int) -> list[SyntheticRequest]:
    """Conversations of three turns on average, a minute apart."""
    return _conversations(seed, [_CHAT], [1.0], rate=0.5, seconds=2400.0)


def _scans(seed: int) -> list[SyntheticRequest]:
    """Conversations, and as many long documents that are read once."""
    return _conversations(seed, [_CHAT, _ONCE], [0.5, 0.5], rate=0.8, seconds=2400.0)


def _agents(seed: int) -> list[SyntheticRequest]:
    """Agents that wait for their tools for seconds, beside conversations and what is asked once."""
    return _conversations(seed, [_CHAT, _ONCE, _AGENT], [0.4, 0.4, 0.2], rate=0.5, seconds=2400.0)


def _one_shot(seed: int) -> list[SyntheticRequest]:
    """Nothing ever returns but the system prompts."""
    return _conversations(seed, [_ONCE], [1.0], rate=1.0, seconds=2400.0)


def _shared_beginnings(seed: int) -> list[SyntheticRequest]:
    """Questions behind forty long beginnings, some asked for far more often than others."""
    story = _TraceMaker(seed)
    beginnings = [story.new(12) for _ in range(40)]
    weights = [1.0 / (rank + 1) for rank in range(len(beginnings))]
    requests = []
    for number in range(3000):
        prompt = story.dice.choices(beginnings, weights)[0] + story.new(1)
        requests.append(SyntheticRequest(float(number), prompt + story.new(1), len(prompt), 120, Hint.FINISHED))
    return requests


def _loop(seed: int) -> list[SyntheticRequest]:
    """Forty documents of ten blocks, asked one after the other, round and round."""
    story = _TraceMaker(seed)
    documents = [story.new(10) for _ in range(40)]
    requests = []
    for number in range(2400):
        prompt = documents[number % len(documents)]
        requests.append(SyntheticRequest(1.5 * number, prompt + story.new(1), len(prompt), 120, Hint.GOES_ON))
    return requests


def _documents(seed: int) -> list[SyntheticRequest]:
    """Documents by Zipf's law, each asked about again and again, at random."""
    story = _TraceMaker(seed)
    documents = [story.new(8) for _ in range(1500)]
    weights = [(rank + 1.0) ** -0.9 for rank in range(len(documents))]
    requests = []
    for number, document in enumerate(story.dice.choices(documents, weights, k=4000)):
        prompt = document + story.new(1)
        requests.append(SyntheticRequest(0.8 * number, prompt, len(prompt), 40, Hint.GOES_ON))
    return requests


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
        return _conversations(seed, [short, long], [0.5, 0.5], rate=0.8, seconds=7200.0)

    return make


def _mixture(seed: int) -> list[SyntheticRequest]:
    """Conversations and scans, in rushes of ten minutes with half an hour between them."""
    requests = _conversations(seed, [_CHAT, _ONCE], [0.6, 0.4], rate=0.8, seconds=2400.0)
    return [
        SyntheticRequest(
            each.arrival + 1800.0 * (each.arrival // 600.0),
            each.blocks,
            each.num_prompt,
            each.num_output_tokens,
            each.hint,
            each.client,
        )
        for each in requests
    ]


TRACES: Final[dict[str, Callable[[int], list[SyntheticRequest]]]] = {
    "chats": _chats,
    "scans": _scans,
    "agents": _agents,
    "one-shot": _one_shot,
    "shared": _shared_beginnings,
    "loop": _loop,
    "documents": _documents,
    "drift": _drift(lambda at: float(at > 3600.0)),
    "flips": _drift(lambda at: float(at // 900.0 % 2)),
    "slow-drift": _drift(lambda at: min(1.0, at / 7200.0)),
    "rushes": _mixture,
}
SIZES: Final = (120, 360, 800, 1600, 3200)  # slots worth trying with each
