"""What is said to one server about its share of a batch: EXISTS, GET, SET, UNLINK, pipelined, every answer judged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers.checksum import checksum
from kvtier.tiers.redis_records import Namespace
from kvtier.tiers.redis_wire import Part, Refusal, Reply, Wire, WireError
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

Settle = Callable[[int, "BlockRecord | Outcome | bool"], None]
"""Told once per position of the batch what became of it."""

_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "TRYAGAIN"})  # another server has the key, or will
DOUBTFUL: Final = _ELSEWHERE | {"READONLY", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "NOREPLICAS", "NOAUTH"}


UNASKED: Final = Refusal("not asked")


def command(*parts: bytes) -> bytes:
    """A command whose arguments are all short."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def refused(refusal: Refusal, *, writing: bool) -> Outcome:
    """What an error reply means for its block."""
    if refusal.code == "OOM":
        return Outcome.FULL
    if refusal.code == "WRONGTYPE":
        return Outcome.KEY_MISMATCH
    if refusal.code in _ELSEWHERE and not writing:
        return Outcome.ABSENT
    return Outcome.IO_ERROR


@dataclass(eq=False, slots=True)
class Lane:
    """One server's share of one batch, over a borrowed connection.

    `asks_epoch` where the namespace's epoch is on this server: `epoch_seen` then is what stands there. `doubtful` says
    that an answer put the topology in doubt.
    """

    wire: Wire
    space: Namespace
    epoch: int  # that the batch goes by
    deadline: float  # time.monotonic
    window: int  # blocks under way at once
    ttl_ms: int
    asks_epoch: bool
    epoch_seen: Reply = UNASKED
    doubtful: bool = False

    def exists(self, hashes: Sequence[ChainHash], positions: Iterable[int], settle: Settle) -> None:
        """Which blocks are there: True or False, or why there is no answer."""
        positions = list(positions)
        keys = [self.space.key(hashes[position], self.epoch) for position in positions]
        self._send([command(b"EXISTS", key) for key in keys], len(keys))
        for position in positions:
            reply = self._reply()
            if isinstance(reply, Refusal):
                settle(position, refused(reply, writing=False))
            else:
                settle(position, reply == 1)

    def get(
        self, hashes: Sequence[ChainHash], into: Sequence[memoryview], positions: Iterable[int], settle: Settle
    ) -> None:
        """Read blocks into their buffers, verify them, and put off their expiry."""
        positions = list(positions)
        line_bytes = len(b"$%d\r\n" % self.space.value_bytes)
        self.wire.begin(self.deadline, ahead=line_bytes + self.space.head_bytes)
        sent = 0
        for done, position in enumerate(positions):
            if sent < len(positions) and sent - done <= self.window // 2:
                more = positions[sent : done + self.window]
                self._send([self._get(self.space.key(hashes[p], self.epoch)) for p in more], 2 * len(more))
                sent += len(more)
            head = self.wire.value(self.space.head_bytes, into[position])
            self._reply()  # PEXPIRE's: a server that refuses writes still answers reads
            settle(position, self._verified(head, hashes[position], into[position]))

    def set(
        self,
        records: Sequence[BlockRecord],
        payloads: Sequence[memoryview],
        positions: Iterable[int],
        settle: Settle,
    ) -> None:
        """Store blocks, in order, until one is refused."""
        positions = list(positions)
        half = max(1, self.window // 2)
        groups = [positions[first : first + half] for first in range(0, len(positions), half)]
        pending: list[int] = []
        for group in [*groups, []]:
            if group:
                parts = [part for p in group for part in self._set(records[p], payloads[p])]
                self._send(parts, len(group))
            outcomes = [self._stored(self._reply()) for _ in pending]
            for position, outcome in zip(pending, outcomes, strict=True):
                settle(position, outcome)
            pending = group
            if any(outcome is not Outcome.OK for outcome in outcomes):
                for position in pending:
                    settle(position, self._stored(self._reply()))
                return

    def unlink(self, hashes: Sequence[ChainHash], positions: Iterable[int], settle: Settle) -> None:
        """Delete blocks."""
        positions = list(positions)
        commands = [command(b"UNLINK", self.space.key(hashes[position], self.epoch)) for position in positions]
        self._send(commands, len(commands))
        for position in positions:
            reply = self._reply()
            settle(position, refused(reply, writing=True) if isinstance(reply, Refusal) else Outcome.OK)

    # inside

    def _send(self, parts: Sequence[Part], num_replies: int) -> None:
        """Send, behind the question for the epoch if that is still to be asked."""
        if not self.asks_epoch:
            self.wire.send(parts, num_replies)
            return
        self.asks_epoch = False
        self.wire.send([command(b"GET", self.space.epoch_key), *parts], num_replies + 1)
        self.epoch_seen = self._reply()

    def _reply(self) -> Reply:
        reply = self.wire.reply()
        if isinstance(reply, Refusal) and reply.code in DOUBTFUL:
            self.doubtful = True
        return reply

    def _get(self, key: bytes) -> bytes:
        return command(b"GET", key) + command(b"PEXPIRE", key, b"%d" % self.ttl_ms)

    def _verified(
        self, head: bytes | Outcome | Refusal | None, chain_hash: ChainHash, payload: memoryview
    ) -> BlockRecord | Outcome:
        if head is None:
            return Outcome.ABSENT
        if isinstance(head, Outcome):  # a StrEnum, as a Refusal is a str: neither is bytes
            return head
        if isinstance(head, Refusal):
            self.doubtful |= head.code in DOUBTFUL
            return refused(head, writing=False)
        record = self.space.decode(head, chain_hash, self.epoch)
        if isinstance(record, BlockRecord) and checksum(payload) != record.checksum:
            return Outcome.CHECKSUM
        return record

    def _set(self, record: BlockRecord, payload: memoryview) -> tuple[Part, Part, Part]:
        key, ttl = self.space.key(record.chain_hash, self.epoch), b"%d" % self.ttl_ms
        before = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, self.space.value_bytes)
        after = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        return before + self.space.encode(record, self.epoch), payload, after

    def _stored(self, reply: Reply) -> Outcome:
        if reply == b"OK":
            return Outcome.OK
        if isinstance(reply, Refusal):
            return refused(reply, writing=True)
        raise WireError(Outcome.CHECKSUM, f"no answer to SET: {reply!r}")
