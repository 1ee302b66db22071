"""A finished answer, and where its prompt's KV came from."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.sequence import FinishReason, Output, Sequence, TokenLogprobs


@dataclass(slots=True)
class Completion:
    """A finished answer. Reused segments are approximate, and so beside the cached tokens, never among them."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logits: list[NDArray[np.float32]] = field(default_factory=list, repr=False)  # one row per token, if asked for
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # one for each token, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # from the second token on, likewise
    num_prompt_tokens: int = 0
    num_l1_tokens: int = 0  # of the prompt: found in L1
    num_external_tokens: int = 0  # of the prompt: loaded from the tiers below
    num_segment_tokens: int = 0  # of the prompt: taken from segments
    num_repaired_tokens: int = 0  # of those from segments: computed anew
    ttft: float | None = None  # seconds from arrival to the first token

    def add(self, output: Output) -> None:
        """One more step's."""
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        if output.logits is not None:
            self.logits.append(output.logits)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        self.finish_reason = output.finish_reason

    def account(self, request: Sequence) -> None:
        """Take over what the request's end left of it."""
        self.num_l1_tokens = request.num_l1_tokens
        self.num_external_tokens = request.num_external_tokens
        self.num_segment_tokens = request.num_segment_tokens
        self.num_repaired_tokens = request.num_repaired_tokens
        self.ttft = request.ttft
        if request.scores is not None:
            self.prompt_logprobs = [request.scores[position] for position in sorted(request.scores)]
