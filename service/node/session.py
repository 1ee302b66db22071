"""One client of the daemon: its socket, the processes that copy for it, and all that it holds."""

import contextlib
import itertools
import os
import secrets
import socket
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from kvtier.connector.daemon import ID_BYTES, FrameReader, Hello, Peer, pidfd_of, wire
from kvtier.service.node.health import Refusals
from kvtier.service.node.loop import READABLE, WRITABLE, Loop, now
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.served_tiers import ServedTiers
from kvtier.tiers import L2, FormatError, KVMismatch, Outcome
from kvtier.tiers.hierarchy import PENDING, Attribution, Claim, Filled
from kvtier.tiers.pool import Lease, Reservation

Who = TypeVar("Who")

MAX_BUFFERED: Final = 64 << 20  # bytes of frames not whole yet and of answers not read yet, over all clients
MAX_PROCESSES: Final = 256  # that copy for one client
MAX_HELD: Final = 8192  # claims and leases of one client
MAX_RESERVATIONS: Final = 8192  # of one client, open at once
_CLIENTS: Final = itertools.count(1)  # their numbers in hints' accounts
_TENANTS: Final = 16  # accounts of one client; tenants beyond share one by their number
_MAX_OUTPUT: Final = 4 << 20  # bytes a client may leave unread
_MAX_TURN: Final = 16  # readings in a row, so that one client does not keep the loop for itself
_MAX_WAIT: Final = 600.0  # seconds


class Buffers(Generic[Who]):
    """Who keeps the daemon from letting go of how many bytes. Lives on the loop's thread.

    Past `limit` the one with most is told to go by `cut`, until the rest fits; of equals the one noted least recently.
    So a client with no more than its equal share of the limit never goes, whatever the others do, and nobody waits.
    """

    def __init__(self, cut: Callable[[Who], None], limit: int = MAX_BUFFERED) -> None:
        """`cut` lets go of what is kept for one, and notes that."""
        self._cut = cut
        self.limit = limit
        self.used = 0  # bytes
        self._kept: dict[Who, int] = {}

    def note(self, who: Who, num_bytes: int) -> None:
        """So many bytes are kept for it now; with 0 it is forgotten. May cut off anybody, itself too."""
        self.used += num_bytes - self._kept.pop(who, 0)
        if num_bytes:
            self._kept[who] = num_bytes
        while self.used > self.limit:
            self._cut(max(self._kept, key=self._kept.__getitem__))

    def check(self) -> None:
        """Raise AssertionError if the sum is not that of the parts, or the bound does not hold."""
        assert self.used == sum(self._kept.values()) <= self.limit, f"{self.used} bytes kept, {self.limit} at most"


class ClientProcesses:
    """Lives on the loop's thread. True while one of them lives."""

    def __init__(self, loop: Loop, all_ended: Callable[[], None]) -> None:
        """`all_ended` is called when the last of them ends by itself."""
        self._loop = loop
        self._all_ended = all_ended
        self._pids: dict[int, int] = {}  # by pidfd, of those that live

    def __bool__(self) -> bool:
        return bool(self._pids)

    @property
    def pids(self) -> list[int]:
        """Of those that live; 0 for those of a pid namespace that this process does not see."""
        return sorted(set(self._pids.values()))

    def watch(self, connection: socket.socket, peer: Peer) -> int:
        """Watch the process that connected; returns what tells it from others (its pidfd's inode). OSError."""
        fd = pidfd_of(connection, peer)
        process = os.fstat(fd).st_ino
        if peer.pid and peer.pid in self._pids.values():
            os.close(fd)
        elif len(self._pids) >= MAX_PROCESSES:
            os.close(fd)
            raise OSError(f"more than {MAX_PROCESSES} processes")
        else:
            self._pids[fd] = peer.pid
            self._loop.watch(fd, lambda events: self._ended(fd))
        return process

    def forget(self) -> None:
        for fd in self._pids:
            self._loop.forget(fd)
            os.close(fd)
        self._pids.clear()

    def _ended(self, fd: int) -> None:
        self._loop.forget(fd)
        os.close(fd)
        del self._pids[fd]
        if not self._pids:
            self._all_ended()


class HeldCounts(NamedTuple):
    claims: int
    leases: int
    reservations: int


class Holdings:
    """One client's claims, leases and reservations, by the client's numbers; a number that has gone is passed over."""

    def __init__(
        self, tiers: ServedTiers, block_size: int, lease_deadline: float, version: int, *, takes_parts: bool
    ) -> None:
        """`version`: of the protocol, as the client speaks it. `takes_parts`: it wants to know children."""
        self._tiers = tiers
        self._hierarchy = tiers.hierarchy
        self._token_bytes = 4 * block_size  # that a block can have
        self._lease_deadline = lease_deadline
        self._version = version
        self._takes_parts = takes_parts
        self._claims: dict[int, Claim] = {}
        self._renewed: dict[int, float] = {}  # claim answered → when the client last wanted it
        self.waiting: dict[int, Claim] = {}  # those of the claims that have no answer yet
        self.news: list[wire.News] = []  # of claims answered; whoever sends it takes it away
        self._client = next(_CLIENTS)  # whose hints they are
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self.sealed: list[Filled] = []  # not passed on yet
        self.verbs: dict[type[wire.Operation], Callable[[Any], Any]] = {
            wire.Ask: self._ask,
            wire.Renew: self._renew,
            wire.Cancel: self._cancel,
            wire.Take: self._take,
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.Seal: self._seal,
            wire.Abandon: self._abandon,
            wire.Computed: lambda op: self._hierarchy.computed(op.num_tokens, op.seconds, op.position),
            wire.Holds: lambda op: bytes(self._hierarchy.holds(wire.unpack_hashes(op.hashes))),
            wire.RequestEnded: self._request_ended,
        }
        """What serves an operation, and returns its answer if it has one."""

    @property
    def counts(self) -> HeldCounts:
        return HeldCounts(len(self._claims), len(self._leases), len(self._reservations))

    def look(self) -> None:
        """Have the claims in `news` that have an answer now and had none before."""
        for number in list(self.waiting):
            self._look(number)

    def publish(self) -> None:
        """Pass on what was sealed: behind the answers, since hashing it takes the GIL while somebody waits for them."""
        sealed, self.sealed = self.sealed, []
        self._hierarchy.seal_each(sealed)

    def expire(self, at: float) -> int:
        """Drop promises not renewed within the lease deadline; how many. Call it with nothing left unread."""
        late = [number for number, since in self._renewed.items() if at - since >= self._lease_deadline]
        for number in late:
            self._drop(number)
        return len(late)

    def may_expire(self, at: float) -> bool:
        return any(at - since >= self._lease_deadline for since in self._renewed.values())

    def drop_claims(self) -> None:
        """The client is gone: what it was promised and has not taken can go, since no copy was ever planned for it."""
        for number in list(self._claims):
            self._drop(number)

    def release_all(self) -> HeldCounts:
        """No copy of the client's is under way any more: all goes. Returns how much there was."""
        self.publish()
        counts = self.counts
        self.drop_claims()
        for lease in self._leases.values():
            lease.release()
        for reservation in self._reservations.values():
            self._hierarchy.abandon(reservation, Outcome.ABORTED)
        self._leases.clear()
        self._reservations.clear()
        return counts

    # claims

    def _ask(self, op: wire.Ask) -> None:
        number, names = op.claim, wire.unpack_hashes(op.hashes)
        if number in self._claims or number in self._leases:
            raise FormatError(f"claim {number} is there already")
        if op.num_l1 > len(names):
            raise FormatError(f"claim {number}: L1 has {op.num_l1} of {len(names)} blocks")
        if len(self._claims) + len(self._leases) >= MAX_HELD:
            nothing = Attribution(len(names), l1=op.num_l1, miss=len(names) - op.num_l1)
            self._hierarchy.metrics.missed(Outcome.QUEUE_FULL, nothing.miss)
            found = wire.pack_found(nothing, self._version)
            self.news.append(wire.News(number, found, Outcome.NO_SLOT, 0.0, b"", b"", (), None))
            return
        if len(set(names)) < len(names):
            raise FormatError(f"claim {number} names a block twice")
        if self.sealed:
            self.publish()  # what was sealed just before may be what is asked for
        claim = self._hierarchy.ask(names, op.parent, op.num_l1, block_size=op.block_size, ends=op.ends)
        self._claims[number] = self.waiting[number] = claim
        self._look(number)

    def _look(self, number: int) -> None:
        claim = self.waiting[number]
        promised = self._tiers.poll(claim)
        if promised is PENDING:
            return
        assert claim.found is not None
        del self.waiting[number]
        at, slots, generations = now(), b"", b""
        if promised and (lease := self._hierarchy.promised(claim)) is not None:
            self._renewed[number] = at
            slots, generations = array("q", lease.slots).tobytes(), array("q", lease.generations).tobytes()
        else:
            del self._claims[number]
            self._hierarchy.cancel(claim)
        found, good_for = wire.pack_found(claim.found, self._version), max(0.0, claim.good_until - at)
        children = claim.children if self._takes_parts else ()
        news = wire.News(number, found, claim.refusal, good_for, slots, generations, children, claim.meeting)
        self.news.append(news)

    def _renew(self, op: wire.Renew) -> None:
        at = now()
        for number in op.claims:
            if number in self._renewed:
                self._renewed[number] = at

    def _cancel(self, op: wire.Cancel) -> None:
        for number in op.claims:
            self._drop(number)

    def _take(self, op: wire.Take) -> None:
        for number in op.claims:
            if self._renewed.pop(number, None) is not None:
                self._leases[number] = self._tiers.take(self._claims.pop(number))  # nothing is left to cancel

    def _release(self, op: wire.Release) -> None:
        for number in op.leases:
            if (lease := self._leases.pop(number, None)) is not None:
                lease.release()

    def _drop(self, number: int) -> None:
        if (claim := self._claims.pop(number, None)) is not None:
            self.waiting.pop(number, None)
            self._renewed.pop(number, None)
            self._hierarchy.cancel(claim)

    # stores

    def _reserve(self, op: wire.Reserve) -> wire.Grants:
        wanted = op.wanted()
        lengths = [len(each.hashes) for each in wanted]
        if not self._reservations.keys().isdisjoint(range(op.first, op.first + len(wanted))):
            raise FormatError(f"a reservation from {op.first} on is there already")
        if op.tails and any([lengths[i] != 1 for i in op.tails]):
            raise FormatError("reserve: a tail is one block")
        if len(self._reservations) + len(lengths) > MAX_RESERVATIONS or max(lengths, default=0) > wire.MAX_ITEMS:
            self._hierarchy.metrics.dropped(L2, Outcome.QUEUE_FULL, sum(lengths))
            return wire.pack_grants([None] * len(lengths))
        try:
            reservations = self._tiers.reserve(wanted)
        except ValueError as error:  # a name given twice; slots taken before it came are dropped, and so abandoned
            raise FormatError(str(error)) from None
        for number, reservation in enumerate(reservations, op.first):
            if reservation is not None and reservation.hashes:
                self._reservations[number] = reservation
        return wire.pack_grants(
            [None if each is None else (each.indices, each.slots, each.generations) for each in reservations]
        )

    def _seal(self, op: wire.Seal) -> None:
        if max(map(len, op.tokens), default=0) > self._token_bytes:  # other clients are told of them
            raise FormatError(f"seal: more than the {self._token_bytes // 4} tokens of a block")
        for number, tokens in op.filled():
            if (reservation := self._reservations.get(number)) is None:
                continue
            if len(tokens) != len(reservation.hashes):
                raise FormatError(f"seal: tokens of {len(tokens)} blocks, {len(reservation)} are reserved")
            if reservation.is_tail and not 0 < len(tokens[0]) < self._token_bytes:
                raise FormatError("seal: a tail has a token or more, and fewer than a block")
            del self._reservations[number]
            self.sealed.append((reservation, tokens, op.epoch))

    def _abandon(self, op: wire.Abandon) -> None:
        for number in op.reservations:
            if (reservation := self._reservations.pop(number, None)) is not None:
                self._hierarchy.abandon(reservation, op.reason)

    # the rest

    def _request_ended(self, op: wire.RequestEnded) -> None:
        account = self._client * _TENANTS + op.client % _TENANTS  # a client is judged for no other's hints
        self._tiers.ended(op.end()._replace(client=account), op.client)


class SessionOwner(Protocol):
    loop: Loop
    counts: Counter[str]  # what became of clients and of what they held
    refusals: Refusals  # whom it refused, and why
    buffers: "Buffers[Session]"  # what is kept for clients, half sent or unread
    lease_deadline: float  # seconds a promise is kept that its client does not renew
    has_waiting: bool  # some claim may have no answer yet: deadlines are looked at more often

    def admit(self, session: "Session", hello: Hello) -> None:
        """Welcome it to its model's tiers, now or when they are open, or refuse it."""

    def join(self, session: "Session", client: bytes) -> None:
        """Watch the process at the session's other end for that client."""

    def copies_ended(self, session: "Session", client: bytes) -> None:
        """The process of this session was that client before; no copy of those times is under way."""

    def ended(self, session: "Session") -> None:
        """Forget it: it holds nothing."""

    def aside(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have `work` done on a thread of its own, and `done` called on the loop's with what it ended with."""

    def log(self, line: str) -> None:
        """Say what the person who runs the daemon should know."""


class Session:
    """One client, from its connection to the end of its last process. Lives on the loop's thread.

    connected → said hello → welcomed → gone. If the connection ends without a `Bye`, its leases and filling slots stay
    until every process of the client has ended, since one of their copies may outlive the socket.
    """

    def __init__(self, daemon: SessionOwner, connection: socket.socket, peer: Peer) -> None:
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
        self._num_kept = 0  # bytes noted last: half sent or unread
        self._over = False
        self._corked = False  # while a batch of frames is taken in
        self._blocked = False  # the client's socket took no more
        self._verbs: dict[type[wire.Operation], Callable[[Any], Any]] = {}  # what serves each operation, once welcomed
        self._busy = False  # with an operation that waits, on a thread of its own
        self._told_epoch = 0
        self.version = wire.VERSION  # of the protocol, as the client speaks it
        self.processes = ClientProcesses(daemon.loop, self._all_ended)
        self.process = self.processes.watch(connection, peer)  # the client's own
        daemon.loop.watch(connection.fileno(), self._ready)

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def counts(self) -> HeldCounts:
        return self.holdings.counts if self.holdings is not None else HeldCounts(0, 0, 0)

    @property
    def holds_slots(self) -> bool:
        return self.counts.leases > 0 or self.counts.reservations > 0

    # what the daemon calls

    def enter(self, namespace: Namespace) -> None:
        """Belong to a namespace, which stays open from now on."""
        if self.connected:
            self.namespace = namespace
            namespace.members.add(self)

    def welcome(self) -> None:
        if self._socket is None or self.namespace is None:
            return
        namespace, tiers = self.namespace, self.namespace.hierarchy
        region = tiers.region
        assert region is not None
        assert region.fd is not None
        block_size = namespace.blocks.block_size
        takes_parts = self.hello is None or self.hello.takes_parts
        self.holdings = Holdings(
            namespace.tiers, block_size, self._daemon.lease_deadline, self.version, takes_parts=takes_parts
        )
        self._verbs = {
            **self.holdings.verbs,
            wire.Lookup: self._look_up,
            wire.Ended: lambda op: self._daemon.copies_ended(self, op.client),
            wire.Bye: lambda op: self.end("bye"),
            wire.Reset: lambda op: _Waits(tiers.reset),
            wire.Drain: lambda op: _Waits(lambda: tiers.drain(min(op.timeout, _MAX_WAIT), below=op.below)),
            wire.Check: self._check,
        }
        self._told_epoch = tiers.epoch
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
        if self._daemon.refusals.note(why, self.peer, self.hello.fingerprint if self.hello else None):
            self._daemon.log(f"client {self.peer.pid} is refused: {why}")
        self._send_handshake_reply(wire.Refused(why[:500], is_other_kv))
        self.end_connection(reason)

    def notify(self) -> None:
        """Send the news there is: claims that were answered, an epoch that has changed."""
        if self.holdings is None or self.namespace is None or self._socket is None:
            return
        if self.holdings.waiting:
            self.holdings.look()
        if self.holdings.news or self._told_epoch != self.namespace.hierarchy.epoch:
            self._reply(0, [])

    def pass_time(self, at: float) -> None:
        """Let promises expire that nobody has renewed, once all that the client has sent was read."""
        holdings = self.holdings
        if holdings is not None and self.connected and holdings.may_expire(at) and self._ready():
            self._daemon.counts["promises_lapsed"] += holdings.expire(at)

    def copies_for(self, client: "Session") -> None:
        """Have that client's blocks held until this session's process has ended, too. OSError as `watch`."""
        if self._socket is not None:
            client.processes.watch(self._socket, self.peer)

    def end_connection(self, reason: str) -> None:
        """Hang up. Promises go; leases and reservations stay while a process lives, which is counted. Idempotent."""
        if self._socket is None:
            return
        self._daemon.loop.forget(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._output.clear()
        self._reader = FrameReader[Any](wire.MAX_HELLO)
        self._num_kept = 0
        self._daemon.buffers.note(self, 0)
        if self.holdings is not None:
            self.holdings.drop_claims()
        if self.holdings is None or not any(self.holdings.counts) or not self.processes:
            self.end(reason)
        else:
            self._daemon.counts[f"{reason}_holding"] += 1

    def end(self, reason: str) -> None:
        """No copy of this client's is under way: take all it holds, forget it, count the reason. Idempotent."""
        self.end_connection(reason)
        if self._over:  # it held nothing, and so has ended with its connection
            return
        self._over = True
        self._daemon.counts[reason] += 1
        self.processes.forget()
        if self.holdings is not None:
            gone = self.holdings.release_all()
            self._daemon.counts["leases_reclaimed"] += gone.leases
            self._daemon.counts["reservations_reclaimed"] += gone.reservations
            self.holdings = None
        self._daemon.ended(self)

    # what the loop calls

    def _all_ended(self) -> None:
        if self._socket is None:  # else a child it forked may live, with socket and region
            self.end("died")

    def _ready(self, events: int = READABLE) -> bool:
        """Read and do what the client has sent, and write what it left unread; True if that was all of it."""
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
            self._corked = True  # what several frames of a batch are answered goes out at once
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
                    self._daemon.log(f"client {self.peer.pid} is cut off: {error}")
                    self.end_connection("malformed")
            except Exception as error:  # whatever one client's words led to must not end the others' service
                self._daemon.log(f"client {self.peer.pid} is cut off: {error!r}")
                self.end_connection("error")
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
        if request.number or self.holdings.news:
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
        return _Waits(lambda: _broken(lambda: namespace.hierarchy.check(in_use=in_use)))

    def _serve_aside(self, request: int, work: Callable[[], Any]) -> None:
        assert self.holdings is not None
        self.holdings.publish()  # it is waited for, or counted

        def done(answer: Any) -> None:
            self._busy = False
            if isinstance(answer, Exception):
                self._daemon.log(f"client {self.peer.pid} is cut off: {answer!r}")
                self.end_connection("error")
            elif self._socket is not None and self.holdings is not None:
                self._reply(request, [True if answer is None else answer])
            if self.namespace is not None:  # the epoch may be another one: all who use it want to know
                for member in list(self.namespace.members):
                    member.notify()

        self._busy = True
        self._daemon.aside(work, done)

    # writing

    def _reply(self, request: int, answers: list[Any]) -> None:
        assert self.namespace is not None
        assert self.holdings is not None
        news, self.holdings.news = self.holdings.news, []
        epoch = self._told_epoch = self.namespace.hierarchy.epoch
        room = max(0, wire.MAX_CHILDREN_BYTES - len(self._output))  # who does not read is told less
        self._output += wire.pack_reply(request, epoch, answers, news, room)
        if not self._corked:
            self._flush()

    def joined(self) -> None:
        """The process at the other end is watched now, by the client it copies for."""
        self._send_handshake_reply(wire.Joined())
        self.end_connection("joined")

    def _send_handshake_reply(self, reply: wire.HandshakeReply) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(wire.pack_handshake(reply, self.version))

    def _flush(self) -> None:
        """Send what there is to send, as far as it goes, and watch for room if that is not all the way."""
        if self._socket is None:
            return
        try:
            if self._output:
                del self._output[: self._socket.send(self._output)]
        except BlockingIOError:
            pass
        except OSError:
            self.end_connection("died")
            return
        if len(self._output) > _MAX_OUTPUT:
            self._daemon.log(f"client {self.peer.pid} is cut off: it does not read what it is sent")
            self.end_connection("slow_reader")
        elif self._blocked != bool(self._output):
            self._blocked = bool(self._output)
            self._daemon.loop.change(self._socket.fileno(), READABLE | WRITABLE if self._blocked else READABLE)
        num_kept = self._reader.num_waiting + len(self._output)
        if num_kept or self._num_kept:  # both are 0 once it has hung up
            self._num_kept = num_kept  # before anybody is cut off for it
            self._daemon.buffers.note(self, num_kept)


class _Waits(NamedTuple):
    """An operation that takes time: `work` returns its answer, on a thread of its own."""

    work: Callable[[], Any]


def _broken(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error)[:500] or "a law does not hold"
    return ""
