"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

from typing import Final

from kvtier.connector.greetings import Hello
from kvtier.connector.remote import RemoteTiers
from kvtier.tiers.below import TiersBelow
from kvtier.tiers.config import Config
from kvtier.tiers.local_tiers import LocalTiers
from kvtier.tiers.opening import Blocks, open_hierarchy

_GRACE: Final = 0.5  # seconds the daemon's answer may come after its own deadline


def open_tiers(config: Config, fingerprint: bytes, shape: Blocks) -> TiersBelow:
    """The daemon's where `[service] socket` names it, else tiers of our own; raises as `open_hierarchy`."""
    service = config.service
    if service.socket is not None:
        hello = Hello(fingerprint, shape.block_size, shape.block_bytes, config.host.size, reset=False)
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    return LocalTiers(open_hierarchy(config, fingerprint, shape))
