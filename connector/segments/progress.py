"""The progress of one request's blend: which tokens it repairs, its next work, and its cost. Without the model."""

from collections import abc, deque
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.connector.segments.paged_attention import uploaded
from kvtier.connector.segments.segment import AUTO_SHARES, BlendRequest, BlendResult, ReusedPart

Positions = NDArray[np.int64]
"""Positions in a prompt, rising."""

_SEED: Final = 5  # for "random": equal requests get equal repairs


def highest(candidates: Positions, scores: NDArray[np.floating], share: float) -> Positions:
    """The share of the candidates with the highest scores (one for each). Among equal ones, the earliest."""
    chosen = np.argsort(-scores, kind="stable")[: count(share, len(candidates))]
    return np.sort(candidates[chosen])


def chosen_share(squares: NDArray[np.floating]) -> float:
    """The share "auto": that of the tokens with more than `_LARGE` squared deviation, but 5 to 20 %."""
    least, most = (max(1, count(share, len(squares))) for share in AUTO_SHARES)
    return min(max(int((squares > _LARGE).sum()), least), most) / len(squares)


def drawn(candidates: Positions, share: float) -> Positions:
    """A random share; it depends only on the number of candidates."""
    generator = np.random.default_rng((_SEED, len(candidates)))
    return np.sort(generator.choice(candidates, count(share, len(candidates)), replace=False))


def first_of(parts: Iterable[Positions], share: float) -> Positions:
    """The leading share of every part."""
    return np.concatenate([part[: count(share, len(part))] for part in parts])


def borders_of(parts: Iterable[Positions], share: float) -> Positions:
    """A share of every part, half of it from each end."""
    return np.concatenate([_from_both_ends(part, count(share, len(part))) for part in parts])


def _from_both_ends(part: Positions, number: int) -> Positions:
    return np.concatenate([part[: number - number // 2], part[len(part) - number // 2 :]])


def count(share: float, number: int) -> int:
    """The rounded share of a number."""
    return round(share * number)


_COPIES: Final = 16  # tokens copied for the price of one computed; on a GPU it could be ten times as many
_COMPARISONS: Final = 64  # … or compared, which takes K and V of one layer
_TINY: Final = 1e-20  # avoids a division by zero
_LARGE: Final = 0.2  # squared relative deviation from which the share "auto" repairs a token: 0.45 of an average norm


class Work(Enum):
    """A blend's next work."""

    COPY = "copy"  # loaded segments, to the request's blocks
    CHECK = "check"  # every row through the layers before the check layer; needs no segment
    COMPARE = "compare"  # K and V at the check layer, with the copied ones
    ASK = "ask"  # the uncopied rows through all layers, to measure what the question attends to
    CHOOSE = "choose"  # the rows to repair
    REPAIR = "repair"  # those and the uncopied rows, through the remaining layers
    WAIT = "wait"  # for segments that are being loaded
    NOTHING = "nothing"  # done


class Blend:
    """One request's blend, made by `Blender.begin`. It may be paused or dropped between two pieces.

    Nothing else may write the blocks of its table, nor those of the parts until `has_copied`. It keeps hidden states of
    the checked rows, later of those that continue: at most one row per token. Work has a price: a row through one layer
    costs `_COMPARISONS`, and `unit` is the price of a token through all of them.
    """

    def __init__(self, request: BlendRequest, num_layers: int, slots: NDArray[np.int64]) -> None:
        """`slots`: the row of K of layer 0 for each token."""
        self.request = request
        self.repair = repair = request.repair
        self.slots = slots
        self.unit = num_layers * _COMPARISONS
        self.first, self.end = request.num_computed, len(request.token_ids) - 1  # the last token is the next step's
        self.is_checked = repair.rule == "deviation" and repair.measures  # compared before the choice
        self.asks = repair.rule == "question" and repair.measures
        self.num_kept_layers = repair.check_layer if self.is_checked else 0  # first layers, which are always computed
        self.states: torch.Tensor | None = None  # [rows, hidden] of `places(CHECK)`, later of `places(REPAIR)`
        self.candidates: Positions = np.zeros(0, np.int64)  # copied tokens, once all are known
        self.compared: list[torch.Tensor] = []  # [4, candidates]: squared differences of K and V; squares of the copies
        self.attended: torch.Tensor | None = None  # the question's attention to each key
        self._parts: list[ReusedPart] = []
        self._copies: deque[ReusedPart] = deque()  # parts left to copy
        self._is_whole = False  # no more parts will follow
        self._places: dict[Work, Positions] = {}
        if self.is_checked:
            self._places[Work.CHECK] = np.arange(self.first, self.end)
        self._taken = dict.fromkeys(Work, 0)  # number of these places taken
        self._missing: Positions = self.candidates  # after `first` and not copied
        self._repaired: Positions | None = None  # of the candidates, once chosen
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
        """Whether the parts' blocks are no longer needed."""
        return self._is_whole and not self._copies

    @property
    def asks_from(self) -> int:
        """Where the question begins: after the last segment."""
        return max((part.end for part in self._parts), default=0)

    @property
    def num_tokens_left(self) -> int:
        """The price in tokens of the remaining work, or of what can be done without more parts.

        The last token is included. A blend that falls back costs more.
        """
        units = sum(self._left(work) * price for work, price in self._prices.items())
        if self._is_whole and self._repaired is None:
            num_expected = len(self._missing) + count(self.repair.most, len(self.candidates))
            units += num_expected * self._prices[Work.REPAIR]
        return -(-units // self.unit) + self._is_whole

    @property
    def result(self) -> BlendResult | None:
        """The result, once it is done."""
        if self._repaired is None or self.work is not Work.NOTHING:
            return None
        num_rows = len(self._places[Work.REPAIR])
        return BlendResult(len(self.candidates), len(self._repaired), num_rows, self._deviation, self._fell_back)

    def bring(self, parts: abc.Sequence[ReusedPart], *, whole: bool) -> None:
        """Add parts: `parts` are all so far, earlier ones first. `whole`: no more will follow."""
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
        """How many rows or tokens of this work so many units pay for, and their cost."""
        number = min(self._left(work), units // self._prices[work])
        return number, number * self._prices[work]

    def take(self, work: Work, number: int) -> Positions:
        """Take the next places of this work, which the caller does."""
        start = self._taken[work]
        self._taken[work] = start + number
        return self._places[work][start : start + number]

    def take_copies(self, number: int) -> list[ReusedPart]:
        """As `take`, for copies."""
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
        """Choose the rows to repair. Waits for the device's measurements."""
        rule, share = self.repair.rule, self.repair.most
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
        """The candidates whose K and V differ most from computed ones, relative to the mean of the copied ones."""
        if not self.compared:
            return self.candidates
        found = torch.cat(self.compared, 1)
        apart, mean = found[:2], found[2:].mean(1, keepdim=True)
        squares: NDArray[np.float64] = ((apart / (mean + _TINY)).sum(0) / 2).double().cpu().numpy()
        share = chosen_share(squares) if self.repair.share == "auto" else self.repair.share
        repaired = highest(self.candidates, squares, share)
        left = squares[~np.isin(self.candidates, repaired)]
        self._deviation = float(np.sqrt(left.mean())) if len(left) else 0.0
        self._fell_back = self._deviation > self.repair.max_deviation
        return self.candidates if self._fell_back else repaired

    def _left(self, work: Work) -> int:
        if work is Work.COPY:
            return sum(part.end - part.start for part in self._copies)
        return len(self._places.get(work, ())) - self._taken[work]
