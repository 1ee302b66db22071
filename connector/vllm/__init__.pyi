from .connector import KVTierConnector
from .keys import OwnChain
from .slots import GroupLane, SlotPlan, engine_blocks
from .tier import KVTierSecondaryTier

__all__ = [
    "GroupLane",
    "KVTierConnector",
    "KVTierSecondaryTier",
    "OwnChain",
    "SlotPlan",
    "engine_blocks",
]
