"""Blocks in other nodes' memory as a tier: located, read in one request per peer, verified; never written."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, NamedTuple

from kvtier.tiers import BlockRecord, Breaker, ChainHash, Direction, Outcome, Tier, require_buffers, require_space
from kvtier.tiers.config import Config
from kvtier.tiers.peers.following import AnnouncedNames, Following
from kvtier.tiers.peers.link import PeerLink, as_they_answer
from kvtier.tiers.peers.one_sided import RemoteMemory
from kvtier.tiers.peers.owners import AT_ONCE, Owners, most_nodes
from kvtier.tiers.peers.peer import MAX_PEERS, MAX_READY, NO_TIME, OtherNode, PeerAddresses, query_each
from kvtier.tiers.peers.ring import Keys, Owner
from kvtier.tiers.peers.stream import PeerAddress, PeerFailed, address_text
from kvtier.tiers.peers.wire import MAX_NAMES, LentBlocks, PeerVerb, shared_key
from kvtier.tiers.shared import KnownNames, OutcomeCounts

_log = logging.getLogger(__name__)

_MOST: Final = 4096


class Resets:
    """Fingerprints of models that were reset. Thread-safe.

    After a reset blocks of one name have other bytes, as when an engine's weights were changed in place. Names do not
    show which of the peers' blocks are from before it. So a reset holds as long as the process.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._fingerprints: set[bytes] = set()
        self._all = False  # too many to store each

    def __contains__(self, fingerprint: bytes) -> bool:
        return self._all or fingerprint in self._fingerprints

    def note(self, fingerprint: bytes) -> bool:
        """Add one; returns whether it is new."""
        with self._lock:
            is_news = fingerprint not in self
            self._fingerprints.add(fingerprint)
            self._all |= len(self._fingerprints) > _MOST
            return is_news


RESETS: Final = Resets()


WRONG: Final = frozenset({Outcome.EVICTED, Outcome.CHECKSUM, Outcome.KEY_MISMATCH})
"""The result for a block that a peer does not have as expected."""


class _PeerRead(NamedTuple):
    """The blocks of one batch that are requested from one peer, by their positions."""

    peer: OtherNode
    positions: list[int]
    hinted: set[int]  # those requested because the peer's events name them


_OTHER_KV: Final = (
    "[peers] the node at %s computes other KV under this model's name, by another release of a library or by code that "
    "was replaced: nothing is borrowed from such nodes"
)
_BY_STREAM: Final = 60.0  # seconds until a peer's memory is tried again
_NAME_LIFETIME: Final = 30.0  # seconds until a known name expires
_LOOK_UP_EVERY: Final = 10.0  # seconds between two look-ups of the nodes' addresses
_HELD_TIME: Final = 0.02  # seconds beyond the deadline for all replies that have begun to arrive, …
_THERE_TIME: Final = 0.001  # … and for each that is received already
_TENDED_AT_ONCE: Final = 16
_TEND_EVERY: Final = 0.25  # seconds between two checks of the connections


class PeersStore(Tier):
    """A `Tier` over the daemons in [peers] nodes. Thread-safe; only `open` raises.

    A thread keeps a connection to each peer ready, so that no request waits for one that is down. Every batch has one
    deadline: `deadline` seconds and its bytes over `bandwidth`. A peer that fails costs the blocks requested from it,
    and after several failures in a row its breaker opens.

    Which blocks peers hold is known by their KV events if these can be followed, else by requests, for a while. Of a
    ring of peers, only those are queried that its owners name. All are hints: a block counts only once it was read and
    verified.

    It takes no stores. After a reset it holds nothing: peers may have blocks from before it.
    """

    is_shared = True

    def __init__(self, config: Config, blocks: LentBlocks, key: bytes) -> None:
        """Use `PeersStore.open`."""
        self._config = config.peers
        self.breaker_limits = config.breaker.failures, config.breaker.retry_after
        self._blocks = blocks
        self._key = key
        self._holders = KnownNames[PeerAddress](_NAME_LIFETIME)  # by the replies of peers
        self._following = Following(config.peers, blocks.fingerprint)
        self._owners = Owners(config.peers, blocks.fingerprint)
        self._probe: bytes | None = None  # our model's KV probe; None: it was not computed
        self._memory = RemoteMemory() if config.peers.transport == "nixl" else None
        self._by_stream_until: dict[PeerAddress, float] = {}  # peers whose memory could not be read
        self._warned_other_kv = False
        self._peers: dict[PeerAddress, OtherNode] = {}  # replaced whole, by the maintenance thread alone
        self._counts = OutcomeCounts()  # and failures of former peers
        self._closing = threading.Event()
        self._addresses = PeerAddresses(self._config.nodes, most=most_nodes(self._config))
        self._looked_up_at = float("-inf")
        self._resolving: threading.Thread | None = None
        self._resolved: list[PeerAddress] = []
        self._tending = threading.Thread(target=self._tend, name="kvtier-peers", daemon=True)

    @classmethod
    def open(cls, config: Config, fingerprint: bytes, *, slot_bytes: int, block_size: int) -> "PeersStore":
        """For the blocks of `fingerprint` (32 bytes). Peers may start later. ConfigError if the key is not usable."""
        require_space(fingerprint, slot_bytes, block_size)
        assert config.peers.key_file is not None
        key = shared_key(config.peers.key_file)
        store = cls(config, LentBlocks(fingerprint, slot_bytes, block_size), key)
        store._tending.start()
        return store

    # Names: no I/O.

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        at, announced = self._holders.leading(hashes), self._announced().values()
        while announced and at < len(hashes):
            end = next((end for names in announced if (end := names.leading(hashes, at)) > at), at)
            if end == at:
                break
            at = end + self._holders.leading(hashes[end:])
        return at

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        announced = self._announced().values()
        located = self._holders.of(hashes)
        return [
            peer is not None or any(names.holds(name) for names in announced)
            for name, peer in zip(hashes, located, strict=True)
        ]

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        """Query the peers that may hold blocks. Of several holders, the longest run counts."""
        if self._is_off:
            return 0
        deadline = time.monotonic() + self._config.deadline
        found = 0
        while found < len(hashes):
            window = hashes[found : found + MAX_NAMES]
            held, failure = self._ask_all(window, deadline)
            announced = {
                address: [names.holds(name) for name in window]
                for address, names in self._announced().items()
                if address not in held
            }
            there = self._learn(window, held, announced)
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

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """One request per peer: all are sent, then the replies are read in turn."""
        require_buffers(len(hashes), into, self._blocks.slot_bytes)
        results: list[BlockRecord | Outcome] = [Outcome.CLOSED if self._closing.is_set() else Outcome.ABSENT] * len(
            hashes
        )
        deadline = time.monotonic() + self._seconds(len(hashes))
        if not self._is_off:
            reads = self._send_requests(hashes, results, deadline)
            for link in as_they_answer(reads, deadline):
                self._receive(reads[link], link, hashes, into, results, deadline)
        if self._is_off and not self._closing.is_set():
            results = [Outcome.EPOCH] * len(hashes)
        self._holders.forget(h for h, result in zip(hashes, results, strict=True) if isinstance(result, Outcome))
        self._counts.add("read", results)
        return results

    def report(self, keys: Keys, own: Owner) -> None:
        """Report to the ring's owners, if there is a ring, that this node holds blocks of these keys.

        On one thread, regularly. `own`: this node as an owner.
        """
        if not self._closing.is_set():
            self._owners.report(keys[:0] if self._is_off else keys, own, self._peers, self._fail)

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """Nothing is stored with peers: the hierarchy does not offer them any."""
        return [Outcome.UNSUPPORTED] * len(records)

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Forget which peers hold them. The peers' blocks stay."""
        self._holders.forget(hashes)

    def reset(self) -> None:
        """From now on, until this process ends, no block of the model is received from a peer or sent to one."""
        if RESETS.note(self._blocks.fingerprint):
            _log.warning(
                "[peers] the model %s was reset: its blocks are not shared with peers any more until this process is "
                "started anew; to make all nodes forget, raise [cache] epoch",
                self._blocks.fingerprint.hex()[:16],
            )
        self._holders.clear()

    def set_kv_probe(self, packed: bytes) -> None:
        """A peer whose model computes otherwise sends nothing, and fails as `other_kv`."""
        self._probe = packed
        for peer in self._peers.values():
            peer.require(packed)

    def probe(self, direction: Direction) -> bool:
        """Whether at least one peer answers."""
        return direction == "write" or any(peer.answers for peer in self._peers.values())

    def stats(self) -> Mapping[str, int]:
        """{read, locate}_{outcome}, failed_{reason}, hints_{right, wrong}, questions; names, told, answering, sure.

        Of a ring: owners_{queried, unanswered}, reports, reported, start_overs.
        """
        counts, peers = Counter(self._counts.counts()), list(self._peers.values())
        for peer in peers:
            counts.update({f"failed_{reason}": count for reason, count in peer.counts.items()})
        answering = sum(peer.answers for peer in peers)
        known = {**self._following.stats(), **self._owners.stats()}
        return {**counts, **known, "names": len(self._holders), "answering": answering}

    def check(self) -> None:
        self._holders.check()
        self._following.check()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closing.set()
        self._following.close()
        for peer in self._peers.values():
            peer.close()
        if self._memory is not None:
            self._memory.close()

    @property
    def _is_off(self) -> bool:
        return self._closing.is_set() or self._blocks.fingerprint in RESETS

    def _seconds(self, num_blocks: int) -> float:
        return self._config.deadline + num_blocks * self._blocks.slot_bytes / self._config.bandwidth

    def _ask_all(
        self, names: Sequence[ChainHash], deadline: float
    ) -> tuple[dict[PeerAddress, list[bool]], Outcome | None]:
        """Which blocks each peer holds, and one failure if there was any."""
        failures: list[Outcome] = []

        def ask(peer: OtherNode, link: PeerLink) -> None:
            link.ask(PeerVerb.HELD, names, deadline)
            self._counts.count("questions", 1)

        def read(peer: OtherNode, link: PeerLink) -> list[bool]:
            return link.read_held(len(names), max(deadline + _HELD_TIME, time.monotonic() + _THERE_TIME))

        def fail(peer: OtherNode, link: PeerLink | None, failed: PeerFailed) -> Outcome:
            failures.append(self._fail(peer, link, failed))
            return failures[-1]

        held = dict[PeerAddress, list[bool]]()
        peers, at_once = self._to_query(names, deadline)
        while peers and not any(flags[0] for flags in held.values()):
            held |= query_each(peers[:at_once], ask, read, deadline, fail)
            peers = peers[at_once:]
        return held, failures[-1] if failures else None

    def _to_query(self, names: Sequence[ChainHash], deadline: float) -> tuple[list[OtherNode], int]:
        """Those that owners name, of a ring, the likeliest first, and how many to query at once.

        Else all that answer, unless their events are complete.
        """
        if self._owners.ring is not None:
            return self._owners.holders(names, self._peers, deadline, self._fail), AT_ONCE
        return [
            each for each in self._peers.values() if each.answers and not self._following.is_sure_of(each)
        ], MAX_PEERS

    def _learn(
        self,
        names: Sequence[ChainHash],
        held: Mapping[PeerAddress, Sequence[bool]],
        announced: Mapping[PeerAddress, Sequence[bool]],
    ) -> int:
        """Store which peer to query for each block that events do not name; returns how many are held."""
        at = 0
        while at < len(names):
            ends = {
                address: next((i for i in range(at, len(names)) if not flags[i]), len(names))
                for address, flags in (*held.items(), *announced.items())
            }
            best = max(ends, key=ends.__getitem__, default=None)
            if best is None or ends[best] == at:
                break
            if best in held:
                self._holders.add(names[at : ends[best]], best)
            at = ends[best]
        return at

    def _announced(self) -> Mapping[PeerAddress, AnnouncedNames]:
        """Names of peers' blocks by their events."""
        return {} if self._is_off else self._following.believed(self._peers)

    def _whom(self, hashes: Sequence[ChainHash]) -> tuple[list[PeerAddress | None], set[int]]:
        """Which peer to query for each block, in few requests, and which blocks are requested because events name them.

        Of several peers with equally long runs, one by the block's name, so that not all nodes query the same.
        """
        whom, hinted, at = self._holders.of(hashes), set[int](), 0
        announced = self._announced() if None in whom else {}
        while announced and at < len(hashes):
            end = at + 1
            if whom[at] is None:
                ends = {address: names.leading(hashes, at) for address, names in announced.items()}
                best = max(ends, key=lambda address: (ends[address], hash((address, hashes[at]))))
                for position in range(at, ends[best]):
                    if whom[position] is None:
                        whom[position] = best
                        hinted.add(position)
                end = max(end, ends[best])
            at = end
        return whom, hinted

    def _send_requests(
        self, hashes: Sequence[ChainHash], results: list[BlockRecord | Outcome], deadline: float
    ) -> dict[PeerLink, _PeerRead]:
        """Request each block from its peer. If a request cannot be sent, its blocks have that outcome."""
        by_peer: dict[PeerAddress, list[int]] = {}
        whom, hinted = self._whom(hashes)
        for position, address in enumerate(whom):
            if address is not None:
                by_peer.setdefault(address, []).append(position)
        reads: dict[PeerLink, _PeerRead] = {}
        for address, positions in by_peer.items():
            peer, link = self._peers.get(address), None
            if peer is None or not peer.breaker.closed:
                continue
            wanted = positions[:MAX_NAMES]  # a request has no room for more
            try:
                link = peer.connection(deadline)
                link.ask_blocks([hashes[position] for position in wanted], deadline)
                reads[link] = _PeerRead(peer, positions, hinted.intersection(wanted))
            except PeerFailed as failed:
                outcome = self._fail(peer, link, failed)
                for position in positions:
                    results[position] = outcome
        return reads

    def _receive(
        self,
        read: _PeerRead,
        link: PeerLink,
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        results: list[BlockRecord | Outcome],
        deadline: float,
    ) -> None:
        peer, positions, hinted = read
        reads_memory = link.reads_memory
        is_late = time.monotonic() >= deadline and not link.is_quiet  # other peers used up the time: not its fault
        wanted, left = positions[:MAX_NAMES], set(positions)

        def report(number: int, result: BlockRecord | Outcome) -> None:
            results[wanted[number]] = result
            left.discard(wanted[number])

        try:
            link.read_blocks([hashes[p] for p in wanted], [into[p] for p in wanted], report, deadline)
        except PeerFailed as failed:  # blocks received before are good
            if reads_memory and failed.outcome not in WRONG:
                self._by_stream_until[peer.address] = time.monotonic() + _BY_STREAM
            for position in left:
                results[position] = failed.outcome
            if is_late:
                link.close()
            else:
                self._fail(peer, link, failed)
            if failed.outcome not in WRONG:
                return  # it does not show whether blocks are there
        else:
            peer.put_back(link, has_sent=True)
            if not link.reads_memory and self._may_try_memory(peer.address):
                peer.close_ready()  # the next one tries again
        if hinted:  # which of them were other blocks, or missing
            hints = [(hashes[p], results[p] in WRONG) for p in wanted if p in hinted]
            self._following.judge(peer.address, hints)

    def _fail(self, peer: OtherNode, link: PeerLink | None, failure: PeerFailed) -> Outcome:
        """A peer failed: forget which blocks it holds."""
        peer.failed(link, failure)
        if failure.reason != NO_TIME:
            self._holders.forget_all(peer.address)
        return failure.outcome

    def _tend(self) -> None:
        """Thread: maintains addresses and connections. Nothing ends it but `close`: peers would stay away for good."""
        while not self._closing.is_set():
            try:
                self._adopt_addresses()
                for peer in self._peers.values():
                    peer.breaker.set_limits(*self.breaker_limits)
                self._tend_away([peer for peer in self._peers.values() if peer.is_away])
                self._following.tend({} if self._owners.ring is not None else self._peers, self._fail)
            except Exception:  # no thread or file is free
                self._counts.count("not_tended", 1)
                _log.exception("[peers] connections are not maintained for now")
            self._closing.wait(_TEND_EVERY)
        self._following.close()  # `close` may have come while a stream was opened

    def _tend_away(self, away: Sequence[OtherNode]) -> None:
        """Some at once, since each that does not answer takes the time for a connection."""
        left = iter(away)

        def tend() -> None:
            for peer in left:
                if self._closing.is_set():
                    return
                peer.tend()

        num_others = min(len(away), _TENDED_AT_ONCE) - 1
        others = [threading.Thread(target=tend, name="kvtier-peers-to", daemon=True) for _ in range(num_others)]
        with suppress(RuntimeError):  # no thread is free: fewer at once
            for each in others:
                each.start()
        tend()
        for each in others:
            if each.ident is not None:
                each.join()

    def _adopt_addresses(self) -> None:
        """Look the nodes up regularly, on another thread: a resolver that hangs costs no peer its connection."""
        if self._resolving is None and time.monotonic() - self._looked_up_at >= _LOOK_UP_EVERY:
            self._looked_up_at = time.monotonic()
            self._resolving = threading.Thread(target=self._resolve, name="kvtier-peers-names", daemon=True)
            self._resolving.start()
        if self._resolving is not None:
            self._resolving.join(_TEND_EVERY)
            if not self._resolving.is_alive():
                self._resolving = None
                self._adopt(self._resolved)

    def _resolve(self) -> None:
        addresses = self._addresses.look_up()
        self._owners.adopt(addresses)
        self._resolved = addresses

    def _adopt(self, addresses: Sequence[PeerAddress]) -> None:
        """Use these peers and no others."""
        peers = {
            address: self._peers.get(address)
            or OtherNode(address, self._connect, Breaker(*self.breaker_limits, time.monotonic))
            for address in addresses
        }
        for peer in peers.values():
            peer.max_ready = MAX_READY if self._owners.ring is None else 1
            peer.require(self._probe)
        removed = [peer for address, peer in self._peers.items() if address not in peers]
        for address in [each for each in self._by_stream_until if each not in peers]:
            del self._by_stream_until[address]
        self._peers = peers
        for peer in removed:
            peer.close()
            self._holders.forget_all(peer.address)
            for reason, count in peer.counts.items():
                self._counts.count(f"failed_{reason}", count)
        if self._closing.is_set():  # `close` may have closed the former peers only
            self.close()

    def _connect(self, address: PeerAddress, seconds: float) -> PeerLink:
        seconds, probe = min(seconds, self._config.connect_timeout), self._probe
        deadline = time.monotonic() + seconds
        opened = PeerLink.opened(address, self._key, self._blocks, seconds)
        if probe is not None:
            try:
                opened.compare(probe, deadline)
            except PeerFailed as failed:
                opened.close()
                if failed.reason == "other_kv" and not self._warned_other_kv:
                    self._warned_other_kv = True
                    _log.warning(_OTHER_KV, address_text(address))
                raise
        opened.compared_probe = probe
        return opened if self._memory is None else self._with_memory(opened, self._memory, address, deadline)

    def _with_memory(self, opened: PeerLink, memory: RemoteMemory, address: PeerAddress, deadline: float) -> PeerLink:
        """The connection reads the peer's memory, if it offers that and could lately be read."""
        if not self._may_try_memory(address):
            return opened
        try:
            reads = opened.read_from(memory, deadline)
        except PeerFailed as failed:
            opened.close()
            self._by_stream_until[address] = time.monotonic() + _BY_STREAM
            if failed.reason != "nixl":
                raise
            return self._connect(address, deadline - time.monotonic())
        self._by_stream_until[address] = 0.0 if reads else time.monotonic() + _BY_STREAM
        return opened

    def _may_try_memory(self, address: PeerAddress) -> bool:
        return self._memory is not None and time.monotonic() >= self._by_stream_until.get(address, 0.0)
