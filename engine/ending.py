"""What a request's end tells of its conversation: what was said, or else what the answer shows."""

import time
from collections import abc
from collections.abc import Callable

from kvtier.connector import Answered
from kvtier.engine.sequence import FinishReason, Sequence
from kvtier.tiers.reuse import Hint

CallsTool = Callable[[abc.Sequence[int]], bool]
"""Whether an answer of these tokens calls a tool."""


def is_call(sequence: Sequence, calls_tool: CallsTool | None) -> bool:
    """Whether an answer that ended by itself calls a tool."""
    return sequence.params.is_call or (calls_tool is not None and calls_tool(sequence.generated))


def answered_of(sequence: Sequence, reason: FinishReason, calls_tool: CallsTool | None) -> Answered | None:
    """What a request came to; None for one without an answer.

    An answer that was cut off calls nothing: nobody runs half a call.
    """
    if not sequence.num_generated:
        return None
    hint, is_derived = sequence.params.hint, False
    if hint is None and reason is FinishReason.STOP:
        hint, is_derived = (Hint.TOOL, True) if is_call(sequence, calls_tool) else (None, False)
    lasted = time.monotonic() - sequence.arrived
    counts = sequence.num_prompt_tokens, sequence.num_generated
    return Answered(*counts, hint, is_derived, lasted, sequence.ttft or 0.0)
