"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

from typing import Final

from kvtier.connector.daemon import Hello, RemoteTiers
from kvtier.tiers import BlockShape
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers, open_hierarchy

_GRACE: Final = 0.5  # seconds the daemon's answer may come after its own deadline


def open_tiers(config: Config, fingerprint: bytes, shape: BlockShape) -> CacheTiers:
    """The daemon's if `[service] socket` names one, else tiers of our own; raises as `open_hierarchy`."""
    service = config.service
    if service.socket is not None:
        hello = Hello(fingerprint, shape.block_size, shape.block_bytes, config.host.size, reset=False)
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    return open_hierarchy(config, fingerprint, shape)
