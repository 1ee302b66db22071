"""An engine's status as a page of text, for `kvtier status`."""

from collections.abc import Iterable

from kvtier.service.observe.statuses import BlockFigures, EngineStatus
from kvtier.service.observe.summary import counts, hit_share, row, wanting


def page(status: EngineStatus) -> str:
    """The whole page. Ends with a newline."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: EngineStatus) -> Iterable[str]:
    requests, tokens, l1 = status.requests, status.tokens, status.l1
    yield f"kvtier {status.version} engine of {status.model}, pid {status.pid}: {status.status}"
    yield from wanting(status.wanting)
    size = f"blocks of {status.block_size} tokens, requests of up to {status.max_model_len:,}"
    yield row("model", f"{status.fingerprint[:16]}: {size}")
    waiting = f"{requests.running} running, {requests.loading} loading, {requests.waiting} waiting"
    yield row("requests", f"{requests.live} of {requests.capacity}: {waiting}; ended {counts(status.outcomes)}")
    yield row("refused", f"{counts(status.refused)}; preempted {status.preempted}")
    yield row("L1", f"{l1.blocks - l1.free} of {l1.blocks} blocks used")
    yield row("tokens", f"{tokens.prompt_tokens:,} of prompts, {tokens.computed_tokens:,} computed")
    yield row("answers", f"{tokens.generated_tokens:,} tokens")
    yield row("cached", f"tokens {counts(status.cached_tokens)}")
    yield row("steps", f"{status.steps.done:,}, {status.steps.failed} failed")
    if status.tiers is not None:
        yield from _tiers(status.tiers)


def _tiers(tiers: BlockFigures) -> Iterable[str]:
    """Of the tiers that are the engine's own, or as it sees its daemon's."""
    lookups = tiers.lookups
    yield row("lookups", f"{sum(lookups.values())} blocks, {hit_share(lookups):.1%} found; {counts(lookups)}")
    yield row("not served", counts(tiers.missed))
    yield row("stored", f"{counts(tiers.stored)}; evicted {counts(tiers.evicted)}")
