"""How likely tokens were: the model's own logarithms of probabilities, before bias, penalties and temperature.

This is what vLLM calls `raw_logprobs`, its default.
"""

from collections.abc import Sequence as Rows
from itertools import accumulate

import numpy as np
import torch

from kvtier.connector.segments import uploaded
from kvtier.engine.batch import Chunk
from kvtier.engine.sequence import Sequence, TokenLogprobs


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, token_ids: Rows[int], num_likeliest: int) -> list[TokenLogprobs]:
    """Of `token_ids`, one for each row of the logits `[rows, vocab]`."""
    logs = logits.float().log_softmax(-1)
    (tokens,) = uploaded([np.array(token_ids, np.int64)], logits.device)
    own = logs.gather(1, tokens[:, None])[:, 0]
    best = logs.topk(min(num_likeliest, logits.shape[1]), dim=-1)
    rows = zip(token_ids, own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(token, log, tuple(zip(ids, values, strict=True))) for token, log, ids, values in rows]


def sampled_logprobs(logits: torch.Tensor, sequences: Rows[Sequence], token_ids: Rows[int]) -> dict[int, TokenLogprobs]:
    """Of the tokens that a step sampled, by row: of those rows whose requests ask for them."""
    asked = {row: num for row, each in enumerate(sequences) if (num := each.params.logprobs) is not None}
    found = logprobs_of(logits[list(asked)], [token_ids[row] for row in asked], max(asked.values()))
    return {
        row: TokenLogprobs(each.token_id, each.logprob, each.likeliest[:num])
        for (row, num), each in zip(asked.items(), found, strict=True)
    }


class PromptRows:
    """The rows of a step's tokens that score prompts: each row tells how likely the token behind it is."""

    def __init__(self, chunks: Rows[Chunk]) -> None:
        self._wanted: list[tuple[Chunk, int, int]] = []  # and the first and the last of its positions, exclusively
        self.rows: list[int] = []  # among the step's tokens
        ends = accumulate(chunk.end - chunk.start for chunk in chunks)
        for chunk, end in zip(chunks, ends, strict=True):
            last = min(chunk.end, chunk.sequence.num_prompt_tokens - 1)
            if not chunk.sequence.looks_up and last > chunk.start:
                self._wanted.append((chunk, chunk.start, last))
                self.rows += range(end - (chunk.end - chunk.start), end - (chunk.end - last))

    def note(self, logits: torch.Tensor) -> None:
        """Note what the logits of these rows say of the prompts' tokens."""
        first = 0
        for chunk, start, last in self._wanted:
            sequence = chunk.sequence
            tokens, num = sequence.token_ids[start + 1 : last + 1], sequence.params.prompt_logprobs
            assert sequence.scores is not None
            found = logprobs_of(logits[first : first + last - start], tokens, num or 0)
            sequence.scores.update(zip(range(start + 1, last + 1), found, strict=True))
            first += last - start
