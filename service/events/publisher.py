"""Publisher: sends KV events over ZMQ in vLLM's frames, and sends again what a subscriber missed (docs/routing.md)."""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import zmq

from kvtier.service.events import wire
from kvtier.service.events.consumer import END, ZAP, CurveKeys, NumberedBatch, require_private, require_unused
from kvtier.service.events.wire import AllBlocksCleared, BlockStored, KVEvent, external_hash
from kvtier.tiers import L2, TIERS, BlockRecord, ChainHash, ConfigError, TierKind
from kvtier.tiers.config import EventsConfig
from kvtier.tiers.hierarchy import Event, EventSource, Removed, TierEvents
from kvtier.tiers.naming import is_named_by, root_hash

MAX_RUN: Final = 512  # blocks in one event


@dataclass(slots=True)
class _Block:
    parent: ChainHash
    tokens: bytes
    tiers: int = 0  # a bit for each that holds it
    is_announced: bool = False


class AnnouncedBlocks:
    """What the tiers hold, and which of it is announced. For one thread; publish what the calls return, in order.

    A block is announced while its whole chain is held, each block in some tier: that is what a prefix lookup finds. If
    its parent is missing, the block waits for it. If a chain breaks, the blocks behind the break are announced as
    removed. So a reader never sees an unknown parent, in whichever order the tiers' changes come in.

    A block is withheld if its parent and tokens alone do not make its name: another engine named it, or an image is in
    it. A reader knows blocks by their tokens, and would take it for another. Law: `check`.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._tiers = tuple(TIERS.values())
        self._places = {kind.name: place for place, kind in enumerate(self._tiers)}  # a tier → its bit
        self._roots: dict[ChainHash, str | None] = {root_hash(fingerprint): None}  # a root → its namespace
        self._blocks: dict[ChainHash, _Block] = {}
        self._children: dict[ChainHash, dict[ChainHash, None]] = {}  # a parent, held or not → blocks held
        self.num_announced = 0
        self.num_withheld = 0  # blocks that came and are never announced
        self.num_hidden = 0  # blocks in host memory whose chain is not whole, or not known to begin anywhere
        self._in_host = 1 << self._places[L2]

    def begin_at(self, root: ChainHash) -> list[KVEvent]:
        """Chains begin at `root`, a tenant's or an adapter's: announce what is held behind it, now and later."""
        if root in self._roots:
            return []
        self._roots[root] = wire.namespace_of(root)
        lines = self._lines()
        for child in self._children.get(root, ()):
            self._spread(child, lines, is_whole=True)
        return lines.events

    def apply(self, event: Event) -> list[KVEvent]:
        """Take in what changed in a tier, in the order in which it did. Returns the events that readers need."""
        lines = self._lines()
        tier = self._places[event.tier]
        if isinstance(event, Removed):
            for name in event.hashes:
                self._remove(name, tier, lines)
        else:
            for record in event.blocks:
                self._store(record, tier, lines)
        return lines.events

    def clear(self) -> list[KVEvent]:
        lines = self._lines()
        for name, block in self._blocks.items():
            for tier in _bits(block.tiers) if block.is_announced else ():
                lines.removed(name, tier)
        self._blocks.clear()
        self._children.clear()
        self.num_announced = self.num_hidden = 0
        return lines.events

    def snapshot(self) -> list[KVEvent]:
        lines = self._lines()
        for name in self._in_order():
            for tier in _bits(self._blocks[name].tiers):
                lines.stored(name, self._blocks[name], tier)
        return lines.events

    def check(self) -> None:
        """Raise AssertionError unless exactly what a lookup can find is announced."""
        reachable = set(self._in_order())
        announced = {name for name, block in self._blocks.items() if block.is_announced}
        assert announced == reachable, "what is announced is not what can be found"
        assert self.num_announced == len(announced), "count of announced blocks"
        hidden = [block for block in self._blocks.values() if block.tiers & self._in_host and not block.is_announced]
        assert self.num_hidden == len(hidden), "count of hidden blocks"
        assert all(block.tiers for block in self._blocks.values()), "a block that no tier holds"
        links = {(block.parent, name) for name, block in self._blocks.items()}
        assert links == {(parent, child) for parent, held in self._children.items() for child in held}, "links"
        assert all(self._children.values()), "an empty list of children"

    def _lines(self) -> "_Lines":
        return _Lines(self._roots, self._tiers)

    def _in_order(self) -> Iterator[ChainHash]:
        waiting = [child for root in self._roots for child in self._children.get(root, ())]
        while waiting:
            name = waiting.pop()
            yield name
            waiting += self._children.get(name, ())

    def _store(self, record: BlockRecord, tier: int, lines: "_Lines") -> None:
        name = record.chain_hash
        block = self._blocks.get(name)
        if block is None:
            if not is_named_by(record):
                self.num_withheld += 1
                return
            block = self._blocks[name] = _Block(record.parent, record.tokens)
            self._children.setdefault(record.parent, {})[name] = None
        if 1 << tier & ~block.tiers & self._in_host and not block.is_announced:
            self.num_hidden += 1
        block.tiers |= 1 << tier
        if block.is_announced:
            lines.stored(name, block, tier)
        elif block.parent in self._roots or (block.parent in self._blocks and self._blocks[block.parent].is_announced):
            self._spread(name, lines, is_whole=True)

    def _remove(self, name: ChainHash, tier: int, lines: "_Lines") -> None:
        block = self._blocks.get(name)
        if block is None or not block.tiers >> tier & 1:
            return  # it was withheld
        block.tiers &= ~(1 << tier)
        if block.is_announced:
            lines.removed(name, tier)
        elif 1 << tier == self._in_host:
            self.num_hidden -= 1
        if block.tiers:
            return
        self._spread(name, lines, is_whole=False)
        del self._blocks[name]
        siblings = self._children[block.parent]
        del siblings[name]
        if not siblings:
            del self._children[block.parent]

    def _spread(self, name: ChainHash, lines: "_Lines", *, is_whole: bool) -> None:
        """The block's chain is whole now, or broken: say so of it and of what stands behind it."""
        waiting, sign = [name], 1 if is_whole else -1
        while waiting:
            name = waiting.pop()
            block = self._blocks[name]
            if block.is_announced is not is_whole:
                block.is_announced = is_whole
                self.num_announced += sign
                self.num_hidden -= sign * bool(block.tiers & self._in_host)
                for tier in _bits(block.tiers):
                    if is_whole:
                        lines.stored(name, block, tier)
                    else:
                        lines.removed(name, tier)
                waiting += self._children.get(name, ())


class _Lines:
    """Events in the making: blocks that follow one another in a chain and a tier become one event."""

    def __init__(self, roots: Mapping[ChainHash, str | None], tiers: Sequence[TierKind]) -> None:
        self._roots, self._tiers = roots, tiers
        self._runs: list[tuple[int, list[tuple[ChainHash, _Block]]]] = []
        self._gone: dict[int, list[ChainHash]] = {}
        self._events: list[KVEvent] = []

    def stored(self, name: ChainHash, block: _Block, tier: int) -> None:
        self._close(removed=True)
        for number, run in reversed(self._runs):
            if number == tier and run[-1][0] == block.parent and len(run) < MAX_RUN:
                run.append((name, block))
                return
        if len(self._runs) >= len(self._tiers):  # a chain may grow in every tier side by side
            self._close(stored=True)
        self._runs.append((tier, [(name, block)]))

    def removed(self, name: ChainHash, tier: int) -> None:
        self._close(stored=True)
        self._gone.setdefault(tier, []).append(name)

    @property
    def events(self) -> list[KVEvent]:
        self._close(stored=True, removed=True)
        return self._events

    def _close(self, *, stored: bool = False, removed: bool = False) -> None:
        if stored:
            self._events += [self._stored(tier, run) for tier, run in self._runs]
            self._runs.clear()
        if removed:
            for tier, names in self._gone.items():
                for i in range(0, len(names), MAX_RUN):
                    hashes = [external_hash(name) for name in names[i : i + MAX_RUN]]
                    self._events.append(wire.BlockRemoved(hashes, self._tiers[tier].medium))
            self._gone.clear()

    def _stored(self, tier: int, run: Sequence[tuple[ChainHash, _Block]]) -> BlockStored:
        first = run[0][1]
        is_first = first.parent in self._roots
        namespace = self._roots[first.parent] if is_first else None
        tokens = np.frombuffer(b"".join(block.tokens for _, block in run), "<u4")
        return BlockStored(
            block_hashes=[external_hash(name) for name, _ in run],
            parent_block_hash=None if is_first else external_hash(first.parent),
            token_ids=tokens.tolist(),
            block_size=len(first.tokens) // 4,
            lora_id=None,
            medium=self._tiers[tier].medium,
            lora_name=None,
            extra_keys=None if namespace is None else [(namespace,), *[None] * (len(run) - 1)],
        )


def _bits(tiers: int) -> Iterator[int]:
    return (tier for tier in range(tiers.bit_length()) if tiers >> tier & 1)


_log = logging.getLogger(__name__)

MAX_WAITING: Final = 16_384  # blocks handed over and not yet published: past it `has_room` is false
MAX_BATCH: Final = 4096  # blocks in one batch …
MAX_BATCH_BYTES: Final = wire.MAX_PAYLOAD // 4  # … and its bytes, unless one event alone has more, as of huge blocks
MOST: Final = 512  # blocks of one tier taken at a time …
_PUMPS: Final = 4  # and how often in one go
MAX_ROOTS: Final = 65_536  # tenants of one model whose blocks are announced; those of others are not
_MAX_BUFFERED: Final = 64 << 20  # bytes of batches kept for replay
_QUEUE: Final = 1000  # batches that may wait for one subscriber
_MAX_REQUEST: Final = 1024  # bytes that a subscriber may say at once
_MAX_REPLAYS: Final = 32  # subscribers served side by side
_REPLAY_DEADLINE: Final = 10.0  # seconds a subscriber may take no message of its replay
_MAX_CLOSED: Final = 64  # models that are closed: a replay still says so
_STEP: Final = 64  # messages of a replay between two looks at the rest
_HEARTBEAT: Final = 2000  # milliseconds; a subscriber that is gone is noticed after three
_POLL: Final = 1000  # milliseconds without anything to do
_BUSY_POLL: Final = 5  # milliseconds while a subscriber reads its replay slowly


Source = EventSource | TierEvents  # tiers that say which blocks come and go


class Publisher:
    """Announces what the tiers of any number of models hold, on a thread of its own. Thread-safe.

    A subscriber that is too slow loses batches. It sees that by their numbers, and asks for a replay. For that the last
    `config.buffer` batches are kept. A subscriber that asks for older ones gets the present state: batches under the
    last of the numbers that it missed, of which the first clears, up to the present number.
    """

    def __init__(self, config: EventsConfig, dp_rank: int = 0, *, has_peers: bool = False) -> None:
        """Bind. ConfigError. `has_peers`: with CURVE keys, a holder of the publishers' own pair may follow, too."""
        assert config.publish is not None
        self._dp_rank = dp_rank
        self._topic, self._form = config.topic, config.form
        self._tiers = {kind.name for kind in TIERS.values() if config.shared or not kind.is_shared}
        self._keys = CurveKeys.load("events", config.curve_key_file, "curve_reader_file", config.curve_reader_file)
        if self._keys is not None and has_peers:
            self._keys = replace(self._keys, lets_own_in=True)
        for option, address in (("publish", config.publish), ("replay", config.replay)):
            if address is not None:
                if not config.allow_remote:
                    require_private(option, address)
                require_unused(option, address)
        self.counts: Counter[str] = Counter()
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asking = self._context.socket(zmq.REP)  # about keys, before anything is bound
        self._asking.bind(ZAP)
        try:
            self._publish, self.endpoint = self._bind(zmq.PUB, "publish", config.publish)
            self._replay, self.replay_endpoint = self._bind(zmq.ROUTER, "replay", config.replay)
        except ConfigError:
            self._context.destroy(linger=0)
            os.close(self._wake)
            raise
        self.seq = 0  # of the next batch
        self._lock = threading.Lock()  # guards the two that follow
        self._tasks: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_waiting = 0
        self._announced: dict[bytes, AnnouncedBlocks] = {}  # by model; from here on the thread's own
        self._closed: dict[bytes, None] = {}  # of these, oldest first
        self._most_buffered = config.buffer
        self._buffer: deque[NumberedBatch] = deque()
        self._num_buffered = 0  # bytes
        self._replays: dict[bytes, _Replay] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether to hand more over. Waiting loses nothing: tiers remember the changes that were not taken."""
        return self._num_waiting < MAX_WAITING

    def feed(self, fingerprint: bytes, *sources: Source) -> "TierFeed":
        return TierFeed(self, fingerprint, sources)

    def announce(self, fingerprint: bytes, events: Sequence[Event]) -> None:
        num_blocks = sum(len(event.hashes) if isinstance(event, Removed) else len(event.blocks) for event in events)
        self._submit(num_blocks, lambda: self._apply(fingerprint, events))

    def begin_at(self, fingerprint: bytes, root: ChainHash) -> None:
        """Chains of this model begin at `root`, a tenant's or an adapter's. Until that is known they are withheld."""
        self._submit(1, lambda: self._send(fingerprint, self._announced_of(fingerprint).begin_at(root)))

    def forget(self, fingerprint: bytes) -> None:
        self._submit(1, lambda: self._forget(fingerprint))

    def tells_all(self, fingerprint: bytes) -> bool:
        announced = self._announced.get(fingerprint)
        return announced is None or not (announced.num_withheld or announced.num_hidden)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was handed over is published. False if time runs out first."""
        done = threading.Event()
        self._submit(0, done.set)
        return done.wait(timeout)

    def close(self) -> None:
        """Publish what was handed over, up to a second, and let the addresses go. Idempotent."""
        if not self._stopped:
            self.flush(1.0)
            self._stopped = True
            self._notify()
            self._thread.join()
            self._context.destroy(linger=0)
            os.close(self._wake)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # any thread

    def _bind(self, kind: int, option: str, address: str | None) -> "tuple[zmq.Socket[bytes] | None, str | None]":
        if address is None:
            return None, None
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full pipe is said, not a reason to drop
        if self._keys is not None and address.startswith("tcp://"):
            self._keys.guard(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            fix = "name another address, as ipc:///run/kvtier/events"
            raise ConfigError(f'[events] {option} "{address}": {error.strerror}; {fix}') from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _submit(self, num_blocks: int, task: Callable[[], None]) -> None:
        with self._lock:
            self._num_waiting += num_blocks
            self._tasks.append((num_blocks, task))
        self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # as full of wake-ups as can be
            os.eventfd_write(self._wake, 1)

    # the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._asking, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._stopped:
            ready = dict(poller.poll(_BUSY_POLL if self._replays else _POLL))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            try:
                if self._asking in ready:
                    self._judge()
                self._turn(self._replay if self._replay in ready else None)
            except Exception:
                self.counts["errors"] += 1
                _log.exception("KV events: a batch is lost")

    def _turn(self, requests: "zmq.Socket[bytes] | None") -> None:
        while self._tasks:
            num_blocks, task = self._tasks.popleft()
            with self._lock:
                self._num_waiting -= num_blocks
            task()
        if requests is not None:
            self._accept(requests)
        for client in list(self._replays):
            self._serve(client)

    def _judge(self) -> None:
        request = self._asking.recv_multipart()
        assert self._keys is not None
        reply, is_known = self._keys.answer(request)
        self._asking.send_multipart(reply)
        if not is_known:
            self.counts["keys_refused"] += 1

    def _announced_of(self, fingerprint: bytes) -> AnnouncedBlocks:
        self._closed.pop(fingerprint, None)
        return self._announced.setdefault(fingerprint, AnnouncedBlocks(fingerprint))

    def _forget(self, fingerprint: bytes) -> None:
        self._send(fingerprint, self._announced_of(fingerprint).clear())
        self._closed[fingerprint] = None
        if len(self._closed) > _MAX_CLOSED:  # weights that change at each step of a training are a model each
            oldest = next(iter(self._closed))
            del self._closed[oldest], self._announced[oldest]

    def _apply(self, fingerprint: bytes, events: Sequence[Event]) -> None:
        blocks = self._announced_of(fingerprint)
        kept = (event for event in events if event.tier in self._tiers)
        self._send(fingerprint, [line for event in kept for line in blocks.apply(event)])

    def _send(self, fingerprint: bytes, events: Sequence[KVEvent]) -> None:
        for part in _parts(events):
            self._publish_batch(fingerprint, part)

    def _publish_batch(self, fingerprint: bytes, events: Sequence[KVEvent]) -> None:
        sent = self._batch(self.seq, fingerprint, events)
        self.seq += 1
        self._buffer.append(sent)
        self._num_buffered += len(sent.payload)
        while len(self._buffer) > self._most_buffered or self._num_buffered > _MAX_BUFFERED:
            self._num_buffered -= len(self._buffer.popleft().payload)
        self.counts["batches"] += 1
        self.counts["events"] += len(events)
        assert self._publish is not None
        self._publish.send_multipart(sent.frames)  # a PUB socket never waits: it drops what has no taker

    def _batch(self, seq: int, fingerprint: bytes, events: Sequence[KVEvent]) -> NumberedBatch:
        topic = wire.topic_of(fingerprint) if self._topic is None else self._topic
        batch = wire.EventBatch(time.time(), events, self._dp_rank)
        return NumberedBatch(seq, topic.encode(), wire.encode_batch(batch, self._form))

    def _accept(self, socket: "zmq.Socket[bytes]") -> None:
        for _ in range(_MAX_REPLAYS):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8 or len(self._replays) >= _MAX_REPLAYS:
                self.counts["replays_refused"] += 1
                continue
            first = int.from_bytes(frames[2], "big")
            self.counts["replays"] += 1
            self._replays[frames[0]] = _Replay(self._from(first))

    def _from(self, first: int) -> Iterator[list[bytes]]:
        kept = [sent for sent in self._buffer if sent.seq >= first]
        if self.seq > first and (not kept or kept[0].seq > first):
            self.counts["snapshots"] += 1
            kept = self._snapshot(self.seq - first)
        yield from ([b"", *sent.frames] for sent in kept)
        yield [b"", b"", END, b""]

    def _snapshot(self, most: int) -> list[NumberedBatch]:
        """The present state in fewer than `most` batches, the last of which has the last number published."""
        parts: list[tuple[bytes, Sequence[KVEvent]]] = []
        for fingerprint, blocks in self._announced.items():  # closed models too: a reader may have missed the end
            is_first = not parts or self._topic is None
            lines = [*([AllBlocksCleared()] if is_first else []), *blocks.snapshot()]
            parts += [(fingerprint, part) for part in _parts(lines)]
        while len(parts) >= most:  # an empty batch takes a number of its own; the first one requested is skipped
            self._publish_batch(parts[0][0], [])
            most += 1
        return [self._batch(self.seq - len(parts) + i, *part) for i, part in enumerate(parts)]

    def _serve(self, client: bytes) -> None:
        replay = self._replays[client]
        assert self._replay is not None
        for _ in range(_STEP):
            if replay.frames is None:
                del self._replays[client]
                return
            try:
                self._replay.send_multipart([client, *replay.frames], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                if error.errno != zmq.EAGAIN or replay.is_late:  # it is gone, or as good as gone
                    self.counts["replays_broken_off"] += 1
                    del self._replays[client]
                return
            replay.advance()


class TierFeed:
    """Hands what changes in one model's tiers to a publisher. Their owner calls it, on one thread; it never waits."""

    def __init__(self, publisher: Publisher, fingerprint: bytes, sources: Sequence[Source]) -> None:
        self._publisher, self._fingerprint, self._sources = publisher, fingerprint, sources
        self._roots: dict[ChainHash, None] = {}
        self._has_all_roots = True

    def begin_at(self, root: ChainHash) -> None:
        if root not in self._roots:
            if len(self._roots) >= MAX_ROOTS:
                self._has_all_roots = False
                return
            self._roots[root] = None
            self._publisher.begin_at(self._fingerprint, root)

    @property
    def tells_all(self) -> bool:
        return self._has_all_roots and self._publisher.tells_all(self._fingerprint)

    def pump(self) -> bool:
        """Hand over what there is, as far as the publisher has room. True if something is left: tiers remember it."""
        for source in self._sources:
            for _ in range(_PUMPS):
                if not source.waiting or not self._publisher.has_room:
                    break
                if events := source.take(MOST):
                    self._publisher.announce(self._fingerprint, events)
        return any(source.waiting for source in self._sources)

    def follow(self, fingerprint: bytes) -> None:
        """The tiers are empty, and name blocks after other weights now."""
        if fingerprint != self._fingerprint:
            self.pump()
            self.close()
            self._fingerprint, self._has_all_roots = fingerprint, True
            self._roots.clear()

    def close(self) -> None:
        self._publisher.forget(self._fingerprint)


class _Replay:
    def __init__(self, messages: Iterator[list[bytes]]) -> None:
        self._messages = messages
        self.advance()

    def advance(self) -> None:
        self.frames = next(self._messages, None)
        self._moved = time.monotonic()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._moved > _REPLAY_DEADLINE


def _parts(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    part: list[KVEvent] = []
    num_blocks = num_bytes = 0
    for event in events:
        num_names = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        # packed it has at most this: names of 64 bits, tokens of 32
        weight = 256 + 10 * num_names + (5 * len(event.token_ids) if isinstance(event, BlockStored) else 0)
        if part and (num_blocks >= MAX_BATCH or num_bytes + weight > MAX_BATCH_BYTES):
            yield part
            part, num_blocks, num_bytes = [], 0, 0
        part.append(event)
        num_blocks += num_names
        num_bytes += weight
    if part:
        yield part
