"""Other nodes' KV events: which peers are followed, which blocks each holds, and which events are believed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from threading import Lock
from typing import Final, Protocol

from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.config import PeersConfig
from kvtier.tiers.peers.link import EventsAt
from kvtier.tiers.peers.peer import Fail, OtherNode
from kvtier.tiers.peers.stream import PeerAddress, PeerFailed
from kvtier.tiers.peers.wire import PeerVerb

_log = logging.getLogger(__name__)

KEY_BYTES: Final = 8
"""Events name a block by the last bytes of its chain hash. A read distinguishes two blocks of one key."""

MAX_DOUBTS: Final = 16
"""Reads in vain because of a peer's events, after which they are not believed until some doubts have expired."""

_KEY: Final = itemgetter(slice(-KEY_BYTES, None))
_DOUBT: Final = 30.0  # seconds for which a name is not believed after its block was missing


class NamesRoom:
    """The budget of names known by events, of all peers together. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.left = self._most = most
        self._lock = Lock()

    def take(self, count: int) -> int:
        """Take up to `count` places; returns how many there were."""
        with self._lock:
            count = min(count, self.left)
            self.left -= count
            return count

    def put_back(self, count: int) -> None:
        with self._lock:
            self.left += count

    def check(self) -> None:
        assert 0 <= self.left <= self._most, f"{self.left} places of {self._most}"


class AnnouncedNames:
    """One peer's names by its events, some 100 bytes each. Lookups take no lock."""

    def __init__(self, room: NamesRoom, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_whole = True  # no name was left out for want of room
        self._room = room
        self._clock = clock
        self._lock = Lock()  # for changes of what follows
        self._keys: set[bytes] = set()
        self._doubts: dict[bytes, float] = {}  # a key whose block was missing → until when it is not believed
        self._closed = False

    def __len__(self) -> int:
        return len(self._keys)

    def store(self, keys: Iterable[bytes]) -> None:
        """The peer's memory holds these blocks now."""
        with self._lock:
            if self._closed:
                return
            fresh = set(keys).difference(self._keys)
            taken = self._room.take(len(fresh))
            if taken < len(fresh):
                self.is_whole = False
                fresh = set(list(fresh)[:taken])
            self._keys |= fresh
            for key in fresh.intersection(self._doubts):
                del self._doubts[key]

    def remove(self, keys: Iterable[bytes]) -> None:
        """The peer's memory holds these blocks no more."""
        with self._lock:
            removed = self._keys.intersection(keys)
            self._keys -= removed
            self._room.put_back(len(removed))

    def clear(self) -> None:
        """Forget all names: the next events name everything that the peer holds."""
        with self._lock:
            self._room.put_back(len(self._keys))
            removed, self._keys, self._doubts, self.is_whole = self._keys, set(), {}, True
        _clear_slowly(removed)

    def close(self) -> None:
        """Forget all; nothing is stored any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._room.put_back(len(self._keys))
            removed, self._keys = self._keys, set()
        _clear_slowly(removed)

    def doubt(self, name: ChainHash) -> None:
        """The peer did not send this block on request."""
        with self._lock:
            self._forget_doubts()
            if len(self._doubts) < MAX_DOUBTS:
                self._doubts[name[-KEY_BYTES:]] = self._clock() + _DOUBT

    @property
    def num_doubts(self) -> int:
        """Names of blocks that were missing lately, though its events named them."""
        if self._doubts:
            with self._lock:
                self._forget_doubts()
        return len(self._doubts)

    def holds(self, name: ChainHash) -> bool:
        key = name[-KEY_BYTES:]
        return key in self._keys and key not in self._doubts

    def leading(self, names: Sequence[ChainHash], first: int = 0) -> int:
        """The end of the run of held blocks that begins at `first`."""
        keys, doubts = self._keys, self._doubts
        following = takewhile(keys.__contains__, map(_KEY, islice(names, first, None)))
        if doubts:
            following = takewhile(lambda key: key not in doubts, following)
        return first + sum(1 for _ in following)

    def check(self) -> None:
        """Raise AssertionError if there are too many doubts, or names after `close`."""
        with self._lock:
            assert len(self._doubts) <= MAX_DOUBTS, f"{len(self._doubts)} doubts"
            assert not (self._closed and self._keys), "names of a closed peer"

    def _forget_doubts(self) -> None:
        now = self._clock()
        self._doubts = {key: until for key, until in self._doubts.items() if until > now}


def _clear_slowly(keys: set[bytes]) -> None:
    """Remove one by one: a million at once would keep all other threads waiting."""
    while keys:
        keys.pop()


_EVENTS_EVERY: Final = 5.0  # seconds between two requests for the address of a peer's events


class EventFeed(Protocol):
    """One peer's events of one model, read on a thread of their own."""

    @property
    def is_live(self) -> bool:
        """Whether all published events were applied, except those on their way."""

    def stop(self) -> None:
        """Read no more, soon."""


OpenFeed = Callable[[bytes, str, str, AnnouncedNames], EventFeed]
"""Follow a model (fingerprint) at a publisher's two ZMQ addresses, into the names. ConfigError for an address."""


class FeedOpener:
    """The function that follows KV events in this process; None unless a daemon sets it."""

    def __init__(self) -> None:
        self.open: OpenFeed | None = None


FEEDS: Final = FeedOpener()


class _Followed:
    """One peer's events."""

    def __init__(self, names: AnnouncedNames) -> None:
        self.names = names
        self.at = EventsAt()
        self.events_read_at = float("-inf")  # when the address of its events was last read on this connection
        self.feed: EventFeed | None = None

    @property
    def is_believed(self) -> bool:
        """Whether a block may be requested because the peer's events name it."""
        return self.feed is not None and self.feed.is_live and self.names.num_doubts < MAX_DOUBTS

    @property
    def is_sure(self) -> bool:
        """Whether, besides, the peer holds no block that its events do not name."""
        return self.is_believed and self.at.tells_all and self.names.is_whole and not self.names.num_doubts

    def close(self) -> None:
        if self.feed is not None:
            self.feed.stop()
        self.names.close()


class Following:
    """The events of all peers of one model. `tend` belongs to one thread; other methods are thread-safe.

    A peer's events are believed while they are live: nothing is missing, and the publisher answers. Other peers, and
    those that hold more than they announce, are queried by name.
    """

    def __init__(self, config: PeersConfig, fingerprint: bytes) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._open = FEEDS.open if config.events else None
        self._room = NamesRoom(config.max_blocks)
        self._followed: dict[PeerAddress, _Followed] = {}  # replaced whole, by the tending thread
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # reads because of events: hints_{right, wrong}

    # Which peers to query: no I/O.

    def believed(self, peers: Mapping[PeerAddress, OtherNode]) -> dict[PeerAddress, AnnouncedNames]:
        """Names by those peers that answer and whose events are believed."""
        return {
            address: each.names
            for address, each in self._followed.items()
            if each.is_believed and (peer := peers.get(address)) is not None and peer.answers
        }

    def is_sure_of(self, peer: OtherNode) -> bool:
        """Whether the peer need not be queried."""
        followed = self._followed.get(peer.address)
        return followed is not None and followed.is_sure

    def judge(self, address: PeerAddress, results: Sequence[tuple[ChainHash, bool]]) -> None:
        """Count whether a read (each name, and whether it was wrong) was in vain; the first wrong name is doubted."""
        wrong = next((name for name, is_wrong in results if is_wrong), None)
        with self._lock:
            self._counts["hints_right" if wrong is None else "hints_wrong"] += 1
        if wrong is not None and (followed := self._followed.get(address)) is not None:
            followed.names.doubt(wrong)

    def stats(self) -> dict[str, int]:
        """Its counts, `told`: names known by events now, and `sure`: peers that need not be queried."""
        followed = list(self._followed.values())
        names = sum(len(each.names) for each in followed)
        return {**self._counts, "told": names, "sure": sum(each.is_sure for each in followed)}

    def tend(self, peers: Mapping[PeerAddress, OtherNode], fail: Fail) -> None:
        """Read the addresses of peers' events regularly, and follow them. Waits for peers."""
        if self._open is None:
            return
        removed = [each for address, each in self._followed.items() if address not in peers]
        self._followed = {
            address: self._followed.get(address) or _Followed(AnnouncedNames(self._room)) for address in peers
        }
        for each in removed:
            each.close()
        for address, followed in self._followed.items():
            if not peers[address].answers:
                followed.events_read_at = float("-inf")  # another process may have the address next
            elif time.monotonic() - followed.events_read_at >= _EVENTS_EVERY:
                followed.events_read_at = time.monotonic()
                self._ask(followed, peers[address], self._open, fail)

    def check(self) -> None:
        for each in self._followed.values():
            each.names.check()
        self._room.check()

    def close(self) -> None:
        for each in self._followed.values():
            each.close()

    def _ask(self, followed: _Followed, peer: OtherNode, open_feed: OpenFeed, fail: Fail) -> None:
        link, deadline = None, time.monotonic() + self._config.deadline
        try:
            link = peer.connection(deadline)
            link.ask(PeerVerb.EVENTS, [self._fingerprint], deadline)
            at = link.read_events(deadline).reached_at(peer.address[0])
        except PeerFailed as failed:
            fail(peer, link, failed)
            return
        peer.put_back(link)
        was, followed.at = followed.at, at
        if (was.publish, was.replay) == (at.publish, at.replay):
            return
        if followed.feed is not None:
            followed.feed.stop()
            followed.feed = None
        followed.names.close()
        followed.names = AnnouncedNames(self._room)
        if at.publish:
            try:
                followed.feed = open_feed(self._fingerprint, at.publish, at.replay, followed.names)
            except ConfigError as refused:
                _log.warning("[peers] %s:%d: its events cannot be followed: %s", *peer.address, refused)
                return
            _log.info("[peers] %s:%d: its events at %s show which blocks it holds", *peer.address, at.publish)
