"""Blocks in other nodes' memory as a tier: located, read in one flight for each peer, verified; never written."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from kvtier.tiers import BlockRecord, Breaker, ChainHash, Direction, Outcome, Tier, require_buffers, require_space
from kvtier.tiers.config import Config
from kvtier.tiers.peers.following import AnnouncedNames, Following
from kvtier.tiers.peers.link import PeerLink, as_they_answer
from kvtier.tiers.peers.peer import OtherNode, PeerAddress, PeerAddresses, address_text
from kvtier.tiers.peers.stream import PeerFailed
from kvtier.tiers.peers.wire import MAX_NAMES, LentBlocks, PeerVerb, shared_key
from kvtier.tiers.shared import KnownNames, OutcomeCounts

_log = logging.getLogger(__name__)

_MOST: Final = 4096


class Resets:
    """Fingerprints of models that somebody told to forget everything. Thread-safe.

    A reset says that blocks of one name have other bytes from now on, as when an engine's weights were changed where
    they lie. Which of the peers' blocks are from before, no name tells. So it lasts as long as the process.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._fingerprints: set[bytes] = set()
        self._all = False  # too many to remember each

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._all or fingerprint in self._fingerprints

    def note(self, fingerprint: bytes) -> bool:
        """Returns whether that is news."""
        with self._lock:
            is_news = fingerprint not in self
            self._fingerprints.add(fingerprint)
            self._all |= len(self._fingerprints) > _MOST
            return is_news


RESETS: Final = Resets()


WRONG: Final = frozenset({Outcome.EVICTED, Outcome.CHECKSUM, Outcome.KEY_MISMATCH})
"""What becomes of a block that a peer does not have as it should."""


class _Flight(NamedTuple):
    """The blocks of one batch that one peer is asked for, by their positions."""

    peer: OtherNode
    positions: list[int]
    hinted: set[int]  # those that are asked for because the peer's events name them


_OTHER_KV: Final = (
    "[peers] the node at %s computes other KV under this model's name, by another release of a library or by code that "
    "was replaced: nothing is borrowed from such nodes"
)
_NAME_LIFETIME: Final = 30.0  # seconds a name is believed
_LOOK_UP_EVERY: Final = 10.0  # seconds between two looks at the addresses of the nodes' names
_HELD_TIME: Final = 0.02  # seconds beyond the deadline for all answers that have begun to arrive, …
_THERE_TIME: Final = 0.001  # … and for each to be read that lies there
_TEND_EVERY: Final = 0.25  # seconds between two looks at the connections


class PeersStore(Tier):
    """A `Tier` over the daemons that [peers] nodes name. Thread-safe; raises from `open` alone.

    A thread keeps a connection to each peer ready, so that no request waits for one that is away. Every batch has one
    deadline: `deadline` seconds and its bytes over `bandwidth`. A peer that fails costs the blocks it was asked for,
    and after some failures in a row it is left alone for a while.

    What peers hold is known by their KV events if these can be followed, else by asking them, for a while. Both are
    hints: a block is what it should be only once it was read and verified.

    It takes no stores. After a reset it holds nothing: what peers have may be what was to be forgotten.
    """

    is_shared = True

    def __init__(self, config: Config, blocks: LentBlocks, key: bytes) -> None:
        """Use `PeersStore.open`."""
        self._config = config.peers
        self._breaker = config.breaker
        self._blocks = blocks
        self._key = key
        self._holders = KnownNames[PeerAddress](_NAME_LIFETIME)  # as peers said when they were asked
        self._following = Following(config.peers, blocks.fingerprint)
        self._probe: bytes | None = None  # what our model computes of a few tokens; None: it was not asked
        self._told_apart = False  # whether the log says that a peer's computes otherwise
        self._peers: dict[PeerAddress, OtherNode] = {}  # replaced whole, by the tending thread alone
        self._counts = OutcomeCounts()  # and failures of peers whose addresses are gone
        self._closing = threading.Event()
        self._addresses = PeerAddresses(self._config.nodes)
        self._looked_up_at = float("-inf")
        self._tending = threading.Thread(target=self._tend, name="kvtier-peers", daemon=True)

    @classmethod
    def open(cls, config: Config, fingerprint: bytes, *, slot_bytes: int, block_size: int) -> "PeersStore":
        """For the blocks of `fingerprint` (32 bytes). Peers need not be there yet. ConfigError if the key is none."""
        require_space(fingerprint, slot_bytes, block_size)
        assert config.peers.key_file is not None
        key = shared_key(config.peers.key_file)
        store = cls(config, LentBlocks(fingerprint, slot_bytes, block_size), key)
        store._tending.start()
        return store

    # names: no I/O

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        at, told = self._holders.leading(hashes), self._told().values()
        while told and at < len(hashes):
            end = next((end for names in told if (end := names.leading(hashes, at)) > at), at)
            if end == at:
                break
            at = end + self._holders.leading(hashes[end:])
        return at

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        told = self._told().values()
        asked = self._holders.of(hashes)
        return [
            peer is not None or any(names.holds(name) for names in told)
            for name, peer in zip(hashes, asked, strict=True)
        ]

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        """Ask every peer that answers, but those whose events tell all; of several holders, who has the longest run."""
        if self._is_off:
            return 0
        deadline = time.monotonic() + self._config.deadline
        found = 0
        while found < len(hashes):
            window = hashes[found : found + MAX_NAMES]
            held, failure = self._ask_all(window, deadline)
            told = {
                address: [names.holds(name) for name in window]
                for address, names in self._told().items()
                if address not in held
            }
            there = self._learn(window, held, told)
            found += there
            if there < len(window):
                if failure is not None and not held and not found:
                    self._counts.add("locate", [failure])
                    return failure
                break
        self._counts.add("locate", [Outcome.OK])
        return found

    @property
    def knows_all(self) -> bool:
        peers = list(self._peers.values())
        return self._is_off or all(self._following.is_sure_of(peer) for peer in peers if peer.answers)

    # blocks

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """One flight for each peer: all are asked, then heard in turn."""
        require_buffers(len(hashes), into, self._blocks.slot_bytes)
        results: list[BlockRecord | Outcome] = [Outcome.CLOSED if self._closing.is_set() else Outcome.ABSENT] * len(
            hashes
        )
        deadline = time.monotonic() + self._seconds(len(hashes))
        if not self._is_off:
            flights = self._take_off(hashes, results, deadline)
            for link in as_they_answer(flights, deadline):
                self._land(flights[link], link, hashes, into, results, deadline)
        if self._is_off and not self._closing.is_set():
            results = [Outcome.EPOCH] * len(hashes)
        self._holders.forget(h for h, result in zip(hashes, results, strict=True) if isinstance(result, Outcome))
        self._counts.add("read", results)
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """Nothing is stored with peers: the hierarchy does not offer them any."""
        return [Outcome.UNSUPPORTED] * len(records)

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Forget who holds them. What peers hold is theirs."""
        self._holders.forget(hashes)

    def reset(self) -> None:
        """From now on, until this process ends, no block of the model comes from a peer or goes to one."""
        if RESETS.note(self._blocks.fingerprint):
            _log.warning(
                "[peers] the model %s was reset: its blocks are not shared with peers any more until this process is "
                "started anew; to make all nodes forget, raise [cache] epoch",
                self._blocks.fingerprint.hex()[:16],
            )
        self._holders.clear()

    # upkeep

    def tell_kv_probe(self, packed: bytes) -> None:
        """A peer whose model computes otherwise lends nothing, and fails as `other_kv`."""
        self._probe = packed
        for peer in self._peers.values():
            peer.require(packed)

    def probe(self, direction: Direction) -> bool:
        """Whether some peer answers."""
        return direction == "write" or any(peer.answers for peer in self._peers.values())

    def stats(self) -> Mapping[str, int]:
        """{read, locate}_{outcome}, failed_{reason}, hints_{right, wrong}, questions; names, told, answering, sure."""
        counts, peers = Counter(self._counts.counts()), list(self._peers.values())
        for peer in peers:
            counts.update({f"failed_{reason}": count for reason, count in peer.counts.items()})
        answering = sum(peer.answers for peer in peers)
        return {**counts, **self._following.stats(), "names": len(self._holders), "answering": answering}

    def check(self) -> None:
        self._holders.check()
        self._following.check()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._closing.set()
        self._following.close()
        for peer in self._peers.values():
            peer.close()

    # inside

    @property
    def _is_off(self) -> bool:
        return self._closing.is_set() or self._blocks.fingerprint in RESETS

    def _seconds(self, num_blocks: int) -> float:
        return self._config.deadline + num_blocks * self._blocks.slot_bytes / self._config.bandwidth

    def _ask_all(
        self, names: Sequence[ChainHash], deadline: float
    ) -> tuple[dict[PeerAddress, list[bool]], Outcome | None]:
        """What each peer holds, and one failure if there was any."""
        asked: list[tuple[OtherNode, PeerLink]] = []
        held: dict[PeerAddress, list[bool]] = {}
        failure: Outcome | None = None
        for peer in [each for each in self._peers.values() if each.answers and not self._following.is_sure_of(each)]:
            link = None
            try:
                link = peer.borrow(deadline)
                link.ask(PeerVerb.HELD, names, deadline)
                asked.append((peer, link))
            except PeerFailed as failed:
                failure = self._fail(peer, link, failed)
        self._counts.count("questions", len(asked))
        by_link = {link: peer for peer, link in asked}
        for link in as_they_answer(by_link, deadline):
            try:
                until = max(deadline + _HELD_TIME, time.monotonic() + _THERE_TIME)
                held[by_link[link].address] = link.hear_held(len(names), until)
                by_link[link].give_back(link)
            except PeerFailed as failed:
                failure = self._fail(by_link[link], link, failed)
        return held, failure

    def _learn(
        self,
        names: Sequence[ChainHash],
        held: Mapping[PeerAddress, Sequence[bool]],
        told: Mapping[PeerAddress, Sequence[bool]],
    ) -> int:
        """Note whom to ask for each block, in few flights, if events do not tell; how many are held."""
        at = 0
        while at < len(names):
            ends = {
                address: next((i for i in range(at, len(names)) if not flags[i]), len(names))
                for address, flags in (*held.items(), *told.items())
            }
            best = max(ends, key=ends.__getitem__, default=None)
            if best is None or ends[best] == at:
                break
            if best in held:
                self._holders.add(names[at : ends[best]], best)
            at = ends[best]
        return at

    def _told(self) -> Mapping[PeerAddress, AnnouncedNames]:
        """What peers hold by their events."""
        return {} if self._is_off else self._following.believed(self._peers)

    def _whom(self, hashes: Sequence[ChainHash]) -> tuple[list[PeerAddress | None], set[int]]:
        """Whom to ask for each block, in few flights, and which blocks are asked for because events name them.

        Of several peers with equally long runs, one by the block's name, so that not all nodes ask the same.
        """
        whom, hinted, at = self._holders.of(hashes), set[int](), 0
        told = self._told() if None in whom else {}
        while told and at < len(hashes):
            end = at + 1
            if whom[at] is None:
                ends = {address: names.leading(hashes, at) for address, names in told.items()}
                best = max(ends, key=lambda address: (ends[address], hash((address, hashes[at]))))
                for position in range(at, ends[best]):
                    if whom[position] is None:
                        whom[position] = best
                        hinted.add(position)
                end = max(end, ends[best])
            at = end
        return whom, hinted

    def _take_off(
        self, hashes: Sequence[ChainHash], results: list[BlockRecord | Outcome], deadline: float
    ) -> dict[PeerLink, _Flight]:
        """Ask every peer for its blocks. What cannot be asked has its outcome."""
        by_peer: dict[PeerAddress, list[int]] = {}
        whom, hinted = self._whom(hashes)
        for position, address in enumerate(whom):
            if address is not None:
                by_peer.setdefault(address, []).append(position)
        flights: dict[PeerLink, _Flight] = {}
        for address, positions in by_peer.items():
            peer, link = self._peers.get(address), None
            if peer is None or not peer.breaker.closed:
                continue
            asked = positions[:MAX_NAMES]  # more than one question has names: not asked
            try:
                link = peer.borrow(deadline)
                link.ask(PeerVerb.LEND, [hashes[position] for position in asked], deadline)
                flights[link] = _Flight(peer, positions, hinted.intersection(asked))
            except PeerFailed as failed:
                outcome = self._fail(peer, link, failed)
                for position in positions:
                    results[position] = outcome
        return flights

    def _land(
        self,
        flight: _Flight,
        link: PeerLink,
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        results: list[BlockRecord | Outcome],
        deadline: float,
    ) -> None:
        peer, positions, hinted = flight
        is_late = time.monotonic() >= deadline and not link.is_quiet  # another peer took all the time: not its fault
        asked, left = positions[:MAX_NAMES], set(positions)

        def settle(number: int, result: BlockRecord | Outcome) -> None:
            results[asked[number]] = result
            left.discard(asked[number])

        try:
            link.hear_blocks([hashes[p] for p in asked], [into[p] for p in asked], settle, deadline)
        except PeerFailed as failed:  # what came before is good
            for position in left:
                results[position] = failed.outcome
            if is_late:
                link.close()
            else:
                self._fail(peer, link, failed)
            if failed.outcome not in WRONG:
                return  # it says nothing of the blocks
        else:
            peer.give_back(link, lent=True)
        if hinted:  # which of them were something else, or nothing
            hints = [(hashes[p], results[p] in WRONG) for p in asked if p in hinted]
            self._following.judge(peer.address, hints)

    def _fail(self, peer: OtherNode, link: PeerLink | None, failure: PeerFailed) -> Outcome:
        """A peer failed: what it was believed to hold is not asked of it any more."""
        peer.failed(link, failure)
        self._holders.forget_all(peer.address)
        return failure.outcome

    def _tend(self) -> None:
        """Thread: keep addresses and connections."""
        while not self._closing.is_set():
            now = time.monotonic()
            if now - self._looked_up_at >= _LOOK_UP_EVERY:
                self._looked_up_at = now
                self._adopt(self._addresses.look_up())
            for peer in self._peers.values():
                if self._closing.is_set():
                    return
                peer.tend()
            self._following.tend(self._peers, self._fail)
            self._closing.wait(_TEND_EVERY)
        self._following.close()  # `close` may have come while a stream was opened

    def _adopt(self, addresses: Sequence[PeerAddress]) -> None:
        """Know these peers and no others."""
        peers = {
            address: self._peers.get(address)
            or OtherNode(
                address, self._connect, Breaker(self._breaker.failures, self._breaker.retry_after, time.monotonic)
            )
            for address in addresses
        }
        for peer in peers.values():
            peer.require(self._probe)
        gone = [peer for address, peer in self._peers.items() if address not in peers]
        self._peers = peers
        for peer in gone:
            peer.close()
            self._holders.forget_all(peer.address)
            for reason, count in peer.counts.items():
                self._counts.count(f"failed_{reason}", count)
        if self._closing.is_set():  # `close` may have seen the peers of before
            self.close()

    def _connect(self, address: PeerAddress, seconds: float) -> PeerLink:
        deadline = time.monotonic() + min(seconds, self._config.connect_timeout)

        def link() -> PeerLink:
            return PeerLink.opened(address, self._key, self._blocks, deadline - time.monotonic())

        probe, opened = self._probe, link()
        if probe is not None:
            try:
                opened.compare(probe, deadline)
            except PeerFailed as failed:
                opened.close()
                if failed.reason == "other_kv" and not self._told_apart:
                    self._told_apart = True
                    _log.warning(_OTHER_KV, address_text(address))
                if failed.reason != "hung_up":
                    raise
                opened = link()  # it knows no probes
        opened.told = probe
        return opened
