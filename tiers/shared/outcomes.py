"""What becomes of a chain when a block of it could not be stored."""

from kvtier.tiers import Outcome


def cut_off(outcomes: list[Outcome]) -> list[Outcome]:
    """Behind the first failure nobody could reach a block."""
    first = next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.OK), len(outcomes))
    if first == len(outcomes) or outcomes[first] in (Outcome.EPOCH, Outcome.CLOSED):
        return outcomes
    rest = Outcome.FULL if outcomes[first] is Outcome.FULL else Outcome.PARENT_FAILED
    return [*outcomes[: first + 1], *[rest] * (len(outcomes) - first - 1)]
