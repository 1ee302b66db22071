"""The owners' client: queries them for a prompt's holders, and reports to them what this node holds."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Final, TypeAlias

from kvtier.tiers import ChainHash
from kvtier.tiers.config import PeersConfig
from kvtier.tiers.peers.link import PeerLink
from kvtier.tiers.peers.peer import MAX_PEERS, Fail, OtherNode, looked_up, query_each
from kvtier.tiers.peers.ring import MAX_NODES, REPLICAS, Keys, Owner, Report, Reports, Ring, anchors_of, keys_of, probes
from kvtier.tiers.peers.stream import PeerAddress, PeerFailed

_log = logging.getLogger(__name__)

_PART: Final = 4  # of `deadline`: the longest that an owner is waited for, and then its replica
AT_ONCE: Final = 2  # holders that are queried for their exact runs; …
_MOST_QUERIED: Final = 6  # … so many if those before have none: they may have restarted

Peers: TypeAlias = Mapping[PeerAddress, OtherNode]
Places: TypeAlias = Mapping[PeerAddress, list[int]]
Holders: TypeAlias = list[list[PeerAddress]]


def most_nodes(config: PeersConfig) -> int:
    """Addresses that are used."""
    return MAX_PEERS if config.index == "all" else MAX_NODES


class Owners:
    """The ring as this node sees it. `adopt` and `report` belong to one thread each; other methods are thread-safe."""

    def __init__(self, config: PeersConfig, fingerprint: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: for the pace of reports."""
        self._config, self._clock = config, clock
        self._fingerprint = fingerprint
        self.ring: Ring | None = None  # None: every node is followed, or queried
        self._listen: list[PeerAddress] | None = None  # this node's addresses by its configuration, once looked up
        self._own: Owner | None = None  # this node as an owner
        self._reports = Reports()
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # owners queried, those that did not answer, names without any
        self._warned_unknown = False

    def adopt(self, addresses: Collection[PeerAddress]) -> bool:
        """Use the ring if nodes are too many, or if it is set; returns whether it is used. May wait for a resolver."""
        wanted = self._config.index
        if not addresses or wanted == "all" or (wanted == "auto" and len(addresses) <= MAX_PEERS):
            self.ring = None
            return False
        if self._listen is None:
            self._listen = _addresses_of(self._config.listen)
        nodes = set(addresses)
        if self._listen and nodes.isdisjoint(self._listen):  # `nodes` may leave this one out
            nodes.add(self._listen[0])
        if self.ring is None or nodes != self.ring.numbers.keys():
            self.ring = Ring(nodes)
        return True

    def stats(self) -> dict[str, int]:
        return {**self._counts, **self._reports.counts}

    def holders(self, names: Sequence[ChainHash], peers: Peers, deadline: float, fail: Fail) -> list[OtherNode]:
        """The nodes to query for their runs, the likeliest first. An owner that does not answer costs a part of time.

        What it does not know is then queried at the other owner: it may have restarted, or been cut off from holders.
        """
        ring, keys = self.ring, keys_of(names)
        if ring is None or not len(probed := keys[probes(keys)]):
            return []
        owners, found, answered = ring.owners(probed), dict[int, list[PeerAddress]](), set[int]()
        own = self._own_address(ring, peers)
        for replica in range(REPLICAS):
            places: dict[PeerAddress, list[int]] = {}
            for i in range(len(probed)):
                if i not in found:
                    places.setdefault(ring.nodes[owners[i, replica]], []).append(i)
            until = min(deadline, self._until())

            def ask(peer: OtherNode, link: PeerLink, places: Places = places, until: float = until) -> None:
                link.ask_holders(probed[places[peer.address]].tolist(), until)

            def read(peer: OtherNode, link: PeerLink, places: Places = places, until: float = until) -> Holders:
                return link.read_holders(len(places[peer.address]), until)

            queried = [peers[address] for address in places if _answers(address, peers)]
            answers = query_each(queried, ask, read, until, fail)
            if own in places and self._own is not None:
                answers[own] = self._own.holders(self._fingerprint, probed[places[own]].tolist())
            for address, nodes in answers.items():
                answered.update(places[address])
                found.update((i, each) for i, each in zip(places[address], nodes, strict=True) if each)
            with self._lock:
                self._counts["owners_queried"] += len(queried)
        with self._lock:
            self._counts["owners_unanswered"] += len(probed) - len(answered)
        ranked = dict.fromkeys(node for i in sorted(found, reverse=True) for node in found[i] if node != own)
        return [peer for node in ranked if (peer := peers.get(node)) is not None and peer.answers][:_MOST_QUERIED]

    def report(self, keys: Keys, own: Owner, peers: Peers, fail: Fail) -> None:
        """One round of reports: this node holds blocks of these keys. `own`: this node as an owner."""
        self._own = own
        if (ring := self.ring) is None:
            return
        if (node := self._own_address(ring, peers)) is None:
            if not self._warned_unknown and all(peer.answers or peer.counts for peer in peers.values()):
                self._warned_unknown = True
                _log.warning("[peers] nodes: no address of this node is among them: others do not find its blocks")
            return

        def send(address: PeerAddress, report: Report) -> bool | None:
            if address == node:
                return own.report(self._fingerprint, report)
            peer, link, until = peers[address], None, self._until()
            try:
                link = peer.connection(until)
                taken = link.report(report, until)
            except PeerFailed as failed:
                fail(peer, link, failed)
                return None
            peer.put_back(link)
            return taken

        def may(address: PeerAddress) -> bool:
            return address == node or _answers(address, peers)

        self._reports.step(node, anchors_of(keys), ring, may, send, self._clock)

    def _until(self) -> float:
        return time.monotonic() + self._config.deadline / _PART

    def _own_address(self, ring: Ring, peers: Peers) -> PeerAddress | None:
        configured = next((each for each in self._listen or () if each in ring.numbers), None)
        return configured or next((address for address, peer in peers.items() if peer.is_myself), None)


def _answers(address: PeerAddress, peers: Peers) -> bool:
    peer = peers.get(address)
    return peer is not None and peer.answers


def _addresses_of(listen: str | None) -> list[PeerAddress] | None:
    """Where others reach this node, by its configuration; none if it listens everywhere. None: not known yet."""
    try:
        found = [] if listen is None else looked_up(listen)
    except (OSError, ValueError):
        return None
    return [each for each in found if each[0] not in ("0.0.0.0", "::")]
