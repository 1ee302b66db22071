"""What is asked: sessions of one or several turns, made up from words, or read from a trace."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final, Literal

from kvtier.service.traces import TraceLine, load_lines
from kvtier.tiers import ConfigError

# --- made up ---------------------------------------------------------------------------------------------------------

Pattern = Literal["shared", "turns", "rag", "agents"]

PATTERNS: Final[tuple[Pattern, ...]] = ("shared", "turns", "rag", "agents")
_WORDS: Final = tuple(  # short English words
    re.findall(
        r"\w+",
        """
        time year people way day man thing woman life child world school state family student group country problem
        hand part place case week company system program question work government number night point home water room
        mother area money story fact month lot right study book eye job word business issue side kind head house
        service friend father power hour game line end member law car city community name president team minute idea
        body information
        """,
    )
)
_PREFIXES: Final = 8  # different shared beginnings, or documents for each that a prompt takes
_DOCUMENTS: Final = 3  # in a prompt of the pattern "rag"
_KEPT: Final = 0.75  # share of a first prompt that others share
_MOST: Final = 1 << 20  # of each figure of a shape
_MOST_WORDS: Final = 1 << 28  # of all that is made up before anybody is asked
_TOOL: Final = 4  # times a turn's tokens: what a tool answers


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """What one request adds to its session's prompt."""

    text: str
    max_tokens: int
    wait: float = 0.0  # seconds behind the answer before: a person reads, a tool runs


@dataclass(frozen=True, slots=True)
class ScriptedSession:
    """Requests that follow each other: each has all turns before it in its prompt, and their answers."""

    number: int
    system: str  # what its first prompt begins with
    turns: Sequence[ScriptedTurn]
    at: float | None = None  # seconds from the start, where a trace says so


@dataclass(frozen=True, slots=True)
class Shape:
    """How large what is asked is. Words stand for tokens: most tokenizers have one for each of these."""

    pattern: Pattern = "shared"
    num_requests: int = 64
    prompt_tokens: int = 512  # of a session's first prompt
    turn_tokens: int = 64  # that each further turn adds
    answer_tokens: int = 32
    num_turns: int = 4  # of "turns" and "agents"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "turn_tokens", "answer_tokens", "num_turns"):
            if not 1 <= (value := getattr(self, name)) <= _MOST:
                raise ConfigError(
                    f"--{name.removeprefix('num_').replace('_', '-')} {value}: use a whole number from 1 to {_MOST}"
                )
        if (num_words := self.num_requests * max(self.prompt_tokens, _TOOL * self.turn_tokens)) > _MOST_WORDS:
            raise ConfigError(f"--requests {self.num_requests}: {num_words} tokens in all; at most {_MOST_WORDS}")


def sessions_of(shape: Shape) -> list[ScriptedSession]:
    """So many sessions that they have `num_requests` requests in all; the last one may be cut short."""
    dice = random.Random(shape.seed)
    found, left = list[ScriptedSession](), shape.num_requests
    for session in _sessions(shape, dice):
        turns = session.turns[:left]
        found.append(ScriptedSession(session.number, session.system, turns))
        left -= len(turns)
        if not left:
            break
    return found


def _sessions(shape: Shape, dice: random.Random) -> Iterator[ScriptedSession]:
    kept = int(shape.prompt_tokens * _KEPT)
    own = shape.prompt_tokens - kept
    beginnings = [words(dice, kept) for _ in range(_PREFIXES)]
    documents = [words(dice, kept // _DOCUMENTS) for _ in range(_PREFIXES * _DOCUMENTS)]
    for number in cycle(range(1 << 30)):
        system = dice.choice(beginnings)
        if shape.pattern == "rag":
            system = "\n\n".join(dice.sample(documents, _DOCUMENTS))
        first = ScriptedTurn(words(dice, own), shape.answer_tokens)
        turns = [first]
        if shape.pattern in ("turns", "agents"):
            turns += [_further(shape, dice) for _ in range(min(shape.num_turns, shape.num_requests) - 1)]
        yield ScriptedSession(number, system, turns)


def _further(shape: Shape, dice: random.Random) -> ScriptedTurn:
    """A person says little; a tool answers at length."""
    size = shape.turn_tokens * (_TOOL if shape.pattern == "agents" and dice.random() < 0.5 else 1)
    text = words(dice, size)
    return ScriptedTurn(f"Tool result:\n{text}" if shape.pattern == "agents" else text, shape.answer_tokens)


def words(dice: random.Random, number: int) -> str:
    """So many short English words."""
    return " ".join(dice.choices(_WORDS, k=max(1, number)))


# --- of a trace ------------------------------------------------------------------------------------------------------

_BLOCK: Final = 512  # tokens of a block where the trace does not say
_MOST_TOKENS: Final = 1 << 28  # tokens of all requests: their texts are made before anybody is asked


def sessions_of_trace(path: Path, num_requests: int, answer_tokens: int, speed: float) -> list[ScriptedSession]:
    """One session for each of the first requests; times are divided by `speed`. ConfigError as `load_lines`."""
    if not speed > 0:
        raise ConfigError(f"speed {speed}: use a number above 0; 2 is twice as fast as the trace")
    lines = load_lines(path, num_requests)
    if (num_tokens := sum(line.input_length for line in lines)) > _MOST_TOKENS:
        fix = f"ask for at most {_MOST_TOKENS}, by fewer --requests"
        raise ConfigError(f"{path}: input_length: {num_tokens} tokens in {len(lines)} requests; {fix}")
    return [_session(number, line, answer_tokens, speed) for number, line in enumerate(lines)]


def _session(number: int, line: TraceLine, answer_tokens: int, speed: float) -> ScriptedSession:
    """A block's words follow from its number. Without times, sessions begin at the pace that is asked for."""
    size, left, texts = line.block_size or _BLOCK, line.input_length, []
    for name in line.hash_ids:
        texts.append(words(random.Random(name), min(size, left)))
        left -= size
        if left <= 0:
            break
    at = line.timestamp / 1000 / speed if line.has_time else None
    return ScriptedSession(number, "", [ScriptedTurn(" ".join(texts), line.output_length or answer_tokens)], at)
