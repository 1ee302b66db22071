"""Which replica a request goes to. Pure functions: no clock, no I/O, nothing remembered from one call to the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NamedTuple

import xxhash

# Which share of computing a block is saved by having it in a tier; benchmarks/ttft.py measures what loading costs.
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({"GPU": 1.0, "CPU": 0.9, "STORAGE": 0.8, "EXTERNAL": 0.6})
# Both tuned by benchmarks/routing.py. Waiting behind others' work costs one request its time; computing at a second
# replica what another holds costs all of them, and room for the blocks: so work that waits weighs less than work to do.
LOAD_WEIGHT: Final = 0.1  # of a block of work that waits, where one to compute is 1
CROWD: Final = 16.0  # requests more than elsewhere that are borne; each time as many again weigh a whole prompt
_CLOSE: Final = 1e-6  # blocks of work; sums of the same parts in another order differ by less


class Reason(StrEnum):
    """Why a choice fell as it did."""

    PREFIX = "prefix"  # it holds more of the prompt than any other
    NEARER = "nearer"  # what it holds of the prompt is nearer to its device: worth more, if not more
    LOAD = "load"  # another's blocks are worth as much or more, but it has less to do
    EQUAL = "equal"  # nothing speaks for one of the best: they take turns
    ONLY = "only"  # no other can take a request
    UNSURE = "unsure"  # of none is it known what it holds: they take turns
    TURN = "turn"  # round robin
    SESSION = "session"  # where its session belongs
    FULL = "full"  # nobody: whoever is alive has all the work it may have
    DEAD = "dead"  # nobody: none is alive


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the router sees it now."""

    name: str
    prefix: Mapping[str, int]  # blocks of the prompt's longest prefix it can have without computing, by medium
    load: float  # blocks of work it has been given and not finished
    limit: float = float("inf")  # of `load`: from here on it is full
    num_requests: int = 0  # it has been given and not finished
    is_alive: bool = True
    is_sure: bool = True  # its events are fresh: `prefix` can be believed

    @property
    def can_take(self) -> bool:
        """Whether a request may be sent to it."""
        return self.is_alive and self.load < self.limit


class Score(NamedTuple):
    """What spoke for and against one replica, in blocks."""

    name: str
    cached: int  # of the prompt, in any tier, as far as it is sure
    load: float
    work: float | None  # before the prompt's first token, as estimated: least is best. None: it cannot take a request


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why; `name` is None where nobody can take it."""

    name: str | None
    reason: Reason
    scores: Sequence[Score]  # in the order of the candidates


def choose(
    replicas: Sequence[Candidate],
    num_blocks: int,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    load_weight: float = LOAD_WEIGHT,
    crowd: float = CROWD,
    turn: int = 0,
) -> Choice:
    """Send a prompt of `num_blocks` to where the least work lies before its first token.

    Work is the prompt's blocks, less what its cached prefix saves by `weights` (a medium that has none saves nothing);
    what the replica has to do already, times `load_weight`; and, where it has more requests than the one with the
    fewest, the prompt once more for each `crowd` of them beyond the first: a prefix that all ask for comes to be held
    by several. Among equals it is the turn of number `turn`: the caller counts requests. A prefix nobody is sure of
    counts nothing; where nobody is sure of any, all take turns.
    """
    fewest = min((replica.num_requests for replica in replicas if replica.can_take), default=0)

    def saved(replica: Candidate) -> float:
        return sum(weights.get(medium, 0.0) * count for medium, count in _believed(replica).items())

    def work(replica: Candidate) -> float:
        crowds = max(0.0, (replica.num_requests - fewest) / crowd - 1)
        return replica.load * load_weight + num_blocks * (1 + crowds) - saved(replica)

    scores = [_score(replica, work(replica)) for replica in replicas]
    able = [score for score in scores if score.work is not None]
    if len(able) <= 1:
        return _no_choice(replicas, scores)
    if not any(replica.is_sure and replica.can_take for replica in replicas):
        return Choice(able[turn % len(able)].name, Reason.UNSURE, scores)
    least = min(score.work for score in able if score.work is not None)
    best = [score for score in able if score.work is not None and score.work <= least + _CLOSE]
    chosen = best[turn % len(best)]
    if len(best) > 1:
        return Choice(chosen.name, Reason.EQUAL, scores)
    worth = {replica.name: saved(replica) for replica in replicas if replica.can_take}
    others = [score for score in able if score is not chosen]
    if any(worth[score.name] > worth[chosen.name] - _CLOSE for score in others):
        return Choice(chosen.name, Reason.LOAD, scores)
    has_most = all(score.cached < chosen.cached for score in others)
    return Choice(chosen.name, Reason.PREFIX if has_most else Reason.NEARER, scores)


def round_robin(replicas: Sequence[Candidate], turn: int) -> Choice:
    """Send request number `turn` to the next of those that can take one, whatever they hold."""
    scores = [_score(replica, replica.load) for replica in replicas]
    able = [replica.name for replica in replicas if replica.can_take]
    if len(able) <= 1:
        return _no_choice(replicas, scores)
    return Choice(able[turn % len(able)], Reason.TURN, scores)


def sticky(replicas: Sequence[Candidate], session: bytes) -> Choice:
    """Send all of a session to one replica, whatever it holds; where that can't take it, always to the same other one.

    The choice is made by rendezvous hashing: when a replica comes or goes, only sessions that must move do.
    """
    scores = [_score(replica, replica.load) for replica in replicas]
    able = [replica.name for replica in replicas if replica.can_take]
    if len(able) <= 1:
        return _no_choice(replicas, scores)
    ranks = {name: xxhash.xxh3_64_intdigest(session, xxhash.xxh3_64_intdigest(name.encode())) for name in able}
    return Choice(max(ranks, key=ranks.__getitem__), Reason.SESSION, scores)


def _believed(replica: Candidate) -> Mapping[str, int]:
    return replica.prefix if replica.is_sure else {}


def _score(replica: Candidate, work: float) -> Score:
    return Score(replica.name, sum(_believed(replica).values()), replica.load, work if replica.can_take else None)


def _no_choice(replicas: Sequence[Candidate], scores: Sequence[Score]) -> Choice:
    for replica in replicas:
        if replica.can_take:
            return Choice(replica.name, Reason.ONLY, scores)
    return Choice(None, Reason.FULL if any(replica.is_alive for replica in replicas) else Reason.DEAD, scores)
