"""Prompts and answers for benchmarks/partial_blocks.py: a trace's by its blocks' numbers, made-up chats by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from _loads import random_tokens
from numpy.typing import NDArray

from kvtier.service.traces import read_trace

TRACE_UNIT: Final = 512  # tokens of the trace's blocks

_SYSTEMS: Final = 4
_PHRASES: Final = 12  # openings that questions have in common
_VOCABULARY: Final = 50_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its answer as symbols of `unit` tokens each; the last one may stand for fewer."""

    symbols: Sequence[int]  # equal ones behind equal ones: equal text
    unit: int
    num_prompt: int  # tokens
    num_held: int  # tokens whose KV is there afterwards
    num_told: int  # tokens that `symbols` stand for
    num_continued: int = 0  # tokens of the exchange that this is the next turn of: held before it, whatever its symbols

    def tokens(self) -> NDArray[np.uint32]:
        """The text whose KV is there afterwards, token by token."""
        numbers = np.asarray(self.symbols, np.uint32)[:, None] * np.uint32(self.unit)
        told = (numbers + np.arange(self.unit, dtype=np.uint32)).reshape(-1)[: self.num_told]
        return np.concatenate([told, np.zeros(max(0, self.num_held - self.num_told), np.uint32)])


def trace_exchanges(path: Path, limit: int | None) -> list[Exchange]:
    """Requests of a trace in Mooncake's form with blocks of 512 tokens.

    It says nothing of the text of answers, nor of where in a block two prompts part. So a prompt that begins with all
    full blocks of an earlier one, two or more, and is longer than it and its answer, is taken for the next turn.
    """
    turns: dict[tuple[int, int], int] = {}  # full blocks, the last one → tokens held
    made = []
    for line in islice(read_trace(path), limit):
        if not line.input_length:
            continue
        length = min(line.input_length, len(line.hash_ids) * TRACE_UNIT)
        continued = 0
        for count in range(len(line.hash_ids), 1, -1):
            if 0 < (earlier := turns.get((count, line.hash_ids[count - 1]), 0)) < length:
                continued = earlier
                break
        held = length + max(0, line.output_length - 1)
        made.append(Exchange(line.hash_ids, TRACE_UNIT, length, held, length, continued))
        if (full := length // TRACE_UNIT) > 1:
            turns[full, line.hash_ids[full - 1]] = held
    return made


def chats(num_requests: int) -> list[Exchange]:
    """Conversations beside each other, each with one of four system prompts of 90 to 700 tokens.

    A turn's prompt is all that was said, then a question. One answer in five is asked for again, and one question in
    seven is edited in its middle. A third of the questions begin with a phrase that many begin with.
    """
    draw = np.random.default_rng(1)
    systems = [_text(draw, int(draw.integers(90, 700))) for _ in range(_SYSTEMS)]
    phrases = [_text(draw, int(draw.integers(5, 40))) for _ in range(_PHRASES)]
    live: list[Iterator[Exchange]] = []
    made: list[Exchange] = []
    while len(made) < num_requests:
        if len(live) < 12:
            live.append(_conversation(draw, systems[int(draw.integers(_SYSTEMS))], phrases))
        place = int(draw.integers(len(live)))
        if (exchange := next(live[place], None)) is None:
            del live[place]
        else:
            made.append(exchange)
    return made


def _conversation(draw: np.random.Generator, said: list[int], phrases: list[list[int]]) -> Iterator[Exchange]:
    def answered(question: list[int]) -> tuple[list[int], Exchange]:
        answer = _text(draw, 4 + int(draw.lognormal(4.8, 0.7)))
        held = len(said) + len(question) + len(answer) - 1  # the KV of an answer's last token is never computed
        return answer, Exchange(said + question + answer, 1, len(said) + len(question), held, held + 1)

    for _ in range(int(draw.geometric(0.2))):
        opening = phrases[int(draw.integers(len(phrases)))] if draw.random() < 1 / 3 else []
        question = opening + _text(draw, 8 + int(draw.lognormal(3.5, 0.8)))
        answer, exchange = answered(question)
        yield exchange
        if draw.random() < 1 / 5:
            answer, exchange = answered(question)
            yield exchange
        if draw.random() < 1 / 7:
            question = question[: len(question) // 2] + _text(draw, 12)
            answer, exchange = answered(question)
            yield exchange
        said = said + question + answer


def _text(draw: np.random.Generator, length: int) -> list[int]:
    return random_tokens(draw, length, 0, _VOCABULARY)
