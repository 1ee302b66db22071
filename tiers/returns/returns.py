"""Returns: takes in the ends of requests, and says which idle blocks are needed least."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.returns.ends import Hint, RequestEnd, ToldEnd
from kvtier.tiers.returns.hazards import NUM_AGES, Hazards, age_of, class_of, expected
from kvtier.tiers.returns.rival import LruRival
from kvtier.tiers.returns.tails import NOBODY, TAIL_NAMES, FoundTail, RequestTails, Tags
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
        self.tails = RequestTails()
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
        found, own = self.tails.find(tags, now - end.seconds), 0
        if are_known is not None:
            own = int(np.count_nonzero(are_known[: found.num_common if found.user else len(tags)]))
        num_blocks = None if are_known is None else len(are_known)
        return self.heard(end, found, own, num_blocks, len(tags), tail_tags[-TAIL_NAMES:].tolist(), now, clock)

    def heard(
        self,
        end: RequestEnd,
        found: FoundTail,
        own: int,
        num_blocks: int | None,
        num_asked: int,
        last_tags: Sequence[int],
        now: float,
        clock: Callable[[], float],
    ) -> ToldEnd:
        """As `note`, of a request whose prompt of `num_asked` full blocks is known by `found`.

        `own`: its blocks that were here, as `LruRival.ended` has them, of `num_blocks`; None: nobody knows.
        `last_tags`: the tags of the last TAIL_NAMES of its `tail_names`.
        """
        if self._learned_at is None:
            self._learned_at = now
        tails, turn, (row, user, num_common) = self.tails, 0, found
        number = tails.next_number if last_tags else 0
        if self._rival is not None and num_blocks is not None and number:
            self._rival.ended(number, num_blocks, user, num_common, num_asked, own)
        if row != NOBODY:
            turn, is_next = tails.turn_of(row, now - end.seconds, last_tags)
            if is_next:
                self._came_back(row, now)
        hint, promises = end.hint, end.hint in _PROMISES
        account = account_of(end.client, is_derived=end.is_derived)
        if promises and not self._trust.is_heard(account):
            hint = None
        kind = class_of(turn, end.num_output_tokens, _HINTS[hint])
        if number:
            judged = account + 1 if promises else 0  # 0: nobody is judged for it
            tails.add(last_tags, now, kind=kind, turn=turn, account=judged)
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
        if (returned := self.tails.came_back(row)) is not None:
            kind, ended_at, account = returned
            self._back.append((kind, ended_at, now, account))
            if account:
                self._trust.returned(account - 1)

    def _learn(self, now: float) -> None:
        assert self._learned_at is not None
        seconds = max(0.0, now - self._learned_at)
        self._hazards.fade(seconds)
        self._trust.fade(seconds)
        tails, rows = self.tails, self.tails.waiting()
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
        start, end = since - ended, np.maximum(since, until) - ended
        self._hazards.waited(kinds, start, end)
        said = accounts > 0
        if said.any():
            promised = expected(self._hazards.unhinted, start[said], end[said])
            self._trust.waited(accounts[said] - 1, promised)
