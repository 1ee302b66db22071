"""The report of a request's end, from which returns are learned: blocks, length of the answer, the client's hint."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, RequestError


class Hint(StrEnum):
    """A client's statement about its conversation, in its request. It counts for as much as such hints proved right."""

    GOES_ON = "goes_on"  # another turn is coming
    TOOL = "tool"  # it waits for a tool's answer, and then goes on
    FINISHED = "finished"  # no more turns


class RequestEnd(NamedTuple):
    """One request has ended. Its leases may outlive it."""

    names: Sequence[ChainHash]  # its full blocks in chain order, the prompt's and then the answer's
    num_prompt: int  # blocks of `names` that are the prompt's
    num_output_tokens: int
    hint: Hint | None = None
    client: int = 0  # the hint's client, by which trust is kept; 0 is the process's own
    is_derived: bool = False  # the hint was derived from the answer, not given
    seconds: float = 0.0  # from the request's arrival to now; 0: not known
    request: str = ""  # its id, for people; "": it has none
    num_prompt_tokens: int = 0  # 0: not known
    ttft: float = 0.0  # seconds from its arrival to its first token; 0: not known


class ReturnOrder(Protocol):
    """The learned order of eviction, as tiers use it. Its methods may be called on any thread."""

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks of blocks whose request had this class and ended so long ago: lower is evicted earlier."""

    def ahead(self, kind: int) -> float:
        """Seconds by which blocks of a request of this class that ends now outlive an average one's.

        Negative if they are evicted earlier; between -MOST_AHEAD and MOST_AHEAD (`predictor.py`).
        """


class ClassifiedEnd(NamedTuple):
    """A request's end with its class, for the tiers below."""

    names: Sequence[ChainHash]  # as of `RequestEnd`
    tags: NDArray[np.uint64]  # the names, a word each (`NAME_MIX`)
    num_prompt: int
    kind: int  # its class
    ended_at: float  # by `clock`, seconds
    order: ReturnOrder
    clock: Callable[[], float]
    num_head: int = 0  # leading blocks that others share
    head_kind: int = 0  # their class


def hint_of(word: str) -> Hint:
    """The hint that a client gave by this word. RequestError for any other word."""
    if word not in list(Hint):
        raise RequestError(f"hint {word!r:.80}: use one of {', '.join(Hint)}")
    return Hint(word)
