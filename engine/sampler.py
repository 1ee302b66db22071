"""Chooses the next token from one row of logits. Stateless: a draw depends on the request's seed and position alone."""

import math
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.engine.sequence import SamplingParams


def sample(logits: NDArray[np.float32], params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position` of an answer, drawn from `logits` [vocab] by temperature, min-p, top-k and top-p.

    Nothing else enters: not the batch, not earlier draws. A request that is preempted goes on as if it had not been.
    """
    if not params.temperature:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # next to 0 a temperature leaves nothing but the likeliest
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
    """A number in [0, 1): the `position`-th of the stream that `seed` (0 ≤ seed < 2**64) names."""
    return (xxhash.xxh3_64_intdigest(struct.pack("<Q", position), seed) >> 11) / 2**53


def _likeliest(scaled: NDArray[np.float64], params: SamplingParams) -> NDArray[np.int64]:
    """The tokens to draw from, likeliest first where that matters; equal ones by token id."""
    if 0 < params.top_k < len(scaled):
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        tokens = np.flatnonzero(scaled >= threshold)
        return tokens[np.argsort(-scaled[tokens], kind="stable")][: params.top_k]
    if params.top_p < 1.0:
        return np.argsort(-scaled, kind="stable")
    return np.arange(len(scaled))
