"""Which blocks an answer left behind, where a trace tells how long it was and not what it was: its next turn tells."""

from collections.abc import Sequence
from typing import Final

from kvtier.service.traces.trace_line import TraceLine
from kvtier.tiers import ConfigError

_MOST_BLOCKS: Final = 1 << 20  # of one answer: as many as a line has room for in a prompt

Ids = Sequence[int]


def told_by_next_turns(lines: Sequence[TraceLine], prompts: Sequence[Ids], size: int, assumed: list[str]) -> list[Ids]:
    """For each request the full blocks that its answer leaves behind those of its prompt.

    As told, else from the first prompt that begins with all full blocks of this one, two or more, and is longer than it
    with its answer: that is its next turn. An answer without one has blocks of its own, which nobody asks for again.
    What was assumed is added to `assumed`.
    """
    answers: list[Ids] = [line.answer_ids or () for line in lines]
    unknown = [line.answer_ids is None and line.output_length > 0 for line in lines]
    if any(unknown):
        known = _from_next_turns(lines, prompts, size, unknown)
        fresh = 1 + max((number for line in lines for number in (*line.hash_ids, *(line.answer_ids or ()))), default=0)
        for i in (i for i, is_unknown in enumerate(unknown) if is_unknown):
            count = (lines[i].input_length + lines[i].output_length) // size - len(prompts[i])
            if count > _MOST_BLOCKS:
                what = f"output_length {lines[i].output_length}: {count} blocks of {size} tokens"
                raise ConfigError(f"{what}, of one answer at most {_MOST_BLOCKS} are simulated; count tokens there")
            told = known.get(i, ())[:count]
            answers[i] = (*told, *range(fresh, fresh + count - len(told)))
            fresh += count - len(told)
        assumed.append("answers: their blocks are those of the next turn's prompt; where none follows, of no other")
    if all(line.answer_ids is None and not line.output_length for line in lines):
        assumed.append("answers: no lengths are told, so only prompts are stored, and each counts as short")
    return answers


def _from_next_turns(
    lines: Sequence[TraceLine], prompts: Sequence[Ids], size: int, unknown: Sequence[bool]
) -> dict[int, Ids]:
    """Request → blocks of its next turn's prompt behind its own full blocks."""
    waiting: dict[int, int] = {}  # last full block of a prompt → the request, until its next turn has come
    known: dict[int, Ids] = {}
    for i, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        for block in reversed(prompt):
            before = waiting.get(block)
            if before is not None and line.input_length > lines[before].input_length + lines[before].output_length:
                known[before] = prompt[len(prompts[before]) :]
                del waiting[block]
                break
        if unknown[i] and len(prompt) > 1:
            waiting[prompt[-1]] = i
    return known
