"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

import logging
from typing import Final

from kvtier.connector.daemon import Hello, RemoteTiers
from kvtier.tiers import BlockShape, ConfigError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers, open_hierarchy
from kvtier.tiers.naming import ModelIdentity

_log = logging.getLogger(__name__)

_GRACE: Final = 0.5  # seconds the daemon's answer may come after its own deadline


def open_tiers(
    config: Config, fingerprint: bytes, shape: BlockShape, identity: ModelIdentity | None = None
) -> CacheTiers:
    """The daemon's if `[service] socket` names one, else tiers of our own; raises as `open_hierarchy`.

    `identity`: what the fingerprint was made from; the daemon tells it to people. ConfigError if it is not made for
    `[cache] lossy`.
    """
    lossy = None if identity is None else identity.lossy
    if (lossy is None) != (config.cache.lossy == "none"):
        raise ConfigError(
            f'[cache] lossy "{config.cache.lossy}": this engine names its KV as {lossy or "exact"}; give both the same'
        )
    service = config.service
    if service.socket is not None:
        if lossy is not None:
            _log.info("[cache] lossy: the daemon's Redis and object store keep K and V as %s", lossy)
        about = () if identity is None else tuple(identity.told().items())
        hello = Hello(
            fingerprint, shape.block_size, shape.block_bytes, config.host.size, reset=False, about=about, lossy=lossy
        )
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    return open_hierarchy(config, fingerprint, shape, lossy=lossy)
