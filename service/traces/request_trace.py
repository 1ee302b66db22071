"""RequestTrace: a whole trace as arrays, ready to be replayed, and what was assumed where it tells nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.service.traces.forms import HINTS, TraceLine
from kvtier.service.traces.reading import Progress, load_lines, times_told
from kvtier.tiers import ConfigError

# --- which blocks an answer left behind ------------------------------------------------------------------------------

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


# --- the whole trace -------------------------------------------------------------------------------------------------

_MOST_BLOCK: Final = 1 << 20  # tokens
_GAP: Final = 1.0  # seconds between two requests where no times are told


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in order. A request's blocks are `blocks[starts[i]:starts[i + 1]]`: its prompt's, then its answer's."""

    block_size: int  # tokens
    blocks: NDArray[np.int64]  # numbers from 0 on, each a block of one name
    starts: NDArray[np.int64]  # [requests + 1]
    num_prompt: NDArray[np.int64]  # of a request's blocks
    num_tokens: NDArray[np.int64]  # of its prompt
    num_output: NDArray[np.int64]  # tokens
    begun: NDArray[np.float64]  # seconds
    hints: NDArray[np.int8]  # 0 for none, then as in HINTS
    tenants: NDArray[np.int64]
    assumed: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.num_prompt)

    @property
    def num_names(self) -> int:
        """How many different blocks there are."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def chain(self, request: int) -> NDArray[np.int64]:
        """The blocks of a request, head first."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]


def load_trace(
    path: Path, *, block_size: int | None = None, limit: int | None = None, progress: Progress | None = None
) -> RequestTrace:
    """The first `limit` requests of a trace. `block_size`: tokens of its blocks, if it does not tell.

    ConfigError if it cannot be read, with every line that is wrong, or if nobody can tell the block size.
    """
    lines = load_lines(path, limit, progress)
    try:
        return trace_of(lines, block_size=block_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def trace_of(lines: Sequence[TraceLine], *, block_size: int | None = None) -> RequestTrace:
    """The same, of requests that are read already."""
    assumed: list[str] = []
    size = _block_size(lines, block_size, assumed)
    prompts = [line.hash_ids[: line.input_length // size] for line in lines]
    answers = told_by_next_turns(lines, prompts, size, assumed)
    numbers: dict[int, int] = {}
    blocks = np.fromiter(
        (
            numbers.setdefault(number, len(numbers))
            for prompt, answer in zip(prompts, answers, strict=True)
            for number in (*prompt, *answer)
        ),
        np.int64,
    )
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    if times_told(lines):
        begun = np.array([line.timestamp / 1e3 for line in lines])
    else:
        begun = _GAP * np.arange(len(lines))
        assumed.append(f"times: none are told, so a request comes every {_GAP:g} s")
    if all(line.tenant is None for line in lines) and any(line.hint for line in lines):
        assumed.append("tenants: none are told, so all hints count as one client's")
    return RequestTrace(
        size,
        blocks,
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        np.array([len(prompt) for prompt in prompts], np.int64),
        np.array([line.input_length for line in lines], np.int64),
        np.array([line.output_length for line in lines], np.int64),
        begun,
        np.array([0 if line.hint is None else 1 + HINTS.index(line.hint) for line in lines], np.int8),
        np.array([line.tenant or 0 for line in lines], np.int64),
        tuple(assumed),
    )


def _block_size(lines: Sequence[TraceLine], given: int | None, assumed: list[str]) -> int:
    """What the trace tells, else what was given, else the only size that the lengths of all requests allow."""
    told = {line.block_size for line in lines}
    if len(told) > 1:
        raise ConfigError("block_size: not the same in all lines; simulate each part by itself")
    (size,) = told
    if size is not None:
        if given not in (None, size):
            raise ConfigError(f"--block-size {given}: the trace says {size}; leave the option out")
        return size
    lowest, highest = _sizes(lines)
    if given is not None:
        if not lowest <= given <= highest:
            raise ConfigError(f"--block-size {given}: its requests have blocks of {lowest} to {highest} tokens")
        return given
    exact = {line.input_length / len(line.hash_ids) for line in lines if line.hash_ids}
    powers = [size for size in (1 << n for n in range(21)) if lowest <= size <= highest]
    if len(exact) == 1 and (only := exact.pop()).is_integer():
        size = int(only)
    elif lowest == highest:
        size = lowest
    elif len(powers) == 1:
        size = powers[0]
    else:
        raise ConfigError("block_size: the trace does not tell how many tokens a block has; say it, by --block-size")
    assumed.append(f"block_size: {size} tokens, the size that fits the lengths of all requests")
    return size


def _sizes(lines: Sequence[TraceLine]) -> tuple[int, int]:
    """The least and the largest block size that the lengths allow: the last block may be left out, or be in part."""
    lowest, highest = 1, _MOST_BLOCK
    for line in lines:
        count = len(line.hash_ids)
        lowest = max(lowest, line.input_length // (count + 1) + 1)
        if count > 1:
            highest = min(highest, -(-line.input_length // (count - 1)) - 1)
    if lowest > highest:
        raise ConfigError("block_size: no size fits the numbers of blocks and the input_length of all requests")
    return lowest, highest
