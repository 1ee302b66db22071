"""Eviction policies by name: which order of `core.py` a pool has, and what the learned one learns from."""

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from kvtier.tiers.compiled import extension
from kvtier.tiers.config import compiled_setting
from kvtier.tiers.pool import core as interpreted
from kvtier.tiers.reuse import NO_CLASS, ReusePredictor, make_shadow

if TYPE_CHECKING:
    from kvtier.tiers.pool.core import LRU, ChildIndex, Index, Learned, Lease, SlotCore, SlotCounts, SlotLists

logger = logging.getLogger(__name__)

POLICIES: Final = ("lru", "s3fifo", "predicted")
MAX_CHILDREN: Final = 8  # slots that a `ChildIndex` finds of one parent at most
_UNTRIED: Final = (
    3.2  # lookups, in multiples of the slots: before, what was learned of a few requests keeps less than LRU
)


def form() -> Any:
    """The core's module: compiled where it was built, else interpreted, which is said once."""
    if (found := extension("kvtier.tiers.pool.core_compiled")) is None:
        _say_interpreted()
    return found or interpreted


@cache
def _say_interpreted() -> None:
    if compiled_setting() != "off":
        logger.warning(
            "the pool runs interpreted: batches of 1 to 2,048 blocks cost two to ten times the CPU time; "
            "install a C compiler, then kvtier anew"
        )


def lease_type() -> "type[Lease]":
    """What leases are made of: the core's own, in its form."""
    return cast("type[Lease]", form().Lease)


def make_index(num_slots: int) -> "Index":
    """An index of names, empty yet: at most one for each slot 0 … num_slots - 1."""
    return cast("Index", form().Index(num_slots))


def make_child_index(num_slots: int) -> "ChildIndex":
    """An index of parents' names, empty yet, of slots 0 … num_slots - 1."""
    return cast("ChildIndex", form().ChildIndex(num_slots))


def make_slot_counts(num_slots: int) -> "SlotCounts":
    """Counts of slots 0 … num_slots - 1, all 0."""
    return cast("SlotCounts", form().SlotCounts(num_slots))


def make_core(
    num_slots: int, policy: str, max_partial: int | None = None, clock: Callable[[], float] = time.monotonic
) -> "SlotCore":
    """A table of slots 0 … num_slots - 1, evicted by this policy. ValueError for a policy that is not in POLICIES."""
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r}: use one of {', '.join(POLICIES)}")
    core = form()

    def order(lists: "SlotLists", index: "Index") -> "LRU":
        made: LRU
        if policy == "predicted":
            rival = make_shadow(num_slots, _UNTRIED * num_slots)
            made = core.Learned(lists, num_slots, ReusePredictor(), rival, NO_CLASS, clock)
        else:
            made = core.LRU(lists) if policy == "lru" else core.S3FIFO(lists, index)
        return made

    made: SlotCore = core.SlotCore(num_slots, order, max_partial)
    return made


def learned(core: "SlotCore") -> "Learned | None":
    """The core's order, if it is the learned one."""
    order: Any = core.order
    return order if hasattr(order, "returns") else None
