"""From a configuration to the tiers below L1: of this process, or of the node's daemon."""

import logging
from dataclasses import replace
from typing import Final

from kvtier.connector.daemon import Hello, RemoteTiers
from kvtier.tiers import BlockShape, ConfigError, KVMismatch
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers, open_hierarchy
from kvtier.tiers.naming import KVProbe, ModelIdentity

_log = logging.getLogger(__name__)

_NAMESPACES: Final = 4  # of one name, for models that compute different KV
_GRACE: Final = 0.5  # seconds the daemon's answer may come after its own deadline


def open_apart(
    config: Config, identity: ModelIdentity, shape: BlockShape, probe: KVProbe | None, *, takes_parts: bool = True
) -> tuple[CacheTiers, ModelIdentity]:
    """The tiers of this identity, or of the first one beside it where what is kept is what the model computes.

    Returns which identity that is; its fingerprint names the blocks. Without a probe nothing is compared. One with NaN
    compares with none: such models have one namespace more. Raises as `open_tiers`; KVMismatch if so many namespaces
    are all of models that compute something else.
    """
    if probe is not None and not probe.is_finite:
        said = "this model computes NaN or infinity of a few plain tokens"
        _log.warning("%s: look at its weights and dtype; its blocks are kept apart, and compared with none", said)
        named = replace(identity, apart=_NAMESPACES)
        return open_tiers(config, named.fingerprint(), shape, named, takes_parts=takes_parts), named
    for apart in (None, *range(1, _NAMESPACES)):
        named = replace(identity, apart=apart)
        try:
            tiers = open_tiers(config, named.fingerprint(), shape, named, probe, takes_parts=takes_parts)
        except KVMismatch as error:
            if apart is None:
                _log.warning("%s; this model's blocks are kept apart, until both sides run the same", error)
            elif apart == _NAMESPACES - 1:
                raise
            continue
        return tiers, named
    raise AssertionError("unreachable")


def open_tiers(
    config: Config,
    fingerprint: bytes,
    shape: BlockShape,
    identity: ModelIdentity | None = None,
    probe: KVProbe | None = None,
    *,
    takes_parts: bool = True,
) -> CacheTiers:
    """The daemon's if `[service] socket` names one, else tiers of our own; raises as `open_hierarchy`.

    `identity`: what the fingerprint was made from; the daemon tells it to people. ConfigError if it is not made for
    `[cache] lossy`. `probe`: what the model computes of a few tokens; KVMismatch if what is kept is another's.
    `takes_parts`: the engine takes promises that end inside a block; a daemon tells others of no children.
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
        size = config.host.size if "size" in config.host.model_fields_set else 0
        hello = Hello(
            *(fingerprint, shape.block_size, shape.block_bytes, size),
            reset=False,
            about=about,
            lossy=lossy,
            kv_probe=None if probe is None else probe.packed(),
            takes_parts=takes_parts and config.cache.partial_blocks,
        )
        patience = config.cache.prefetch_deadline + _GRACE
        return RemoteTiers(service.socket, hello, patience, deadline=service.deadline)
    return open_hierarchy(config, fingerprint, shape, lossy=lossy, kv_probe=probe)
