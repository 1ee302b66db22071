from .connector import KVTierConnector
from .encoder_connector import KVTierECConnector
from .keys import OwnChain
from .tier import KVTierSecondaryTier

__all__ = [
    "KVTierConnector",
    "KVTierECConnector",
    "KVTierSecondaryTier",
    "OwnChain",
]
