"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

from kvtier.tiers.below import TiersBelow
from kvtier.tiers.config import Config
from kvtier.tiers.local_tiers import LocalTiers
from kvtier.tiers.opening import Blocks, open_hierarchy


def open_tiers(config: Config, fingerprint: bytes, shape: Blocks) -> TiersBelow:
    """The daemon's where `[service] socket` names it, else tiers of our own; raises as `open_hierarchy`."""
    return LocalTiers(open_hierarchy(config, fingerprint, shape))
