"""Returns: takes in the ends of requests, and says which idle blocks are needed least."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.returns.ends import Hint, RequestEnd, ToldEnd
from kvtier.tiers.returns.hazards import NUM_AGES, Hazards, age_of, class_of, spans_of
from kvtier.tiers.returns.rival import LruRival
from kvtier.tiers.returns.tails import NOBODY, RequestTails, Tags
from kvtier.tiers.returns.trust import HintTrust, account_of

Kinds = NDArray[np.int64]
Seconds = NDArray[np.float64]

_HINTS: Final = {None: 0, Hint.GOES_ON: 1, Hint.TOOL: 2, Hint.FINISHED: 3}
_PROMISES: Final = (Hint.GOES_ON, Hint.TOOL)  # what keeps blocks longer, so that others' go earlier
_FIRST_LEARN, _LAST_LEARN = 64, 1024  # ends between two lessons: more and more, as one more end tells less and less
_LONGEST: Final = 3600.0  # seconds after which a request counts as gone for good


class Returns:
    """What was learned of how requests return. Bounded memory, no object for each request. Takes no lock."""

    def __init__(self, rival: LruRival | None = None) -> None:
        """`rival`: hears of every end, too."""
        self._rival = rival
        self._tails = RequestTails()
        self._hazards = Hazards()
        self._trust = HintTrust()
        self._back: list[tuple[int, float, float, int]] = []  # since the last lesson: class, end, return, account
        self._since = 0  # ends since the last lesson
        self._lesson = _FIRST_LEARN
        self._learned_at: float | None = None

    def note(
        self,
        end: RequestEnd,
        tags: Tags,
        tail_tags: Tags,
        now: float,
        are_known: NDArray[np.bool_] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> ToldEnd:
        """A request has ended; `tags` are its prompt's full blocks in chain order, `tail_tags` those of `tail_names`.

        `are_known`: which of all its blocks are here, and were so when an earlier request ended. `now` is by
        `clock`.
        """
        if self._learned_at is None:
            self._learned_at = now
        number = self._tails.next_number if len(tail_tags) else 0
        turn, (row, user, num_common) = 0, self._tails.find(tags, now - end.seconds)
        if self._rival is not None and are_known is not None and number:
            own = int(np.count_nonzero(are_known[: num_common if user else len(tags)]))
            self._rival.ended(number, len(are_known), user, num_common, len(tags), own)
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
        if number:
            judged = account + 1 if promises else 0  # 0: nobody is judged for it
            self._tails.add(tail_tags, now, kind=kind, turn=turn, account=judged)
        self._since += 1
        if self._since >= self._lesson:
            self._learn(now)
        return ToldEnd(end.names, end.num_prompt, kind, number, user, num_common, now, self, clock)

    def places(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Where blocks of these classes (UNTOLD is one) stand that are so old: lower goes earlier."""
        places: NDArray[np.int64] = self._hazards.places[kinds, age_of(seconds)]
        return places

    def ahead(self, kind: int) -> float:
        """As `ReturnOrder`."""
        return self._hazards.ahead(kind)

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: requests that returned after so long, as `Hazards.gaps`; those since the last lesson, too."""
        lately = np.array([until - ended for _, ended, until, _ in list(self._back)])
        seen: NDArray[np.float64] = self._hazards.gaps() + np.bincount(age_of(lately), minlength=NUM_AGES)
        return seen

    def _came_back(self, row: int, now: float) -> None:
        tails = self._tails
        if tails.is_open[row]:
            tails.is_open[row] = False
            account = int(tails.account[row])
            self._back.append((int(tails.kind[row]), float(tails.ended_at[row]), now, account))
            if account:
                self._trust.returned(account - 1)

    def _learn(self, now: float) -> None:
        assert self._learned_at is not None
        seconds = max(0.0, now - self._learned_at)
        self._hazards.fade(seconds)
        self._trust.fade(seconds)
        tails, rows = self._tails, self._tails.waiting()
        kinds, ended, until, accounts = np.array(self._back, np.float64).reshape(-1, 4).T
        self._back.clear()
        self._hazards.returned(kinds.astype(np.int64), until - ended)
        self._waits(
            np.append(kinds, tails.kind[rows]).astype(np.int64),
            np.append(ended, tails.ended_at[rows]),
            np.append(until, np.full(len(rows), now)),
            np.append(accounts, tails.account[rows]).astype(np.int64),
        )
        tails.is_open[rows[now - tails.ended_at[rows] > _LONGEST]] = False
        self._learned_at = now
        self._hazards.learn()
        self._since, self._lesson = 0, min(2 * self._lesson, _LAST_LEARN)

    def _waits(self, kinds: Kinds, ended: Seconds, until: Seconds, accounts: Kinds) -> None:
        """Count what these requests waited since the last lesson. `accounts`: 0, or one more than the account."""
        assert self._learned_at is not None
        since = np.maximum(ended, self._learned_at)
        spans = spans_of(since - ended, np.maximum(since, until) - ended)
        self._hazards.waited(kinds, spans)
        said = accounts > 0
        if said.any():
            self._trust.waited(accounts[said] - 1, spans[said] @ self._hazards.unhinted)
