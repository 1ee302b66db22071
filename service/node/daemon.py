"""The node's daemon and its clients: accepts them, serves each its model's tiers, reclaims what dead ones held."""

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvtier.connector.daemon import ID_BYTES, FrameReader, Hello, Peer, is_trusted, peer_of, wire
from kvtier.service import Reloads
from kvtier.service.explain import RequestLog
from kvtier.service.node.health import Health, Refusals, Wanting
from kvtier.service.node.holdings import Buffers, ClientProcesses, HeldCounts, Holdings, return_freed_memory
from kvtier.service.node.loop import READABLE, WRITABLE, Listener, Loop, now
from kvtier.service.node.namespaces import Namespace, Namespaces, Opening
from kvtier.service.node.peer_server import PeerFeeds, PeerServer
from kvtier.service.node.served_tiers import TenantLimits
from kvtier.service.observe import LastStores, brief_time, statuses
from kvtier.tiers import ConfigError, FormatError, KVMismatch, TierUnavailable
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import begun
from kvtier.tiers.peers import FEEDS, EventsAt

if TYPE_CHECKING:
    from kvtier.service.events import Publisher


_MAX_OUTPUT: Final = 4 << 20  # bytes a client may leave unread
_REST: Final = 1 << 16  # bytes read at once of a client that is cut off
_LARGE: Final = 1 << 20  # bytes of a client's buffers that are given back when it ends
_MAX_TURN: Final = 16  # reads in a row, so that one client does not occupy the loop
_MAX_WAIT: Final = 600.0  # seconds


class Session:
    """One client, from its connection to the end of its last process: one of their copies may outlive the socket."""

    def __init__(self, daemon: "Daemon", connection: socket.socket, peer: Peer) -> None:
        self.peer = peer
        self.client = secrets.token_bytes(ID_BYTES)
        self.since = now()
        self.namespace: Namespace | None = None
        self.holdings: Holdings | None = None
        self.said_hello = False
        self.hello: Hello | None = None
        self._daemon = daemon
        self._socket: socket.socket | None = connection
        self._reader = FrameReader[Any](wire.MAX_HELLO)
        self._output = bytearray()
        self._num_kept = 0  # bytes last reported to `Buffers`: half sent or unread
        self._over = False
        self._corked = False  # while a batch of frames is read
        self._blocked = False  # the client's socket buffer is full
        self._sent_at = 0.0  # when it last took bytes
        self._verbs: dict[
            type[wire.Operation], Callable[[Any], Any]
        ] = {}  # the handler of each operation, once welcomed
        self._busy = False  # with an operation that waits, on a thread of its own
        self._sent_epoch = 0
        self.version = wire.VERSION  # of the protocol, as the client speaks it
        self.processes = ClientProcesses(daemon.loop, self._all_ended)
        self.process = self.processes.watch(connection, peer)  # the client's own
        daemon.loop.watch(connection.fileno(), self._ready)

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def counts(self) -> HeldCounts:
        return self.holdings.counts if self.holdings is not None else HeldCounts(0, 0, 0, 0)

    @property
    def holds_slots(self) -> bool:
        return any(self.counts[1:])

    def welcome(self) -> None:
        if self._socket is None or self.namespace is None:
            return
        namespace, tiers = self.namespace, self.namespace.hierarchy
        region = tiers.region
        assert region is not None
        assert region.fd is not None
        block_size = namespace.blocks.block_size
        takes_parts = self.hello is None or self.hello.takes_parts
        self.holdings = Holdings(namespace.tiers, block_size, self._daemon.lease_deadline, self.version, takes_parts)
        self._verbs = {
            **self.holdings.verbs,
            wire.Lookup: self._look_up,
            wire.Ended: lambda op: self._daemon.copies_ended(self, op.client),
            wire.Bye: lambda op: self.end("bye"),
            wire.Reset: lambda op: _Waits(tiers.reset),
            wire.Drain: lambda op: _Waits(lambda: tiers.drain(min(op.timeout, _MAX_WAIT), below=op.below)),
            wire.Check: self._check,
        }
        self._sent_epoch = tiers.epoch
        self._daemon.refusals.welcomed(namespace.fingerprint)
        self._reader.limit, self._reader.decoder = wire.MAX_FRAME, wire.REQUESTS
        welcome = wire.Welcome(
            self.client,
            namespace.instance,
            region.num_slots,
            region.slot_bytes,
            tiers.epoch,
            tiers.has_lower,
            self._daemon.lease_deadline,
        )
        try:
            # the first bytes: they all fit
            socket.send_fds(self._socket, [wire.pack_handshake(welcome, self.version)], [region.fd])
        except OSError:
            self.end_connection("died")

    def refuse(self, why: Exception | str, reason: str = "refused") -> None:
        is_other_kv, why = isinstance(why, KVMismatch), str(why)
        if self._daemon.refusals.record(why, self.peer, self.hello.fingerprint if self.hello else None):
            self._daemon.log(f"client {self.peer.pid} is refused: {why}")
        self._send_handshake_reply(wire.Refused(why[:500], is_other_kv))
        self.end_connection(reason)

    def notify(self) -> None:
        if self.holdings is None or self.namespace is None or self._socket is None:
            return
        if self.holdings.waiting:
            self.holdings.look()
        if self.holdings.news or self._sent_epoch != self.namespace.hierarchy.epoch:
            self._reply(0, [])

    def pass_time(self, at: float) -> None:
        """Expire promises that the client has not renewed, after reading all it has sent.

        Of a client that was cut off some may be unread: it may copy to slots that it has taken by that.
        """
        holdings = self.holdings
        if holdings is not None and self.connected and holdings.may_expire(at) and self._ready() and self.connected:
            self._daemon.counts["promises_lapsed"] += holdings.expire(at)
        if self.connected and self._blocked and at - self._sent_at >= self._daemon.lease_deadline:
            self.cut_off("it does not read what it is sent", "slow_reader")

    def copies_for(self, client: "Session") -> None:
        """Keep that client's blocks until this session's process has ended, too. OSError as `watch`."""
        if self._socket is not None:
            client.processes.watch(self._socket, self.peer)

    def end_connection(self, reason: str, *, is_legible: bool = True) -> None:
        """Close. Promises are cancelled; leases and reservations stay while a process lives, counted. Idempotent.

        Unless what the client sent `is_legible` to its end, promises become leases: it may have taken them.
        """
        if self._socket is None:
            return
        is_read = is_legible and self._has_read_rest()
        self._daemon.loop.forget(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._output.clear()
        self._reader = FrameReader[Any](wire.MAX_HELLO)
        if self._num_kept > _LARGE:
            return_freed_memory()
        self._num_kept = 0
        self._daemon.buffers.record(self, 0)
        if self.holdings is not None:
            self.holdings.drop_claims(may_be_taken=not is_read)
        if self.holdings is None or not any(self.holdings.counts) or not self.processes:
            self.end(reason)
        else:
            self._daemon.counts[f"{reason}_holding"] += 1

    def cut_off(self, why: Exception | str, reason: str, *, is_legible: bool = True) -> None:
        self._daemon.log(f"client {self.peer.pid} is cut off: {why}")
        self.end_connection(reason, is_legible=is_legible)

    def _has_read_rest(self) -> bool:
        """Let the client send nothing more, and serve what it took last: a copy may be under way."""
        assert self._socket is not None
        if self.holdings is None:
            return True
        try:
            self._socket.shutdown(socket.SHUT_RD)
            while data := self._socket.recv(_REST):
                for request in self._reader.feed(data):
                    self.holdings.take([each for each in request.operations if type(each) is wire.Take])
        except (OSError, FormatError):
            return False
        return True

    def end(self, reason: str) -> None:
        """No copy of this client is under way: release all it holds, remove it, count the reason. Idempotent."""
        self.end_connection(reason)
        if self._over:  # it held nothing, so it ended with its connection
            return
        self._over = True
        self._daemon.counts[reason] += 1
        self.processes.forget()
        if self.holdings is not None:
            released = self.holdings.release_all()
            self._daemon.counts["leases_reclaimed"] += released.leases
            self._daemon.counts["reservations_reclaimed"] += released.reservations
            self.holdings = None
        self._daemon.ended(self)

    # called by the loop

    def _all_ended(self) -> None:
        if self._socket is None:  # else a child it forked may live, with socket and region
            self.end("died")

    def _ready(self, events: int = READABLE) -> bool:
        """Read and serve what the client has sent, and write pending output. True if nothing was left to read."""
        if events & WRITABLE:
            self._flush()
            if events == WRITABLE:
                return True
        buffer = self._daemon.loop.buffer
        for _ in range(_MAX_TURN):
            if self._socket is None:
                return True
            try:
                size = self._socket.recv_into(buffer)
            except BlockingIOError:
                return True
            except OSError:
                size = 0
            if not size:
                self.end_connection("died")
                return True
            self._corked = True  # the answers to a batch of frames go out at once
            try:
                for each in self._reader.feed(buffer[:size]):
                    if isinstance(each, wire.Request):
                        self._serve(each)
                    elif self._socket is not None:  # else cut off by an earlier frame
                        self._greet(each)
            except FormatError as error:
                if self.holdings is None:
                    self.refuse(error, "malformed")
                else:
                    self.cut_off(error, "malformed", is_legible=False)
            except Exception as error:  # one client's input must not end the others' service
                self.cut_off(repr(error), "error", is_legible=False)
            self._corked = False
            if self._output or self._reader.num_waiting or self._num_kept:
                self._flush()
            if self.holdings is not None and self.holdings.sealed:
                self.holdings.publish()
            if size < len(buffer):
                return True  # a later byte makes the socket readable again
        return False

    def _greet(self, body: memoryview) -> None:
        if self.said_hello:
            raise FormatError("a second frame before the first was answered")
        self.said_hello = True
        self.version = wire.version_of(body)
        match wire.unpack_handshake(body):
            case Hello() as hello:
                self.hello = hello
                self._daemon.admit(self, hello)
            case wire.Join(client):
                self._daemon.join(self, client)

    def _serve(self, request: wire.Request) -> None:
        if self._socket is None or self.holdings is None:  # cut off by an earlier frame
            return
        answers: list[Any] = []
        if request.traces is not None:
            self.holdings.expect(request.traces)
        for operation in request.operations:
            answer = self._verbs[type(operation)](operation)
            if self._over:
                return
            if isinstance(answer, _Waits):
                if len(request.operations) > 1 or self._busy:
                    raise FormatError("an operation that waits comes alone, one at a time")
                self._serve_aside(request.number, answer.work)
                return
            if answer is not None:
                answers.append(answer)
        if request.number or self.holdings.news or self.holdings.granted is not None:
            self._reply(request.number, answers)
        if self.holdings.waiting:
            self._daemon.has_waiting = True

    def _look_up(self, op: wire.Lookup) -> "wire.Found | _Waits":
        namespace, names = self.namespace, wire.unpack_hashes(op.hashes)
        assert namespace is not None
        if not namespace.is_shared:
            return wire.pack_found(namespace.hierarchy.lookup(names), self.version)
        timeout = min(op.timeout, _MAX_WAIT)
        return _Waits(lambda: wire.pack_found(namespace.hierarchy.locate(names, timeout), self.version))

    def _check(self, op: wire.Check) -> "_Waits":
        namespace = self.namespace
        assert namespace is not None
        in_use = namespace.in_use

        def broken() -> str:
            try:
                namespace.hierarchy.check(in_use=in_use)
            except AssertionError as error:
                return str(error)[:500] or "a law does not hold"
            return ""

        return _Waits(broken)

    def _serve_aside(self, request: int, work: Callable[[], Any]) -> None:
        assert self.holdings is not None
        self.holdings.publish()  # the operation may wait for it, or count it

        def done(answer: Any) -> None:
            self._busy = False
            if isinstance(answer, Exception):
                self.cut_off(repr(answer), "error")
            elif self._socket is not None and self.holdings is not None:
                self._reply(request, [True if answer is None else answer])
            if self.namespace is not None:
                self.namespace.notify()

        self._busy = True
        self._daemon.aside(work, done)

    def _reply(self, request: int, answers: list[Any]) -> None:
        assert self.namespace is not None
        assert self.holdings is not None
        news, self.holdings.news = self.holdings.news, []
        granted, self.holdings.granted = self.holdings.granted, None
        epoch = self._sent_epoch = self.namespace.hierarchy.epoch
        room = max(0, wire.MAX_CHILDREN_BYTES - len(self._output))  # fewer children for a client that does not read
        self._output += wire.pack_reply(request, epoch, answers, news, room, granted)
        if not self._corked:
            self._flush()

    def joined(self) -> None:
        self._send_handshake_reply(wire.Joined())
        self.end_connection("joined")

    def _send_handshake_reply(self, reply: wire.HandshakeReply) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(wire.pack_handshake(reply, self.version))

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            if self._output:
                del self._output[: self._socket.send(self._output)]
                self._sent_at = now()
        except BlockingIOError:
            pass
        except OSError:
            self.end_connection("died")
            return
        if self.holdings is not None:
            self.holdings.num_unread = len(self._output)
            if self.holdings.waits_for_reader and not self._output:
                self.holdings.waits_for_reader = False
                self._daemon.loop.call(self.notify)
        if len(self._output) > _MAX_OUTPUT:
            self.cut_off("it does not read what it is sent", "slow_reader")
        elif self._blocked != bool(self._output):
            self._blocked = bool(self._output)
            self._daemon.loop.change(self._socket.fileno(), READABLE | WRITABLE if self._blocked else READABLE)
        num_kept = self._reader.num_waiting + len(self._output)
        if num_kept or self._num_kept:  # both are 0 once it has disconnected
            self._num_kept = num_kept  # `note` may cut a client off
            self._daemon.buffers.record(self, num_kept)


class _Waits(NamedTuple):
    """A slow operation: `work` returns its answer, on a thread of its own."""

    work: Callable[[], Any]


# --- the daemon ------------------------------------------------------------------------------------------------------

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_CLIENTS: Final = 256
_TICK: Final = 0.05  # seconds between two looks at deadlines while a claim waits
_IDLE_TICK: Final = 0.5
_HELLO_DEADLINE: Final = 5.0  # seconds a connection may stay silent
_LOOK: Final = 2.0  # seconds between two checks that the socket still exists
_LOG_PAUSE: Final = 1.0  # seconds
_SUBMIT_DEADLINE: Final = 5.0  # seconds a call from another thread waits for the loop


class Daemon:
    """One node's tiers behind a Unix socket. `run` serves on the calling thread until `stop`, then `close`.

    Everything lives on that thread; from others: `submit`, `call`, `stop`, and the hierarchies, which are thread-safe.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        lease_deadline: float = 60.0,
        publisher: "Publisher | None" = None,
        reloads: Reloads | None = None,
    ) -> None:
        """Bind the socket. ConfigError. Promises not renewed last `lease_deadline` s; the caller owns `publisher`."""
        self.config, self.path = config, path
        self.reloads = reloads or Reloads(lambda: config)
        self.publisher = publisher
        if config.peers.nodes and config.peers.events:
            FEEDS.open = PeerFeeds(config.events).open
        self.lease_deadline = lease_deadline
        self.loop = Loop()
        self.counts: Counter[str] = Counter()
        self.refusals = Refusals()
        self.started = now()
        self.limits: dict[str, TenantLimits] = {}  # by cache_salt; on the loop's thread
        too_much = "it neither ends what it sends nor reads what it is sent"
        self.buffers: Buffers[Session] = Buffers(lambda session: session.cut_off(too_much, "buffer_full"))
        self.request_log = RequestLog.opened(config.service.request_log, "[service] request_log")
        self.models = Namespaces(config, self.request_log)
        self._sessions: dict[bytes, Session] = {}
        self._waiting: dict[bytes, list[tuple[Session, Hello]]] = {}  # fingerprint being opened → the clients that wait
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
        """After `run`: disconnect, write what waits to be written, and close every tier. False if time ran out."""
        deadline = time.monotonic() + timeout
        self._listener.close()
        models, num_clients = list(self.models), len(self._sessions)
        stores = LastStores(each.hierarchy for each in models)
        for session in list(self._sessions.values()):
            session.end_connection("shutdown")
        used = {each for each in models if each.in_use}
        for session in list(self._sessions.values()):
            session.end("shutdown")
        self.loop.close()
        if self.peer_server is not None:
            self.peer_server.close()
        threads = [
            threading.Thread(
                target=each.close, args=(timeout,), kwargs={"is_used": each in used}, name="kvtier-close", daemon=True
            )
            for each in self.models.clear()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline + 0.5 - time.monotonic()))
        if self.request_log is not None:
            self.request_log.close()
        up = brief_time(now() - self.started)
        logger.info("stopped after %s: models %d, clients %d; %s", up, len(models), num_clients, stores.line())
        return not any(thread.is_alive() for thread in threads)

    def reload(self, config: Config) -> None:
        """Put in force what a running daemon takes of a configuration. On any thread but the loop's."""

        def apply() -> None:
            self.config = self.models.config = config
            for namespace in self.models:
                namespace.tiers.reload(config)

        wait([self.submit(apply)], _MAX_WAIT)  # it is in force as soon as the loop runs it

    # for people and their tools

    def namespaces(self) -> list[Namespace]:
        """The models whose tiers are open. On the loop's thread: `submit` it."""
        return list(self.models)

    def clients(self) -> list[statuses.ClientStatus]:
        return [
            statuses.ClientStatus(
                pids=session.processes.pids,
                uid=session.peer.uid,
                connected=session.connected,
                seconds=round(now() - session.since, 3),
                protocol=session.version,
                **session.counts._asdict(),
                model=None if session.namespace is None else session.namespace.name,
            )
            for session in self._sessions.values()
        ]

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Call `function` on the loop's thread, where it must not wait. The future gets its result."""
        return self.loop.submit(function)

    def call(self, function: Callable[[], T], timeout: float = _SUBMIT_DEADLINE) -> T:
        """`submit`, and wait for the result. TierUnavailable if the loop does not run it in time."""
        try:
            return self.loop.submit(function).result(timeout)
        except TimeoutError:
            raise TierUnavailable(f"the daemon's loop has not answered within {timeout:g} s") from None

    def check(self) -> None:
        """Raise AssertionError if a law of the budget or of any namespace is broken. On the loop's thread."""
        self.models.check()
        self.buffers.check()
        if self.peer_server is not None:
            self.peer_server.check()
        for namespace in self.models:
            namespace.hierarchy.check(in_use=namespace.in_use)

    def admit(self, session: Session, hello: Hello) -> None:
        try:
            namespace = self.models.find(hello)
            if namespace is None:
                if hello.fingerprint not in self.models.opening:
                    self._openings.append(self.models.plan(hello))
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
        if session.connected:  # from here on the namespace stays open
            session.namespace = namespace
            namespace.members.add(session)
        if hello.reset:
            self.aside(namespace.hierarchy.reset, lambda result: self._reset(session, namespace, result))
        else:
            session.welcome()

    def join(self, session: Session, client: bytes) -> None:
        if (copies_for := self._sessions.get(client)) is None:
            session.refuse("no such client: it has ended, or the daemon has restarted")
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
        """Run slow work on a thread of its own, one per session at most. `done` gets the result or the exception."""
        begun("kvtier-aside", work).add_done_callback(
            lambda ended: self.loop.call(lambda: done(ended.exception() or ended.result()))
        )

    def log(self, line: str) -> None:
        """One line, as a warning; at most one in a second, so that no client fills the disk."""
        if now() < self._log_from:
            self.counts["not_logged"] += 1
            return
        self._log_from = now() + _LOG_PAUSE
        logger.warning("%s", line)

    def _look(self) -> None:
        """Check that the socket is where engines look for it, and create it again if not. On another thread."""
        listener = self._listener

        def work() -> "socket.socket | None":
            return None if listener.is_there else listener.renewed()

        def done(result: "socket.socket | Exception | None") -> None:
            if isinstance(result, Exception):
                why = f'[service] socket "{self.path}": removed, and cannot be created again ({result})'
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
                self.log(f'[service] socket "{self.path}": it was removed, and is there again')
            self._looked_at = now()

        self._looked_at = math.inf  # one look at a time
        self.aside(work, done)

    def _look_around(self) -> None:
        given = self.models.used

        def done(result: list[Wanting] | Exception) -> None:
            if isinstance(result, Exception):
                self.log(f"its health cannot be checked: {result}")
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
        except OSError:  # the client has left, or no file descriptor is free: try again a little later
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
        except OSError:  # dead already; or, before Linux 6.5, of another pid namespace
            fix = "share the daemon's pid namespace, or run Linux 6.5 or later"
            self._turn_away(connection, peer, f"process {peer.pid} cannot be watched: {fix}")
        else:
            self._sessions[session.client] = session

    def _turn_away(self, connection: socket.socket, peer: Peer, why: str) -> None:
        self.counts["turned_away"] += 1
        self.refusals.record(why, peer)
        with connection:
            try:
                connection.send(wire.pack_handshake(wire.Refused(why[: wire.MAX_TEXT])))
            except OSError:
                return

    def _open_next(self) -> None:
        """Close models to make room for one at a time: a closed one may be wanted again. Openings run in parallel."""
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
        self.models.opened(fingerprint, result if isinstance(result, Namespace) else None)
        if isinstance(result, Namespace):
            result.tiers.reload(self.config)  # which may have changed meanwhile
            result.hierarchy.news.watch(lambda: self._note_progress(result))
            if self.peer_server is not None:
                result.lent = self.peer_server.lend(result.hierarchy, fingerprint, result.blocks)
                result.lent.kv_probe = lambda: result.kv_probe
            if self.publisher is not None and result.source is not None:
                result.tiers.feed = feed = self.publisher.feed(fingerprint, result.source)
                at = EventsAt.bound(self.publisher.endpoint, self.publisher.replay_endpoint)
                if result.lent is not None and at.publish:
                    result.lent.events = lambda: replace(at, tells_all=feed.tells_all)
            least = result.hierarchy.host.region.slot_stride
            for cache_salt, limits in self.limits.items():
                at_least = TenantLimits(*(None if size is None else max(size, least) for size in limits))
                result.tiers.quotas.set(cache_salt, at_least)
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
        namespace.notify()

    def _note_progress(self, namespace: Namespace) -> None:
        if not namespace.progressed:
            namespace.progressed = self._progressed = True
            self.loop.wake()

    def _turn(self) -> float:
        """After every round: pass on progress, and check deadlines if a tick is due. Returns the seconds to wait."""
        at = now()
        is_due = at - self._ticked >= _TICK
        progressed, self._progressed = self._progressed, False
        feeds = False
        is_announced_soon = progressed and not is_due and self.publisher is not None
        for namespace in self.models if progressed or is_due else ():
            progressed, namespace.progressed = namespace.progressed, False
            if progressed or is_due:
                if is_due:
                    namespace.hierarchy.tick()
                    feeds |= namespace.tiers.feed is not None and namespace.tiers.feed.pump()
                namespace.notify()
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
