"""Decides which replica a request goes to. Pure functions: no clock, no I/O, no state between calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import xxhash

from kvtier.service.observe import ReplicaScore
from kvtier.tiers import TIERS

# The share of a block's compute that is saved if a tier holds it; benchmarks/ttft.py measures the cost of loading.
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({kind.medium: kind.weight for kind in TIERS.values()})
# Both are tuned by benchmarks/routing.py. A request that waits behind other work loses that time only. A second copy
# of a prefix costs compute, and room for its blocks. So waiting work weighs less than work to do.
LOAD_WEIGHT: Final = 0.1  # weight of a block of waiting work; a block to compute weighs 1
CROWD: Final = 16.0  # extra requests that a replica may have; each time as many again weigh a whole prompt
FEW: Final = 8  # requests at a replica that never count as a crowd
SPREAD: Final = 1.25  # times the mean number of requests; a replica with more takes no session
_CLOSE: Final = 1e-6  # blocks of work; sums in another order may differ by this much


class Reason(StrEnum):
    PREFIX = "prefix"  # it holds more of the prompt than any other
    NEARER = "nearer"  # its part of the prompt is in a faster tier: worth more, even if not longer
    LOAD = "load"  # another's blocks are worth as much or more, but this one has less to do
    EQUAL = "equal"  # several are equally good: they take turns
    ONLY = "only"  # no other can take a request
    UNSURE = "unsure"  # it is not known what any replica holds: they take turns
    SESSION = "session"  # its session belongs to this replica
    FULL = "full"  # none chosen: every live replica is at its limit
    DEAD = "dead"  # none chosen: no replica is alive


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    prefix: Mapping[str, int]  # blocks of the prompt's longest prefix that it need not compute, by medium
    load: float  # blocks of work given to it and not finished
    limit: float = float("inf")  # upper limit of `load`; at the limit the replica is full
    num_requests: int = 0  # requests given to it and not finished
    is_alive: bool = True
    is_sure: bool = True  # its events are up to date, so `prefix` can be believed

    @property
    def can_take(self) -> bool:
        return self.is_alive and self.load < self.limit


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why; `name` is None if no replica can take it."""

    name: str | None
    reason: Reason
    scores: Sequence[ReplicaScore]  # in the order of the candidates


def choose(
    replicas: Sequence[Candidate],
    num_blocks: int,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    load_weight: float = LOAD_WEIGHT,
    crowd: float = CROWD,
    turn: int = 0,
) -> Choice:
    """Choose the replica with the least work before the prompt's first token.

    Work is a sum of three parts. First the prompt's blocks, less what the cached prefix saves by `weights`; a medium
    without a weight saves nothing. Second the replica's present work, times `load_weight`. Third a penalty for crowds:
    for each `crowd` requests more than the replica with the fewest has, beyond the first `crowd`, the prompt counts
    once more. So a prefix that all requests share comes to be held by several replicas.

    Equally good replicas take turns by `turn`, the number of the request. A prefix counts only if the replica is sure
    of it. If no replica is sure, all take turns.
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


def sticky(replicas: Sequence[Candidate], session: bytes, *, spread: float = float("inf")) -> Choice:
    """Send all requests of a session to one replica, whatever it holds; if that is full or down, to a fixed next one.

    The choice is rendezvous hashing: when a replica comes or goes, only the sessions that must move do. A replica with
    at least `FEW` requests and `spread` times the mean takes no more sessions: they go to the next replica in their
    order. This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). So a session that
    everybody asks for overloads no replica.
    """
    scores = [_score(replica, replica.load) for replica in replicas]
    able = {replica.name: replica.num_requests for replica in replicas if replica.can_take}
    if len(able) <= 1:
        return _no_choice(replicas, scores)
    most = max(FEW, spread * (sum(able.values()) + 1) / len(able))
    ranks = {name: xxhash.xxh3_64_intdigest(session, xxhash.xxh3_64_intdigest(name.encode())) for name in able}
    ranked = sorted(able, key=ranks.__getitem__, reverse=True)
    chosen = next(name for name in ranked if able[name] < most)  # there is one: the fewest are less than the mean
    return Choice(chosen, Reason.SESSION if chosen == ranked[0] else Reason.LOAD, scores)


def choose_or_stick(
    replicas: Sequence[Candidate],
    num_blocks: int,
    session: bytes | None,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    turn: int = 0,
) -> Choice:
    """`choose`, or `sticky` for a session if it is not known what any replica holds that can take it."""
    if session is None or any(each.is_sure and each.can_take for each in replicas):
        return choose(replicas, num_blocks, weights=weights, turn=turn)
    return sticky(replicas, session, spread=SPREAD)


def _believed(replica: Candidate) -> Mapping[str, int]:
    return replica.prefix if replica.is_sure else {}


def _score(replica: Candidate, work: float) -> ReplicaScore:
    cached = sum(_believed(replica).values())
    return ReplicaScore(replica.name, cached, replica.load, work if replica.can_take else None)


def _no_choice(replicas: Sequence[Candidate], scores: Sequence[ReplicaScore]) -> Choice:
    for replica in replicas:
        if replica.can_take:
            return Choice(replica.name, Reason.ONLY, scores)
    return Choice(None, Reason.FULL if any(replica.is_alive for replica in replicas) else Reason.DEAD, scores)
