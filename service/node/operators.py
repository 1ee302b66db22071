"""What operators do to a model: keep it open, choose blocks, pin them, and explain why they are held or not."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Final

from kvtier.service import Json
from kvtier.service.explain import PromptChain, client_of, explain_chain, held_by_tenants, is_unknown, tenant_name
from kvtier.service.node.daemon import Daemon
from kvtier.service.node.loop import now
from kvtier.service.node.namespaces import Namespace, OperatorHold, name_of
from kvtier.tiers import ChainHash, ConfigError, KVTierError, TierUnavailable
from kvtier.tiers.file import closed_models
from kvtier.tiers.hierarchy import Hierarchy, load_and_lease
from kvtier.tiers.naming import chain_hashes, root_hash
from kvtier.tiers.pool import Lease


class NotFound(KVTierError):
    """No model, pin or request of that name exists here."""


def hold_open(daemon: Daemon, model: str | None, hold: OperatorHold) -> Namespace:
    """Keep the one model open whose fingerprint begins with `model`, until `release_hold`. NotFound, ConfigError."""

    def enter() -> Namespace:
        namespace = _choose(daemon.namespaces(), model)
        namespace.members.add(hold)
        return namespace

    return daemon.call(enter)


def release_hold(daemon: Daemon, namespace: Namespace, hold: OperatorHold) -> None:
    def exit() -> None:
        namespace.members.discard(hold)
        namespace.idle_since = now()

    daemon.submit(exit)  # a stopping daemon does not need it


@contextmanager
def held_open(daemon: Daemon, model: str | None) -> Iterator[Namespace]:
    hold = OperatorHold()
    namespace = hold_open(daemon, model, hold)
    try:
        yield namespace
    finally:
        release_hold(daemon, namespace, hold)


def _choose(namespaces: Sequence[Namespace], model: str | None) -> Namespace:
    found = [each for each in namespaces if model is None or each.fingerprint.hex().startswith(model)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.name for each in namespaces)
    if not namespaces:
        raise NotFound("no model is open; an engine has to attach first")
    if found:
        choice = "none is named" if model is None else f'model "{model}"'
        raise ConfigError(f"{choice}: {len(found)} models are open; name one of {names}")
    raise NotFound(f'model "{model}": not open; name one of {names}')


UNKNOWN: Final = bytes(32)  # the parent of blocks given by name alone; no block's name
_SCHEMES: Final = ("sha256", "xxh3")


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """Consecutive blocks of one chain: their names, or the prompt's tokens from its first."""

    hashes: Sequence[ChainHash] = ()
    tokens: Sequence[int] = ()
    cache_salt: str | None = None

    def names(self, namespace: Namespace, timeout: float) -> tuple[Sequence[ChainHash], ChainHash]:
        """The blocks' names by the first hash scheme that finds any, and the parent of the first. ConfigError."""
        if self.hashes:
            namespace.hierarchy.locate(self.hashes, timeout)
            return self.hashes, UNKNOWN
        size = namespace.blocks.block_size
        if len(self.tokens) < size:
            raise ConfigError(f"tokens: {len(self.tokens)} of them, this model's blocks have {size}; give one block's")
        root = root_hash(namespace.fingerprint, cache_salt=self.cache_salt)
        chains = [chain_hashes(root, self.tokens, size, scheme) for scheme in _SCHEMES]
        until = monotonic() + timeout
        found = [namespace.hierarchy.locate(chain, max(0.0, until - monotonic())).loadable for chain in chains]
        return chains[found.index(max(found))], root


MAX_PINS: Final = 256
SHARE: Final = 4  # of a model's L2 at most this part is pinned


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
    """All pins of a daemon, for any thread but the loop's. `_lock` guards `_pins`, and is never held across a wait."""

    daemon: Daemon
    _lock: Lock = field(default_factory=Lock)
    _pins: dict[int, _Pin] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def pin(self, model: str | None, blocks: BlockSelection, seconds: float, timeout: float) -> Json:
        """Lease the leading blocks that any tier holds in L2, for `seconds`.

        Waits up to `timeout` seconds for lower tiers. ConfigError past a quarter of L2 or at too many pins. NotFound if
        no tier holds the first block. TierUnavailable if waiting requests hold all they may.
        """
        pin = _Pin(next(self._numbers), monotonic() + seconds)
        pin.namespace = namespace = hold_open(self.daemon, model, pin)
        try:
            hashes, parent = blocks.names(namespace, timeout)
            pin.epoch = namespace.hierarchy.epoch
            self._enter(pin, namespace, hashes)
            lease = _lease(namespace.hierarchy, hashes, parent, monotonic() + timeout)
            if not len(lease):
                raise NotFound("no tier holds the first of these blocks; have an engine compute them first")
            namespace.tiers.quotas.promoted(lease.hashes, parent)
            with self._lock:
                pin.lease, pin.hashes = lease, frozenset(lease.hashes)
                return _view(pin, namespace)
        except BaseException:
            self._end(pin)
            raise

    def unpin(self, number: int) -> None:
        with self._lock:
            pin = self._pins.get(number)
        if pin is None:
            raise NotFound(f"pin {number}: there is none; `kvtier pin` without blocks lists them")
        self._end(pin)

    def unpin_blocks(self, namespace: Namespace, hashes: Sequence[ChainHash]) -> int:
        names = frozenset(hashes)
        return self._end_all(lambda pin: pin.namespace is namespace and not names.isdisjoint(pin.hashes))

    def expire(self) -> None:
        at = monotonic()
        self._end_all(
            lambda pin: pin.until <= at or (pin.namespace is not None and pin.namespace.hierarchy.epoch != pin.epoch)
        )

    def clear(self) -> None:
        self._end_all(lambda pin: True)

    def listing(self) -> list[Json]:
        with self._lock:
            return [_view(pin, pin.namespace) for pin in self._pins.values() if pin.lease is not None and pin.namespace]

    def blocks_by_model(self) -> dict[str, int]:
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
    """The leading blocks, promoted from lower tiers until no more come. Empty if none is held."""
    best = load_and_lease(hierarchy, hashes, parent, deadline)
    if best is None:
        raise TierUnavailable("waiting requests hold all the host memory they may; try again")
    while 0 < len(best) < len(hashes) and monotonic() < deadline:
        more = load_and_lease(hierarchy, hashes, parent, deadline)
        if more is None or len(more) <= len(best):  # blocks with another lease stay either way
            if more is not None:
                more.release()
            return best
        best.release()
        best = more
    return best


def _view(pin: _Pin, namespace: Namespace) -> Json:
    return {
        "pin": pin.number,
        "model": namespace.name,
        "blocks": len(pin.hashes),
        "bytes": len(pin.hashes) * namespace.hierarchy.host.region.slot_stride,
        "seconds_left": round(max(0.0, pin.until - monotonic()), 1),
    }


def explain(
    namespace: Namespace, others: Sequence[Namespace], blocks: BlockSelection, timeout: float, slabs: Path | None = None
) -> Json:
    """Which blocks of the prompt are held, and why the others are not; `others`: models that may hold them.

    If no tier holds a block of it, the answer names closed slabs of the same checkpoint in the directory `slabs`.
    For operators: it names other tenants that hold the same tokens, but gives no token of theirs. Takes up to
    `timeout` seconds, half of them for shared tiers; it leaves out tenants that it has no time for.
    ConfigError as `BlockSelection.names`.
    """
    until = monotonic() + timeout
    shared_until = until - timeout / 2
    hierarchy, size, model = namespace.hierarchy, namespace.blocks.block_size, namespace.name
    own_root = root_hash(namespace.fingerprint, cache_salt=blocks.cache_salt)
    if blocks.tokens and len(blocks.tokens) < size:
        answer = explain_chain(model, PromptChain((), own_root, size, blocks.tokens), hierarchy)
        answer["elsewhere"] = _elsewhere(namespace, others, blocks, 0, shared_until)
        return answer
    hashes, root = blocks.names(namespace, timeout / 2)
    chain = PromptChain(hashes, root, size, blocks.tokens)
    answer = explain_chain(model, chain, hierarchy)
    if blocks.tokens and answer["cause"] is not None:
        known = answer["held"]
        answer["elsewhere"] = _elsewhere(namespace, others, blocks, known * size, shared_until)
        if is_unknown(answer["cause"]):
            if not known and not answer["elsewhere"]:
                answer["closed"] = _closed(namespace, others, slabs)
            unsalted = namespace.tiers.tenants.unsalted
            roots = [(each, tenant_name(each, unsalted)) for each in namespace.tiers.tenants.known()]
            first = blocks.tokens[:size]
            scheme = next(each for each in _SCHEMES if chain_hashes(root, first, size, each)[0] == hashes[0])
            in_time = takewhile(lambda _: monotonic() < until, roots)
            lookup = lambda names: hierarchy.lookup(names).loadable  # noqa: E731
            answer["tenants"] = held_by_tenants(chain, in_time, lookup, known, scheme)
    return answer


def explain_request(namespace: Namespace, request_id: str, cache_salt: str | None, timeout: float) -> Json:
    """As `explain`, for a request that ended lately. NotFound if the tenant has none of that id."""
    root = root_hash(namespace.fingerprint, cache_salt=cache_salt)
    names = namespace.tiers.seen.recent.find(client_of(root), request_id)
    if names is None:
        why = "no request of this id and cache salt ended here lately; `kvtier explain --blocks` takes its tokens"
        raise NotFound(f'request "{request_id}": {why}')
    if not names:
        return explain_chain(namespace.name, PromptChain((), root, namespace.blocks.block_size), None)
    return explain(namespace, [], BlockSelection(names), timeout)


def _elsewhere(
    own: Namespace, others: Sequence[Namespace], blocks: BlockSelection, known: int, until: float
) -> list[Json]:
    found: list[Json] = []
    for other in others:
        try:
            names, _ = blocks.names(other, max(0.0, until - monotonic()))
        except ConfigError:  # shorter than a block of that model's
            continue
        held = other.hierarchy.lookup(names).loadable
        if held * other.blocks.block_size > known:
            row = {"model": other.name, "blocks": held, "block_size": other.blocks.block_size}
            found.append({**row, "fields": _differing(own.about, other.about)})
    return found


def _closed(own: Namespace, others: Sequence[Namespace], slabs: Path | None) -> list[Json]:
    """Closed slabs of the same weights or name, not read. None while the own slab is off: its disk may hang."""
    if "file" in own.hierarchy.wanting:
        return []
    closed = closed_models(slabs, {own.fingerprint, *(other.fingerprint for other in others)})
    return [
        {"model": name_of(each.fingerprint), "bytes": each.num_bytes, "fields": _differing(own.about, each.about)}
        for each in closed
        if any(field in own.about and each.about.get(field) == own.about[field] for field in ("model", "revision"))
    ]


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[Json]:
    if not here or not there:
        return []
    fields = dict.fromkeys([*here, *there])
    fields.pop("model", None)  # a name for people
    return [
        {"field": field, "here": here.get(field, "none"), "there": there.get(field, "none")}
        for field in fields
        if here.get(field) != there.get(field)
    ]
