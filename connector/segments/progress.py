"""How far one request's blend has come: which tokens it repairs, what it does next, and what that takes. No model."""

from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connector.segments.paged_attention import uploaded
from kvtier.connector.segments.segment import BlendRequest, ReusedPart

Positions = NDArray[np.int64]
"""Positions in a prompt, rising."""

_SEED: Final = 5  # of "random": equal requests are repaired alike


def highest(candidates: Positions, scores: NDArray[np.floating], share: float) -> Positions:
    """The share of the candidates that scores highest; `scores` has one for each. Of equal ones, the earliest."""
    chosen = np.argsort(-scores, kind="stable")[: count(share, len(candidates))]
    return np.sort(candidates[chosen])


def drawn(candidates: Positions, share: float) -> Positions:
    """A random share, the same for the same number of candidates."""
    generator = np.random.default_rng((_SEED, len(candidates)))
    return np.sort(generator.choice(candidates, count(share, len(candidates)), replace=False))


def first_of(parts: Iterable[Positions], share: float) -> Positions:
    """The share of every part that it begins with."""
    return np.concatenate([part[: count(share, len(part))] for part in parts])


def borders_of(parts: Iterable[Positions], share: float) -> Positions:
    """The share of every part, half of it at its beginning and half at its end."""
    return np.concatenate([_both_ends(part, count(share, len(part))) for part in parts])


def _both_ends(part: Positions, number: int) -> Positions:
    return np.concatenate([part[: number - number // 2], part[len(part) - number // 2 :]])


def count(share: float, number: int) -> int:
    """How many of so many."""
    return round(share * number)


_COPIES: Final = 16  # tokens are copied for the price of one that is computed; on a GPU it could be ten times as many
_COMPARISONS: Final = 64  # … or compared: that takes K and V of one layer
_TINY: Final = 1e-20  # keeps a division by nothing from raising


@dataclass(frozen=True, slots=True)
class BlendResult:
    """What one request's blend came to. `deviation` is of what was left unrepaired, None where nobody measured it."""

    num_reused: int
    num_repaired: int  # of the reused
    num_computed: int  # rows that went through all layers, the repaired ones among them
    deviation: float | None = None
    fell_back: bool = False  # it was too large: everything was computed


class Work(Enum):
    """What a blend does next."""

    COPY = "copy"  # what was brought, to its place
    CHECK = "check"  # every row through the layers before the check layer: that needs no segment
    COMPARE = "compare"  # K and V at the check layer with the copied ones
    ASK = "ask"  # what was not copied through all layers, to see what the question attends to
    CHOOSE = "choose"  # which rows are repaired
    REPAIR = "repair"  # these, and what was not copied, through the layers that are left
    WAIT = "wait"  # for segments that are still to be brought
    NOTHING = "nothing"  # it is done


class Blend:
    """One request's blend, made by `Blender.begin`. Between two of its pieces anything may happen, or it is dropped.

    Nobody else writes the blocks of its table, nor those of the parts until `has_copied`. It keeps hidden states: of
    the rows that were checked, later of those that go on, so at most one row for each token. Work has a price: a row
    through one layer costs `_COMPARISONS`, and `unit` is a token through all of them.
    """

    def __init__(self, request: BlendRequest, num_layers: int, slots: NDArray[np.int64]) -> None:
        """`slots`: where K of layer 0 goes, for each token."""
        self.request = request
        self.repair = repair = request.repair
        self.slots = slots
        self.unit = num_layers * _COMPARISONS
        self.first, self.end = request.num_computed, len(request.token_ids) - 1  # the last token is the next step's
        self.is_checked = repair.rule == "deviation" and 0 < repair.share < 1  # compared before anything is chosen
        self.asks = repair.rule == "question" and 0 < repair.share < 1
        self.num_kept_layers = repair.check_layer if self.is_checked else 0  # first layers, that are never copied
        self.states: torch.Tensor | None = None  # [rows, hidden] of `places(CHECK)`, later of `places(REPAIR)`
        self.candidates: Positions = np.zeros(0, np.int64)  # tokens that are copied, once all of them are known
        self.compared: list[torch.Tensor] = []  # [4, candidates]: squared differences of K and V; squares of the copies
        self.attended: torch.Tensor | None = None  # what each key gets of the question's attention
        self._parts: list[ReusedPart] = []
        self._copies: deque[ReusedPart] = deque()  # what is left to copy
        self._is_whole = False  # no other part will be brought
        self._places: dict[Work, Positions] = {}
        if self.is_checked:
            self._places[Work.CHECK] = np.arange(self.first, self.end)
        self._taken = dict.fromkeys(Work, 0)  # of these places
        self._missing: Positions = self.candidates  # behind `first` and not copied
        self._repaired: Positions | None = None  # of the candidates, once they are chosen
        self._deviation: float | None = None
        self._fell_back = False
        self._prices = {
            Work.COPY: self.unit // _COPIES,
            Work.CHECK: self.num_kept_layers * _COMPARISONS,
            Work.COMPARE: self.unit // _COMPARISONS,
            Work.ASK: self.unit,
            Work.REPAIR: self.unit - self.num_kept_layers * _COMPARISONS,
        }
        if request.parts is not None:
            self.bring(request.parts, whole=True)

    @property
    def work(self) -> Work:
        if self._copies:
            return Work.COPY
        if self._left(Work.CHECK):
            return Work.CHECK
        if not self._is_whole:
            return Work.WAIT
        if self._repaired is None:
            return next((work for work in (Work.COMPARE, Work.ASK) if self._left(work)), Work.CHOOSE)
        return Work.REPAIR if self._left(Work.REPAIR) else Work.NOTHING

    @property
    def has_copied(self) -> bool:
        """Whether nobody needs the blocks of the parts any longer."""
        return self._is_whole and not self._copies

    @property
    def asks_from(self) -> int:
        """Where the question begins: behind the last segment."""
        return max((part.end for part in self._parts), default=0)

    @property
    def num_tokens_left(self) -> int:
        """The price of what is left, the last token's too, or of what can be done before other parts are brought.

        A blend that falls back takes more.
        """
        units = sum(self._left(work) * price for work, price in self._prices.items())
        if self._is_whole and self._repaired is None:
            num_expected = len(self._missing) + count(self.repair.share, len(self.candidates))
            units += num_expected * self._prices[Work.REPAIR]
        return -(-units // self.unit) + self._is_whole

    @property
    def result(self) -> BlendResult | None:
        """What it came to, once it is done."""
        if self._repaired is None or self.work is not Work.NOTHING:
            return None
        num_rows = len(self._places[Work.REPAIR])
        return BlendResult(len(self.candidates), len(self._repaired), num_rows, self._deviation, self._fell_back)

    def bring(self, parts: abc.Sequence[ReusedPart], *, whole: bool) -> None:
        """All parts so far, those that were brought before first. `whole`: there will be no others."""
        if self._is_whole:
            return
        self._copies += parts[len(self._parts) :]
        self._parts = list(parts)
        if not whole:
            return
        self._is_whole = True
        reused = np.zeros(len(self.request.token_ids), bool)
        for part in parts:
            reused[part.start : part.end] = True
        self.candidates = np.flatnonzero(reused)
        missing = np.flatnonzero(~reused[: self.end])
        self._missing = missing[missing >= self.first]
        if self.is_checked:
            self._places[Work.COMPARE] = self.candidates
        if self.asks:
            self._places[Work.ASK] = np.append(self._missing, self.end)

    def affordable(self, work: Work, units: int) -> tuple[int, int]:
        """How many rows or tokens of this work so many units pay for, and what they cost."""
        number = min(self._left(work), units // self._prices[work])
        return number, number * self._prices[work]

    def take(self, work: Work, number: int) -> Positions:
        """The next places of this work. The caller does it."""
        start = self._taken[work]
        self._taken[work] = start + number
        return self._places[work][start : start + number]

    def take_copies(self, number: int) -> list[ReusedPart]:
        """The same of what is to be copied."""
        taken = []
        while number:
            part = self._copies.popleft()
            some = replace(part, end=min(part.end, part.start + number))
            taken.append(some)
            number -= some.end - some.start
            if some.end < part.end:
                self._copies.appendleft(replace(part, start=some.end))
        return taken

    def choose(self) -> None:
        """Decide what is repaired, by what was found. Waits for a device that found it."""
        rule, share = self.repair.rule, self.repair.share
        if self.is_checked:
            self._repaired = self._deviating()
        elif self.asks:
            assert self.attended is not None
            scores = self.attended.double().cpu().numpy()
            self._repaired = highest(self.candidates, scores[self.candidates], share)
        elif share in (0, 1) or not len(self.candidates):
            self._repaired = self.candidates if share else self.candidates[:0]
        elif rule == "random":
            self._repaired = drawn(self.candidates, share)
        else:
            parts = sorted(self._parts, key=lambda part: part.start)
            rows = first_of if rule == "first" else borders_of
            self._repaired = rows([np.arange(part.start, part.end) for part in parts], share)
        self._places[Work.REPAIR] = chosen = np.union1d(self._missing, self._repaired)
        if self.states is not None:
            [kept] = uploaded([chosen - self.first], self.states.device)
            self.states = self.states[kept]
        self.compared, self.attended = [], None

    def _deviating(self) -> Positions:
        """The candidates whose K and V are furthest from computed ones, relative to the mean of the copied ones."""
        if not self.compared:
            return self.candidates
        found = torch.cat(self.compared, 1)
        apart, mean = found[:2], found[2:].mean(1, keepdim=True)
        squares: NDArray[np.float64] = ((apart / (mean + _TINY)).sum(0) / 2).double().cpu().numpy()
        repaired = highest(self.candidates, squares, self.repair.share)
        left = squares[~np.isin(self.candidates, repaired)]
        self._deviation = float(np.sqrt(left.mean())) if len(left) else 0.0
        self._fell_back = self._deviation > self.repair.max_deviation
        return self.candidates if self._fell_back else repaired

    def _left(self, work: Work) -> int:
        if work is Work.COPY:
            return sum(part.end - part.start for part in self._copies)
        return len(self._places.get(work, ())) - self._taken[work]
