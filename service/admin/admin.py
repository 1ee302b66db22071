"""What operators do to a running daemon: forget, evict, pin, give quotas. Each verb takes a body and answers JSON."""

from functools import partial
from typing import Final

from kvtier.service import Json
from kvtier.service.admin.bodies import BlocksBody, ExplainedBody, PinBody, QuotaBody, ResetBody, UnpinBody
from kvtier.service.node import (
    MAX_QUOTAS,
    Daemon,
    Namespace,
    NotFound,
    Pins,
    PinView,
    explain,
    explain_request,
    held_open,
    name_of,
)
from kvtier.tiers import ConfigError
from kvtier.tiers.hierarchy import evict_everywhere

_PATIENCE: Final = 15.0  # seconds for lower tiers


class Admin:
    """The verbs. They wait, for the loop and for lower tiers, each up to a deadline: on any thread but the loop's.

    All raise ConfigError for what cannot be asked, NotFound for what is not here, TierUnavailable if the loop or a
    tier does not answer in time.
    """

    def __init__(self, daemon: Daemon, pins: Pins) -> None:
        self._daemon = daemon
        self._pins = pins

    def reset(self, body: ResetBody) -> Json:
        """Forget everything of one model, or of all that are open, in every tier."""
        models = [each.fingerprint.hex() for each in self._open()] if body.all else [body.model]
        names = []
        for model in models:
            with held_open(self._daemon, model) as namespace:
                namespace.hierarchy.reset()
                self._daemon.submit(partial(_tell, namespace))  # clients forget what they were promised before
                names.append(name_of(namespace.fingerprint))
        self._pins.expire()
        return {"reset": names}

    def evict(self, body: BlocksBody) -> Json:
        """Drop blocks from every tier, pinned or not."""
        with held_open(self._daemon, body.model) as namespace:
            hashes, _ = body.blocks.names(namespace, _PATIENCE)
            num_unpinned = self._pins.unpin_blocks(namespace, hashes)
            evicted = evict_everywhere(namespace.hierarchy, hashes, _PATIENCE)
            return {"model": name_of(namespace.fingerprint), "evicted": evicted, "unpinned": num_unpinned}

    def explain(self, body: ExplainedBody) -> Json:
        """Which tier holds each block of a prompt, and why none holds the first that is missing."""
        with held_open(self._daemon, body.model) as namespace:
            if body.request is not None:
                return explain_request(namespace, body.request, body.cache_salt, _PATIENCE)
            others = [each for each in self._open() if each is not namespace]
            return explain(namespace, others, body.blocks, _PATIENCE, self._daemon.config.file.path)

    def pin(self, body: PinBody) -> Json:
        """Have blocks in host memory, and keep them there for a time."""
        blocks = body.blocks
        return _pin(self._pins.pin(body.model, blocks, body.ttl, _PATIENCE))

    def unpin(self, body: UnpinBody) -> Json:
        self._pins.unpin(body.pin)
        return {"unpinned": body.pin}

    def pins(self) -> Json:
        return {"pins": [_pin(view) for view in self._pins.listing()]}

    def quota(self, body: QuotaBody) -> Json:
        """Give a tenant a quota in every model, also in those opened later; or take it away."""
        salt, size = body.cache_salt, body.size
        if size is None:
            for namespace in self._daemon.call(lambda: self._forget_quota(salt)):
                namespace.tiers.quotas.remove(salt)
            return {"removed": salt}
        namespaces = self._daemon.call(lambda: self._note_quota(salt, size))
        for namespace in namespaces:
            namespace.tiers.quotas.set(salt, size)
        return {"cache_salt": salt, "size": size, "models": [name_of(each.fingerprint) for each in namespaces]}

    def quotas(self) -> Json:
        """Every tenant that has one, and what it has of each model's host memory."""
        limits = self._daemon.call(lambda: dict(self._daemon.limits))
        used: dict[str, dict[str, int]] = {salt: {} for salt in limits}
        for namespace in self._open():
            for quota in namespace.tiers.quotas.listing():
                used.setdefault(quota.cache_salt, {})[name_of(namespace.fingerprint)] = quota.used
        return {"quotas": [{"cache_salt": salt, "size": size, "used": used[salt]} for salt, size in limits.items()]}

    def _note_quota(self, salt: str, size: int) -> list[Namespace]:
        """On the loop's thread."""
        limits, namespaces = self._daemon.limits, self._daemon.namespaces()
        if len(limits) >= MAX_QUOTAS and salt not in limits:
            raise ConfigError(f"cache_salt: {MAX_QUOTAS} tenants have a quota already; remove one first")
        for namespace in namespaces:
            namespace.tiers.quotas.require(size)
        limits[salt] = size
        return namespaces

    def _forget_quota(self, salt: str) -> list[Namespace]:
        """On the loop's thread."""
        if self._daemon.limits.pop(salt, None) is None:
            raise NotFound("cache_salt: this tenant has no quota; `kvtier quota` lists those that have")
        return self._daemon.namespaces()

    def _open(self) -> list[Namespace]:
        return self._daemon.call(self._daemon.namespaces)


def _tell(namespace: Namespace) -> None:
    """On the loop's thread."""
    for member in list(namespace.members):
        member.notify()


def _pin(view: PinView) -> Json:
    return {
        "pin": view.number,
        "model": name_of(view.fingerprint),
        "blocks": view.num_blocks,
        "bytes": view.num_bytes,
        "seconds_left": round(view.seconds, 1),
    }
