"""Pins: blocks an operator wants kept in host memory for a time, each a lease with an end."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

from kvtier.service.node.daemon import Daemon
from kvtier.service.node.namespaces import Namespace, OperatorHold
from kvtier.service.node.operator_access import NotThere, hold_open, name_of, release_hold
from kvtier.service.node.selection import BlockSelection
from kvtier.tiers import ChainHash, ConfigError, TierUnavailable
from kvtier.tiers.hierarchy import Hierarchy, bring
from kvtier.tiers.pool import Lease

MAX_PINS: Final = 256
SHARE: Final = 4  # of a model's L2 at most this part is pinned


class PinView(NamedTuple):
    """One pin, for people."""

    number: int
    fingerprint: bytes
    num_blocks: int
    num_bytes: int
    seconds: float  # that it has left


@dataclass(eq=False)
class _Pin(OperatorHold):
    number: int
    until: float
    hashes: frozenset[ChainHash] = frozenset()
    namespace: Namespace | None = None
    lease: Lease | None = None
    epoch: int = 0


@dataclass(eq=False)
class Pins:
    """All pins of a daemon. Thread-safe, for any thread but the loop's. What a reset or an evict took is unpinned.

    Lock: `_lock` guards `_pins`; never held while anything waits, but the pool's lock is taken inside it.
    """

    daemon: Daemon
    _lock: Lock = field(default_factory=Lock)
    _pins: dict[int, _Pin] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def pin(self, model: str | None, blocks: BlockSelection, seconds: float, timeout: float) -> PinView:
        """Have the leading blocks that any tier holds in L2, and keep them there for `seconds`.

        Waits up to `timeout` seconds for lower tiers. ConfigError past a quarter of L2 or too many pins, NotThere if
        no tier holds the first block, TierUnavailable if waiting requests hold all that may be held.
        """
        pin = _Pin(next(self._numbers), time.monotonic() + seconds)
        pin.namespace = namespace = hold_open(self.daemon, model, pin)
        try:
            hashes, parent = blocks.names(namespace, timeout)
            pin.epoch = namespace.hierarchy.epoch
            self._enter(pin, namespace, hashes)
            lease = _lease(namespace.hierarchy, hashes, parent, time.monotonic() + timeout)
            if not len(lease):
                raise NotThere("no tier holds the first of these blocks; have an engine compute them first")
            namespace.tiers.quotas.promoted(lease.hashes, parent)
            with self._lock:
                pin.lease, pin.hashes = lease, frozenset(lease.hashes)
                return _view(pin, namespace)
        except BaseException:
            self._end(pin)
            raise

    def unpin(self, number: int) -> None:
        """Let go of one. NotThere if there is none of that number."""
        with self._lock:
            pin = self._pins.get(number)
        if pin is None:
            raise NotThere(f"pin {number}: there is none; `kvtier pin` without blocks lists them")
        self._end(pin)

    def unpin_blocks(self, namespace: Namespace, hashes: Sequence[ChainHash]) -> int:
        """Let go of those that hold any of the blocks; returns how many there were."""
        names = frozenset(hashes)
        return self._end_all(lambda pin: pin.namespace is namespace and not names.isdisjoint(pin.hashes))

    def expire(self) -> None:
        """Let go of those whose time is over, or whose blocks a reset took. Called now and then."""
        at = time.monotonic()
        self._end_all(
            lambda pin: pin.until <= at or (pin.namespace is not None and pin.namespace.hierarchy.epoch != pin.epoch)
        )

    def clear(self) -> int:
        """Let go of all; returns how many there were."""
        return self._end_all(lambda pin: True)

    def listing(self) -> list[PinView]:
        with self._lock:
            return [_view(pin, pin.namespace) for pin in self._pins.values() if pin.lease is not None and pin.namespace]

    def blocks_by_model(self) -> dict[str, int]:
        """How many blocks of each model are pinned, by the name people see."""
        with self._lock:
            pins = [(pin.namespace.fingerprint, pin.hashes) for pin in self._pins.values() if pin.namespace is not None]
        names = {fingerprint: frozenset[ChainHash]() for fingerprint, _ in pins}
        for fingerprint, hashes in pins:
            names[fingerprint] |= hashes
        return {name_of(fingerprint): len(hashes) for fingerprint, hashes in names.items()}

    def _enter(self, pin: _Pin, namespace: Namespace, hashes: Sequence[ChainHash]) -> None:
        pin.namespace, pin.hashes = namespace, frozenset(hashes)
        most = namespace.hierarchy.host.pool.num_slots // SHARE
        with self._lock:
            if len(self._pins) >= MAX_PINS:
                raise ConfigError(f"{MAX_PINS} pins are there already; unpin one first")
            others = frozenset().union(*(each.hashes for each in self._pins.values() if each.namespace is namespace))
            if len(others | pin.hashes) > most:
                raise ConfigError(
                    f"{len(pin.hashes)} blocks: with the {len(others)} pinned already that is more than {most}, "
                    f"a quarter of this model's host memory; pin fewer, or unpin some"
                )
            self._pins[pin.number] = pin

    def _end_all(self, is_over: Callable[[_Pin], bool]) -> int:
        with self._lock:
            over = [pin for pin in self._pins.values() if pin.lease is not None and is_over(pin)]
        for pin in over:
            self._end(pin)
        return len(over)

    def _end(self, pin: _Pin) -> None:
        with self._lock:
            self._pins.pop(pin.number, None)
        if pin.lease is not None:
            pin.lease.release()
        if pin.namespace is not None:
            release_hold(self.daemon, pin.namespace, pin)


def _lease(hierarchy: Hierarchy, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float) -> Lease:
    """The leading blocks, read from lower tiers for as long as that brings more. Empty if nothing is held."""
    best = bring(hierarchy, hashes, parent, deadline)
    if best is None:
        raise TierUnavailable("waiting requests hold all the host memory they may; ask again")
    while 0 < len(best) < len(hashes) and time.monotonic() < deadline:
        more = bring(hierarchy, hashes, parent, deadline)
        if more is None or len(more) <= len(best):  # what is held by more than one lease stays either way
            if more is not None:
                more.release()
            return best
        best.release()
        best = more
    return best


def _view(pin: _Pin, namespace: Namespace) -> PinView:
    num_blocks = len(pin.hashes)
    left = max(0.0, pin.until - time.monotonic())
    return PinView(
        pin.number, namespace.fingerprint, num_blocks, num_blocks * namespace.hierarchy.host.region.slot_stride, left
    )
