"""One connection to one peer for one model's blocks: sends requests, and verifies every reply before its use."""

import hmac
import ipaddress
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

from kvtier.tiers import BlockRecord, ChainHash, Outcome, checksum
from kvtier.tiers.peers import wire
from kvtier.tiers.peers.one_sided import METADATA_BYTES, RemoteMemory
from kvtier.tiers.peers.ring import Report
from kvtier.tiers.peers.stream import TAG_BYTES, PeerAddress, PeerFailed, PeerStream
from kvtier.tiers.peers.wire import Greeting, LentBlocks, PeerSession, PeerVerb, ProtocolError

_FORM: Final = Struct("<B128s128s")  # tells_all, publish, replay: padded with zeros
_TCP: Final = "tcp://"
EVENTS_BYTES: Final = _FORM.size


@dataclass(frozen=True, slots=True)
class EventsAt:
    """Where a node publishes its KV events. Empty addresses: no other machine can follow it, or it sends no blocks."""

    publish: str = ""
    replay: str = ""
    tells_all: bool = False  # every block of this model that the node sends is announced there

    @classmethod
    def bound(cls, publish: str | None, replay: str | None) -> "EventsAt":
        """From a publisher's addresses: TCP alone, and only if it repeats missed events."""
        addresses = (publish or "", replay or "")
        is_announced = all(each.startswith(_TCP) and len(each) <= 128 for each in addresses)
        return cls(*addresses) if is_announced else cls()

    def pack(self) -> bytes:
        return _FORM.pack(self.tells_all, self.publish.encode(), self.replay.encode())

    @classmethod
    def unpack(cls, data: bytes) -> "EventsAt":
        """Inverse of `pack`. ProtocolError."""
        tells_all, *addresses = _FORM.unpack(data)
        try:
            publish, replay = (each.rstrip(b"\0").decode("ascii") for each in addresses)
        except UnicodeDecodeError:
            raise ProtocolError("events") from None
        at = cls.bound(publish, replay)
        if tells_all > 1 or (at.publish, at.replay) != (publish, replay):
            raise ProtocolError("events")
        return cls(publish, replay, bool(tells_all))

    def reached_at(self, host: str) -> "EventsAt":
        """The addresses as reached through `host`; none if they cannot be: loopback is each machine's own."""
        publish, replay = (_reached(each, host) for each in (self.publish, self.replay))
        return EventsAt(publish, replay, self.tells_all) if publish and replay else EventsAt()


def _reached(address: str, host: str) -> str:
    """One address; empty if it cannot be reached."""
    bound, _, port = address.removeprefix(_TCP).rpartition(":")
    there = _plain(bound)
    try:
        ip = None if there == "*" else ipaddress.ip_address(there)
    except ValueError:  # a name: the reader resolves it
        return address
    if ip is None or ip.is_unspecified:
        there = _plain(host)
    elif ip.is_loopback != _is_loopback(host):
        return ""
    return f"{_TCP}[{there}]:{port}" if ":" in there else f"{_TCP}{there}:{port}"


def _plain(host: str) -> str:
    return host.strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(_plain(host)).is_loopback
    except ValueError:
        return False


ReportBlock = Callable[[int, "BlockRecord | Outcome"], None]
"""Called once per position of a request with the block's result."""

_POLL_SECONDS: Final = 60.0  # waited at once: poll's milliseconds are an int
_GROUP_BYTES: Final = 4 << 20  # received before their records are looked at, or one block if that is larger


class IsMyself(Exception):
    """The address is this process's own."""


class PeerLink:
    """Requests to one peer, one at a time. Not thread-safe: one thread has it at a time. Every method but `close`
    raises PeerFailed; then the connection is unusable.
    """

    def __init__(self, stream: PeerStream, session: PeerSession) -> None:
        """Use `PeerLink.opened`."""
        self._stream = stream
        self._session = session
        self.compared_probe: bytes | None = None  # the KV probe that the peer found equal to its own
        self._memory: tuple[RemoteMemory, Any] | None = None  # what reads the peer's memory, and its name there

    @classmethod
    def opened(cls, address: tuple[str, int], key: bytes, blocks: LentBlocks, seconds: float) -> "PeerLink":
        """Connect and prove the key to each other, within `seconds`. PeerFailed; IsMyself."""
        deadline = time.monotonic() + seconds
        if seconds <= 0:
            raise PeerFailed(Outcome.TIMEOUT, "no_connection")
        try:
            connection = socket.create_connection(address, timeout=seconds)
        except TimeoutError:
            raise PeerFailed(Outcome.TIMEOUT, "no_connection") from None
        except OSError:
            raise PeerFailed(Outcome.IO_ERROR, "no_connection") from None
        try:
            stream = PeerStream(connection)
            return cls(stream, _shake_hands(stream, key, blocks, deadline))
        except BaseException:
            connection.close()
            raise

    @property
    def is_quiet(self) -> bool:
        """Whether nothing unexpected came: neither bytes nor the end of the connection."""
        return self._stream.is_quiet()

    def close(self) -> None:
        self._stream.connection.close()
        if self._memory is not None:
            memory, name = self._memory
            self._memory = None
            memory.disconnect(name)

    def fileno(self) -> int:
        return self._stream.fileno()

    def ask(self, verb: PeerVerb, names: Sequence[ChainHash], deadline: float) -> None:
        """Send a request; `read_held` or `read_events` reads the reply."""
        self._stream.send([self._session.question(verb, names)], deadline)

    def read_held(self, num_names: int, deadline: float) -> list[bool]:
        """Which of the blocks the peer holds."""
        size = wire.WORDS_BYTES + num_names + wire.PROOF_BYTES
        with_flags = self._stream.take(size, deadline)
        count, flags = self._read(PeerVerb.HELD, with_flags, num_names)
        if count != num_names or not set(flags) <= {0, 1}:
            raise PeerFailed(Outcome.IO_ERROR, "garbage")
        return [flag == 1 for flag in flags]

    def compare(self, packed: bytes, deadline: float) -> None:
        """Send our model's KV probe. PeerFailed, with the reason `other_kv`, if the peer's model computes otherwise."""
        self._stream.send([self._session.probe_question(packed)], deadline)
        answer = self._stream.take(wire.WORDS_BYTES + wire.PROOF_BYTES, deadline)
        if self._read(PeerVerb.KV_PROBE, answer, 1)[0]:
            raise PeerFailed(Outcome.IO_ERROR, "other_kv")

    def read_events(self, deadline: float) -> EventsAt:
        """The address of the peer's KV events."""
        size = wire.WORDS_BYTES + EVENTS_BYTES + wire.PROOF_BYTES
        _, message = self._read(PeerVerb.EVENTS, self._stream.take(size, deadline), 1)
        try:
            return EventsAt.unpack(message)
        except ProtocolError as wrong:
            raise _wrong(wrong) from None

    def ask_holders(self, keys: Sequence[int], deadline: float) -> None:
        """Send the request that `read_holders` reads the reply of."""
        self.ask(PeerVerb.HOLDERS, wire.pack_query(keys), deadline)

    def read_holders(self, num_keys: int, deadline: float) -> list[list[PeerAddress]]:
        """Which nodes hold each block, as the peer knows."""
        size = wire.WORDS_BYTES + num_keys * wire.HOLDERS_BYTES + wire.PROOF_BYTES
        return wire.unpack_holders(self._read(PeerVerb.HOLDERS, self._stream.take(size, deadline), num_keys)[1])

    def report(self, report: Report, deadline: float) -> bool:
        """Report to an owner; whether it took the report. False: start over."""
        self.ask(PeerVerb.REPORT, wire.pack_report(report), deadline)
        answer = self._stream.take(wire.WORDS_BYTES + wire.PROOF_BYTES, deadline)
        return self._read(PeerVerb.REPORT, answer, 1)[0] == 1

    def read_from(self, memory: RemoteMemory, deadline: float) -> bool:
        """Read blocks by `memory` from now on, if the peer offers its own."""
        self.ask(PeerVerb.MEMORY, [self._session.blocks.fingerprint], deadline)
        size = wire.WORDS_BYTES + METADATA_BYTES + wire.PROOF_BYTES
        count, metadata = self._read(PeerVerb.MEMORY, self._stream.take(size, deadline), METADATA_BYTES)
        if count:
            self._memory = memory, memory.connect(metadata[:count])
        return bool(count)

    @property
    def reads_memory(self) -> bool:
        return self._memory is not None

    def ask_blocks(self, names: Sequence[ChainHash], deadline: float) -> None:
        """Send the request that `read_blocks` reads the reply of."""
        self.ask(PeerVerb.LEND if self._memory is None else PeerVerb.PLACES, names, deadline)

    def read_blocks(
        self, names: Sequence[ChainHash], into: Sequence[memoryview], report: ReportBlock, deadline: float
    ) -> None:
        """Read and verify blocks: name, tag, checksum. EVICTED if the peer has one no more; else PeerFailed."""
        verb = PeerVerb.LEND if self._memory is None else PeerVerb.PLACES
        count, _ = self._read(verb, self._stream.take(wire.WORDS_BYTES + wire.PROOF_BYTES, deadline), len(names))
        if self._memory is None:
            self._read_stream(names[:count], into, report, deadline)
        elif count:
            self._read_places(self._memory, names[:count], into[:count], report, deadline)
        for position in range(count, len(names)):
            report(position, Outcome.EVICTED)

    def _read_places(
        self,
        read_by: tuple[RemoteMemory, Any],
        names: Sequence[ChainHash],
        into: Sequence[memoryview],
        report: ReportBlock,
        deadline: float,
    ) -> None:
        memory, peer = read_by
        session, head_bytes = self._session, self._session.head_bytes
        places = memoryview(self._stream.take(len(names) * session.place_bytes, deadline))
        rows = [places[at : at + session.place_bytes] for at in range(0, len(places), session.place_bytes)]
        addresses = [wire.ADDRESS.unpack_from(row, head_bytes)[0] for row in rows]
        memory.read(peer, addresses, into, deadline)
        # Verified before the lender may use the slots again: it checks its blocks if the connection ends first.
        for position, (row, payload) in enumerate(zip(rows, into, strict=True)):
            head, tag = row[:head_bytes], session.tag(row[:head_bytes], payload)
            report(position, self._verified(names[position], head, row[-TAG_BYTES:], tag, checksum(payload)))
        self.ask(PeerVerb.DONE, [session.blocks.fingerprint], deadline)

    def _read_stream(
        self, names: Sequence[ChainHash], into: Sequence[memoryview], report: ReportBlock, deadline: float
    ) -> None:
        """The next blocks arrive while records are looked at, and each is hashed while it arrives."""
        stream, head_bytes = self._stream, self._session.head_bytes
        step = head_bytes + TAG_BYTES
        around = memoryview(bytearray(len(names) * step))
        rows = [
            (around[at : at + head_bytes], payload, around[at + head_bytes : at + step])
            for at, payload in zip(range(0, len(around), step), into, strict=False)
        ]
        run = stream.transfer([], rows, mac=self._session.mac)
        group, end = max(1, _GROUP_BYTES // self._session.blocks.slot_bytes), 0
        while end < len(rows):
            first, end = end, min(end + group, len(rows))
            stream.move(run, 0, deadline, end)
            for i in range(first, run.whole):
                head, _, tag = rows[i]
                report(i, self._verified(names[i], head, tag, run.tag_at(i), run.hash_at(i)))
            if run.whole < end:
                raise stream.stopped(deadline)

    def _verified(
        self, name: ChainHash, head: memoryview, tag: memoryview, right_tag: bytes, payload_hash: int
    ) -> BlockRecord:
        if not hmac.compare_digest(tag, right_tag):
            raise PeerFailed(Outcome.CHECKSUM, "mac")
        try:
            record = self._session.read_head(head)
        except ProtocolError:
            raise PeerFailed(Outcome.CHECKSUM, "garbage") from None
        if record.chain_hash != name:
            raise PeerFailed(Outcome.KEY_MISMATCH, "other_block")
        if payload_hash != record.checksum:
            raise PeerFailed(Outcome.CHECKSUM, "checksum")
        return record

    def _read(self, verb: PeerVerb, data: bytes, most: int) -> tuple[int, bytes]:
        try:
            return self._session.read_answer(verb, data, most)
        except ProtocolError as wrong:
            raise _wrong(wrong) from None


def as_they_answer(links: Iterable[PeerLink], deadline: float) -> Iterator[PeerLink]:
    """Each once, when its reply begins; at the deadline the others. So none waits behind a slower one."""
    waiting = {link.fileno(): link for link in links}
    if len(waiting) > 1:
        poll = select.poll()
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(math.ceil(1000 * min(left, _POLL_SECONDS))):
                poll.unregister(number)
                yield waiting.pop(number)
    yield from waiting.values()


def _shake_hands(stream: PeerStream, key: bytes, blocks: LentBlocks, deadline: float) -> PeerSession:
    try:
        challenge = wire.unpack_challenge(stream.take(wire.CHALLENGE_BYTES, deadline))
        session = PeerSession(key, challenge, os.urandom(wire.NONCE_BYTES), blocks)
        stream.send([session.hello(wire.own_node())], deadline)
        try:
            answer = stream.take(wire.WELCOME_BYTES, deadline)
        except PeerFailed as failed:  # the peer hangs up if its key is another
            raise PeerFailed(failed.outcome, "key" if failed.reason == "hung_up" else failed.reason) from None
        reply, node = session.read_welcome(answer)
    except ProtocolError as wrong:
        raise PeerFailed(Outcome.IO_ERROR, "key" if str(wrong) == "proof" else "garbage") from None
    if node == wire.own_node():
        raise IsMyself
    if reply is not Greeting.WELCOME:
        raise PeerFailed(Outcome.IO_ERROR, reply.name.lower())
    return session


def _wrong(wrong: ProtocolError) -> PeerFailed:
    is_proof = str(wrong) == "proof"
    return PeerFailed(Outcome.CHECKSUM if is_proof else Outcome.IO_ERROR, "mac" if is_proof else "garbage")
