"""What the hierarchy decides by: write policy, admission, deadlines, queue bounds."""

from dataclasses import dataclass
from typing import Literal

WritePolicy = Literal["write_through", "write_back"]


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    """Values of the configuration, as the hierarchy uses them; see docs/configuration.md."""

    write_policy: WritePolicy = "write_through"
    admit_after: int | Literal["auto"] = 1  # sightings of a block before it is stored; auto: `admission.py`
    store_queue: int | None = None  # bytes leased while they wait for each lower tier; None: a quarter of L2
    prefetch_deadline: float = 2.0  # seconds a request waits for lower tiers
    lease_deadline: float = 60.0  # seconds a promise is kept that nobody asks about
    clean_share: float = 0.25  # write-back: the share of L2 that is kept free or clean for instant eviction
