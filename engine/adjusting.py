"""Changes a step's logits as its requests ask: bias, penalties and guides, for all of them at once, on their device.

Order and terms are those of vLLM (`vllm/v1/sample/sampler.py`, `vllm/model_executor/layers/utils.py`) and of OpenAI's
API reference. `logit` is a token's, `count` how often the answer so far has it:

1. logit_bias: `logit += bias[token]`
2. repetition_penalty, of tokens in prompt or answer: `logit / penalty` if the logit is positive, else `logit * penalty`
3. frequency_penalty: `logit -= penalty * count`
4. presence_penalty: `logit -= penalty`, if `count` is not 0
5. guide: `logit = -inf` of every token that may not come next
"""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connector.segments import uploaded
from kvtier.engine.sequence import Sequence
from kvtier.engine.used_tokens import UsedTokens


@torch.inference_mode()
def adjusted(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """The logits `[rows, vocab]` as the rows' sequences want them, in fp32; those given stay as they are."""
    changed = logits.to(torch.float32, copy=True)
    biased, repeated, penalised = _Cells(), _Cells(), _Cells()
    masks: dict[int, NDArray[np.uint32]] = {}
    for row, sequence in enumerate(sequences):
        params = sequence.params
        if params.logit_bias:
            biased.add(row, np.fromiter(params.logit_bias, np.int64), np.fromiter(params.logit_bias.values(), float))
        if params.guide is not None:
            if sequence.guided is None:
                sequence.guided = params.guide.start(sequence.token_ids, sequence.num_prompt_tokens)
            masks[row] = sequence.guided.allowed()
        if not params.has_penalties:
            continue
        repeats = params.repetition_penalty != 1.0
        if sequence.used is None:
            sequence.used = UsedTokens(sequence.token_ids, sequence.num_prompt_tokens, repeats=repeats)
        answer, counts = sequence.used.answer()
        if repeats:
            known = sequence.used.all(answer)
            repeated.add(row, known, np.full(len(known), params.repetition_penalty))
        if params.frequency_penalty or params.presence_penalty:
            penalties = counts * params.frequency_penalty + params.presence_penalty
            penalised.add(row, answer, np.asarray(penalties, np.float64))
    if biased.rows:
        rows, tokens, bias = biased.sent(changed)
        changed[rows, tokens] += bias
    if repeated.rows:
        rows, tokens, penalty = repeated.sent(changed)
        held = changed[rows, tokens]
        changed[rows, tokens] = torch.where(held > 0, held / penalty, held * penalty)
    if penalised.rows:
        rows, tokens, penalty = penalised.sent(changed)
        changed[rows, tokens] -= penalty
    if masks:
        _mask(changed, masks)
    return changed


def _mask(logits: torch.Tensor, masks: Mapping[int, NDArray[np.uint32]]) -> None:
    """Only tokens whose bits are set may be chosen in these rows."""
    bits = np.unpackbits(np.stack(list(masks.values())).view(np.uint8), axis=1, bitorder="little")
    allowed = np.zeros((len(masks), logits.shape[1]), np.uint8)
    allowed[:, : bits.shape[1]] = bits[:, : logits.shape[1]]
    (rows,) = uploaded([np.fromiter(masks, np.int64)], logits.device)
    refused = torch.from_numpy(allowed).to(logits.device) == 0
    logits[rows] = logits[rows].masked_fill(refused, -torch.inf)


class _Cells:
    """Places among the logits, each at most once, and a value for each."""

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
