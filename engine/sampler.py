"""Samples tokens from logits: penalties, bias, guides, the draw, and log probabilities."""

import math
import struct
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Rows
from itertools import accumulate

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvtier.connector.segments import uploaded
from kvtier.engine.requests import SamplingParams, TokenLogprobs, UsedTokens
from kvtier.engine.sequence import Chunk, Sequence


def sample(logits: NDArray[np.float32], params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position` of an answer, drawn from `logits` [vocab] by temperature, min-p, top-k and top-p.

    It depends on nothing else: not the batch, not earlier draws. So preemption does not change an answer.
    """
    if not params.temperature:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # near 0 a temperature leaves only the likeliest
        scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    if params.min_p:  # after the temperature, before top-k and top-p, as in vLLM
        scaled[scaled < math.log(params.min_p)] = -np.inf
    tokens = _likeliest(scaled, params)
    weights = np.exp(scaled[tokens])
    total = np.cumsum(weights)
    if params.top_p < 1.0:
        total = total[: int(np.searchsorted(total, params.top_p * total[-1])) + 1]
    drawn = int(np.searchsorted(total, uniform(seed, position) * total[-1], side="right"))
    return int(tokens[min(drawn, len(total) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): the `position`-th of the stream of `seed` (0 ≤ seed < 2**64)."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<Q", position), seed) >> 11) / 2**53


def _likeliest(scaled: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """The tokens to draw from, likeliest first if that matters; equal ones by token id."""
    if 0 < params.top_k < len(scaled):
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        tokens = np.flatnonzero(scaled >= threshold)
        return tokens[np.argsort(-scaled[tokens], kind="stable")][: params.top_k]
    if params.top_p < 1.0:
        return np.argsort(-scaled, kind="stable")
    return np.arange(len(scaled))


@torch.inference_mode()
def adjusted(logits: torch.Tensor, sequences: Rows[Sequence], eos_token_ids: Collection[int]) -> torch.Tensor:
    """The logits `[rows, vocab]` adjusted by the rows' parameters, in fp32; the argument is unchanged."""
    changed = logits.to(torch.float32, copy=True)
    biased, repeated, penalised, early = _Cells(), _Cells(), _Cells(), _Cells()
    masks: dict[int, NDArray[np.uint32]] = {}
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.logit_bias:
            biased.add(row, np.fromiter(params.logit_bias, np.int64), np.fromiter(params.logit_bias.values(), float))
        if sequence.num_generated < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            known = np.array(sorted(token for token in ends if token < logits.shape[1]), np.int64)
            early.add(row, known, np.zeros(len(known)))
        if params.guide is not None:
            if sequence.sampling.guided is None:
                sequence.sampling.guided = params.guide.start(sequence.token_ids, sequence.num_prompt_tokens)
            masks[row] = sequence.sampling.guided.allowed()
        if not params.has_penalties:
            continue
        repeats = params.repetition_penalty != 1.0
        if sequence.sampling.used is None:
            sequence.sampling.used = UsedTokens(sequence.token_ids, sequence.num_prompt_tokens, repeats=repeats)
        answer, counts = sequence.sampling.used.answer()
        if repeats:
            known = sequence.sampling.used.all(answer)
            repeated.add(row, known, np.full(len(known), params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            penalties = counts * params.frequency_penalty + params.presence_penalty
            penalised.add(row, answer, np.asarray(penalties, np.float64))
    if biased.rows:
        rows, tokens, bias = biased.sent(changed)
        changed[rows, tokens] += bias
    if repeated.rows:
        rows, tokens, penalty = repeated.sent(changed)
        current = changed[rows, tokens]
        changed[rows, tokens] = torch.where(current > 0, current / penalty, current * penalty)
    if penalised.rows:
        rows, tokens, penalty = penalised.sent(changed)
        changed[rows, tokens] -= penalty
    if early.rows:
        rows, tokens, _ = early.sent(changed)
        changed[rows, tokens] = -torch.inf
    if masks:
        _mask(changed, masks)
    return changed


def _mask(logits: torch.Tensor, masks: Mapping[int, NDArray[np.uint32]]) -> None:
    bits = np.unpackbits(np.stack(list(masks.values())).view(np.uint8), axis=1, bitorder="little")
    allowed = np.zeros((len(masks), logits.shape[1]), np.uint8)
    allowed[:, : bits.shape[1]] = bits[:, : logits.shape[1]]
    (rows,) = uploaded([np.fromiter(masks, np.int64)], logits.device)
    refused = torch.from_numpy(allowed).to(logits.device) == 0
    logits[rows] = logits[rows].masked_fill(refused, -torch.inf)


class _Cells:
    """Positions in the logits, each at most once, with a value each."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []

    def add(self, row: int, tokens: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self.rows.append(np.full(len(tokens), row, np.int64))
        self._tokens.append(tokens)
        self._values.append(values)

    def sent(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, tokens and values, on the device of the logits."""
        bits = np.concatenate(self._values).astype(np.float64).view(np.int64)  # one upload for all three
        rows, tokens, values = uploaded([np.concatenate(self.rows), np.concatenate(self._tokens), bits], logits.device)
        return rows, tokens, values.view(torch.float64).to(torch.float32)


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, token_ids: Rows[int], num_likeliest: int) -> list[TokenLogprobs]:
    """Those of `token_ids`, one per row of the logits `[rows, vocab]`."""
    logs = logits.float().log_softmax(-1)
    (tokens,) = uploaded([np.array(token_ids, np.int64)], logits.device)
    own = logs.gather(1, tokens[:, None])[:, 0]
    best = logs.topk(min(num_likeliest, logits.shape[1]), dim=-1)
    rows = zip(token_ids, own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(token, log, tuple(zip(ids, values, strict=True))) for token, log, ids, values in rows]


def sampled_logprobs(logits: torch.Tensor, sequences: Rows[Sequence], token_ids: Rows[int]) -> dict[int, TokenLogprobs]:
    """Those of a step's sampled tokens, by row, for requests with `logprobs`."""
    wanted = {row: num for row, each in enumerate(sequences) if (num := each.params.logprobs) is not None}
    found = logprobs_of(logits[list(wanted)], [token_ids[row] for row in wanted], max(wanted.values()))
    return {
        row: TokenLogprobs(each.token_id, each.logprob, each.likeliest[:num])
        for (row, num), each in zip(wanted.items(), found, strict=True)
    }


class PromptRows:
    """The rows of a step's tokens that score prompts: each row scores the token after it."""

    def __init__(self, chunks: Rows[Chunk]) -> None:
        self._wanted: list[tuple[Chunk, int, int]] = []  # chunk, first position, end position
        self.rows: list[int] = []  # among the step's tokens
        ends = accumulate(chunk.end - chunk.start for chunk in chunks)
        for chunk, end in zip(chunks, ends, strict=True):
            last = min(chunk.end, chunk.sequence.num_prompt_tokens - 1)
            if not chunk.sequence.looks_up and last > chunk.start:
                self._wanted.append((chunk, chunk.start, last))
                self.rows += range(end - (chunk.end - chunk.start), end - (chunk.end - last))

    def record(self, logits: torch.Tensor) -> None:
        first = 0
        for chunk, start, last in self._wanted:
            sequence = chunk.sequence
            tokens, num = sequence.token_ids[start + 1 : last + 1], sequence.params.prompt_logprobs
            assert sequence.sampling.scores is not None
            found = logprobs_of(logits[first : first + last - start], tokens, num or 0)
            sequence.sampling.scores.update(zip(range(start + 1, last + 1), found, strict=True))
            first += last - start
