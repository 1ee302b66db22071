"""A batch over all servers, each one's share in one pipeline: EXISTS, GET, SET, UNLINK, every reply checked."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.redis.names import Keyspace
from kvtier.tiers.redis.nodes import MAX_CONNECTIONS, Endpoint, Nodes
from kvtier.tiers.redis.wire import Head, RedisReply, Refusal, TooLongError, Wire, WireError
from kvtier.tiers.shared import SendBuffer, Transfer

Report = Callable[[int, "BlockRecord | Outcome | bool"], None]
"""Called once per position of the batch with the block's result."""

_AT_ONCE: Final = 1024  # blocks whose expiry is renewed at once
_GETS: Final = 512 << 10  # bytes of values under way: with more replies ready a server is slower
_SETS: Final = 256 << 10  # bytes of commands under way: a server reads a large value fastest if little comes behind it
_OK: Final = b"+OK\r\n"
_ELSEWHERE: Final = frozenset({"MOVED", "ASK", "TRYAGAIN"})  # another server has the key, or will
DOUBTFUL: Final = _ELSEWHERE | {"READONLY", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "NOREPLICAS", "NOAUTH"}
NOT_READ: Final = Refusal("not read")


class _Wanted(NamedTuple):
    """The reads of a batch, by position: names, buffers of a slot each; and the callback for results."""

    hashes: Sequence[ChainHash]
    into: Sequence[memoryview]
    report: Report


def command(*parts: bytes) -> bytes:
    """A command whose arguments are all short."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def commands(verb: bytes, keys: Sequence[bytes], *more: bytes) -> bytes:
    """The same command for every key, all keys of one length."""
    before = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n" % (2 + len(more), len(verb), verb, len(keys[0]))
    after = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in more)
    return before + (after + before).join(keys) + after


def epoch_command(space: Keyspace) -> bytes:
    """The namespace's epoch; "" for none. Reads one byte more than an epoch has, which shows that it is none."""
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
    """One server's share of one batch, over a connection that it has for itself.

    `asks_epoch`: this server has the epoch, seen as `epoch_seen`. `doubtful`: a reply shows that the topology changed.
    """

    wire: Wire
    space: Keyspace
    keys: Sequence[bytes]  # of the whole batch, by position
    epoch: int  # of the batch's keys
    window: int  # blocks under way at once
    ttl_ms: int
    asks_epoch: bool
    epoch_seen: RedisReply = NOT_READ
    doubtful: bool = False
    epoch_due: bool = False  # requested, and to be read before any other reply

    def exists(self, positions: Sequence[int], report: Report) -> None:
        """Which blocks are there: True, False, or why it is not known."""
        for position, reply in self._each(b"EXISTS", positions):
            report(position, refused(reply, writing=False) if isinstance(reply, Refusal) else reply == 1)

    def get(
        self, hashes: Sequence[ChainHash], into: Sequence[memoryview], positions: Sequence[int], report: Report
    ) -> None:
        """Read blocks into their buffers and verify them. Their expiry is renewed: its replies show which are there."""
        wanted = _Wanted(hashes, into, report)
        read = self._get_in_turn if self.space.form.stored_bytes is None else self._get
        for first in range(0, len(positions), _AT_ONCE):
            some = positions[first : first + _AT_ONCE]
            while some:
                some = read(wanted, some)

    def set(
        self,
        records: Sequence[BlockRecord],
        payloads: Sequence[memoryview],
        positions: Sequence[int],
        report: Report,
    ) -> None:
        """Store blocks, in order, until one is refused."""
        if not self.space.form.reads_payload:
            self._set_in_turn([self._set(p, records[p], payloads[p]) for p in positions], positions, report)
            return
        groups = self._groups(positions)

        def store(group: list[int]) -> None:
            parts = [part for p in group for part in self._set(p, records[p], payloads[p])]
            self._send(parts, len(group))

        for group in self._turns(groups, store):
            if not self._all_stored(group, report):
                groups.clear()

    def _set_in_turn(self, sets: list[Sequence[SendBuffer]], positions: Sequence[int], report: Report) -> None:
        """Each when the server is done with those before it, but for a few over a long way."""
        self.wire.keep_under_way(_SETS, self._most)
        while sets:
            self._send(sets[0], 1)
            self._read_epoch()
            places = [(memoryview(bytearray(len(_OK))),) for _ in sets]

            def stored(run: Transfer, replies: range, positions: Sequence[int] = positions) -> None:
                for i in replies:
                    report(positions[i], Outcome.OK)

            num_whole, num_sent = self.wire.in_turn(sets, places, _OK, 1, stored)
            if not self._all_stored(positions[num_whole:num_sent], report):
                return
            sets, positions = sets[num_sent:], positions[num_sent:]

    def _all_stored(self, positions: Sequence[int], report: Report) -> bool:
        """Read replies to SETs."""
        if self.wire.all_are(_OK, len(positions)):
            outcomes = [Outcome.OK] * len(positions)
        else:
            outcomes = [self._stored(self._reply()) for _ in positions]
        for position, outcome in zip(positions, outcomes, strict=True):
            report(position, outcome)
        return set(outcomes) <= {Outcome.OK}

    @property
    def _most(self) -> int:
        """Bytes under way below which the window has room for one more."""
        return (self.window - 1) * self.space.slot_bytes + 1

    def expire(self, milliseconds: Sequence[int], positions: Sequence[int], report: Report) -> None:
        """Each block that is there expires so long from now; `milliseconds` by position."""
        expiries = [command(b"PEXPIRE", self.keys[position], b"%d" % milliseconds[position]) for position in positions]
        self._send([b"".join(expiries)], len(positions))
        self._read_epoch()
        for position in positions:
            reply = self._reply()
            found = Outcome.OK if reply == 1 else Outcome.ABSENT
            report(position, refused(reply, writing=True) if isinstance(reply, Refusal) else found)

    def unlink(self, positions: Sequence[int], report: Report) -> None:
        for position, reply in self._each(b"UNLINK", positions):
            report(position, refused(reply, writing=True) if isinstance(reply, Refusal) else Outcome.OK)

    def _get(self, wanted: _Wanted, positions: Sequence[int]) -> Sequence[int]:
        """Values that have a length each."""
        unexpected: dict[int, RedisReply] | None = None  # replies to PEXPIRE of missing blocks; None: not read yet
        groups = self._groups(positions)
        expiry = [commands(b"PEXPIRE", [self.keys[p] for p in positions], b"%d" % self.ttl_ms)]

        def send(group: list[int]) -> None:
            keys = [self.keys[position] for position in group]
            self._send([*expiry, commands(b"GET", keys)], len(keys) + len(expiry) * len(positions))
            expiry.clear()

        for group in self._turns(groups, send):
            if unexpected is None:
                unexpected = self._unlike(b":1\r\n", positions)
                self._skip(groups, unexpected, wanted.report)
            self._get_sent(wanted, group)
        return []

    def _get_in_turn(self, wanted: _Wanted, positions: Sequence[int]) -> Sequence[int]:
        """Values of one length, while replies are as expected. Returns the positions left to read."""
        wire, decode, head_bytes = self.wire, self.space.form.decode, self.space.head_bytes
        hashes, into, report = wanted
        under_way = wire.keep_under_way(_GETS, self._most)
        get = b"*2\r\n$3\r\nGET\r\n$%d\r\n" % len(self.keys[positions[0]])
        gets = [get + self.keys[position] + b"\r\n" for position in positions]
        expiry = commands(b"PEXPIRE", [self.keys[position] for position in positions], b"%d" % self.ttl_ms)
        num_sent = min(len(positions), max(1, under_way // self.space.slot_bytes))
        self._send([expiry, *gets[:num_sent]], len(positions) + num_sent)
        self._read_epoch()
        if unexpected := self._unlike(b":1\r\n", positions):
            self._get_sent(wanted, positions[:num_sent])
            for position in positions[num_sent:]:
                if unexpected.get(position) == 0:
                    report(position, Outcome.ABSENT)
            gets = [get for get, p in zip(gets[num_sent:], positions[num_sent:], strict=True) if unexpected.get(p) != 0]
            positions = [position for position in positions[num_sent:] if unexpected.get(position) != 0]
            num_sent = 0
        if not positions:
            return []
        line, places = wire.value_places(head_bytes, [into[position] for position in positions])

        def came(run: Transfer, replies: range) -> None:
            for i in replies:
                position, head = positions[i], bytes(places[i][0][len(line) :])
                report(position, decode(head, into[position], hashes[position], self.epoch, run.hash_at(i)))

        num_whole, num_sent = wire.in_turn([(get,) for get in gets], places, line, num_sent, came)
        self._get_sent(wanted, positions[num_whole:num_sent])
        return positions[num_sent:]

    def _get_sent(self, wanted: _Wanted, positions: Sequence[int]) -> None:
        """Read values one by one whose GET was sent."""
        buffers, form = [wanted.into[position] for position in positions], self.space.form
        self._judge(wanted, positions, self.wire.one_by_one(self.space.head_bytes, buffers, form.stored_bytes))

    def _judge(self, wanted: _Wanted, positions: Sequence[int], heads: Iterable[Head]) -> None:
        """Verify each GET's reply and report the result."""
        decode, epoch, (hashes, into, report) = self.space.form.decode, self.epoch, wanted
        for position, head in zip(positions, heads, strict=True):
            if isinstance(head, bytes):
                report(position, decode(head, into[position], hashes[position], epoch))
            elif head is None:
                report(position, Outcome.ABSENT)
            elif isinstance(head, Outcome):  # a StrEnum, as a Refusal is a str
                report(position, head)
            else:
                self.doubtful |= head.code in DOUBTFUL
                report(position, refused(head, writing=False))

    def _unlike(self, usual: bytes, positions: Sequence[int]) -> dict[int, RedisReply]:
        """Which positions got another reply than `usual`; none, in one comparison, if all are equal."""
        if self.wire.all_are(usual, len(positions)):
            return {}
        return {position: reply for position in positions if (reply := self._reply()) != 1}

    def _skip(self, groups: deque[list[int]], unexpected: Mapping[int, RedisReply], report: Report) -> None:
        """Send no GET for blocks that are not there."""
        if not unexpected:
            return
        rest = [position for group in groups for position in group]
        groups.clear()
        groups.extend(self._groups([position for position in rest if unexpected.get(position) != 0]))
        for position in rest:
            if unexpected.get(position) == 0:
                report(position, Outcome.ABSENT)

    def _each(self, verb: bytes, positions: Sequence[int]) -> Iterator[tuple[int, RedisReply]]:
        """Positions, each with the reply to a command for its block alone."""
        self._send([commands(verb, [self.keys[position] for position in positions])], len(positions))
        self._read_epoch()
        for position in positions:
            yield position, self._reply()

    def _groups(self, positions: Sequence[int]) -> deque[list[int]]:
        """Cut so that two are under way at once, or, of the largest blocks, one."""
        size = max(1, self.window // 2)
        return deque(list(positions[first : first + size]) for first in range(0, len(positions), size))

    def _turns(self, groups: deque[list[int]], send: Callable[[list[int]], None]) -> Iterator[list[int]]:
        """Each group when its replies are to be read. Groups removed from `groups` are not sent."""
        sent: deque[list[int]] = deque()
        while groups or sent:
            while groups and len(sent) < min(2, self.window):
                sent.append(groups.popleft())
                send(sent[-1])
            self._read_epoch()
            yield sent.popleft()

    def _send(self, parts: Sequence[SendBuffer], num_replies: int) -> None:
        """Send, behind a read of the epoch if that is still due."""
        if not self.asks_epoch:
            self.wire.send(parts, num_replies)
            return
        self.asks_epoch, self.epoch_due = False, True
        self.wire.send([epoch_command(self.space), *parts], num_replies + 1)

    def _read_epoch(self) -> None:
        if self.epoch_due:
            self.epoch_due = False
            self.epoch_seen = self._reply()

    def _reply(self) -> RedisReply:
        reply = self.wire.reply()
        if isinstance(reply, Refusal) and reply.code in DOUBTFUL:
            self.doubtful = True
        return reply

    def _set(self, position: int, record: BlockRecord, payload: memoryview) -> Sequence[SendBuffer]:
        """The value comes last: a server takes it from the socket without a copy."""
        head, body = self.space.form.encode(record, payload, self.epoch)
        key, ttl = self.keys[position], b"%d" % self.ttl_ms
        words = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b"
        return words % (len(key), key, len(ttl), ttl, len(head) + body.nbytes, head), body, b"\r\n"

    def _stored(self, reply: RedisReply) -> Outcome:
        if reply == b"OK":
            return Outcome.OK
        if isinstance(reply, Refusal):
            return refused(reply, writing=True)
        raise WireError(Outcome.CHECKSUM, f"no answer to SET: {reply!r}")


_WINDOW_BYTES: Final = 8 << 20  # of blocks under way on one connection, half of them in one call
_MAX_WINDOW: Final = 512  # blocks; the kernel takes 1,024 pieces at once
_MAX_LANES: Final = 16  # servers of a cluster talked to at once

BlockResult = BlockRecord | Outcome | bool
LaneWork = Callable[[Lane, list[int], Report], None]
"""Work on a lane and the positions of the batch that are its share."""


class Batches:
    """Runs batches over the servers of a namespace. Thread-safe. After it returns, no thread uses the buffers."""

    def __init__(self, space: Keyspace, nodes: Nodes, ttl_ms: int, in_flight: int) -> None:
        self.space = space
        self.nodes = nodes
        self._ttl_ms = ttl_ms
        self._in_flight = in_flight  # bytes, over all connections
        self._threads = ThreadPoolExecutor(_MAX_LANES, "kvtier-redis")

    def run(
        self, hashes: Sequence[ChainHash], epoch: int, deadline: float, work: LaneWork
    ) -> tuple[list[BlockResult | None], RedisReply]:
        """The result of each block (None: stopped before), and the epoch that was read (NOT_READ: not known)."""
        answers: list[BlockResult | None] = [None] * len(hashes)
        shares: dict[Endpoint, list[int]] = {}
        keys = self.space.keys(hashes, epoch)
        for position, key in enumerate(keys):
            endpoint = self.nodes.endpoint(key)
            if endpoint is None:
                answers[position] = Outcome.IO_ERROR
                self.nodes.refresh()
            else:
                shares.setdefault(endpoint, []).append(position)
        home = self.nodes.endpoint(self.space.epoch_key)
        num_endpoints = max(1, len(self.nodes.endpoints()))
        allowed = self._in_flight // (MAX_CONNECTIONS * num_endpoints * self.space.value_bytes)
        window = max(1, min(allowed, _MAX_WINDOW, max(2, _WINDOW_BYTES // self.space.slot_bytes)))
        seen: list[RedisReply] = []

        def attempt(endpoint: Endpoint, positions: list[int]) -> None:
            with endpoint.connection(deadline) as wire:
                lane = Lane(wire, self.space, keys, epoch, window, self._ttl_ms, endpoint is home)
                try:
                    work(lane, positions, answers.__setitem__)
                finally:
                    seen.append(lane.epoch_seen)
                    if lane.doubtful:
                        self.nodes.refresh()

        def share(endpoint: Endpoint, positions: list[int]) -> None:
            while positions:
                try:
                    attempt(endpoint, positions)
                    return
                except TooLongError as error:  # GETs sent behind it are sent again
                    bad, *positions = [position for position in positions if answers[position] is None]
                    answers[bad] = error.outcome
                except WireError as error:
                    self._failed(error, answers, positions)
                    return

        self._side_by_side(share, shares, answers)
        return answers, next((epoch for epoch in reversed(seen) if epoch is not NOT_READ), NOT_READ)

    def ask(self, key: bytes, commands: Sequence[bytes], deadline: float) -> list[RedisReply]:
        """The replies of `key`'s server to short commands. WireError if it gives none."""
        endpoint = self.nodes.endpoint(key)
        if endpoint is None:
            self.nodes.refresh()
            raise WireError(Outcome.IO_ERROR, "no server has its slot")
        try:
            with endpoint.connection(deadline) as wire:
                wire.send(commands, len(commands))
                replies = [wire.reply() for _ in commands]
        except WireError:
            self.nodes.refresh()
            raise
        if any(isinstance(reply, Refusal) and reply.code in DOUBTFUL for reply in replies):
            self.nodes.refresh()
        return replies

    def close(self) -> None:
        """Close every connection; batches under way end as failures. Idempotent."""
        self.nodes.close()
        self._threads.shutdown(wait=False)

    def _side_by_side(
        self,
        share: Callable[[Endpoint, list[int]], None],
        shares: dict[Endpoint, list[int]],
        answers: list[BlockResult | None],
    ) -> None:
        """One share on this thread, the others on the pool's. All end by the deadline, before this returns."""
        futures: list[Future[None]] = []
        rest = list(shares.items())
        for endpoint, positions in rest[1:]:
            try:
                futures.append(self._threads.submit(share, endpoint, positions))
            except RuntimeError:  # closed meanwhile, or the interpreter is shutting down
                for position in positions:
                    answers[position] = Outcome.CLOSED
        for endpoint, positions in rest[:1]:
            share(endpoint, positions)
        wait(futures)
        for future in futures:
            future.result()

    def _failed(self, error: WireError, answers: list[BlockResult | None], positions: list[int]) -> None:
        """The rest of a share whose connection failed."""
        outcome = error.outcome
        if outcome is not Outcome.CLOSED:
            self.nodes.refresh()  # even if the breaker is open: its replica may have replaced it
        if outcome is Outcome.BREAKER_OPEN and not any(endpoint.usable for endpoint in self.nodes.endpoints()):
            outcome = Outcome.IO_ERROR  # no server is left: the tier's breaker should count it
        for position in positions:
            if answers[position] is None:
                answers[position] = outcome
                if outcome is Outcome.CHECKSUM:  # the value being read is not ours; those behind it are lost
                    outcome = Outcome.IO_ERROR
