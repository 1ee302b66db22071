"""Other nodes that send blocks: their addresses, ready connections, a breaker each."""

import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Final, TypeVar

from kvtier.tiers import Breaker, Outcome
from kvtier.tiers.peers.link import IsMyself, PeerLink, as_they_answer
from kvtier.tiers.peers.stream import PeerAddress, PeerFailed, address_text

_log = logging.getLogger(__name__)

MAX_PEERS: Final = 64  # followed or queried each; more are a ring
_KEPT: Final = 3600.0  # seconds; addresses that are dead by then cost a connection now and then


class PeerAddresses:
    """The addresses of the HOST:PORTs that [peers] names. Not thread-safe; a look-up waits for the resolver.

    A failed look-up is no empty answer: a name's last addresses count for `_KEPT` seconds more. Of more than `most`
    addresses a stable choice is used, whatever their order: those that rank first under this machine's name, so that
    machines do not all choose the same. For a ring they do.
    """

    def __init__(
        self, nodes: Sequence[str], clock: Callable[[], float] = time.monotonic, most: int = MAX_PEERS
    ) -> None:
        self._nodes, self._clock, self._most = nodes, clock, most
        self._known: dict[str, tuple[float, list[PeerAddress]]] = {}  # by node: time and result of the last look-up
        self._unknown: set[str] = set()  # nodes whose last look-up failed
        self._warned_too_many = False

    def look_up(self) -> list[PeerAddress]:
        """Up to `most` addresses, each once."""
        for node in self._nodes:
            try:
                self._known[node] = self._clock(), looked_up(node)
                self._unknown.discard(node)
            except (OSError, ValueError) as error:
                if node not in self._unknown:
                    self._unknown.add(node)
                    kept = "; its last addresses stay for now" if node in self._known else ""
                    _log.warning(
                        "[peers] nodes %s: cannot be looked up (%s); it is tried again and again%s", node, error, kept
                    )
                if node in self._known and self._clock() - self._known[node][0] > _KEPT:
                    del self._known[node]
        found = list(dict.fromkeys(each for _, addresses in self._known.values() for each in addresses))
        if len(found) <= self._most:
            return found
        if not self._warned_too_many:
            self._warned_too_many = True
            _log.warning("[peers] nodes: %d addresses, %d of them are used", len(found), self._most)
        by = socket.gethostname().encode()[:64] if self._most <= MAX_PEERS else b""
        return sorted(found, key=lambda each: blake2b(address_text(each).encode(), key=by).digest())[: self._most]


def looked_up(node: str) -> list[PeerAddress]:
    """The addresses of HOST:PORT. OSError or ValueError if it cannot be resolved; waits for a resolver."""
    host, _, port = node.rpartition(":")
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(info[4][0]), int(info[4][1])) for info in infos))


_LEAST: Final = 0.005  # seconds, without which no connection is begun
NO_TIME: Final = "no_time"  # the reason if other peers had used up the time for a connection
MAX_READY: Final = 2  # connections kept: as many as threads of the hierarchy use at once


class OtherNode:
    """One peer. Thread-safe. After a failure it is used again when it welcomes us; after several its breaker opens."""

    def __init__(
        self, address: PeerAddress, connect: Callable[[PeerAddress, float], PeerLink], breaker: Breaker
    ) -> None:
        """`connect` takes so many seconds at most, and raises as `PeerLink.opened`."""
        self.address = address
        self.breaker = breaker
        self.is_myself = False
        self.max_ready = MAX_READY
        self.counts: Counter[str] = Counter()
        self._connect = connect
        self._lock = Lock()  # guards what follows; never held across I/O
        self._ready: list[PeerLink] = []
        self._is_up = False
        self._closed = False
        self._probe: bytes | None = None  # the KV probe that each connection must have compared

    @property
    def answers(self) -> bool:
        """Whether it may be used now: it has welcomed us, and has not failed since."""
        return self._is_up

    def connection(self, deadline: float) -> PeerLink:
        """A connection, a new one if none is ready. PeerFailed; `put_back` or `failed` follows."""
        while True:
            with self._lock:
                link = self._ready.pop() if self._ready else None
            if link is None:
                return self._connected(deadline - time.monotonic())
            if link.is_quiet:
                return link
            link.close()  # the peer closed it, as one that was idle for long

    def put_back(self, link: PeerLink, *, has_sent: bool = False) -> None:
        """All replies on it were read. `has_sent`: blocks among them, and only that closes the breaker."""
        if has_sent:
            self.breaker.success()
        with self._lock:
            self._is_up = self.breaker.closed and not self._closed
            if not self._closed and link.compared_probe == self._probe and len(self._ready) < self.max_ready:
                self._ready.append(link)
                return
        link.close()

    def failed(self, link: PeerLink | None, failure: PeerFailed) -> None:
        """The connection is unusable: close it. If other peers had used up the time, this one stays as it is."""
        self.counts[failure.reason] += 1
        if failure.reason == NO_TIME:
            return
        self.breaker.failure()
        with self._lock:
            self._is_up = False
            links, self._ready = self._ready, []
        for each in links if link is None else [link, *links]:
            each.close()

    @property
    def is_away(self) -> bool:
        """Whether `tend` may have something to do."""
        return not (self._is_up or self.is_myself or self._closed)

    def tend(self) -> None:
        """Open a connection if it is away; after several failures only after its breaker's wait. Waits for it."""
        if not self.is_away or not (self.breaker.closed or self.breaker.take_probe()):
            return
        try:
            link = self._connected(math.inf)
        except PeerFailed as failure:
            if not self.is_myself:
                self.failed(None, failure)
                self.breaker.probed(False)
            return
        self.breaker.probed(True)
        self.put_back(link)

    def _connected(self, seconds: float) -> PeerLink:
        """A new connection. PeerFailed, also if this process has the peer's address by now."""
        if seconds < _LEAST:
            raise PeerFailed(Outcome.TIMEOUT, NO_TIME)
        try:
            return self._connect(self.address, seconds)
        except IsMyself:
            self.is_myself = True
            raise PeerFailed(Outcome.IO_ERROR, "no_connection") from None

    def require(self, probe: bytes | None) -> None:
        """Use only connections that have compared this KV probe."""
        with self._lock:
            if probe == self._probe:
                return
            self._probe, self._is_up = probe, False
            links, self._ready = self._ready, []
        for link in links:
            link.close()

    def close_ready(self) -> None:
        """Close connections that are not in use: later ones are new."""
        with self._lock:
            links, self._ready = self._ready, []
        for link in links:
            link.close()

    def close(self) -> None:
        """Close all connections; one in use is closed afterwards."""
        with self._lock:
            self._closed, self._is_up = True, False
            links, self._ready = self._ready, []
        for link in links:
            link.close()


A = TypeVar("A")
Fail = Callable[[OtherNode, PeerLink | None, PeerFailed], Outcome]
"""Called for a peer that failed, with its connection if it had one."""


def query_each(
    peers: Iterable[OtherNode],
    ask: Callable[[OtherNode, PeerLink], None],
    read: Callable[[OtherNode, PeerLink], A],
    deadline: float,
    fail: Fail,
) -> dict[PeerAddress, A]:
    """Send all queries, then read the replies as they come. Those of failed peers are missing.

    A new connection may take half of the time that is left: one that hangs costs no other peer its query.
    """
    links: dict[PeerLink, OtherNode] = {}
    answers: dict[PeerAddress, A] = {}
    for peer in peers:
        link = None
        try:
            link = peer.connection((time.monotonic() + deadline) / 2)
            ask(peer, link)
            links[link] = peer
        except PeerFailed as failed:
            fail(peer, link, failed)
    for link in as_they_answer(links, deadline):
        peer = links[link]
        try:
            answers[peer.address] = read(peer, link)
            peer.put_back(link)
        except PeerFailed as failed:
            fail(peer, link, failed)
    return answers
