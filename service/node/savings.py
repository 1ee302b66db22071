"""Savings: what a model's requests did not have to compute, in tokens and in seconds of prefill."""

from typing import Final

from kvtier.tiers.hierarchy import Rates

MEASURED: Final = "measured"
ASSUMED: Final = "assumed"


class Savings:
    """Counts the blocks that clients took instead of computing them. On the loop's thread; others may read.

    Seconds are what an engine of this model measured last, for so many tokens at that place of a prompt; else what the
    operator assumes. Tokens are counted even if there is neither.
    """

    def __init__(self, rates: Rates, assumed_rate: int | None) -> None:
        """`assumed_rate`: tokens a second of prefill, if no engine has told any."""
        self.rates = rates
        self.assumed_rate = assumed_rate
        self.num_tokens = 0
        self.num_untimed = 0  # of these, no rate was known
        self.seconds = {MEASURED: 0.0, ASSUMED: 0.0}

    @property
    def tokens_per_second(self) -> float | None:
        """Of prefill now, whether measured or assumed."""
        measured = self.rates.tokens_per_second
        return self.assumed_rate if measured is None else measured

    @property
    def is_assumed(self) -> bool:
        return self.rates.tokens_per_second is None and self.assumed_rate is not None

    def took(self, start: int, num_tokens: int) -> None:
        """A request takes the KV of so many tokens, behind its first `start`."""
        self.num_tokens += num_tokens
        if (seconds := self.rates.prefill_seconds(start, num_tokens)) is not None:
            self.seconds[MEASURED] += seconds
        elif self.assumed_rate is not None:
            self.seconds[ASSUMED] += num_tokens / self.assumed_rate
        else:
            self.num_untimed += num_tokens
