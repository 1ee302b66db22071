"""Returns: takes in the ends of requests, and says which idle blocks are needed least."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.returns.ends import Hint, RequestEnd
from kvtier.tiers.returns.hazards import Hazards, age_of, class_of, spans_of
from kvtier.tiers.returns.tails import NOBODY, RequestTails, Tags
from kvtier.tiers.returns.trust import HintTrust, account_of

_HINTS: Final = {None: 0, Hint.GOES_ON: 1, Hint.TOOL: 2, Hint.FINISHED: 3}
_PROMISES: Final = (Hint.GOES_ON, Hint.TOOL)  # what keeps blocks longer, so that others' go earlier
_FIRST_LEARN, _LAST_LEARN = 64, 1024  # ends between two lessons: more and more, as one more end tells less and less
_LONGEST: Final = 3600.0  # seconds after which a request counts as gone for good


class Returns:
    """What was learned of how requests return. Bounded memory, no object for each request. Takes no lock."""

    def __init__(self) -> None:
        self._tails = RequestTails()
        self._hazards = Hazards()
        self._trust = HintTrust()
        self._since = 0  # ends since the last lesson
        self._lesson = _FIRST_LEARN
        self._learned_at: float | None = None

    def note(self, end: RequestEnd, tags: Tags, tail_tags: Tags, now: float) -> int:
        """A request has ended; `tags` are its prompt's full blocks in chain order, `tail_tags` those of `tail_names`.

        Returns its class.
        """
        if self._learned_at is None:
            self._learned_at = now
        turn, row = 0, self._tails.continued_by(tags, now - end.seconds)
        if row != NOBODY:
            turn = int(self._tails.turn[row])
            if self._tails.ended_at[row] <= now - end.seconds:
                turn += 1
                self._came_back(row, now)
            else:  # it ran beside it: another try or choice of the same turn
                self._tails.is_open[row] &= not self._tails.is_twin(row, tail_tags)
        hint, promises = end.hint, end.hint in _PROMISES
        account = account_of(end.client, is_derived=end.is_derived)
        if promises and not self._trust.is_heard(account):
            hint = None
        kind = class_of(turn, end.num_output_tokens, _HINTS[hint])
        if len(tail_tags):
            judged = account + 1 if promises else 0  # 0: nobody is judged for it
            self._tails.add(tail_tags, now, kind=kind, turn=turn, account=judged)
        self._since += 1
        if self._since >= self._lesson:
            self._learn(now)
        return kind

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Where blocks of these classes (UNTOLD is one) stand that are so old: lower goes earlier."""
        places: NDArray[np.int64] = self._hazards.places[kinds, age_of(seconds)]
        return places

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: requests that returned after so long, as `Hazards.gaps`."""
        return self._hazards.gaps()

    def _came_back(self, row: int, now: float) -> None:
        tails = self._tails
        if tails.is_open[row]:
            tails.is_open[row] = False
            self._waits(np.array([row]), now)
            self._hazards.returned(int(tails.kind[row]), now - float(tails.ended_at[row]))
            if tails.account[row]:
                self._trust.returned(int(tails.account[row]) - 1)

    def _learn(self, now: float) -> None:
        assert self._learned_at is not None
        seconds = max(0.0, now - self._learned_at)
        self._hazards.fade(seconds)
        self._trust.fade(seconds)
        rows = self._tails.waiting()
        self._waits(rows, now)
        self._tails.is_open[rows[now - self._tails.ended_at[rows] > _LONGEST]] = False
        self._learned_at = now
        self._hazards.learn()
        self._since, self._lesson = 0, min(2 * self._lesson, _LAST_LEARN)

    def _waits(self, rows: NDArray[np.intp], now: float) -> None:
        """Count what these requests waited since the last lesson."""
        assert self._learned_at is not None
        ended = self._tails.ended_at[rows]
        since = np.maximum(ended, self._learned_at)
        spans = spans_of(since - ended, np.maximum(since, now) - ended)
        self._hazards.waited(self._tails.kind[rows].astype(np.int64), spans)
        said = self._tails.account[rows] > 0
        if said.any():
            usual = spans[said] @ self._hazards.unhinted
            self._trust.waited(self._tails.account[rows[said]].astype(np.int64) - 1, usual)
