"""How one layer weighs the keys it sees: its window or chunk, soft caps and sinks; and attention by that."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What a layer's attention depends on beside Q, K and V."""

    scaling: float
    window: int | None = None  # tokens: a row sees so many, its own included
    chunk: int | None = None  # tokens: a row sees those of its own chunk, which begin at multiples of this
    softcap: float | None = None  # scores are bent below it by a tanh
    sinks: torch.Tensor | None = None  # [heads]: the score of a key that is not there

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """What decides who sees whom."""
        return self.window, self.chunk

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does all of it."""
        return self.softcap is None and self.sinks is None

    def lowest(self, position: int) -> int:
        """The first key that a row at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where the row at position `queries` sees the key at position `keys`; the two are broadcast."""
        sees = keys <= queries
        if self.window is not None:
            sees &= keys > queries - self.window
        return sees if self.chunk is None else sees & (keys >= queries // self.chunk * self.chunk)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rows_a_head: int
    ) -> torch.Tensor:
        """Attention by hand, `[batch, kv heads, rows, head dim]` each; for layers that are not plain.

        Rows are those of the heads of one group below each other, `rows_a_head` of each. Without a mask each row sees
        every key.
        """
        scores = query @ key.transpose(-2, -1) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.view(1, key.shape[1], -1).repeat_interleave(rows_a_head, -1)[..., None]
            scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32)
        if self.sinks is not None:
            weights = weights[..., :-1]
        return weights.to(value.dtype) @ value
