"""A client's connection to the daemon: it reconnects by itself, and failures are only ever "unavailable"."""

import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Raw
from msgspec.structs import replace

from kvtier.connector.daemon import wire
from kvtier.tiers import ConfigError, FormatError, KVMismatch, TierUnavailable, forget_descriptor, hide_from_children
from kvtier.tiers.config import HostConfig
from kvtier.tiers.hierarchy import Claim
from kvtier.tiers.host import HostRegion

_log = logging.getLogger(__name__)

_PEER: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77  # Linux 6.5, asm-generic/socket.h; not in Python's socket module
_RECEIVE: Final = 256 << 10  # bytes read at once
_MAX_OUTPUT: Final = 2 * wire.MAX_FRAME  # bytes the daemon may leave unread
_WELCOME: Final = 30.0  # seconds for the daemon to open a slab; waited for only at start
_MAX_UNSENT: Final = 512  # buffered operations
_STEPS_AHEAD: Final = 4  # slots are preallocated for so many steps like the last
_FIRST_RETRY: Final = 0.1  # seconds after a failure; doubled by each further one in a row
_LAST_RETRY: Final = 5.0
_JOINED: Final = 5.0  # seconds a worker waits for the answer to `Join`
_SILENT: Final = 5.0  # seconds an overdue answer may still take before the link is cut
_READ: Final = (1 << 63) - 1  # the request number of lookups: the daemon confirms that it read them
_NOTHING: Final[list[wire.Reply]] = []  # never mutated


class Peer(NamedTuple):
    """The process at the other end, from the kernel."""

    pid: int  # 0: in a pid namespace that this process cannot see
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected; for a client, the one that listens."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def pidfd_of(connection: socket.socket, peer: Peer) -> int:
    """A pidfd of the process that connected. OSError if it is gone or cannot be watched from here.

    From Linux 6.5 on the socket provides it: so it cannot be another process that reused the pid, and it may be in a
    pid namespace that this process cannot see.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(peer.pid)


def is_trusted(uid: int) -> bool:
    """Whether a user may read this one's blocks, or serve them."""
    return uid in (os.geteuid(), 0)


@dataclass(eq=False)
class RemoteClaim(Claim):
    number: int = 0
    link: "Link | None" = None  # that it was sent on; None if there was none
    asked_at: float = 0.0
    renewed_at: float = 0.0  # no later than the last renewal that the daemon got
    answered: bool = False
    polled: bool = False  # without an answer: the next poll sends the lookup
    again: bool = False  # sent for the second time: the first answer was lost
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class Link:
    """One connection; after the welcome also this client's operations, claims and leases on it.

    Leases and reservations of a lost link are void, since the state of their slots is unknown. Not thread-safe, but for
    `wait`.
    """

    welcome: wire.Welcome
    region: HostRegion
    epoch_base: int  # the client's epoch minus the daemon's

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if no process listens, ConfigError if another user's does."""
        self.claims: dict[int, RemoteClaim] = {}  # open: neither taken nor cancelled
        self.held: set[int] = set()  # leases and reservations whose copies may be under way
        self.unsent: list[wire.Operation] = []
        self.num_unsent = 0  # operations, counted before coalescing
        self.answers: dict[int, list[Raw]] = {}  # request → its answers
        self.overdue: dict[int, float] = {}  # requests that timed out → when, oldest first; their answers are ignored
        self.overdue_aside: dict[int, float] = {}  # likewise, of operations that wait in the daemon
        self.unheard_since: float | None = None  # when the oldest lookup without any later reply was sent
        self.error: Exception | None = None  # why the link cannot send any more
        self.output = bytearray()  # bytes that the socket did not accept yet; `send` retries
        self.files: list[int] = []  # received with the frames read so far; the code that removes one closes it
        self.early: list[wire.Reply] = []  # received with the welcome
        self.traces: wire.Traces = []  # of what is sent next
        self.preallocated: list[tuple[int, int]] = []  # slots for stores without a round trip; with their generations
        self.preallocated_at = 0.0  # no later than the daemon last renewed them
        self.preallocation_round = 0  # counts how often it gave all of them up, or let them lapse
        self.num_wanted = 0  # slots that the next steps may store
        self._has_question = False  # whether `unsent` has a lookup
        self._clock = clock
        self._reader = wire.FrameReader[Any](wire.MAX_FRAME)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        hide_from_children(self.socket.fileno())
        try:
            self.socket.connect(os.fspath(path))
            peer = peer_of(self.socket)
            if not is_trusted(peer.uid):
                raise ConfigError(
                    f'[service] socket "{path}": user {peer.uid} serves it, this is user {os.geteuid()}; '
                    "name the socket of a daemon of your own"
                )
        except BaseException:
            self.close()
            raise

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether an answer has been due for so long. The daemon confirms a lookup at once."""
        late, unheard = next(iter(self.overdue.values()), None), self.unheard_since
        return (late is not None and now - late >= seconds) or (unheard is not None and now - unheard >= seconds)

    def put(self, operation: wire.Operation) -> None:
        """Send it with the next message."""
        self.num_unsent += 1
        if not (self.unsent and wire.coalesce(self.unsent[-1], operation, wire.MAX_ITEMS)):
            self.unsent.append(operation)
            self._has_question |= type(operation) is wire.Ask
        if self.num_unsent >= _MAX_UNSENT:
            self.send()

    def send(self, operations: Sequence[wire.Operation] = (), request: int = 0) -> bool:
        """Send everything unsent and then `operations`, in one frame; True if all of it was accepted.

        Bytes that the socket does not accept are kept for the next call. `error` is set if the daemon is gone, or has
        not read for too long.
        """
        if everything := [*self.unsent, *operations]:
            self.unsent, self.num_unsent = [], 0
            if self._has_question and not request:
                request = _READ
                self.unheard_since = self._clock() if self.unheard_since is None else self.unheard_since
            self._has_question = False
            traces, self.traces = self.traces[: wire.MAX_ITEMS], []
            try:
                for first in range(0, len(everything) - wire.MAX_ITEMS, wire.MAX_ITEMS):
                    self.output += wire.pack_request(0, everything[first : first + wire.MAX_ITEMS], traces)
                self.output += wire.pack_request(
                    request, everything[-((len(everything) - 1) % wire.MAX_ITEMS + 1) :], traces
                )
            except ValueError as error:  # too large for a frame
                self.error = error
        if self.output and self.error is None:
            try:
                del self.output[: self.socket.send(self.output)]
            except BlockingIOError:
                pass
            except OSError as error:
                self.error = error
            if len(self.output) > _MAX_OUTPUT:
                self.error = OSError("the daemon does not read")
        return not self.output and self.error is None

    def preallocate(self, num_stores: int, now: float) -> list[wire.Operation]:
        """What a step with so many stores of one block requests for those after it; `now` as `is_fresh`."""
        if not self.is_fresh(now):
            self._begin_round()
        most = min(wire.MAX_PREALLOCATED, self.welcome.num_slots // wire.CLIENT_SHARE)
        self.num_wanted = min(most, max(_STEPS_AHEAD * num_stores, self.num_wanted - self.num_wanted // 8))
        # A step that stores more could never use them.
        return [] if num_stores > most else [wire.Preallocate(self.preallocation_round, now, self.num_wanted)]

    def give_up_preallocated(self, now: float) -> None:
        """The daemon may free what this client has not used."""
        self._begin_round()
        self.put(wire.Preallocate(self.preallocation_round, now, 0))

    def _begin_round(self) -> None:
        """What is left of the last round, here or on its way, is not used any more."""
        self.preallocation_round += 1
        self.preallocated = []

    def add_preallocated(self, columns: wire.Preallocated) -> None:
        """Slots from the daemon. FormatError."""
        counted, at, *_ = columns
        slots = wire.unpack_preallocated(columns, self.welcome.num_slots)
        if counted == self.preallocation_round:
            self.preallocated += slots
            self.preallocated_at = at
            if len(self.preallocated) > wire.MAX_PREALLOCATED:
                raise FormatError(f"more than {wire.MAX_PREALLOCATED} preallocated slots")

    def is_fresh(self, now: float) -> bool:
        """Whether preallocated slots may be used at `now`, this client's clock before it sends something.

        The daemon frees them if they are not renewed for twice as long; from then on it renews none of their round, so
        a client that was stopped meanwhile never takes them for fresh.
        """
        return now - self.preallocated_at < self.welcome.lease_deadline / 2

    def read(self, data: bytes) -> list[wire.Reply]:
        """The replies in these bytes and in what follows in the socket. OSError if the daemon is gone, FormatError."""
        replies = list[wire.Reply]()
        if not data:
            raise ConnectionResetError("the daemon has hung up")
        while data:
            replies += self._reader.feed(data)
            if len(data) < _RECEIVE:
                break
            try:
                data = self.socket.recv(_RECEIVE)
            except BlockingIOError:
                break
        return replies  # the next call reads an end of file again

    def receive_handshake(self, timeout: float) -> memoryview | None:
        """The body of the first frame alone, within `timeout` seconds; None if there is none. Raises as `read`."""
        end = time.monotonic() + timeout
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self.socket, _RECEIVE, 1, socket.MSG_CMSG_CLOEXEC)
                self.files += files
                if not data:
                    raise ConnectionResetError("the daemon has hung up")
                bodies: list[memoryview] = self._reader.feed(data)
                if bodies:
                    self._reader.decoder = wire.REPLIES
                    for body in bodies[1:]:  # a reply with an epoch may follow at once
                        self.early += wire.FrameReader(wire.MAX_FRAME, wire.REPLIES).feed(
                            len(body).to_bytes(4, "little") + body
                        )
                    return bodies[0]
            except BlockingIOError:
                if not self.wait(max(0.0, end - time.monotonic())):
                    return None

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the socket to be readable. From any thread."""
        poll = select.poll()
        try:
            poll.register(self.socket.fileno(), select.POLLIN | (select.POLLOUT if self.output else 0))
        except ValueError:  # closed meanwhile
            return False
        return bool(poll.poll(timeout * 1000))

    def close(self) -> None:
        """Disconnect. Idempotent."""
        forget_descriptor(self.socket.fileno())
        self.socket.close()
        for fd in self.files:
            os.close(fd)
        self.files.clear()


class Attachment:
    """At most one link at a time, reconnected automatically. Not thread-safe; only `start` and `close` wait.

    The region stays mapped while copies use it; a restarted daemon has a new one, and room for it once the old is gone.
    """

    def __init__(self, path: Path, hello: wire.Hello, clock: Callable[[], float]) -> None:
        self.link: Link | None = None
        self.region: HostRegion | None = None  # the last one
        self.epoch = 0  # counts resets and new links: what happened in between is unknown
        self.has_lower = False
        self.path = path
        self.away: str | None = None  # why there is no link, after a failed attempt; read by any thread
        self.hello = hello
        self.connecting: tuple[Link, wire.Hello, float] | None = None  # no welcome yet; its deadline
        self._clock = clock
        self._version = wire.VERSION  # lowered if a daemon answers in a lower one
        self._former: list[Link] = []  # lost; their copies' end is not reported to the daemon yet
        self._instance = b""
        self._retry, self._retry_at = _FIRST_RETRY, 0.0
        self._welcomed_at = 0.0
        self._warned = False
        self._owes_reset = False
        self._closed = False
        self.goes_silently = False  # a copy may still run

    @property
    def attaching_since(self) -> float | None:
        """When the hello was sent that has no answer yet."""
        return self.connecting[2] - _WELCOME if self.connecting is not None else None

    def start(self) -> None:
        """Connect and wait for the welcome. If the daemon is not there, log a warning; it is found later.

        The same if it refuses, e.g. for lack of memory: the engine starts without the cache. ConfigError if another
        user serves the socket. KVMismatch if the daemon has the KV of another model.
        """
        try:
            link = self._say_hello()
        except OSError as error:
            self._failed(error)
            return
        try:
            body = link.receive_handshake(_WELCOME)
            if body is None:
                raise TimeoutError(f"no welcome within {_WELCOME:g} s")
            if not self._is_of_before(body):
                self._welcomed(link, wire.unpack_handshake_reply(body))
                return
        except KVMismatch:
            link.close()
            raise
        except (OSError, ConfigError, FormatError, TierUnavailable) as error:
            link.close()
            self._failed(error)
            return
        link.close()
        self.start()  # again, in its version

    def receive(self) -> list[wire.Reply]:
        """Read what has arrived; if there is no link and a retry is due, connect. Never waits or raises."""
        link = self.link
        if link is None:
            self._attach()
            link = self.link
            if link is None:
                return _NOTHING
        try:
            if link.output:
                link.send()
            if link.error is not None:
                raise link.error
            try:
                data = link.socket.recv(_RECEIVE)
            except BlockingIOError:
                replies = _NOTHING
            else:
                replies = link.read(data)
            if link.early:
                replies, link.early = [*link.early, *replies], []
            if self._former:
                self._say_ended(link)
        except OSError as error:
            self.cut(error)
            self._retry_at = self._welcomed_at + _FIRST_RETRY  # it may have restarted long ago
            self._attach()
            return _NOTHING
        except (FormatError, ValueError) as error:
            self.cut(error)
            return _NOTHING
        for reply in replies:
            self.epoch = max(self.epoch, link.epoch_base + reply.epoch)
            link.unheard_since = None
            if reply.request in link.overdue or reply.request in link.overdue_aside:
                link.overdue.pop(reply.request, None)
                link.overdue_aside.pop(reply.request, None)
            elif reply.request not in (0, _READ):
                link.answers[reply.request] = reply.answers
        if link.overdue or link.overdue_aside or link.unheard_since is not None:
            now = self._clock()
            if link.is_silent(now, _SILENT) or any(now - since >= _SILENT for since in link.overdue_aside.values()):
                self.cut(TimeoutError(f"no answer for {_SILENT:g} s"))
        return replies

    def give_up(self, link: Link, request: int, *, aside: bool = False) -> None:
        """The caller stops waiting for this answer. The daemon counts as slow, until it is silent for too long.

        `aside`: of an operation that waits in the daemon, for other tiers. If late, it says nothing about the daemon.
        """
        if link is self.link:
            (link.overdue_aside if aside else link.overdue)[request] = self._clock()

    def cut(self, why: Exception) -> None:
        """Drop the link: its leases and reservations are void; the daemon keeps them until this client reconnects."""
        if self.link is not None:
            self.link.close()
            self.link.claims.clear()
            self.link.unsent.clear()
            self._former.append(self.link)
            self.link = None
        self._version = wire.VERSION  # the next daemon may be of a later release
        self._failed(why)

    def reset_owed(self, owed: bool) -> None:
        """Whether the next hello makes the daemon forget everything."""
        self._owes_reset = owed
        if owed:
            self.epoch += 1

    def close(self, timeout: float) -> None:
        """Send `Bye`, for up to `timeout` seconds if the daemon is slow to read, and unmap. Idempotent.

        With `goes_silently` no `Bye` is sent: the daemon keeps this client's slots until the process has ended.
        """
        self._closed = True
        deadline = self._clock() + timeout
        if self.connecting is not None:
            self.connecting[0].close()
            self.connecting = None
        if self.link is not None:
            link, self.link = self.link, None
            sent = link.send([] if self.goes_silently else [wire.Bye()])
            while not sent and link.error is None and (left := deadline - self._clock()) > 0:
                link.wait(left)
                sent = link.send()
            link.close()
        for region in {link.region for link in self._former} | ({self.region} if self.region is not None else set()):
            region.close()
        self._former.clear()

    # inside

    def _attach(self) -> None:
        now = self._clock()
        try:
            if self.connecting is None:
                if self._closed or now < self._retry_at:
                    return
                self.connecting = (self._say_hello(), self.hello, now + _WELCOME)
            link, hello, until = self.connecting
            body = link.receive_handshake(0.0)
            if body is None:
                if now >= until:
                    raise TimeoutError("the daemon does not answer")
                return
            self.connecting = None
            if self._owes_reset and not hello.reset:  # the reset came after the hello
                link.close()
                return
            try:
                if self._is_of_before(body):
                    link.close()
                    return
                self._welcomed(link, wire.unpack_handshake_reply(body))
            except BaseException:
                link.close()
                raise
        except (OSError, ConfigError, FormatError, KVMismatch, TierUnavailable) as error:
            if self.connecting is not None:
                self.connecting[0].close()
                self.connecting = None
            self._failed(error)
            self._unmap_unused()

    @property
    def is_current(self) -> bool:
        """Whether the daemon knows `Overlap.WHOLE`, traces, offers and preallocated slots: that of 0.1 does not."""
        return self._version == wire.VERSION

    def _say_hello(self) -> Link:
        self.hello = replace(self.hello, reset=self._owes_reset)
        hello, version = self.hello, self._version
        if not hello.size and version < wire.VERSION:  # it has no shares, and allocates the requested size
            hello = replace(hello, size=HostConfig().size)
        return _opened(self.path, wire.pack_handshake(hello, version), self._clock)

    def _is_of_before(self, body: memoryview) -> bool:
        """Whether the daemon answered in a lower version than the hello's: that one is used from now on.

        UnspokenVersion if it is too low, or if this client needs a later one.
        """
        spoken, self._version = self._version, wire.version_of(body)
        if not self.is_current and self.hello.lossy is not None:
            problem = f"a daemon before kvtier {wire.RELEASES[wire.VERSION]} does not know it"
            raise wire.UnspokenVersion(f"[cache] lossy: {problem}; upgrade the daemon")
        if self._version < spoken:
            release = wire.RELEASES[self._version]
            _log.warning('[service] socket "%s": a daemon of kvtier %s; upgrade it when you can', self.path, release)
        return self._version < spoken

    def _welcomed(self, link: Link, reply: wire.HandshakeReply) -> None:
        if isinstance(reply, wire.Refused):
            raise KVMismatch(reply.why) if reply.is_other_kv else TierUnavailable(reply.why)
        if not isinstance(reply, wire.Welcome) or not link.files:
            raise FormatError("a welcome without its region")
        fd = link.files.pop()
        try:
            region = self.region if self._instance == reply.instance else None
            if region is None:
                if reply.slot_bytes != self.hello.block_bytes:
                    raise FormatError(f"slots of {reply.slot_bytes} bytes for blocks of {self.hello.block_bytes}")
                region = HostRegion.attach(fd, reply.num_slots, reply.slot_bytes)
        finally:
            os.close(fd)
        if self._instance:
            self.epoch += 1
        self.region, self._instance, self.has_lower = region, reply.instance, reply.has_lower
        link.welcome, link.region, link.epoch_base = reply, region, self.epoch - reply.epoch
        self.link = link
        self._owes_reset, self.away = False, None
        self._retry, self._welcomed_at = _FIRST_RETRY, self._clock()
        if self._warned:
            _log.warning('[service] socket "%s": attached', self.path)
            self._warned = False

    def _say_ended(self, link: Link) -> None:
        """Report lost links whose copies have all ended, and unmap regions that no copy uses."""
        for former in [former for former in self._former if not former.held]:
            link.put(wire.Ended(former.welcome.client))
            self._former.remove(former)
            if former.region is not self.region and all(former.region is not other.region for other in self._former):
                former.region.close()

    def _unmap_unused(self) -> None:
        """The daemon is gone, or refuses: perhaps for lack of the memory that its predecessor's region takes."""
        used = [former.region for former in self._former if former.held]
        for region in [former.region for former in self._former]:
            if region not in used:
                region.close()
        if self.region not in used:
            self.region = None

    def _failed(self, why: Exception) -> None:
        self.away = f'[service] socket "{self.path}": {why}'
        if not self._warned and not self._closed:
            _log.warning('[service] socket "%s": %s; until this is attached, everything is a miss', self.path, why)
            self._warned = True
        self._retry_at = self._clock() + self._retry
        self._retry = min(_LAST_RETRY, 2 * self._retry)


def join(path: Path, client: bytes) -> None:
    """Register this process as a worker of a client, whose slots are then kept until this process has ended too.

    Called before the worker maps the client's region. TierUnavailable if the daemon does not watch the process.
    """
    try:
        reply, version = _joined(path, client, wire.VERSION)
        if version < wire.VERSION:  # an older daemon answers in its own version
            reply, _ = _joined(path, client, version)
        if isinstance(reply, wire.Refused):
            raise TierUnavailable(reply.why)
    except (OSError, FormatError, TierUnavailable) as error:
        raise TierUnavailable(f'[service] socket "{path}": {error}') from None


def _joined(path: Path, client: bytes, version: int) -> tuple[wire.HandshakeReply, int]:
    """The daemon's answer to a `Join` of this version, and the answer's version."""
    link = _opened(path, wire.pack_handshake(wire.Join(client), version))
    try:
        body = link.receive_handshake(_JOINED)
    finally:
        link.close()
    if body is None:
        raise TierUnavailable(f"no answer within {_JOINED:g} s")
    return wire.unpack_handshake_reply(body), wire.version_of(body)


def _opened(path: Path, handshake: bytes, clock: Callable[[], float] = time.monotonic) -> Link:
    """A connection with this handshake sent. OSError; ConfigError as `Link`."""
    link = Link(path, clock)
    link.output += handshake
    link.send()
    if link.error is not None:
        link.close()
        raise link.error
    return link
