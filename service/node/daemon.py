"""The daemon: takes clients in, gives each the tiers of its model, and gives back what dead ones held."""

import contextlib
import fcntl
import logging
import math
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.connector.daemon import Hello, Peer, is_trusted, peer_of, wire
from kvtier.service.explain import RequestLog
from kvtier.service.node.health import Health, Refusals, Wanting
from kvtier.service.node.loop import Loop, now
from kvtier.service.node.namespaces import Namespace, Namespaces, Opening
from kvtier.service.node.peer_server import PeerFeeds, PeerServer
from kvtier.service.node.session import Buffers, Session
from kvtier.tiers import ConfigError, FormatError, KVMismatch, TierUnavailable
from kvtier.tiers.config import Config
from kvtier.tiers.peers import FEEDS, EventsAt

if TYPE_CHECKING:
    from kvtier.service.events import Publisher

BACKLOG: Final = 512
_MAX_PATH: Final = 107  # bytes of sockaddr_un.sun_path, less its terminating zero


class Listener:
    """A listening socket at a path; the lock beside it, `{path}.lock`, stays, and its holder may replace the socket."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the path cannot be used, or naming the pid of another daemon that serves it."""
        self.path = path
        self._renewing = threading.Lock()
        if (length := len(os.fsencode(path))) > _MAX_PATH:
            raise ConfigError(f'[service] socket "{path}": {length} bytes, at most {_MAX_PATH}; choose a shorter path')
        with _directory(path) as home:
            self._lock = _lock(path, home)
            try:
                self.socket, self._file = _listen(path, home)
            except BaseException:
                os.close(self._lock)
                raise

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this socket: a cleaner of temporary files may have removed it. May wait."""
        try:
            return os.path.samestat(self.path.lstat(), self._file) and self._holds_lock()
        except FileNotFoundError:
            return False

    def _holds_lock(self) -> bool:
        """Whether the lock that another daemon would look at is ours. FileNotFoundError where there is none."""
        return os.path.samestat(os.lstat(f"{self.path}.lock"), os.fstat(self._lock))

    def renewed(self) -> socket.socket:
        """A new socket at the path, while we hold the lock; `replace` takes it. May wait. ConfigError as at first."""
        with self._renewing:
            if self._lock < 0:
                raise ConfigError("the daemon is stopping")
            with _directory(self.path) as home:
                self._lock_again(home)
                made, self._file = _listen(self.path, home)
        return made

    def _lock_again(self, home: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._holds_lock():
                return
        lock = _lock(self.path, home)  # ConfigError: another daemon serves there by now
        os.close(self._lock)
        self._lock = lock

    def replace(self, made: socket.socket) -> None:
        self.socket.close()
        self.socket = made

    def close(self) -> None:
        """Take the socket away, if the path does not lead to another daemon's by now; idempotent."""
        with self._renewing:
            if self._lock >= 0:
                self.socket.close()
                with contextlib.suppress(OSError):
                    if os.path.samestat(self.path.lstat(), self._file):
                        self.path.unlink()
                os.close(self._lock)
                self._lock = -1


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """The socket's directory, opened: if it is moved away meanwhile, nothing is done in whatever takes its place."""
    home = path.absolute().parent
    try:
        opened = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f'[service] socket "{path}": {home}: {error.strerror}; make that directory') from None
    try:
        _check_directory(path, home, os.fstat(opened))
        yield opened
    finally:
        os.close(opened)


def _check_directory(path: Path, home: Path, found: os.stat_result) -> None:
    if not is_trusted(found.st_uid):
        raise ConfigError(
            f'[service] socket "{path}": {home} is user {found.st_uid}\'s, this is user {os.geteuid()}; '
            "choose a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f'[service] socket "{path}": others may replace files in {home}; `chmod go-w` it, or choose another'
        )


def _check_owner(path: Path, home: int) -> None:
    try:
        found = os.lstat(path.name, dir_fd=home)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f'[service] socket "{path}": a file that is no socket is there; move it, or choose another')
    if not is_trusted(found.st_uid):
        raise ConfigError(
            f'[service] socket "{path}": user {found.st_uid}\'s, this is user {os.geteuid()}; choose another path'
        )


def _lock(path: Path, home: int) -> int:
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"{path.name}.lock", flags, 0o600, dir_fd=home)
    except OSError as error:
        raise ConfigError(f'[service] socket "{path}": {path}.lock: {error.strerror}; choose another path') from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f'[service] socket "{path}": the daemon with pid {owner} serves it; stop that one, or choose another path'
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _listen(path: Path, home: int) -> tuple[socket.socket, os.stat_result]:
    _check_owner(path, home)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=home)  # stale, since its owner would hold the lock
        listener.bind(os.fspath(path))
        os.chmod(path.name, 0o600, dir_fd=home)  # before `listen` nobody gets in
        found = os.lstat(path.name, dir_fd=home)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f'[service] socket "{path}": {error.strerror}; choose another path') from None
    return listener, found


# --- the daemon ------------------------------------------------------------------------------------------------------

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CLIENTS: Final = 256
_TICK: Final = 0.05  # seconds between two looks at deadlines while a claim waits
_IDLE_TICK: Final = 0.5
_HELLO_DEADLINE: Final = 5.0  # seconds a connection may say nothing
_LOOK: Final = 2.0  # seconds between two looks whether the socket is still there
_LOG_PAUSE: Final = 1.0  # seconds
_SUBMIT_DEADLINE: Final = 5.0  # seconds a call from another thread waits for the loop


class ClientView(NamedTuple):
    """One client, for people: alive, or dead with processes that may still copy."""

    pids: list[int]
    uid: int
    connected: bool
    fingerprint: bytes | None  # of its model; None before it was welcomed
    seconds: float  # since it connected
    protocol: int  # version
    claims: int
    leases: int
    reservations: int


class Daemon:
    """One node's tiers behind a Unix socket. `run` serves on the calling thread until `stop`, then `close`.

    Everything lives on that thread; from others: `submit`, `call`, `stop`, and the hierarchies, which are thread-safe.
    Implements `session.SessionOwner`.
    """

    def __init__(
        self, config: Config, path: Path, *, lease_deadline: float = 60.0, publisher: "Publisher | None" = None
    ) -> None:
        """Take the socket at `path`. Raises ConfigError as `Listener` and `PeerServer` do.

        A promise its client does not renew is kept for `lease_deadline` seconds. `publisher` is told what the tiers
        hold; it stays the caller's.
        """
        self.config, self.path = config, path
        self.publisher = publisher
        if config.peers.nodes and config.peers.events:
            FEEDS.open = PeerFeeds(config.events).open
        self.lease_deadline = lease_deadline
        self.loop = Loop()
        self.counts: Counter[str] = Counter()
        self.refusals = Refusals()
        self.started = now()
        self.limits: dict[str, int] = {}  # cache_salt → bytes of each model's L2 it may have; on the loop's thread
        self.buffers: Buffers[Session] = Buffers(self._cut_off)
        self.request_log = RequestLog.opened(config.service.request_log, "[service] request_log")
        self._namespaces = Namespaces(config, self.request_log)
        self._sessions: dict[bytes, Session] = {}
        self._waiting: dict[bytes, list[tuple[Session, Hello]]] = {}  # fingerprint being opened → who wants it
        self._openings: list[Opening] = []  # planned: room is made for one at a time
        self.has_waiting = False
        self._progressed = False  # some namespace has: set by any thread, read by the loop
        self._ticked = self._log_from = self._looked_at = self._looked_around_at = 0.0
        self.health = Health(config)
        self._listener = Listener(path)
        try:
            self.peer_server = None if config.peers.listen is None else PeerServer(config.peers)
        except BaseException:
            self._listener.close()
            raise
        self._accepts = False
        self._listen()

    def run(self) -> None:
        self.loop.run(self._turn)

    def stop(self) -> None:
        """End `run`. Safe in a signal handler and from any thread."""
        self.loop.stop()

    def close(self, timeout: float = 10.0) -> bool:
        """After `run`: hang up, write what waits to be written, and close every tier. False if time ran out."""
        deadline = time.monotonic() + timeout
        self._listener.close()
        for session in list(self._sessions.values()):
            session.end("shutdown")
        self.loop.close()
        if self.peer_server is not None:
            self.peer_server.close()
        threads = [
            threading.Thread(target=each.close, args=(timeout,), name="kvtier-close", daemon=True)
            for each in self._namespaces.clear()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline + 0.5 - time.monotonic()))
        if self.request_log is not None:
            self.request_log.close()
        return not any(thread.is_alive() for thread in threads)

    # for people and their tools

    def namespaces(self) -> list[Namespace]:
        """The models whose tiers are open. On the loop's thread: `submit` it."""
        return list(self._namespaces)

    @property
    def host_bytes_given(self) -> int:
        """Of the budget, to models open or being opened. On the loop's thread."""
        return self._namespaces.used

    def clients(self) -> list[ClientView]:
        """Who is there. On the loop's thread: `submit` it."""
        return [_client(session) for session in self._sessions.values()]

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Have `function` called on the loop's thread, where it must not wait; its result comes in the future."""
        return self.loop.submit(function)

    def call(self, function: Callable[[], T], timeout: float = _SUBMIT_DEADLINE) -> T:
        """`submit`, and wait for the result. TierUnavailable if the loop does not get to it in time."""
        try:
            return self.loop.submit(function).result(timeout)
        except TimeoutError:
            raise TierUnavailable(f"the daemon's loop has not answered within {timeout:g} s") from None

    def check(self) -> None:
        """Raise AssertionError if a law of the budget or of any namespace is broken. On the loop's thread."""
        self._namespaces.check()
        self.buffers.check()
        if self.peer_server is not None:
            self.peer_server.check()
        for namespace in self._namespaces:
            namespace.hierarchy.check(in_use=namespace.in_use)

    # what sessions ask: `session.SessionOwner`

    def admit(self, session: Session, hello: Hello) -> None:
        """Give the session its model's tiers, opening them first if they are closed; refuse it if that fails."""
        try:
            namespace = self._namespaces.find(hello)
            if namespace is None:
                if not self._namespaces.is_opening(hello.fingerprint):
                    self._openings.append(self._namespaces.plan(hello))
                    for closing in self._openings[-1].close_first:
                        if closing.tiers.feed is not None:
                            closing.tiers.feed.close()
                    if len(self._openings) == 1:
                        self._open_next()
                self._waiting.setdefault(hello.fingerprint, []).append((session, hello))
                return
        except (ConfigError, FormatError, KVMismatch) as error:
            session.refuse(error)
            return
        namespace.about = namespace.about or dict(hello.about)
        session.enter(namespace)
        if hello.reset:
            self.aside(namespace.hierarchy.reset, lambda result: self._reset(session, namespace, result))
        else:
            session.welcome()

    def join(self, session: Session, client: bytes) -> None:
        if (copies_for := self._sessions.get(client)) is None:
            session.refuse("no such client: it has ended, or the daemon was started anew")
            return
        try:
            session.copies_for(copies_for)
        except OSError as error:
            session.refuse(f"process {session.peer.pid} cannot be watched: {error}")
        else:
            session.joined()

    def copies_ended(self, session: Session, client: bytes) -> None:
        before = self._sessions.get(client)
        if before is None or before is session:
            return
        if (before.peer, before.process) == (session.peer, session.process):
            before.end("replaced")

    def ended(self, session: Session) -> None:
        self._sessions.pop(session.client, None)
        namespace, session.namespace = session.namespace, None
        if namespace is not None:
            namespace.members.discard(session)
            namespace.idle_since = now()

    def aside(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do what waits on a thread of its own, one for a session at most. `done` gets the result or the exception."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                result = error
            self.loop.call(lambda: done(result))

        threading.Thread(target=run, name="kvtier-aside", daemon=True).start()

    def log(self, line: str) -> None:
        """One line, as a warning; at most one in a second, so that no client fills the disk."""
        if now() < self._log_from:
            self.counts["not_logged"] += 1
            return
        self._log_from = now() + _LOG_PAUSE
        logger.warning("%s", line)

    # inside

    def _look(self) -> None:
        """See whether the socket is still where engines look for it, and put it there again. Not on this thread."""
        listener = self._listener

        def work() -> "socket.socket | None":
            return None if listener.is_there else listener.renewed()

        def done(result: "socket.socket | Exception | None") -> None:
            if isinstance(result, Exception):
                why = f'[service] socket "{self.path}": removed, and cannot be made again ({result})'
                if self.health.socket_is(why):
                    self.log(why)
            else:
                self.health.socket_is(None)
            if isinstance(result, socket.socket):
                if self._accepts:
                    self.loop.forget(listener.socket.fileno())
                self._accepts = False
                listener.replace(result)
                self._listen()
                self.log(f'[service] socket "{self.path}": somebody removed it; it is there again')
            self._looked_at = now()

        self._looked_at = math.inf  # one look at a time
        self.aside(work, done)

    def _look_around(self) -> None:
        given = self.host_bytes_given

        def done(result: list[Wanting] | Exception) -> None:
            if isinstance(result, Exception):
                self.log(f"its health cannot be looked at: {result}")
            else:
                for each in result:
                    logger.warning("%s", each.why)
            self._looked_around_at = now()

        self._looked_around_at = math.inf
        self.aside(lambda: self.health.look(given), done)

    def _listen(self) -> None:
        if not self._accepts:
            self._accepts = True
            self.loop.watch(self._listener.socket.fileno(), self._accept)

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._listener.socket.accept()
        except OSError:  # it went away again, or there is no file left for it: then look again a little later
            self.counts["not_accepted"] += 1
            self._accepts = False
            self.loop.forget(self._listener.socket.fileno())
            return
        connection.setblocking(False)
        peer = peer_of(connection)
        try:
            if not is_trusted(peer.uid):
                raise ConfigError(f"user {peer.uid} may not use the daemon of user {os.geteuid()}")
            if len(self._sessions) >= MAX_CLIENTS:
                raise ConfigError(f"{MAX_CLIENTS} clients are there already")
            session = Session(self, connection, peer)
        except ConfigError as error:
            self._turn_away(connection, peer, str(error))
        except OSError:  # dead already; before Linux 6.5 also one of another pid namespace
            fix = "share the daemon's pid namespace, or run Linux 6.5 or later"
            self._turn_away(connection, peer, f"process {peer.pid} cannot be watched: {fix}")
        else:
            self._sessions[session.client] = session

    def _cut_off(self, session: Session) -> None:
        self.log(f"client {session.peer.pid} is cut off: it neither ends what it sends nor reads what it is sent")
        session.end_connection("buffer_full")

    def _turn_away(self, connection: socket.socket, peer: Peer, why: str) -> None:
        self.counts["turned_away"] += 1
        self.refusals.note(why, peer)
        with connection:
            try:
                connection.send(wire.pack_handshake(wire.Refused(why[: wire.MAX_TEXT])))
            except OSError:
                return

    def _open_next(self) -> None:
        """Room is made for one model after the other: what is closed may be wanted again. None waits as one opens."""
        opening = self._openings[0]

        def opens(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._opened(opening, result)
            else:
                self.aside(opening.run, lambda result: self._opened(opening, result))
            self._openings.pop(0)
            if self._openings:
                self._open_next()

        self.aside(opening.make_room, opens)

    def _opened(self, opening: Opening, result: Namespace | Exception) -> None:
        fingerprint = opening.hello.fingerprint
        waiting = self._waiting.pop(fingerprint, [])
        self._namespaces.opened(fingerprint, result if isinstance(result, Namespace) else None)
        if isinstance(result, Namespace):
            result.hierarchy.news.watch(lambda: self._note_progress(result))
            if self.peer_server is not None:
                result.lent = self.peer_server.lend(result.hierarchy, fingerprint, result.blocks)
                result.lent.kv_probe = lambda: result.kv_probe
            if self.publisher is not None and result.source is not None:
                result.tiers.feed = feed = self.publisher.feed(fingerprint, result.source)
                at = EventsAt.bound(self.publisher.endpoint, self.publisher.replay_endpoint)
                if result.lent is not None and at.publish:
                    result.lent.events = lambda: replace(at, tells_all=feed.tells_all)
            for cache_salt, num_bytes in self.limits.items():
                result.tiers.quotas.set(cache_salt, max(num_bytes, result.hierarchy.host.region.slot_stride))
        for session, hello in waiting:
            if isinstance(result, Namespace):
                self.admit(session, hello)
            else:
                session.refuse(result)

    def _reset(self, session: Session, namespace: Namespace, result: Exception | None) -> None:
        if result is None:
            session.welcome()
        else:
            session.refuse(f"reset: {result}")
        for member in list(namespace.members):
            member.notify()

    def _note_progress(self, namespace: Namespace) -> None:
        """On any thread, under the hierarchy's lock: leave a note, wake the loop."""
        if not namespace.progressed:
            namespace.progressed = self._progressed = True
            self.loop.wake()

    def _turn(self) -> float:
        """After every round: pass on what has come to pass; now and then let deadlines pass. Seconds to wait."""
        at = now()
        is_due = at - self._ticked >= _TICK
        progressed, self._progressed = self._progressed, False
        feeds = False
        is_announced_soon = progressed and not is_due and self.publisher is not None
        for namespace in self._namespaces if progressed or is_due else ():
            progressed, namespace.progressed = namespace.progressed, False
            if progressed or is_due:
                if is_due:
                    namespace.hierarchy.tick()
                    feeds |= namespace.tiers.feed is not None and namespace.tiers.feed.pump()
                for member in list(namespace.members):
                    member.notify()
        if is_due:
            self._ticked = at
            self._listen()
            if at - self._looked_at >= _LOOK:
                self._look()
            if at - self._looked_around_at >= _LOOK:
                self._look_around()
            sessions = list(self._sessions.values())
            self.has_waiting = feeds or any(each.holdings is not None and each.holdings.waiting for each in sessions)
            for session in sessions:
                session.pass_time(at)
                if not session.said_hello and at - session.since > _HELLO_DEADLINE:
                    session.end_connection("silent")
        return _TICK if self.has_waiting or is_announced_soon else _IDLE_TICK


def _client(session: Session) -> ClientView:
    namespace, held = session.namespace, session.counts
    return ClientView(
        session.processes.pids,
        session.peer.uid,
        session.connected,
        namespace.fingerprint if namespace is not None else None,
        now() - session.since,
        session.version,
        *held,
    )
