"""What is said to one server about its share of a batch: EXISTS, GET, SET, UNLINK, pipelined, every answer judged."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.redis.forms import Keyspace
from kvtier.tiers.redis.stream import SendBuffer, WireError
from kvtier.tiers.redis.wire import Head, RedisReply, Refusal, Wire

Settle = Callable[[int, "BlockRecord | Outcome | bool"], None]
"""Told once per position of the batch what became of it."""

_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "TRYAGAIN"})  # another server has the key, or will
DOUBTFUL: Final = _ELSEWHERE | {"READONLY", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "NOREPLICAS", "NOAUTH"}


UNASKED: Final = Refusal("not asked")


def command(*parts: bytes) -> bytes:
    """A command whose arguments are all short."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def commands(verb: bytes, keys: Sequence[bytes], *more: bytes) -> bytes:
    """The same command for every key, all keys of one length."""
    before = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n" % (2 + len(more), len(verb), verb, len(keys[0]))
    after = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in more)
    return before + (after + before).join(keys) + after


def ask_epoch(space: Keyspace) -> bytes:
    """What stands as the namespace's epoch; "" for nothing. No more of it than shows that it is none."""
    return command(b"GETRANGE", space.epoch_key, b"0", b"16")


def refused(refusal: Refusal, *, writing: bool) -> Outcome:
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

    `asks_epoch` says that the namespace's epoch is on this server, and `epoch_seen` then what it is there. `doubtful`
    says that an answer put the topology in doubt.
    """

    wire: Wire
    space: Keyspace
    epoch: int  # that the batch goes by
    deadline: float  # time.monotonic
    window: int  # blocks under way at once
    ttl_ms: int
    asks_epoch: bool
    epoch_seen: RedisReply = UNASKED
    doubtful: bool = False

    def exists(self, hashes: Sequence[ChainHash], positions: Iterable[int], settle: Settle) -> None:
        """Which blocks are there: True or False, or why there is no answer."""
        for position, reply in self._each(b"EXISTS", hashes, positions):
            settle(position, refused(reply, writing=False) if isinstance(reply, Refusal) else reply == 1)

    def get(
        self, hashes: Sequence[ChainHash], into: Sequence[memoryview], positions: Iterable[int], settle: Settle
    ) -> None:
        """Read blocks into their buffers, verify them, and put off their expiry."""
        space, wire = self.space, self.wire  # lengths and expiry first: what is known to be there comes in one go
        length = b":%d\r\n" % space.value_bytes

        def ask(group: list[int]) -> None:
            keys = space.keys((hashes[position] for position in group), self.epoch)
            expiry = commands(b"PEXPIRE", keys, b"%d" % self.ttl_ms)
            self._send([commands(b"STRLEN", keys), expiry, commands(b"GET", keys)], 3 * len(keys))

        for group in self._turns(self._groups(positions), ask):
            whole = self._all_are(length, len(group))
            self._all_are(b":1\r\n", len(group))  # or not: a server that refuses writes still answers reads
            buffers = [into[position] for position in group]
            heads = (
                wire.values(space.head_bytes, buffers) if whole else (wire.value(space.head_bytes, b) for b in buffers)
            )
            for position, head in zip(group, heads, strict=True):
                settle(position, self._verified(head, hashes[position], into[position]))

    def set(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], positions: Iterable[int], settle: Settle
    ) -> None:
        """Store blocks, in order, until one is refused."""
        groups = self._groups(positions)

        def store(group: list[int]) -> None:
            self._send(self._sets([records[p] for p in group], [payloads[p] for p in group]), len(group))

        for group in self._turns(groups, store):
            if self.wire.all_are(b"+OK\r\n", len(group)):
                outcomes = [Outcome.OK] * len(group)
            else:
                outcomes = [self._stored(self._reply()) for _ in group]
                groups.clear()
            for position, outcome in zip(group, outcomes, strict=True):
                settle(position, outcome)

    def unlink(self, hashes: Sequence[ChainHash], positions: Iterable[int], settle: Settle) -> None:
        for position, reply in self._each(b"UNLINK", hashes, positions):
            settle(position, refused(reply, writing=True) if isinstance(reply, Refusal) else Outcome.OK)

    # inside

    def _each(
        self, verb: bytes, hashes: Sequence[ChainHash], positions: Iterable[int]
    ) -> Iterator[tuple[int, RedisReply]]:
        """Positions, each with the reply to a command for its block alone."""
        positions = list(positions)
        keys = self.space.keys((hashes[position] for position in positions), self.epoch)
        self._send([command(verb, key) for key in keys], len(keys))
        for position in positions:
            yield position, self._reply()

    def _groups(self, positions: Iterable[int]) -> deque[list[int]]:
        """Cut so that two are under way at once, or, of the largest blocks, one."""
        rest, size = list(positions), max(1, self.window // 2)
        return deque(rest[first : first + size] for first in range(0, len(rest), size))

    def _turns(self, groups: deque[list[int]], send: Callable[[list[int]], None]) -> Iterator[list[int]]:
        """Each group when its replies are to be read. Of those cleared from `groups` none is sent."""
        sent: deque[list[int]] = deque()
        while groups or sent:
            while groups and len(sent) < min(2, self.window):
                sent.append(groups.popleft())
                send(sent[-1])
            yield sent.popleft()

    def _send(self, parts: Sequence[SendBuffer], num_replies: int) -> None:
        """Send, behind the question for the epoch if that is still to be asked."""
        if not self.asks_epoch:
            self.wire.send(parts, num_replies)
            return
        self.asks_epoch = False
        self.wire.send([ask_epoch(self.space), *parts], num_replies + 1)
        self.epoch_seen = self._reply()

    def _all_are(self, usual: bytes, count: int) -> bool:
        """Whether the next `count` replies, all read, are `usual`."""
        return self.wire.all_are(usual, count) or not [self._reply() for _ in range(count)]

    def _reply(self) -> RedisReply:
        reply = self.wire.reply()
        if isinstance(reply, Refusal) and reply.code in DOUBTFUL:
            self.doubtful = True
        return reply

    def _verified(self, head: Head, chain_hash: ChainHash, payload: memoryview) -> BlockRecord | Outcome:
        if head is None:
            return Outcome.ABSENT
        if isinstance(head, Outcome):  # a StrEnum, as a Refusal is a str: neither is bytes
            return head
        if isinstance(head, Refusal):
            self.doubtful |= head.code in DOUBTFUL
            return refused(head, writing=False)
        return self.space.form.decode(head, payload, chain_hash, self.epoch)

    def _sets(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[SendBuffer]:
        keys = self.space.keys((record.chain_hash for record in records), self.epoch)
        before = b"*5\r\n$3\r\nSET\r\n$%d\r\n" % len(keys[0])
        between = b"\r\n$%d\r\n" % self.space.value_bytes
        after = b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(b"%d" % self.ttl_ms), self.ttl_ms)
        parts: list[SendBuffer] = []
        start = before
        for key, record, payload in zip(keys, records, payloads, strict=True):
            head, body = self.space.form.encode(record, payload, self.epoch)
            parts += (start + key + between + head, body)
            start = after + before
        return [*parts, after]

    def _stored(self, reply: RedisReply) -> Outcome:
        if reply == b"OK":
            return Outcome.OK
        if isinstance(reply, Refusal):
            return refused(reply, writing=True)
        raise WireError(Outcome.CHECKSUM, f"no answer to SET: {reply!r}")
