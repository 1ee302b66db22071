"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

from typing import Final

from kvtier.connector.daemon import Hello, RemoteTiers
from kvtier.tiers import BlockShape
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers, open_hierarchy
from kvtier.tiers.naming import ModelIdentity

_GRACE: Final = 0.5  # seconds the daemon's answer may come after its own deadline


def open_tiers(
    config: Config, fingerprint: bytes, shape: BlockShape, identity: ModelIdentity | None = None
) -> CacheTiers:
    """The daemon's if `[service] socket` names one, else tiers of our own; raises as `open_hierarchy`.

    `identity`: what the fingerprint was made from; the daemon tells it to people.
    """
    service = config.service
    if service.socket is not None:
        about = () if identity is None else tuple(identity.told().items())
        hello = Hello(fingerprint, shape.block_size, shape.block_bytes, config.host.size, reset=False, about=about)
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    return open_hierarchy(config, fingerprint, shape)
