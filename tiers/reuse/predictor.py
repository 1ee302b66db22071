"""ReusePredictor: records the ends of requests, and ranks idle blocks by how likely they are needed again."""

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.compiled import extension
from kvtier.tiers.reuse import recent as interpreted
from kvtier.tiers.reuse.ends import ClassifiedEnd, Hint, RequestEnd

if TYPE_CHECKING:
    from kvtier.tiers.reuse.recent import LruShadow, RecentRequests

_form: Any = extension("kvtier.tiers.reuse.recent_compiled") or interpreted


def make_shadow(num_slots: int, first_stay: float = 0.0) -> "LruShadow":
    """LRU's shadow of so many slots. `first_stay`: blocks looked up before the learned order is tried at all."""
    return cast("LruShadow", _form.LruShadow(num_slots, first_stay))


# --- how likely each class of requests returns at each age -----------------------------------------------------------

NUM_AGES: Final = 28
NUM_TURNS: Final = 6  # first, second, third or fourth, and three of later ones, by their gap
NUM_HEADS: Final = 8  # of beginnings that requests share, by how many did
NUM_ANSWERS: Final = 4  # by length
NUM_HINTS: Final = 4  # none, and those of `Hint`
NUM_REQUEST_CLASSES: Final = NUM_TURNS * NUM_ANSWERS * NUM_HINTS
NUM_CLASSES: Final = NUM_REQUEST_CLASSES + NUM_HEADS
NO_CLASS: Final = NUM_CLASSES  # the row of blocks without a recorded end: as all requests are

_ANSWER_TOKENS: Final = (48, 160, 512)
_GAPS: Final = (14.0, 40.0)  # seconds since the turn before
_HALF_LIFE: Final = 7200.0  # seconds after which an observation counts half
_OLDEST: Final = 4000.0  # seconds that the last, open age counts as
_BELIEF: Final = 3.0  # returns after which a class, a group or all requests weigh as much as their prior

EDGES: Final[NDArray[np.float64]] = np.concatenate([[0.0], 2.0 * 1.36 ** np.arange(NUM_AGES - 1)])  # s, to about 2 h
MOST_AHEAD: Final = float(EDGES[-1])  # seconds
_WIDTHS: Final[NDArray[np.float64]] = np.append(np.diff(EDGES), _OLDEST)
_WHOLE: Final[NDArray[np.float64]] = np.append(np.diff(EDGES), 0.0)  # none goes beyond the last
_MIDDLES: Final[NDArray[np.float64]] = np.append((EDGES[:-1] + EDGES[1:]) / 2, EDGES[-1] * 1.3)
_PRIOR: Final[NDArray[np.float64]] = 0.25 / (_MIDDLES + 20.0)  # returns a second


def class_of(turn: int, num_output_tokens: int, hint: int, gap: float = 0.0) -> int:
    """The class of a request: `turn` from 0, its answer's length, its hint's number (0: none), and its `gap`.

    `gap`: seconds since the turn before. Who came back fast will do so again.
    """
    turns = turn if turn < 2 else 2 if turn < 4 else 3 + bisect_right(_GAPS, gap)
    answer = bisect_right(_ANSWER_TOKENS, num_output_tokens)
    return (turns * NUM_HINTS + hint) * NUM_ANSWERS + answer


def class_of_head(num_requests: int) -> int:
    """The class of a beginning that so many requests shared, one or more."""
    return NUM_REQUEST_CLASSES + min(NUM_HEADS, num_requests.bit_length()) - 1


def age_of(seconds: NDArray[np.float64]) -> NDArray[np.intp]:
    """The number of the age in which each of these lies."""
    return np.searchsorted(EDGES, seconds, "right").clip(1) - 1


def expected(hazard: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[n]`: the returns that a hazard by age predicts from one age to another, both in seconds."""
    until = np.append(0.0, np.cumsum(hazard[:-1] * np.diff(EDGES)))
    at_start, at_end = age_of(start), age_of(end)
    before = until[at_start] + hazard[at_start] * (start - EDGES[at_start])
    return until[at_end] + hazard[at_end] * (end - EDGES[at_end]) - before


class Hazards:
    """Returns and seconds waited, by class and age; and `places`, the order of eviction of idle blocks.

    A class with few observations is drawn towards its group, a group towards all requests. All of them are drawn
    towards a hazard that falls as one over the age. Under that last one alone the order is LRU's.
    """

    def __init__(self) -> None:
        self._returns = np.zeros((NUM_CLASSES, NUM_AGES))
        self._waited = np.zeros((NUM_CLASSES, NUM_AGES))  # request-seconds
        self.all = _PRIOR  # of all requests, returns a second
        self.unhinted = _PRIOR  # of requests without a hint: a promise has to exceed it
        self.places = np.zeros((NUM_CLASSES + 1, NUM_AGES), np.int64)  # lower is evicted earlier
        self.learn()

    def returned(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """Requests of these classes returned at these ages."""
        np.add.at(self._returns, (kinds, age_of(seconds)), 1.0)

    def waited(self, kinds: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
        """Requests of these classes waited from one age to another more, in seconds.

        Only sums by class and age are made, as 65,536 may wait. Each age gets the waits that end in it, less those that
        begin in it, and its whole length for each wait that spans it.
        """
        ends, parts_of_ends = _sums_by_age(kinds, end)
        starts, parts_of_starts = _sums_by_age(kinds, start)
        begun = ends - starts  # by age: those that end there, less those that begin there
        beyond = np.cumsum(begun[:, ::-1], 1)[:, ::-1] - begun
        self._waited += np.maximum(parts_of_ends - parts_of_starts + beyond * _WHOLE, 0.0)

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: returns seen at each age (`EDGES`), of all classes; those of long ago count less."""
        seen: NDArray[np.float64] = self._returns[:NUM_REQUEST_CLASSES].sum(0)
        return seen

    def ahead(self, kind: int) -> float:
        """As `ReturnOrder.ahead`."""
        mine, average = self.places[kind], self.places[NO_CLASS]
        if mine[0] >= average[0]:
            is_below = mine < average[0]
            return float(EDGES[is_below.argmax()]) if is_below.any() else MOST_AHEAD
        is_below = average <= mine[0]
        return -float(EDGES[is_below.argmax()]) if is_below.any() else -MOST_AHEAD

    def fade(self, seconds: float) -> None:
        """Observations so far count less."""
        faded = 0.5 ** (seconds / _HALF_LIFE)
        self._returns *= faded
        self._waited *= faded

    def learn(self) -> None:
        """Compute the order from the observations."""
        hazards = np.vstack([self._shrunk(), self.all])
        index = _gittins(hazards)
        order = np.argsort(index, axis=None, kind="stable")
        self.places.reshape(-1)[order] = np.arange(order.size)

    def _shrunk(self) -> NDArray[np.float64]:
        """Each class's hazard `[classes, ages]`: a gamma-Poisson estimate around its group's, and that around all."""
        heads = self._returns[NUM_REQUEST_CLASSES:], self._waited[NUM_REQUEST_CLASSES:]
        seen, waited = self._returns[:NUM_REQUEST_CLASSES], self._waited[:NUM_REQUEST_CLASSES]
        self.all = (seen.sum(0) + _BELIEF) / (waited.sum(0) + _BELIEF / _PRIOR)
        plain = slice(0, None, NUM_HINTS)  # groups whose hint is none
        shape = (NUM_TURNS * NUM_HINTS, NUM_ANSWERS, NUM_AGES)
        of_groups = seen.reshape(shape).sum(1), waited.reshape(shape).sum(1)
        self.unhinted = _drawn_to(self.all, *(each[plain].sum(0, keepdims=True) for each in of_groups))[0]
        groups = _drawn_to(self.all, *of_groups)
        of_heads = _drawn_to(_drawn_to(self.all, *(each.sum(0, keepdims=True) for each in heads)), *heads)
        return np.vstack([_drawn_to(np.repeat(groups, NUM_ANSWERS, 0), seen, waited), of_heads])


def _sums_by_age(
    kinds: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`[classes, ages]`: how many requests are of each age, and how many seconds above its edge they are together."""
    ages = age_of(seconds)
    cells, shape = kinds * NUM_AGES + ages, (NUM_CLASSES, NUM_AGES)
    counts = np.bincount(cells, minlength=NUM_CLASSES * NUM_AGES)
    sums = np.asarray(np.bincount(cells, seconds - EDGES[ages], NUM_CLASSES * NUM_AGES), np.float64)
    return counts.reshape(shape), sums.reshape(shape)


def _drawn_to(mean: NDArray[np.float64], seen: NDArray[np.float64], waited: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hazards `[n, ages]` around `mean`: first one factor for all ages, then each age by itself."""
    expected = (mean * waited).sum(1, keepdims=True)
    scaled = (seen.sum(1, keepdims=True) + _BELIEF) / (expected + _BELIEF) * mean
    drawn: NDArray[np.float64] = (seen + _BELIEF) / (waited + _BELIEF / scaled)
    return drawn


def _gittins(hazards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Gittins' index (1979): the best chance of a return per second held, over all times at which to evict.

    `hazards` and the result are `[classes, ages]`, returns a second.
    """
    index = np.zeros_like(hazards)
    for age in range(NUM_AGES):
        widths = _WIDTHS[age:].copy()
        widths[0] *= 0.5  # on average it is in the middle of its age
        stays = np.exp(-hazards[:, age:] * widths)
        left = np.cumprod(stays, 1)
        before = np.hstack([np.ones((len(hazards), 1)), left[:, :-1]])
        held = np.cumsum(before * (1 - stays) / hazards[:, age:], 1)
        index[:, age] = ((1 - left) / held).max(1)
    return index


# --- which hints count -----------------------------------------------------------------------------------------------

NUM_CLIENTS: Final = 1024  # further clients share accounts, by their number
NUM_ACCOUNTS: Final = 2 * NUM_CLIENTS  # for hints of clients, then for derived ones
_PROOF: Final = 4.0  # returns that would have come by now, before a client is judged
_TRUST_HALF_LIFE: Final = 1800.0  # seconds after which a client's hint counts half: no judgement is for ever


def account_of(client: int, *, is_derived: bool) -> int:
    """The account of this client's hints of this kind."""
    return client % NUM_CLIENTS + NUM_CLIENTS * is_derived


class HintTrust:
    """Which hints count: a client whose "goes on" proved empty is ignored, until its requests return again.

    A client's hints and those derived from its answers have an account each. It counts the returns of requests that
    should go on, and those expected without a hint.
    """

    def __init__(self) -> None:
        self._returned = np.zeros(NUM_ACCOUNTS)
        self._expected = np.zeros(NUM_ACCOUNTS)

    def is_trusted(self, account: int) -> bool:
        """Whether requests with its promises return more than those without a hint."""
        return bool(self._expected[account] < _PROOF or self._returned[account] >= self._expected[account])

    def returned(self, account: int) -> None:
        """A request with such a promise returned."""
        self._returned[account] += 1

    def waited(self, accounts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
        """Such requests waited, in which `expected` returns each would have been usual."""
        self._expected += np.bincount(accounts, expected, NUM_ACCOUNTS)

    def fade(self, seconds: float) -> None:
        """Observations so far count less."""
        faded = 0.5 ** (seconds / _TRUST_HALF_LIFE)
        self._returned *= faded
        self._expected *= faded


# --- the predictor ---------------------------------------------------------------------------------------------------

Kinds = NDArray[np.int64]
Seconds = NDArray[np.float64]

_HINTS: Final = {None: 0, Hint.GOES_ON: 1, Hint.TOOL: 2, Hint.FINISHED: 3}
_PROMISES: Final = (Hint.GOES_ON, Hint.TOOL)  # keep blocks longer, so that others' are evicted earlier
_FIRST_LEARN, _LAST_LEARN = 64, 1024  # ends between two updates: more and more, as one more end adds less and less
_LONGEST: Final = 3600.0  # seconds after which a request counts as finished


class ReusePredictor:
    """What was learned of how requests return. Bounded memory, no object for each request. Takes no lock."""

    def __init__(self) -> None:
        self.recent = cast("RecentRequests", _form.RecentRequests())
        self._hazards = Hazards()
        self._trust = HintTrust()
        self._back: list[tuple[int, float, float, int]] = []  # since the last update: class, end, return, account
        self._since = 0  # ends since the last update
        self._lesson = _FIRST_LEARN
        self._learned_at: float | None = None

    def record(
        self, end: RequestEnd, tags: NDArray[np.uint64], num_shared: Callable[[int], int], clock: Callable[[], float]
    ) -> ClassifiedEnd:
        """A request has ended, whose names have these tags.

        `num_shared`: the turn, from 0 → leading blocks here that more requests had than a conversation of that turn.
        """
        now, recent = clock(), self.recent
        if self._learned_at is None:
            self._learned_at = now
        turn, gap, num_head, returned = recent.recognise(tags, end.num_prompt, now - end.seconds)
        if returned is not None:
            last_kind, ended_at, promised = returned
            self._back.append((last_kind, ended_at, now, promised))
            if promised:
                self._trust.returned(promised - 1)
        num_sharing = head_kind = 0
        if num_head := num_head or num_shared(turn):
            num_sharing = self._shared_head(int(tags[num_head - 1]), now) + 1
            head_kind = class_of_head(num_sharing)
        hint, judged = end.hint, 0  # no account is judged for it
        if hint in _PROMISES:
            account = account_of(end.client, is_derived=end.is_derived)
            hint, judged = hint if self._trust.is_trusted(account) else None, account + 1
        kind = class_of(turn, end.num_output_tokens, _HINTS[hint], gap)
        recent.add(tags, end.num_prompt, now, kind, turn, judged)
        if num_head:
            recent.add_head(int(tags[num_head - 1]), num_head, num_sharing, head_kind)
        self._since += 1
        if self._since >= self._lesson:
            self._learn(now)
        return ClassifiedEnd(end.names, tags, end.num_prompt, kind, now, self, clock, num_head, head_kind)

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks of blocks of these classes (NO_CLASS is one) and ages in seconds: lower is evicted earlier."""
        places: NDArray[np.int64] = self._hazards.places[kinds, age_of(seconds)]
        return places

    @property
    def place_of_new(self) -> int:
        """The rank of a block that is stored now, before its request's class is known."""
        return int(self._hazards.places[NO_CLASS, 0])

    def ahead(self, kind: int) -> float:
        """As `ReturnOrder`."""
        return self._hazards.ahead(kind)

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: requests that returned after so long, as `Hazards.gaps`; those since the last update, too."""
        lately = np.array([until - ended for _, ended, until, _ in list(self._back)])
        seen: NDArray[np.float64] = self._hazards.gaps() + np.bincount(age_of(lately), minlength=NUM_AGES)
        return seen

    def _shared_head(self, tag: int, now: float) -> int:
        """How many requests shared the beginning whose last block has this tag, before one that does now."""
        if (known := self.recent.head_of(tag)) is None:
            return 0
        kind, ended_at, num_sharing = known
        if kind:
            self._back.append((kind, ended_at, now, 0))
        return num_sharing

    def _learn(self, now: float) -> None:
        assert self._learned_at is not None
        seconds = max(0.0, now - self._learned_at)
        self._hazards.fade(seconds)
        self._trust.fade(seconds)
        recent = self.recent
        rows, heads = recent.waiting(), recent.waiting_heads()
        kinds, ended, until, accounts = np.array(self._back, np.float64).reshape(-1, 4).T
        self._back.clear()
        self._hazards.returned(kinds.astype(np.int64), until - ended)
        self._waits(
            np.concatenate([kinds, recent.kind[rows], recent.head_kind[heads]]).astype(np.int64),
            np.concatenate([ended, recent.ended_at[rows], recent.ended_at[heads]]),
            np.append(until, np.full(len(rows) + len(heads), now)),
            np.concatenate([accounts, recent.account[rows], np.zeros(len(heads))]).astype(np.int64),
        )
        recent.is_open[rows[now - recent.ended_at[rows] > _LONGEST]] = False
        recent.is_head_open[heads[now - recent.ended_at[heads] > _LONGEST]] = False
        self._learned_at = now
        self._hazards.learn()
        self._since, self._lesson = 0, min(2 * self._lesson, _LAST_LEARN)

    def _waits(self, kinds: Kinds, ended: Seconds, until: Seconds, accounts: Kinds) -> None:
        """Count how long these requests waited since the last update. `accounts`: 0, or one more than the account."""
        assert self._learned_at is not None
        since = np.maximum(ended, self._learned_at)
        start, end = since - ended, np.maximum(since, until) - ended
        self._hazards.waited(kinds, start, end)
        judged = accounts > 0
        if judged.any():
            promised = expected(self._hazards.unhinted, start[judged], end[judged])
            self._trust.waited(accounts[judged] - 1, promised)
