"""Weight updates of a running SGLang: pages get new random names, once SGLang's own caches are empty."""

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakSet

from kvtier.tiers import ChainHash

_log = logging.getLogger(__package__)

_KEPT: Final = (
    "SGLang's weights were changed: kvtier finds and keeps no page until SGLang has flushed its caches (/flush_cache)"
)
_NAME_BYTES: Final = 32


class PageNames:
    """Names of pages for SGLang's keys, which are hashes of tokens alone. Thread-safe.

    Pages of updated weights get random names and are never shared with another process: a version number does not
    identify the weights.
    """

    def __init__(self) -> None:
        self._secret: bytes | None = b""  # empty: the initial weights; None: SGLang's caches have stale pages

    def of(self, keys: Sequence[str]) -> list[ChainHash] | None:
        """`keys` are hex, one per page. None if pages have no name now."""
        secret = self._secret
        if secret is None:
            return None
        if not secret:
            return [bytes.fromhex(key) for key in keys]
        return [hashlib.blake2b(bytes.fromhex(key), key=secret, digest_size=_NAME_BYTES).digest() for key in keys]

    def weights_changed(self, *, caches_are_empty: bool) -> None:
        """The weights changed: the content of SGLang's caches is stale, unless they are empty."""
        if caches_are_empty:
            self._secret = secrets.token_bytes(_NAME_BYTES)
        elif self._secret is not None:
            self._secret = None
            _log.info(_KEPT)

    def caches_emptied(self) -> None:
        """The caches are empty: from now on they get pages of the current weights."""
        if self._secret is None:
            self._secret = secrets.token_bytes(_NAME_BYTES)


_followers: Final = WeakSet[PageNames]()


def follow(names: PageNames) -> None:
    """Notify `names` when this process's scheduler changes its weights, and when its caches are emptied."""
    _followers.add(names)
    _hook()


@functools.cache
def _hook() -> None:
    """Wrap the methods that every weight update calls; SGLang has no hook for storages."""
    try:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    except ImportError as error:
        _log.warning("weights changed in a running server will not be noticed, so clear the storage then (%s)", error)
        return

    def change(updater: Any) -> None:
        is_empty = _are_empty(updater.scheduler)
        for names in list(_followers):
            names.weights_changed(caches_are_empty=is_empty)

    def empty(_: Any) -> None:
        for names in list(_followers):
            names.caches_emptied()

    _around(SchedulerWeightUpdaterManager, "begin_weight_update", before=change)
    _around(SchedulerWeightUpdaterManager, "_observe_weight_load", before=change)
    _around(HiCacheController, "reset", behind=empty)


def _around(
    owner: type, name: str, before: Callable[[Any], None] | None = None, behind: Callable[[Any], None] | None = None
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(self)
        answer = original(self, *arguments, **named)
        if behind is not None:
            behind(self)
        return answer

    setattr(owner, name, method)


def _are_empty(scheduler: Any) -> bool:
    """Whether SGLang has no page of the old weights: neither a request's, nor in its caches."""
    tree = getattr(scheduler, "tree_cache", None)
    host = getattr(getattr(tree, "cache_controller", None), "mem_pool_host", None)
    if tree is None or host is None:
        return False
    is_idle = scheduler.is_fully_idle(ignore_waiting=True)
    in_tree = tree.evictable_size() + tree.protected_size()
    return bool(is_idle and in_tree == 0 and host.available_size() == host.logical_size)
