"""TraceLine: one request of a trace, whatever the form of the file it was read from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request. Equal `hash_ids` are equal blocks; a chain's come head first, each once.

    What a form does not tell has its default; `None` where zero could be meant.
    """

    timestamp: int  # milliseconds since the trace began
    input_length: int  # tokens
    output_length: int  # tokens; 0 if it was not known
    hash_ids: tuple[int, ...]
    block_size: int | None = None  # tokens
    answer_ids: tuple[int, ...] | None = None  # the full blocks that its answer left behind those of the prompt
    ended: int | None = None  # milliseconds since the trace began
    hint: str | None = None
    tenant: int | None = None
    has_time: bool = True  # whether `timestamp` was told
