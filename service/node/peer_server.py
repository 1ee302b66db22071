"""Blocks between nodes: serves host memory's blocks to other nodes' daemons, and follows their KV events."""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

import numpy as np

from kvtier import tiers
from kvtier.service import Crowd, events
from kvtier.service.node.holder_index import HolderIndex
from kvtier.tiers import L2, TIERS, BlockRecord, BlockShape, ChainHash, ConfigError, Outcome, checksum, peers
from kvtier.tiers.config import EventsConfig, PeersConfig
from kvtier.tiers.hierarchy import Hierarchy, begun
from kvtier.tiers.naming import KVProbe
from kvtier.tiers.peers import AnnouncedNames, EventsAt, PeerFailed, PeerStream, RemoteMemory, wire
from kvtier.tiers.pool import Lease

_log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4 * peers.MAX_NODES  # a thread each: one of every node for each of four models
MAX_STRANGERS: Final = (
    256  # of these, connections that have not proven the key yet: a restart has all nodes come at once
)
_HELLO_SECONDS: Final = 5.0  # for the whole handshake
_IDLE_SECONDS: Final = 300.0  # without a question
_ACCEPT_PAUSE: Final = 0.2  # seconds without a file descriptor to spare
_SEND_BYTES: Final = 512 << 10  # given to the kernel at once: it sends while the next are hashed
_HELD_AT_ONCE: Final = 256  # names looked up under the pool's lock at a time
_CLOSE_SECONDS: Final = 5.0


class LentModel:
    def __init__(
        self, hierarchy: Hierarchy, fingerprint: bytes, sizes: BlockShape, forget: "Callable[[LentModel], None]"
    ) -> None:
        self.hierarchy, self._forget = hierarchy, forget
        self.blocks = wire.LentBlocks(fingerprint, sizes.block_bytes, sizes.block_size)
        self.events: Callable[[], EventsAt] = EventsAt  # where KV events announce these blocks; default: nowhere
        self.kv_probe: Callable[[], KVProbe | None] = lambda: None  # what the model computes, if that is known
        num_slots = hierarchy.host.pool.num_slots
        self._tags = np.zeros((num_slots, peers.TAG_BYTES), np.uint8)  # of the block in each slot …
        self._tagged = np.full(num_slots, -1, np.int64)  # … of this generation
        self._memory: Future[RemoteMemory] | None = None  # what lets borrowers read these slots
        self._closing = threading.Event()
        self._reporting: threading.Thread | None = None
        self._idle = threading.Condition()
        self._users: set[socket.socket] = set()  # connections whose question about it is being answered
        self._closed = False

    @property
    def is_lent(self) -> bool:
        """False after a reset, which a borrower may not have noticed."""
        return not self._closed and self.hierarchy.epoch == 0 and self.blocks.fingerprint not in peers.RESETS

    def is_alike(self, session: wire.PeerSession) -> bool:
        """Whether the borrower may have these blocks: no probe shows that its model computes other KV."""
        ours, theirs = self.kv_probe(), session.probe
        if ours is None or theirs is None:
            return True
        if session.compared is None or session.compared[0] is not ours:
            session.compared = ours, ours.distance(theirs) <= ours.tolerance
        return session.compared[1]

    @contextmanager
    def used_by(self, connection: socket.socket) -> Iterator[bool]:
        with self._idle:
            may = self.is_lent
            if may:
                self._users.add(connection)
        try:
            yield may
        finally:
            with self._idle:
                self._users.discard(connection)
                self._idle.notify_all()

    def offer_memory(self) -> None:
        """Register the slots for borrowers with transport "nixl", which takes a second. They are sent if it fails."""

        def register() -> RemoteMemory:
            memory = RemoteMemory()
            try:
                memory.register(self.hierarchy.host.region.slot(0))
            except Exception as error:
                _log.warning("[peers] blocks are sent over tcp: %s", error)
                raise
            return memory

        self._memory = begun("kvtier-nixl", register)

    def keys(self) -> peers.Keys:
        """The last eight bytes of each lent block's name, as a hint: names change meanwhile."""
        pool = self.hierarchy.host.pool
        words = np.frombuffer(pool.naming[0], np.uint64).reshape(-1, wire.HASH_BYTES // 8)
        return words[pool.ready_slots() if self.is_lent else [], -1]

    def begin_reports(self, index: HolderIndex) -> None:
        """Report to the ring's owners which blocks are lent, until `close`."""

        def run() -> None:
            while not self._closing.wait(peers.ROUND):
                for port in self.hierarchy.ports:
                    if isinstance(tier := port.tier, peers.PeersStore):
                        tier.report(self.keys(), index)

        self._reporting = threading.Thread(target=run, name="kvtier-report", daemon=True)
        self._reporting.start()

    def memory(self, seconds: float = 0.0) -> RemoteMemory | None:
        """What borrowers read, once it is registered; None: they get blocks over the connection."""
        if self._memory is None:
            return None
        try:
            return self._memory.result(seconds)
        except (TimeoutError, ConfigError, PeerFailed):
            return None

    def tag_in(self, slot: int, generation: int) -> bytes | None:
        """The tag of a leased block, if it was made since it came into its slot."""
        return bytes(self._tags[slot]) if self._tagged[slot] == generation else None

    def keep_tag(self, slot: int, generation: int, tag: bytes | bytearray) -> None:
        self._tags[slot] = np.frombuffer(tag, np.uint8)
        self._tagged[slot] = generation  # last; while the block is leased its tag cannot change

    def close(self) -> None:
        """Stop lending, and cut off connections that blocks are being sent to: the memory is freed. Idempotent."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._forget(self)
        self._closing.set()
        if self._reporting is not None:
            self._reporting.join(_CLOSE_SECONDS)
        with self._idle:
            self._closed = True
            for connection in self._users:
                _shut(connection)
            if not self._idle.wait_for(lambda: not self._users, max(0.0, deadline - time.monotonic())):
                _log.warning("[peers] a block is still being sent after %g s", _CLOSE_SECONDS)
        if (memory := self.memory(_CLOSE_SECONDS)) is not None:
            memory.close()


class PeerServer:
    """Listens at [peers] listen. A thread for each connection; none runs on the daemon's loop.

    A connection's cost is bounded: number of connections and of strangers, time of a handshake and of each answer,
    names in a question, bytes lent at once. It counts blocks and bytes lent, and why connections were cut off.
    """

    def __init__(self, config: PeersConfig, node: bytes | None = None) -> None:
        """Bind the address. ConfigError if it or the key cannot be used. `node`: who lends; None: this process."""
        assert config.listen is not None
        assert config.key_file is not None
        self._config = config
        self._node = node or wire.own_node()
        self._key = wire.shared_key(config.key_file)
        if config.transport == "nixl":
            peers.load_nixl()
        self._lock = threading.Condition()  # guards what follows; never held across I/O
        self.counts: Counter[str] = Counter()
        self.index = HolderIndex(config.max_blocks)
        self._models: dict[bytes, LentModel] = {}
        self._connections: set[socket.socket] = set()
        self._strangers = Crowd[socket.socket](MAX_STRANGERS)
        self._in_flight = 0  # bytes of blocks leased for others
        self._closed = False
        self._listener = _listen(config.listen)
        self.address = peers.address_text(self._listener.getsockname())
        self._thread = threading.Thread(target=self._accept, name="kvtier-lend", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def lend(self, hierarchy: Hierarchy, fingerprint: bytes, sizes: BlockShape) -> LentModel:
        model = LentModel(hierarchy, fingerprint, sizes, self._forget)
        if self._config.transport == "nixl":
            model.offer_memory()
        if self._config.nodes and self._config.index != "all":
            model.begin_reports(self.index)
        with self._lock:
            self._models[fingerprint] = model
        return model

    def _forget(self, model: LentModel) -> None:
        with self._lock:
            if self._models.get(model.blocks.fingerprint) is model:
                del self._models[model.blocks.fingerprint]

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
            self._lock.notify_all()
        _shut(self._listener)
        self._listener.close()
        for connection in connections:
            _shut(connection)
        with self._lock:
            self._lock.wait_for(lambda: not self._connections, _CLOSE_SECONDS)

    def check(self) -> None:
        self.index.check()
        with self._lock:
            assert 0 <= self._in_flight, f"{self._in_flight} bytes in flight"
            assert len(self._strangers) <= len(self._connections) <= MAX_CONNECTIONS, "connections"

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                if not self._closed:  # no file descriptor is free, or the client has left
                    self._note("not_accepted")
                    time.sleep(_ACCEPT_PAUSE)
                continue
            with self._lock:
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full and not self._closed:
                    self._connections.add(connection)
                    self._strangers.add(connection, str(peer[0]))
                    if (victim := self._strangers.surplus()) is not None:  # a client with the key proves it quickly
                        _shut(victim)
                        self.counts["too_many"] += 1
            if is_full or self._closed:
                self._note("too_many")
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="kvtier-lend-to", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is free
                self._note("not_accepted")
                self._end(connection)

    def _serve(self, connection: socket.socket) -> None:
        is_stranger = True
        try:
            stream = PeerStream(connection)
            session = self._welcome(stream)
            is_stranger = False
            with self._lock:
                self._strangers.discard(connection)
            self._note("welcomed")
            while True:
                self._answer(stream, session)
        except PeerFailed as failed:
            if is_stranger or failed.reason != "hung_up":
                self._note(f"{'stranger' if is_stranger else 'cut_off'}_{failed.reason}")
        except wire.ProtocolError as wrong:
            self._note(f"{'stranger' if is_stranger else 'cut_off'}_{wrong}")
        except OSError:
            self._note(f"{'stranger' if is_stranger else 'cut_off'}_error")
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(connection)
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            self._lock.notify_all()

    def _welcome(self, stream: PeerStream) -> wire.PeerSession:
        deadline = time.monotonic() + _HELLO_SECONDS
        challenge = os.urandom(wire.NONCE_BYTES)
        stream.send([wire.pack_challenge(challenge)], deadline)
        session, _ = wire.PeerSession.accept(self._key, challenge, stream.take(wire.HELLO_BYTES, deadline))
        model = self._models.get(session.blocks.fingerprint)
        reply = wire.Greeting.WELCOME if model is None or model.blocks == session.blocks else wire.Greeting.OTHER_BLOCKS
        stream.send([session.welcome(reply, self._node)], deadline)
        if reply is not wire.Greeting.WELCOME:
            raise wire.ProtocolError(reply.name.lower())
        return session

    def _answer(self, stream: PeerStream, session: wire.PeerSession) -> None:
        if not stream.wait(_IDLE_SECONDS):
            raise PeerFailed(Outcome.TIMEOUT, "timeout")
        deadline = time.monotonic() + self._config.deadline
        words = stream.take(wire.WORDS_BYTES, deadline)
        rest = stream.take(session.question_bytes(words), deadline)
        verb, names = session.read_question(words, rest)
        model = self._models.get(session.blocks.fingerprint)
        if verb is wire.PeerVerb.DONE:
            return
        if verb in (wire.PeerVerb.HOLDERS, wire.PeerVerb.REPORT):
            stream.send([self._answer_as_owner(session, verb, names)], deadline)
            return
        if verb is wire.PeerVerb.KV_PROBE:
            session.note_probe(names)
            is_other = model is not None and not model.is_alike(session)
            stream.send([session.answer(verb, is_other)], deadline)
            return
        if model is None or model.blocks != session.blocks or not model.is_alike(session):
            self._send_none(stream, session, verb, len(names))
            return
        with model.used_by(stream.connection) as may:
            if not may:
                self._send_none(stream, session, verb, len(names))
            elif verb is wire.PeerVerb.HELD:
                flags = bytes(self._held(model, names))
                stream.send([session.answer(verb, len(names), flags)], deadline)
            elif verb is wire.PeerVerb.EVENTS:
                stream.send([session.answer(verb, 1, model.events().pack())], deadline)
            elif verb is wire.PeerVerb.MEMORY:
                memory = model.memory()
                metadata = b"" if memory is None else memory.metadata
                whole = metadata.ljust(peers.METADATA_BYTES, b"\0")
                stream.send([session.answer(verb, len(metadata), whole)], deadline)
            else:
                self._lend_blocks(stream, session, model, names, verb)

    def _answer_as_owner(self, session: wire.PeerSession, verb: wire.PeerVerb, words: Sequence[bytes]) -> bytes:
        """Of any model, also of those that are not open here."""
        fingerprint = session.blocks.fingerprint
        if verb is wire.PeerVerb.REPORT:
            return session.answer(verb, self.index.report(fingerprint, wire.unpack_report(words)))
        found = self.index.holders(fingerprint, wire.unpack_query(words))
        return session.answer(verb, len(found), wire.pack_holders(found))

    def _send_none(self, stream: PeerStream, session: wire.PeerSession, verb: wire.PeerVerb, num: int) -> None:
        nothing = {
            wire.PeerVerb.HELD: bytes(num),
            wire.PeerVerb.EVENTS: EventsAt().pack(),
            wire.PeerVerb.MEMORY: bytes(peers.METADATA_BYTES),
        }.get(verb, b"")
        answer = session.answer(verb, num if verb is wire.PeerVerb.HELD else 0, nothing)
        stream.send([answer], time.monotonic() + self._config.deadline)

    def _held(self, model: LentModel, names: Sequence[ChainHash]) -> list[bool]:
        pool, flags = model.hierarchy.host.pool, list[bool]()
        for first in range(0, len(names), _HELD_AT_ONCE):
            flags += pool.holds(names[first : first + _HELD_AT_ONCE])
        return flags

    def _lend_blocks(
        self,
        stream: PeerStream,
        session: wire.PeerSession,
        model: LentModel,
        names: Sequence[ChainHash],
        verb: wire.PeerVerb,
    ) -> None:
        slot_bytes = session.blocks.slot_bytes
        most = max(1, min(len(names), tiers.BATCH_BYTES // slot_bytes))
        deadline = time.monotonic() + self._config.deadline + most * slot_bytes / self._config.bandwidth
        with self._room(most * slot_bytes, deadline) as has_room:
            if not has_room:
                self._note("no_room")
                self._send_none(stream, session, verb, len(names))
                return
            with model.hierarchy.host.pool.lease(names[:most]) as lease:
                lent = self._leading(model, lease) if model.is_lent else []
                stream.send([session.answer(verb, len(lent))], deadline)
                loan = _Loan(stream, session, model, lent, deadline)
                if verb is wire.PeerVerb.LEND:
                    loan.send()
                elif lent:
                    loan.send_places()
        with self._lock:
            self.counts["blocks"] += len(lent)
            self.counts["bytes"] += len(lent) * slot_bytes

    @staticmethod
    def _leading(model: LentModel, lease: Lease) -> list[tuple[BlockRecord, int, int]]:
        """Record, slot and generation of the leased blocks, up to the first that cannot be sent to another node."""
        host, lent = model.hierarchy.host, list[tuple[BlockRecord, int, int]]()
        for slot, time_taken, name in zip(lease.slots, lease.generations, lease.hashes, strict=True):
            record = host.records[slot]
            if record is None or record.chain_hash != name or len(record.parent) != wire.HASH_BYTES:
                break
            lent.append((record, slot, time_taken))
        return lent

    @contextmanager
    def _room(self, num_bytes: int, deadline: float) -> Iterator[bool]:
        """Wait until so many bytes may be lent beside all others; False if the deadline passes first."""
        most = max(self._config.in_flight, num_bytes)  # one block may be larger: then it goes alone
        with self._lock:
            has_room = self._lock.wait_for(
                lambda: self._closed or self._in_flight + num_bytes <= most, max(0.0, deadline - time.monotonic())
            )
            has_room = has_room and not self._closed
            self._in_flight += num_bytes * has_room
        try:
            yield has_room
        finally:
            if has_room:
                with self._lock:
                    self._in_flight -= num_bytes
                    self._lock.notify_all()

    def _note(self, event: str) -> None:
        with self._lock:
            self.counts[event] += 1


class _Loan(NamedTuple):
    """Leased blocks on their way to a borrower."""

    stream: PeerStream
    session: wire.PeerSession
    model: LentModel
    blocks: Sequence[tuple[BlockRecord, int, int]]  # with slot and generation
    deadline: float

    def send(self) -> None:
        """Each is hashed while it is sent, and tagged the first time. PeerFailed if one is corrupt: its tag stays."""
        host, stream, model = self.model.hierarchy.host, self.stream, self.model
        rows = [
            (
                self.session.pack_head(record),
                host.region.slot(slot),
                model.tag_in(slot, time_taken) or bytearray(peers.TAG_BYTES),
            )
            for record, slot, time_taken in self.blocks
        ]
        expected = [record.checksum for record, _, _ in self.blocks]
        run = stream.transfer(rows, [], mac=self.session.mac, expected=expected)
        stream.move(run, _SEND_BYTES, self.deadline)
        for (_, slot, time_taken), (_, _, tag) in zip(self.blocks[: run.num_sent], rows, strict=False):
            if isinstance(tag, bytearray):
                model.keep_tag(slot, time_taken, tag)
        if run.unlike:
            host.pool.evict([self.blocks[run.num_sent][0].chain_hash], Outcome.CHECKSUM)
            raise PeerFailed(Outcome.CHECKSUM, "rotten")
        if run.num_sent < len(rows):
            raise stream.stopped(self.deadline)

    def send_places(self) -> None:
        """Send where blocks lie, and keep them until the borrower is done. If it ends instead, one may be corrupt."""
        host, parts = self.model.hierarchy.host, list[bytes]()
        for record, slot, generation in self.blocks:
            payload, head = host.region.slot(slot), self.session.pack_head(record)
            address = wire.ADDRESS.pack(np.frombuffer(payload, np.uint8).ctypes.data)
            tag = self.model.tag_in(slot, generation)
            if tag is None:
                self.model.keep_tag(slot, generation, tag := self.session.tag(head, payload))
            parts += [head, address, tag]
        self.stream.send(parts, self.deadline)
        if not self.stream.wait(self.deadline - time.monotonic()):
            raise PeerFailed(Outcome.TIMEOUT, "timeout")
        try:
            has_ended = not self.stream.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # reset
            has_ended = True
        if has_ended:
            for record, slot, _ in self.blocks:
                if checksum(host.region.slot(slot)) != record.checksum:
                    host.pool.evict([record.chain_hash], Outcome.CHECKSUM)
            raise PeerFailed(Outcome.IO_ERROR, "hung_up")


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, int(port)), family=family, backlog=MAX_CONNECTIONS)
    except (OSError, ValueError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = os.strerror(number) if number and number > 0 else error  # else the resolver's
        raise ConfigError(
            f'[peers] listen "{address}": {why}; choose an address of this host and a free port'
        ) from None


_KEY_BYTES = 8


class _HostBlocks:
    """One peer's blocks in host memory. Implements `EventSink`."""

    def __init__(self, names: AnnouncedNames) -> None:
        self._names = names
        self._medium = TIERS[L2].medium

    def apply(self, worker: str, event: events.KVEvent) -> None:
        if isinstance(event, events.BlockStored | events.BlockRemoved):
            if event.medium == self._medium:
                keys = [events.as_u64(name).to_bytes(_KEY_BYTES, "big") for name in event.block_hashes]
                (self._names.store if isinstance(event, events.BlockStored) else self._names.remove)(keys)
        else:
            self._names.clear()

    def drop(self, worker: str) -> None:
        self._names.clear()


class PeerFeeds:
    """Opens feeds of other nodes' events, with the CURVE keys of this node's publisher, if it has any."""

    def __init__(self, config: EventsConfig) -> None:
        keys = events.CurveKeys.load("events", config.curve_key_file, "curve_reader_file", config.curve_reader_file)
        # another daemon's publisher has the same pair, and `lets_own_in`
        self._keys = None if keys is None else events.CurveKeys(keys.public, keys.secret, keys.public)

    def open(self, fingerprint: bytes, publish: str, replay: str, names: AnnouncedNames) -> events.EventConsumer:
        """As `tiers.peers.following.OpenFeed`."""
        topic = events.topic_of(fingerprint)
        return events.EventConsumer(publish, _HostBlocks(names), publish, replay, topic=topic, keys=self._keys)
