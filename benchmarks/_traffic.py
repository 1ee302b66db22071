"""Requests for simulated replicas: from a trace in Mooncake's form, or made up if there is none."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.service.events import prompt_hashes
from kvtier.service.traces import TraceLine, read_trace
from kvtier.tiers import BlockRecord, FormatError
from kvtier.tiers.naming import TokenChain, root_hash

SMALL: Final = 16  # tokens of the block that stands for one of the trace's
FINGERPRINT: Final = b"routing".ljust(32, b".")
_LAST_TICK: Final = 1000  # milliseconds from the last timestamp to the end of the trace
_SESSION_BLOCKS: Final = 2


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """One request of a trace. Lengths are the trace's; its blocks are small ones, one for each of the trace's."""

    arrival: float  # seconds since the trace began
    num_tokens: int
    num_answer: int  # tokens, at least one
    blocks: Sequence[BlockRecord]  # its full ones
    sequence: Sequence[int]  # the same by Dynamo's hashes, as a router names them
    session: bytes


def read_prompts(path: Path, block_size: int, limit: int | None) -> list[TracePrompt]:
    """The first `limit` requests of a trace whose blocks have `block_size` tokens.

    ConfigError if it cannot be read, FormatError with the line and the field that is wrong.
    """
    lines = list(islice(read_trace(path), limit))
    if not lines:
        raise FormatError(f"{path}: no requests; name a trace in Mooncake's form")
    for number, line in enumerate(lines, 1):
        if not line.input_length:
            raise FormatError(f"{path}:{number}: input_length 0: a prompt has tokens")
        if not 0 <= len(line.hash_ids) * block_size - line.input_length + block_size < 2 * block_size:
            raise FormatError(
                f"{path}:{number}: hash_ids: {len(line.hash_ids)} blocks for an input_length of {line.input_length}: "
                f"not blocks of {block_size}; say of how many tokens they are, by --block-size"
            )
    return prompts_of(lines, block_size)


def prompts_of(lines: Sequence[TraceLine], block_size: int) -> list[TracePrompt]:
    """Prompts of a trace's lines. Those with one timestamp arrive evenly spread over the time up to the next one."""
    records: dict[bytes, BlockRecord] = {}
    prompts = []
    for arrival, line in zip(_arrivals(lines), lines, strict=True):
        ids = line.hash_ids[: line.input_length // block_size]
        # A block's content is its number, and its name comes from its parents' too, as in an engine.
        tokens = np.tile(np.array(ids, "<u8").view("<u4").reshape(-1, 2), SMALL // 2).ravel()
        chain = TokenChain(root_hash(FINGERPRINT), SMALL)
        chain.extend(tokens)
        blocks = [
            records.setdefault(name, BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0))
            for i, name in enumerate(chain.hashes)
        ]
        session = repr(line.hash_ids[:_SESSION_BLOCKS]).encode()
        sequence = prompt_hashes(tokens, SMALL)
        prompts.append(TracePrompt(arrival, line.input_length, max(1, line.output_length), blocks, sequence, session))
    return prompts


def made_up(num_requests: int, block_size: int) -> list[TracePrompt]:
    """Conversations that begin with one of four system prompts and grow by a question and an answer each turn."""
    draw = np.random.default_rng(1)
    lines: list[tuple[float, int, list[int], int]] = []
    fresh = iter(range(4, 1 << 62))
    begun = 0.0
    while len(lines) < num_requests:
        begun += float(draw.exponential(1000))
        now, ids = begun, [int(draw.integers(4))]
        for _ in range(int(draw.geometric(0.25))):
            ids = ids + list(islice(fresh, 1 + int(draw.lognormal(1.5, 1.0))))
            length = len(ids) * block_size - int(draw.integers(block_size))
            lines.append((now, length, ids, 1 + int(draw.exponential(300))))
            now += float(draw.exponential(60_000))
    lines = sorted(lines, key=lambda line: line[0])[:num_requests]
    return prompts_of(
        [TraceLine(int(when), length, answer, tuple(ids)) for when, length, ids, answer in lines], block_size
    )


def _arrivals(lines: Sequence[TraceLine]) -> Iterator[float]:
    at_once = Counter(line.timestamp for line in lines)
    ticks = sorted(at_once)
    nexts = dict([*pairwise(ticks), (ticks[-1], ticks[-1] + _LAST_TICK)])
    seen = Counter[int]()
    for line in lines:
        now = line.timestamp
        yield (now + (nexts[now] - now) * seen[now] / at_once[now]) / 1000
        seen[now] += 1
