"""A client's tie to the daemon: its socket, attached, lost and attached again, with nothing worse than "not now"."""

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
from typing import Final, NamedTuple

from msgspec import Raw
from msgspec.structs import replace

from kvtier.connector.daemon.wire import (
    LOSSY_SINCE,
    MAX_FRAME,
    MAX_ITEMS,
    RELEASES,
    SHARES_SINCE,
    VERSION,
    Ask,
    Bye,
    Ended,
    FrameReader,
    HandshakeReply,
    Hello,
    Join,
    Operation,
    Refused,
    Reply,
    UnspokenVersion,
    Welcome,
    coalesce,
    pack_handshake,
    pack_request,
    unpack_handshake_reply,
    unpack_reply,
    version_of,
)
from kvtier.tiers import ConfigError, FormatError, KVMismatch, TierUnavailable, forget_descriptor, hide_from_children
from kvtier.tiers.config import HostConfig
from kvtier.tiers.hierarchy import Claim
from kvtier.tiers.host import HostRegion

_log = logging.getLogger(__name__)

_PEER: Final = struct.Struct("3i")
_SO_PEERPIDFD: Final = 77  # Linux 6.5, asm-generic/socket.h; Python has no name for it
_RECEIVE: Final = 256 << 10  # bytes read at once
_MAX_OUTPUT: Final = 2 * MAX_FRAME  # bytes the other end may leave unread
_WELCOME: Final = 30.0  # seconds for the daemon to open a slab; only at start anybody waits for it
_MAX_UNSENT: Final = 512  # operations nobody waits for
_FIRST_RETRY: Final = 0.1  # seconds after a failure; each further one in a row doubles it
_LAST_RETRY: Final = 5.0
_JOINED: Final = 5.0  # seconds a worker waits to be watched
_SILENT: Final = 5.0  # seconds an answer that nobody waits for any more may still come
_READ: Final = (1 << 63) - 1  # the request of questions: the daemon answers that it has read them, if it has no news
_NOTHING: Final[list[Reply]] = []  # nobody changes it


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int  # 0: it lives in a pid namespace this process does not see
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process that connected; asked by a client, the one that listens."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def pidfd_of(connection: socket.socket, peer: Peer) -> int:
    """A pidfd of the process that connected. OSError if it is gone, or nobody can watch it from here.

    From Linux 6.5 on the socket itself has it. So it can't be another process that got the same pid since, and it may
    live in a pid namespace this process does not see.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(peer.pid)


def is_trusted(uid: int) -> bool:
    """Whether a user may have this one's blocks, or serve them."""
    return uid in (os.geteuid(), 0)


@dataclass(eq=False)
class RemoteClaim(Claim):
    number: int = 0
    link: "Link | None" = None  # it was asked on; None where there was none
    asked_at: float = 0.0
    renewed_at: float = 0.0  # not after the daemon heard it last
    answered: bool = False
    polled: bool = False  # in vain: whoever polls again wants it sent
    again: bool = False  # asked for the second time: the first answer was lost
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class Link:
    """One connection, and once the daemon has welcomed us all that was said and is held by it.

    What is held by a link that was lost is void: nobody knows what became of its slots. Not thread-safe, but for
    `wait`.
    """

    welcome: Welcome
    region: HostRegion
    epoch_base: int  # the client's epoch less the daemon's

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if nobody listens, ConfigError if another user does."""
        self.claims: dict[int, RemoteClaim] = {}  # asked about, and not taken or cancelled
        self.held: set[int] = set()  # leases and reservations whose copies may be under way
        self.unsent: list[Operation] = []
        self.num_unsent = 0  # operations, before those of a kind became one
        self.answers: dict[int, list[Raw]] = {}  # request → what the daemon answered
        self.overdue: dict[int, float] = {}  # requests given up → when, in that order; what they are answered is void
        self.overdue_aside: dict[int, float] = {}  # likewise, of one that waits there: others are answered meanwhile
        self.unheard_since: float | None = None  # when a question went out behind which nothing has come yet
        self.error: Exception | None = None  # why nothing more can be sent
        self.output = bytearray()  # what the socket did not take yet; `send` tries again
        self.files: list[int] = []  # that came with the frames read so far; the code that takes one out closes it
        self._has_question = False  # what is unsent has one
        self._clock = clock
        self._reader = FrameReader(MAX_FRAME)
        self._kept: list[memoryview] = []  # bodies received behind the first
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        hide_from_children(self._socket.fileno())
        try:
            self._socket.connect(os.fspath(path))
            peer = peer_of(self._socket)
            if not is_trusted(peer.uid):
                raise ConfigError(
                    f'[service] socket "{path}": user {peer.uid} serves it, this is user {os.geteuid()}; '
                    "name the socket of a daemon of your own"
                )
        except BaseException:
            self.close()
            raise

    @property
    def late_since(self) -> float | None:
        """When the first of the answers that are still due was given up."""
        return next(iter(self.overdue.values()), None)

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether the daemon has owed an answer for so long. It owes one to a question at once, also without news."""
        late, unheard = next(iter(self.overdue.values()), None), self.unheard_since
        return (late is not None and now - late >= seconds) or (unheard is not None and now - unheard >= seconds)

    def put(self, operation: Operation) -> None:
        """Have it sent with the next message."""
        self.num_unsent += 1
        if not (self.unsent and coalesce(self.unsent[-1], operation, MAX_ITEMS)):
            self.unsent.append(operation)
            self._has_question |= type(operation) is Ask
        if self.num_unsent >= _MAX_UNSENT:
            self.send()

    def send(self, operations: Sequence[Operation] = (), request: int = 0) -> bool:
        """Send what was left unsent and these behind it, in one frame; True if all of it is on its way.

        What the socket does not take is kept for the next call. If the daemon is gone, or has not read for too long,
        `error` says so.
        """
        if everything := [*self.unsent, *operations]:
            self.unsent, self.num_unsent = [], 0
            if self._has_question and not request:
                request = _READ
                self.unheard_since = self._clock() if self.unheard_since is None else self.unheard_since
            self._has_question = False
            try:
                for first in range(0, len(everything) - MAX_ITEMS, MAX_ITEMS):
                    self.output += pack_request(0, everything[first : first + MAX_ITEMS])
                self.output += pack_request(request, everything[-((len(everything) - 1) % MAX_ITEMS + 1) :])
            except ValueError as error:  # nothing that fits into a frame
                self.error = error
        if self.output and self.error is None:
            self.flush()
        return not self.output and self.error is None

    def flush(self) -> None:
        """Send what the socket did not take before."""
        try:
            del self.output[: self._socket.send(self.output)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = error
        if len(self.output) > _MAX_OUTPUT:
            self.error = OSError("the daemon does not read")

    def receive(self) -> list[Reply]:
        """What has arrived. Raises OSError if the other end is gone, FormatError."""
        replies, self._kept = [unpack_reply(body) for body in self._kept] if self._kept else _NOTHING, []
        while True:
            try:
                data = self._socket.recv(_RECEIVE)
            except BlockingIOError:
                return replies
            if not data:
                if replies:
                    return replies  # the end is there again at the next call
                raise ConnectionResetError("the daemon has hung up")
            replies = [*replies, *map(unpack_reply, self._reader.feed(data))]
            if len(data) < _RECEIVE:
                return replies

    def receive_handshake(self, timeout: float) -> memoryview | None:
        """The body of the first frame alone, within `timeout` seconds; None if there is none. Errors as `receive`."""
        end = time.monotonic() + timeout
        while not self._kept:
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _RECEIVE, 1, socket.MSG_CMSG_CLOEXEC)
                self.files += files
                if not data:
                    raise ConnectionResetError("the daemon has hung up")
                self._kept = self._reader.feed(data)
            except BlockingIOError:
                if not self.wait(max(0.0, end - time.monotonic())):
                    return None
        return self._kept.pop(0)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for something to receive. From any thread."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self.output else 0))
        except ValueError:  # closed meanwhile
            return False
        return bool(poll.poll(timeout * 1000))

    def close(self) -> None:
        """Hang up; idempotent."""
        forget_descriptor(self._socket.fileno())
        self._socket.close()
        for fd in self.files:
            os.close(fd)
        self.files.clear()


class Attachment:
    """At most one link at a time, made again by itself. Not thread-safe; no method but `start` and `close` waits.

    The region lives on while something copies from or to it; a daemon that was restarted has another one.
    """

    def __init__(self, path: Path, hello: Hello, clock: Callable[[], float]) -> None:
        self.link: Link | None = None
        self.region: HostRegion | None = None  # the last one there was
        self.epoch = 0  # counts resets, and every new link: who knows what happened in between
        self.has_lower = False
        self.path = path
        self.away: str | None = None  # why there is no link, once one was tried in vain; read by any thread
        self.hello = hello
        self.connecting: tuple[Link, Hello, float] | None = None  # not welcomed yet; until when we wait for that
        self._clock = clock
        self._version = VERSION  # that we speak, until a daemon answers in a lower one
        self._former: list[Link] = []  # lost, and the daemon does not know yet that their copies have ended
        self._instance = b""
        self._retry, self._retry_at = _FIRST_RETRY, 0.0
        self._welcomed_at = 0.0
        self._warned = False
        self._owes_reset = False
        self._closed = False
        self.goes_silently = False  # a copy may still run, for all that is known

    @property
    def attaching_since(self) -> float | None:
        """When the hello was said that has no answer yet."""
        return self.connecting[2] - _WELCOME if self.connecting is not None else None

    def start(self) -> None:
        """Attach, waiting for the daemon's answer; a daemon that is not there is a warning, and found later.

        So is one that says no, for want of memory say: an engine starts without the cache. ConfigError if another user
        serves the socket. KVMismatch if the daemon has the KV of a model that computes something else.
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
                self._welcomed(link, unpack_handshake_reply(body))
                return
        except KVMismatch:
            link.close()
            raise
        except (OSError, ConfigError, FormatError, TierUnavailable) as error:
            link.close()
            self._failed(error)
            return
        link.close()
        self.start()  # once more, as it speaks

    def receive(self) -> list[Reply]:
        """Read what has arrived, and attach if there is no link and it is time to try. Never waits or raises."""
        link = self.link
        if link is None:
            self._attach()
            link = self.link
            if link is None:
                return _NOTHING
        try:
            if link.output:
                link.flush()
            if link.error is not None:
                raise link.error
            replies = link.receive()
            if self._former:
                self._say_ended(link)
        except OSError as error:
            self.cut(error)
            self._retry_at = self._welcomed_at + _FIRST_RETRY  # it may be there anew, long since: we said nothing
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
        """Nobody waits for this answer any longer. The daemon is there and slow, until it is silent for too long.

        `aside`: of an operation that waits there, for other tiers. One that is late says nothing of the daemon.
        """
        if link is self.link:
            (link.overdue_aside if aside else link.overdue)[request] = self._clock()

    def cut(self, why: Exception) -> None:
        """Give the link up: everything held by it is void, and the daemon keeps it until it hears from us again."""
        if self.link is not None:
            self.link.close()
            self.link.claims.clear()
            self.link.unsent.clear()
            self._former.append(self.link)
            self.link = None
        self._version = VERSION  # the next daemon may be a later one
        self._failed(why)

    def reset_owed(self, owed: bool) -> None:
        """Whether the daemon has to be told to forget everything before we use it again."""
        self._owes_reset = owed
        if owed:
            self.epoch += 1

    def close(self, timeout: float) -> None:
        """Send `Bye`, which takes up to `timeout` seconds if the daemon is slow to read, and unmap. Idempotent.

        With `goes_silently` there is no `Bye`: the daemon keeps what is held until this process has ended.
        """
        self._closed = True
        deadline = self._clock() + timeout
        if self.connecting is not None:
            self.connecting[0].close()
            self.connecting = None
        if self.link is not None:
            link, self.link = self.link, None
            sent = link.send([] if self.goes_silently else [Bye()])
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
            if self._owes_reset and not hello.reset:  # it came about after we had said hello
                link.close()
                return
            try:
                if self._is_of_before(body):
                    link.close()
                    return
                self._welcomed(link, unpack_handshake_reply(body))
            except BaseException:
                link.close()
                raise
        except (OSError, ConfigError, FormatError, KVMismatch, TierUnavailable) as error:
            if self.connecting is not None:
                self.connecting[0].close()
                self.connecting = None
            self._failed(error)

    def _say_hello(self) -> Link:
        self.hello = replace(self.hello, reset=self._owes_reset)
        hello, version = self.hello, self._version
        if not hello.size and version < SHARES_SINCE:  # it knows no shares, and gives as much as it is asked for
            hello = replace(hello, size=HostConfig().size)
        return _opened(self.path, pack_handshake(hello, version), self._clock)

    def _is_of_before(self, body: memoryview) -> bool:
        """Whether the daemon has answered in a lower version than it was spoken to: then that is spoken from now on.

        UnspokenVersion if it is too low, or if what we want needs a later one.
        """
        spoken, self._version = self._version, version_of(body)
        if self._version < LOSSY_SINCE and self.hello.lossy is not None:
            release = RELEASES[LOSSY_SINCE]
            raise UnspokenVersion(
                f"[cache] lossy: a daemon before kvtier {release} does not know it; upgrade the daemon"
            )
        if self._version < spoken:
            release = RELEASES[self._version]
            _log.warning('[service] socket "%s": a daemon of kvtier %s; upgrade it when you can', self.path, release)
        return self._version < spoken

    def _welcomed(self, link: Link, reply: HandshakeReply) -> None:
        if isinstance(reply, Refused):
            raise KVMismatch(reply.why) if reply.is_other_kv else TierUnavailable(reply.why)
        if not isinstance(reply, Welcome) or not link.files:
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
        if self.region is not None:
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
        """Tell the daemon of lost links whose copies have all ended, and let go of regions nothing copies to."""
        for former in [former for former in self._former if not former.held]:
            link.put(Ended(former.welcome.client))
            self._former.remove(former)
            if former.region is not self.region and all(former.region is not other.region for other in self._former):
                former.region.close()

    def _failed(self, why: Exception) -> None:
        self.away = f'[service] socket "{self.path}": {why}'
        if not self._warned and not self._closed:
            _log.warning('[service] socket "%s": %s; until this is attached, everything is a miss', self.path, why)
            self._warned = True
        self._retry_at = self._clock() + self._retry
        self._retry = min(_LAST_RETRY, 2 * self._retry)


def join(path: Path, client: bytes) -> None:
    """Say that this process copies for a client: what that one holds is held until this process has ended too.

    Called by a worker before it maps the client's region. Raises TierUnavailable if the daemon does not watch it.
    """
    try:
        reply, version = _joined(path, client, VERSION)
        if version < VERSION:  # a daemon of before answers as it speaks
            reply, _ = _joined(path, client, version)
        if isinstance(reply, Refused):
            raise TierUnavailable(reply.why)
    except (OSError, FormatError, TierUnavailable) as error:
        raise TierUnavailable(f'[service] socket "{path}": {error}') from None


def _joined(path: Path, client: bytes, version: int) -> tuple[HandshakeReply, int]:
    """What the daemon answers to a `Join` of this version, and in which."""
    link = _opened(path, pack_handshake(Join(client), version))
    try:
        body = link.receive_handshake(_JOINED)
    finally:
        link.close()
    if body is None:
        raise TierUnavailable(f"no answer within {_JOINED:g} s")
    return unpack_handshake_reply(body), version_of(body)


def _opened(path: Path, handshake: bytes, clock: Callable[[], float] = time.monotonic) -> Link:
    """A connection on which this was said. OSError; ConfigError as `Link`."""
    link = Link(path, clock)
    link.output += handshake
    link.flush()
    if link.error is not None:
        link.close()
        raise link.error
    return link
