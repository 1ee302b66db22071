from .connector import KVTierConnector
from .keys import OwnChain
from .tier import KVTierSecondaryTier

__all__ = [
    "KVTierConnector",
    "KVTierSecondaryTier",
    "OwnChain",
]
