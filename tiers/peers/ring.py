"""The ring: where nodes are too many to follow or query each, two of them know the holders of a block.

Only every eighth name counts, an *anchor*: chosen by its own bits, so that both sides find it without a block's depth
or parent. Who holds an anchor usually holds what is before it, and is queried for the exact run. So a prompt costs a
few questions, not one for each block, and a node reports an eighth of its changes.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.peers.stream import PeerAddress, address_text

Keys: TypeAlias = NDArray[np.uint64]

MAX_NODES: Final = 1024
REPLICAS: Final = 2
ANCHORS: Final = 8  # names for each one that is an anchor
MAX_PROBES: Final = 8  # anchors of a prompt, in queries to owners
MAX_HOLDERS: Final = 3  # of an anchor, in an answer
HEARTBEAT: Final = 30.0  # seconds, at most, between two reports to an owner
LAPSE: Final = 4 * HEARTBEAT  # seconds after which a silent node's blocks are forgotten
MAX_REPORTED: Final = 2048  # keys in one report
ROUND: Final = 1.0  # seconds from one round of reports to the next, and the longest of one …
PACE: Final = 250  # … and the most reports in it, to all owners together
_POINTS: Final = 64  # of a node on the ring: its load is within some 30 % of the mean
_MAX_PENDING: Final = 4096  # changes that wait for one owner; beyond that it gets the whole
_MAX_SEQ: Final = 0xFFFF


def keys_of(names: Sequence[ChainHash]) -> Keys:
    """The last eight bytes of each name."""
    return np.frombuffer(b"".join(name[-8:] for name in names), "<u8")


def anchors_of(keys: Keys) -> Keys:
    """Those that are anchors, sorted."""
    return np.unique(keys[keys % np.uint64(ANCHORS) == 0])


def probes(keys: Keys) -> list[int]:
    """The places of a prompt's anchors to query: the first, the second, and each twice as deep as the one before.

    A holder of most of the prompt is found by an anchor of at least half its run, where few others are.
    """
    places = np.flatnonzero(keys % np.uint64(ANCHORS) == 0).tolist()
    return [places[(1 << i) - 1] for i in range(MAX_PROBES) if 1 << i <= len(places)]


class Ring:
    """Consistent hashing: a key belongs to the next two nodes. A node that comes or goes moves only its own part."""

    def __init__(self, nodes: Collection[PeerAddress]) -> None:
        """At least one node. All nodes that have the same list have the same ring."""
        self.nodes = sorted(nodes)
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        texts = [address_text(node).encode() for node in self.nodes]
        digests = (blake2b(text, salt=bytes([i])).digest() for text in texts for i in range(_POINTS // 8))
        at = np.frombuffer(b"".join(digests), "<u8")
        order = np.argsort(at)
        self._at, first = at[order], order // _POINTS
        second = np.roll(first, -1)
        while len(self.nodes) > 1 and (same := second == first).any():
            second[same] = np.roll(second, -1)[same]
        self._owners = np.stack([first, second], 1)

    def owners(self, keys: Keys) -> NDArray[np.int64]:
        """The numbers of each key's nodes, `[n, REPLICAS]`."""
        return self._owners[np.searchsorted(self._at, keys) % len(self._at)]


class Report(NamedTuple):
    """Changes of what a node holds. Number 0 replaces all that it has reported to this owner."""

    node: PeerAddress
    epoch: int  # another one each time that it starts over
    seq: int
    added: Sequence[int]
    removed: Sequence[int]


class Owner(Protocol):
    """Knows who holds the anchors of its part of the ring."""

    def report(self, fingerprint: bytes, report: Report) -> bool:
        """Take it. False: reports before it are missing, the node has to start over."""

    def holders(self, fingerprint: bytes, keys: Sequence[int]) -> list[list[PeerAddress]]:
        """Up to MAX_HOLDERS for each. None known does not mean that there are none: it may have missed reports."""


Send: TypeAlias = Callable[[PeerAddress, Report], bool | None]
"""Returns what the owner answered; None: it failed, and may have the report or not."""


@dataclass(slots=True)
class _Reported:
    """What one owner knows of this node, by what it does not know yet."""

    at: float
    epoch: int = field(default_factory=lambda: int.from_bytes(os.urandom(8), "little"))
    seq: int = 0
    pending: dict[int, bool] = field(default_factory=dict)  # key → whether it was added


class Reports:
    """What a node reports to owners, on one thread. Nothing is queued: an owner gets all changes since its last report.

    An owner that fails, restarts, or lags behind gets the whole part of it anew.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # reports, reported (keys), start_overs
        self._ring: Ring | None = None
        self._keys: Keys = np.zeros(0, np.uint64)
        self._reported: dict[PeerAddress, _Reported] = {}
        self._full: dict[PeerAddress, float] = {}  # owners that had no room for this node → until when it waits
        self._turn = 0  # the owner that is next

    def step(
        self,
        node: PeerAddress,
        keys: Keys,
        ring: Ring,
        may: Callable[[PeerAddress], bool],
        send: Send,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One round: `keys` (sorted) is what the node holds. Reports go to owners that `may` get one, in turn."""
        self._note(keys, ring)
        sent, num_nodes, began = 0, len(ring.nodes), clock()
        owners: NDArray[np.int64] | None = None
        for _ in range(num_nodes):
            now = clock()
            if sent >= PACE or now - began >= ROUND:
                return  # the next round goes on here
            self._turn = (self._turn + 1) % num_nodes
            owner = ring.nodes[self._turn]
            known = self._reported.get(owner)
            if (known is not None and not known.pending and now - known.at < HEARTBEAT) or not may(owner):
                continue
            if known is None:
                if now < self._full.get(owner, now):
                    continue
                owners = ring.owners(keys) if owners is None else owners
                known = self._reported[owner] = _Reported(now)
                known.pending = dict.fromkeys(keys[(owners == self._turn).any(1)].tolist(), True)
                self.counts["start_overs"] += 1
            for report in _reports(node, known):
                sent += 1
                self.counts["reports"] += 1
                self.counts["reported"] += len(report.added) + len(report.removed)
                if not (taken := send(owner, report)):
                    del self._reported[owner]
                    if report.seq == 0 and taken is False:
                        self._full[owner] = now + HEARTBEAT
                    break
                known.seq = known.seq % _MAX_SEQ + 1
            known.at, known.pending = now, {}

    def _note(self, keys: Keys, ring: Ring) -> None:
        """Find what changed since the last round, of blocks and of their owners."""
        before, known = self._ring or ring, self._keys
        stayed = keys[:0] if before is ring else np.intersect1d(keys, known, assume_unique=True)
        came, left = (np.setdiff1d(*each, assume_unique=True) for each in ((keys, known), (known, keys)))
        for changed, was_held, is_held in ((stayed, True, True), (came, False, True), (left, True, False)):
            pairs = (each.owners(changed).tolist() for each in (before, ring))
            for key, *owners in zip(changed.tolist(), *pairs, strict=True):
                was = {before.nodes[i] for i in owners[0]} if was_held else set()
                now = {ring.nodes[i] for i in owners[1]} if is_held else set()
                self._change(key, now - was, is_added=True)
                self._change(key, was - now, is_added=False)
        for owner in [each for each in (*self._reported, *self._full) if each not in ring.numbers]:
            self._reported.pop(owner, None)
            self._full.pop(owner, None)
        self._ring, self._keys = ring, keys

    def _change(self, key: int, owners: Collection[PeerAddress], *, is_added: bool) -> None:
        for owner in owners:
            if (known := self._reported.get(owner)) is None:
                continue
            if known.pending.pop(key, is_added) is is_added:  # else the owner knows of neither
                known.pending[key] = is_added
            if len(known.pending) > _MAX_PENDING:
                del self._reported[owner]


def _reports(node: PeerAddress, known: _Reported) -> Iterator[Report]:
    """What an owner does not know yet; an empty one says that the node is there."""
    pending = list(known.pending.items())
    for first in range(0, max(1, len(pending)), MAX_REPORTED):
        part = pending[first : first + MAX_REPORTED]
        added, removed = ([key for key, is_added in part if is_added is wanted] for wanted in (True, False))
        yield Report(node, known.epoch, known.seq, added, removed)
