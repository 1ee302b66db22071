"""What other nodes' KV events tell of their memory: whose are followed, what each holds, which are believed."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from threading import Lock
from typing import Final, Protocol

from kvtier.tiers import ChainHash, ConfigError, Outcome
from kvtier.tiers.config import PeersConfig
from kvtier.tiers.peers.link import EventsAt, PeerLink
from kvtier.tiers.peers.peer import OtherNode, PeerAddress
from kvtier.tiers.peers.stream import PeerFailed
from kvtier.tiers.peers.wire import PeerVerb

_log = logging.getLogger(__name__)

KEY_BYTES: Final = 8
"""Events name a block by the last bytes of its chain hash. Two blocks of one key are told apart when one is read."""

MAX_DOUBTS: Final = 16
"""Flights that a peer's events sent in vain, after which they are not believed until some doubts have passed."""

_KEY: Final = itemgetter(slice(-KEY_BYTES, None))
_DOUBT: Final = 30.0  # seconds for which a name that was not there is not believed


class NamesRoom:
    """How many names may be known by events, of all peers together. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.left = self._most = most
        self._lock = Lock()

    def take(self, count: int) -> int:
        """Up to `count` places; how many there were."""
        with self._lock:
            count = min(count, self.left)
            self.left -= count
            return count

    def give_back(self, count: int) -> None:
        with self._lock:
            self.left += count

    def check(self) -> None:
        assert 0 <= self.left <= self._most, f"{self.left} places of {self._most}"


class AnnouncedNames:
    """One peer's names, some 100 bytes each; asking takes no lock. `is_whole`: none was left out for want of room."""

    def __init__(self, room: NamesRoom, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_whole = True  # no name was left out
        self._room = room
        self._clock = clock
        self._lock = Lock()  # held by whoever changes what follows
        self._keys: set[bytes] = set()
        self._doubts: dict[bytes, float] = {}  # a key that was asked for in vain → until when it is not believed
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
        """They have left it."""
        with self._lock:
            gone = self._keys.intersection(keys)
            self._keys -= gone
            self._room.give_back(len(gone))

    def clear(self) -> None:
        """Nothing is known of the peer: what comes now is all it holds."""
        with self._lock:
            self._room.give_back(len(self._keys))
            gone, self._keys, self._doubts, self.is_whole = self._keys, set(), {}, True
        _let_go(gone)

    def close(self) -> None:
        """Forget all; nothing is stored any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._room.give_back(len(self._keys))
            gone, self._keys = self._keys, set()
        _let_go(gone)

    def doubt(self, name: ChainHash) -> None:
        """The peer was asked for this block, and did not send it."""
        with self._lock:
            self._forget_doubts()
            if len(self._doubts) < MAX_DOUBTS:
                self._doubts[name[-KEY_BYTES:]] = self._clock() + _DOUBT

    @property
    def num_doubts(self) -> int:
        """Names that it did not have lately, though its events said so."""
        if self._doubts:
            with self._lock:
                self._forget_doubts()
        return len(self._doubts)

    def holds(self, name: ChainHash) -> bool:
        key = name[-KEY_BYTES:]
        return key in self._keys and key not in self._doubts

    def leading(self, names: Sequence[ChainHash], first: int = 0) -> int:
        """Where the run of held blocks that begins at `first` ends."""
        keys, doubts = self._keys, self._doubts
        following = takewhile(keys.__contains__, map(_KEY, islice(names, first, None)))
        if doubts:
            following = takewhile(lambda key: key not in doubts, following)
        return first + sum(1 for _ in following)

    def check(self) -> None:
        """Raise AssertionError if more is doubted than may be."""
        with self._lock:
            assert len(self._doubts) <= MAX_DOUBTS, f"{len(self._doubts)} doubts"
            assert not (self._closed and self._keys), "names of a peer that nobody follows"

    def _forget_doubts(self) -> None:
        now = self._clock()
        self._doubts = {key: until for key, until in self._doubts.items() if until > now}


def _let_go(keys: set[bytes]) -> None:
    """One by one: a million at once would keep all other threads waiting."""
    while keys:
        keys.pop()


_ASK_EVERY: Final = 5.0  # seconds between two questions where a peer's events are


class EventFeed(Protocol):
    """One peer's events of one model, as they are read on a thread of their own."""

    @property
    def is_live(self) -> bool:
        """Whether all that was published has been taken in, but for what is on its way."""

    def stop(self) -> None:
        """Read no more, soon."""


OpenFeed = Callable[[bytes, str, str, AnnouncedNames], EventFeed]
"""Follow a model (fingerprint) at a publisher's two ZMQ addresses, into the names. ConfigError for an address."""


class FeedOpener:
    """Who can follow KV events in this process. Nobody, unless it is a daemon that says so: events are its business."""

    def __init__(self) -> None:
        self.open: OpenFeed | None = None


FEEDS: Final = FeedOpener()


class _Followed:
    """One peer's events."""

    def __init__(self, names: AnnouncedNames) -> None:
        self.names = names
        self.at = EventsAt()
        self.asked_at = float("-inf")  # when it last said where its events are, since it welcomed us
        self.feed: EventFeed | None = None

    @property
    def is_believed(self) -> bool:
        """Whether it may be asked for a block because its events name it."""
        return self.feed is not None and self.feed.is_live and self.names.num_doubts < MAX_DOUBTS

    @property
    def is_sure(self) -> bool:
        """Whether, besides, it holds nothing that its events do not name."""
        return self.is_believed and self.at.tells_all and self.names.is_whole and not self.names.num_doubts

    def close(self) -> None:
        if self.feed is not None:
            self.feed.stop()
        self.names.close()


class Following:
    """The events of all peers of one model. `tend` belongs to one thread; the rest may be asked by any.

    A peer's events are believed while they are live: nothing is missing, and the publisher answers. A peer whose events
    are not, or that holds more than it announces, has to be asked by names.
    """

    def __init__(self, config: PeersConfig, fingerprint: bytes) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._open = FEEDS.open if config.events else None
        self._room = NamesRoom(config.max_blocks)
        self._followed: dict[PeerAddress, _Followed] = {}  # replaced whole, by the tending thread
        self._lock = Lock()
        self._counts: Counter[str] = Counter()  # flights that events sent: hints_{right, wrong}

    # whom to ask: no I/O

    def believed(self, peers: Mapping[PeerAddress, OtherNode]) -> dict[PeerAddress, AnnouncedNames]:
        """Names by those peers that answer and whose events count."""
        return {
            address: each.names
            for address, each in self._followed.items()
            if each.is_believed and (peer := peers.get(address)) is not None and peer.answers
        }

    def is_sure_of(self, peer: OtherNode) -> bool:
        """Whether the peer need not be asked."""
        followed = self._followed.get(peer.address)
        return followed is not None and followed.is_sure

    def judge(self, address: PeerAddress, asked: Sequence[tuple[ChainHash, bool]]) -> None:
        """Note whether a flight (each name, and whether it was wrong) was in vain; the first wrong one is doubted."""
        wrong = next((name for name, is_wrong in asked if is_wrong), None)
        with self._lock:
            self._counts["hints_right" if wrong is None else "hints_wrong"] += 1
        if wrong is not None and (followed := self._followed.get(address)) is not None:
            followed.names.doubt(wrong)

    def stats(self) -> dict[str, int]:
        """Its counts, `told`: names known now, and `sure`: peers that need not be asked."""
        followed = list(self._followed.values())
        names = sum(len(each.names) for each in followed)
        return {**self._counts, "told": names, "sure": sum(each.is_sure for each in followed)}

    # upkeep

    def tend(
        self,
        peers: Mapping[PeerAddress, OtherNode],
        fail: Callable[[OtherNode, PeerLink | None, PeerFailed], Outcome],
    ) -> None:
        """Ask peers where their events are, now and then, and follow them there. Waits for peers."""
        if self._open is None:
            return
        gone = [each for address, each in self._followed.items() if address not in peers]
        self._followed = {
            address: self._followed.get(address) or _Followed(AnnouncedNames(self._room)) for address in peers
        }
        for each in gone:
            each.close()
        for address, followed in self._followed.items():
            if not peers[address].answers:
                followed.asked_at = float("-inf")  # whoever welcomes us next may be another process
            elif time.monotonic() - followed.asked_at >= _ASK_EVERY:
                followed.asked_at = time.monotonic()
                self._ask(followed, peers[address], self._open, fail)

    def check(self) -> None:
        for each in self._followed.values():
            each.names.check()
        self._room.check()

    def close(self) -> None:
        for each in self._followed.values():
            each.close()

    def _ask(
        self,
        followed: _Followed,
        peer: OtherNode,
        open_feed: OpenFeed,
        fail: Callable[[OtherNode, PeerLink | None, PeerFailed], Outcome],
    ) -> None:
        link, deadline = None, time.monotonic() + self._config.deadline
        try:
            link = peer.borrow(deadline)
            link.ask(PeerVerb.EVENTS, [self._fingerprint], deadline)
            at = link.hear_events(deadline).reached_at(peer.address[0])
        except PeerFailed as failed:
            fail(peer, link, failed)
            return
        peer.give_back(link)
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
            _log.info("[peers] %s:%d: its events at %s tell which blocks it holds", *peer.address, at.publish)
