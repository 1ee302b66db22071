"""What a call of `generate` tells the tiers when it has ended: one end for each prompt."""

from collections.abc import Sequence

from kvtier.connector import Answered
from kvtier.connector.transformers.tier_blocks import PromptRow
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.reuse import Hint


def tell_ends(
    tiers: CacheTiers, rows: Sequence[PromptRow], num_outputs: Sequence[int], hint: Hint | None, seconds: float
) -> None:
    """Tell of each row that its request ended: so many tokens were answered, `seconds` after the call began.

    The rows' chains have what was stored of the answers by now. Of several answers to one prompt, the first counts.
    """
    for row, num_output in zip(rows, num_outputs, strict=True):
        tiers.ended(Answered(len(row.token_ids), num_output, hint, seconds=seconds).end_of(row.chain))
    tiers.tick()  # nobody else sends it
