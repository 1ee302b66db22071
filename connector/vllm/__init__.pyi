from .connector import KVTierConnector
from .encoder_connector import KVTierECConnector
from .keys import OwnChain
from .slots import GroupLane, SlotPlan, engine_blocks
from .tier import KVTierSecondaryTier

__all__ = [
    "GroupLane",
    "KVTierConnector",
    "KVTierECConnector",
    "KVTierSecondaryTier",
    "OwnChain",
    "SlotPlan",
    "engine_blocks",
]
