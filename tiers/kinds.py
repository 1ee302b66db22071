"""The one table of tiers: what counters, pages, KV events, the router and answers call each, and who opens it."""

from dataclasses import dataclass
from typing import Final

L1: Final = "l1"  # the engine's own blocks, on its device
L2: Final = "l2"  # host memory
MISS: Final = "miss"  # the counters' word for a block that no tier had


@dataclass(frozen=True, slots=True)
class TierKind:
    """One tier, as everything outside its own folder knows it.

    No two have the same name, label or medium: a reader of KV events tells them apart by the medium alone.
    """

    name: str  # in counters, JSON and log lines; a tier with options has them in the section of this name
    label: str  # in an answer's usage
    shown: str  # to people, on the live pages
    medium: str  # in KV events, in the words of vLLM where it has one
    weight: float  # the share of computing a block that finding it here saves: where routing starts from
    aliases: tuple[str, ...] = ()  # what other publishers of KV events call the medium
    is_shared: bool = False  # nodes share it: what one has stored there, all can load
    takes_fp8: bool = False  # [cache] lossy counts for it: blocks are packed before it has them
    module: str | None = None  # of a lower tier: the module that opens it, a `TierModule` (`hierarchy/opening.py`)


# benchmarks/ttft.py measures what loading costs, from which the weights come.
_ROWS: Final = (
    TierKind(L1, "L1", "L1 device", "GPU", 1.0),
    TierKind(L2, "L2", "host memory", "CPU", 0.9, aliases=("CPU_PINNED",)),
    TierKind("file", "file", "file", "STORAGE", 0.8, aliases=("DISK", "NVME"), module="kvtier.tiers.file.opening"),
    TierKind("peers", "peers", "other nodes", "PEER", 0.7, is_shared=True, module="kvtier.tiers.peers.opening"),
    TierKind(
        "redis",
        "redis",
        "Redis",
        "EXTERNAL",
        0.6,
        is_shared=True,
        takes_fp8=True,
        module="kvtier.tiers.redis.opening",
    ),
    # its weight was not measured: its first byte comes later than that of Redis
    TierKind(
        "objects",
        "objects",
        "object store",
        "OBJECT",
        0.4,
        is_shared=True,
        takes_fp8=True,
        module="kvtier.tiers.objects.opening",
    ),
)

TIERS: Final[dict[str, TierKind]] = {row.name: row for row in _ROWS}
"""Every tier by name, nearest to the engine first. Read it at use, not at import."""


def lookup_results() -> tuple[str, ...]:
    """Where a block that was looked up may have been found: every tier, nearest first, and last `MISS`."""
    return (*TIERS, MISS)


def lower_tiers() -> list[TierKind]:
    """The tiers below L2, nearest first."""
    return [kind for kind in TIERS.values() if kind.module is not None]


def tier_captions() -> list[dict[str, str | bool]]:
    """What a status says to the live page about the tiers, nearest first: the page knows none by itself."""
    return [
        {
            "name": kind.name,
            "label": kind.label,
            "shown": kind.shown,
            "medium": kind.medium,
            "lower": kind.module is not None,
        }
        for kind in TIERS.values()
    ]
