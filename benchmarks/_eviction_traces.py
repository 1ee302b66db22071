"""The traces that `eviction.py` replays: made-up ones and the production trace, with hints as right as one wants."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from _synthetic_traces import TRACES, SyntheticRequest
from numpy.typing import NDArray

from kvtier.service.traces import HINTS, RequestTrace, load_trace
from kvtier.tiers.reuse import Hint

PRODUCTION: Final = "production conversations"
_FILE: Final = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl.gz"
BLOCK_SIZE: Final = 512  # tokens
_GOES_ON, _FINISHED = (1 + HINTS.index(name) for name in ("goes_on", "finished"))


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
    lengths = [len(each.blocks) for each in requests]
    _, blocks = np.unique([block for each in requests for block in each.blocks], return_inverse=True)
    num_prompt = np.array([each.num_prompt for each in requests], np.int64)
    return RequestTrace(
        BLOCK_SIZE,
        blocks.astype(np.int64),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        num_prompt,
        BLOCK_SIZE * num_prompt,
        np.array([each.num_output_tokens for each in requests], np.int64),
        np.array([each.arrival for each in requests]),
        np.array([1 + HINTS.index(Hint(each.hint).value) for each in requests], np.int8),
        np.array([each.client for each in requests], np.int64),
    )
