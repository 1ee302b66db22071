"""EventConsumer follows a publisher's KV events over ZMQ, and keeps an index right; who may read them: CURVE keys."""

import contextlib
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

import xxhash
import zmq
from zmq.auth import load_certificate
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvtier.service.events.wire import MAX_PAYLOAD, AllBlocksCleared, KVEvent, decode_batch, pieces
from kvtier.tiers import ConfigError, FormatError

ZAP: Final = "inproc://zeromq.zap.01"  # where libzmq asks whether a key may connect (ZeroMQ RFC 27)

_MAKE: Final = "make one by zmq.auth.create_certificates (docs/routing.md)"
_KEY_LENGTH: Final = 32  # bytes; 40 characters in Z85
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's key pair and the other side's public key, in Z85. They count at tcp:// addresses alone."""

    public: bytes
    secret: bytes
    other: bytes
    lets_own_in: bool = False  # a holder of this very pair may connect, too: another node's daemon

    @classmethod
    def load(cls, section: str, own: Path | None, other_name: str, other: Path | None) -> "CurveKeys | None":
        """From `[section] curve_key_file`, private, and the other side's file; None without them. ConfigError."""
        if own is None or other is None:  # the configuration has both or none
            return None
        option = f'[{section}] curve_key_file "{own}"'
        if not zmq.has("curve"):
            raise ConfigError(f"{option}: this libzmq knows no CURVE; install pyzmq from a wheel")
        public, secret = _certificate(option, own)
        if secret is None:
            raise ConfigError(f"{option}: no secret key in it; name the file that ends with .key_secret")
        if own.stat().st_mode & _OTHERS:
            raise ConfigError(f"{option}: others can read this secret; chmod 600 it")
        return cls(public, secret, _certificate(f'[{section}] {other_name} "{other}"', other)[0])

    def guard(self, bound: "zmq.Socket[bytes]", domain: bytes = b"kvtier") -> None:
        """Before `bind`: admit only those that `answer` admits."""
        bound.curve_server = True
        bound.curve_publickey, bound.curve_secretkey = self.public, self.secret
        bound.zap_domain = domain

    def present(self, connecting: "zmq.Socket[bytes]") -> None:
        """Before `connect`: prove this key, and accept only a holder of the other one."""
        connecting.curve_serverkey = self.other
        connecting.curve_publickey, connecting.curve_secretkey = self.public, self.secret

    def answer(self, request: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """Reply to [version, number, domain, address, identity, mechanism, key] at `ZAP`; whether it lets in."""
        mechanism, key = request[5:7] if len(request) == 7 else (b"", b"")
        accepted = [z85.decode(each) for each in ([self.other, self.public] if self.lets_own_in else [self.other])]
        known = mechanism == b"CURVE" and key in accepted
        number = request[1] if len(request) > 1 else b""
        return [b"1.0", number, *((b"200", b"OK") if known else (b"400", b"unknown key")), b"", b""], known


def require_private(option: str, address: str) -> None:
    """ConfigError if other users of this machine can reach an ipc:// address."""
    name = address.removeprefix("ipc://")
    if not address.startswith("ipc://") or name == "*":  # for which libzmq makes a directory of its own
        return
    where = f'[events] {option} "{address}"'
    if name.startswith("@"):
        raise ConfigError(f"{where}: everybody reaches a name without a file; use a path in a directory of mode 0700")
    path = Path(name)
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; make that directory, of mode 0700") from None
    if mode & _OTHERS:
        fix = "chmod 700 it, or set allow_remote"
        raise ConfigError(f"{where}: others can enter {path.parent}, and events hold prompts; {fix}")


def require_unused(option: str, address: str) -> None:
    """ConfigError if an ipc:// address is in use: libzmq would take it over without notice."""
    if not address.startswith("ipc://") or address == "ipc://*":
        return
    name = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect("\0" + name[1:] if name.startswith("@") else name)
        except OSError:
            return
    raise ConfigError(f'[events] {option} "{address}": another process listens there; choose another path')


def _certificate(option: str, path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError(f"{option}: no file with a CURVE key; {_MAKE}") from None
    try:
        keys = [z85.decode(key) for key in (public, secret) if key is not None]
    except (KeyError, ValueError, struct.error):
        keys = [b""]
    if not all(len(key) == _KEY_LENGTH for key in keys):
        raise ConfigError(f"{option}: a key in it is not {_KEY_LENGTH} bytes in Z85; {_MAKE}")
    if secret is not None and zmq.curve_public(secret) != public:
        raise ConfigError(f"{option}: the two keys in it are no pair; {_MAKE}")
    return public, secret


# --- batches in order ------------------------------------------------------------------------------------------------

END: Final = (-1).to_bytes(8, "big", signed=True)  # the sequence number behind the last replayed batch

MAX_HELD: Final = 4096  # batches that wait for earlier ones …
MAX_HELD_BYTES: Final = 256 << 20  # … and their bytes
_REMEMBERED: Final = 1024  # batches applied last; another one of the same number has other bytes


class NumberedBatch(NamedTuple):
    seq: int
    topic: bytes
    payload: bytes

    @property
    def frames(self) -> list[bytes]:
        return [self.topic, self.seq.to_bytes(8, "big"), self.payload]

    @classmethod
    def parse(cls, frames: Sequence[bytes]) -> "NumberedBatch | None":
        """Inverse of `frames`; None for the end of a replay. FormatError for anything else."""
        if len(frames) != 3 or len(frames[1]) != 8:
            raise FormatError(f"{len(frames)} frames: not topic, eight bytes of a sequence number, payload")
        topic, number, payload = frames
        return None if number == END else cls(int.from_bytes(number, "big"), topic, payload)


class ForgetAll(NamedTuple):
    """Forget everything that this publisher announced: what comes next stands alone."""


Step = NumberedBatch | ForgetAll  # what to do next: apply a batch, or forget everything


class Sequencer:
    """Gets batches as they arrive and says what to apply: in order, without a gap, each once.

    While `wants` is a number, something is missing and a replay from that number is due. Its batches come in by
    `replayed`, up to `ended` or `failed`. Live batches wait for its end: a replay may be a summary under their numbers,
    which counts as a whole or not at all. Batches lost for good, and a publisher that begins anew, lead to a ForgetAll.
    Law: what was applied since the last ForgetAll is one run of numbers, up to `next`.
    """

    def __init__(self, *, can_replay: bool = True) -> None:
        self.next: int | None = None  # the number to be applied next; None: begin by whatever a replay has
        self.counts: Counter[str] = Counter()
        self._can_replay = can_replay
        self._asked: int | None = None  # a replay from here is under way
        self._is_first = False  # and nothing of it has come yet
        self._jumped = False  # it brings a summary under numbers that once were other batches'
        self._missing = False  # the replay was requested because something is missing, not to make sure
        self._held: dict[int, NumberedBatch] = {}
        self._num_held = 0  # bytes
        self._seen = -1  # the highest number that arrived
        self._recent: dict[int, int | None] = {}  # number → the batch's digest; None: a summary's

    @property
    def wants(self) -> int | None:
        if not self._can_replay or self._asked is not None:
            return None
        if self.next is None:
            return 0
        return self.next if self.next <= self._seen else None

    @property
    def is_replaying(self) -> bool:
        return self._asked is not None

    @property
    def is_live(self) -> bool:
        return self.next is not None and self.next > self._seen

    def start_over(self) -> None:
        """The publisher may be another one now: begin by a replay, whose first batch comes with a ForgetAll."""
        self.next = self._asked = None
        self._held.clear()
        self._num_held = 0
        self._recent.clear()
        self._seen = -1

    def asked(self, first: int) -> None:
        """A replay from `first` on was requested: what `wants` said, or `next` to make sure that nothing is missing."""
        self._asked, self._is_first, self._jumped = first, True, False
        self._missing = first <= self._seen
        self.counts["replays"] += 1

    def live(self, batch: NumberedBatch) -> list[Step]:
        if self.next is None and not self._can_replay:
            return self._begin_at(batch.seq, batch)
        if self.next is not None and batch.seq < self.next:
            digest = self._recent.get(batch.seq, -1)
            if digest is None or digest == _digest(batch):
                self.counts["duplicates"] += 1
                return []
            self.counts["restarts"] += 1
            self.start_over()
            return self.live(batch)
        if self.is_live and self.next is not None and batch.seq > self.next:
            self.counts["gaps"] += 1
        self._seen = max(self._seen, batch.seq)
        self._hold(batch)
        if self._asked is not None:
            return []
        if self._can_replay:
            return self._drain()
        return self._drain() or self._skip()

    def replayed(self, batch: NumberedBatch) -> list[Step]:
        if self._asked is None:
            return []
        is_first, self._is_first = self._is_first, False
        self._seen = max(self._seen, batch.seq)
        if self.next is None or (is_first and batch.seq > self.next):
            self.counts["lost"] += self.next is not None
            self._jumped = batch.seq > self._asked
            return self._begin_at(batch.seq, batch)
        if batch.seq > self.next:  # a hole in the replay itself
            self.counts["broken_replays"] += 1
            return self._break_off()
        return [] if batch.seq < self.next else [self._apply(batch)]

    def ended(self) -> list[Step]:
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        if self.next is None:  # nothing was ever published
            self.next = 0
            return [ForgetAll(), *self._drain()]
        steps = self._drain()
        if self.next == asked and self._missing:  # it is not to be had any more
            self.counts["lost"] += 1
            return self._skip()
        return steps

    def failed(self) -> list[Step]:
        if self._asked is None:
            return []
        self.counts["failed_replays"] += 1
        return self._break_off()

    def _break_off(self) -> list[Step]:
        """Half a summary is nothing to build upon."""
        self._asked = None
        if self._jumped:
            self.start_over()
        return self._drain()

    def _begin_at(self, seq: int, batch: NumberedBatch) -> list[Step]:
        self.next = seq
        for early in [held for held in self._held if held < seq]:
            self._let_go(early)
        return [ForgetAll(), self._apply(batch)]

    def _hold(self, batch: NumberedBatch) -> None:
        self._let_go(batch.seq)
        if len(self._held) < MAX_HELD and self._num_held + len(batch.payload) <= MAX_HELD_BYTES:
            self._held[batch.seq] = batch
            self._num_held += len(batch.payload)
        else:
            self.counts["overflows"] += 1  # a later replay brings it

    def _let_go(self, seq: int) -> None:
        if seq in self._held:
            self._num_held -= len(self._held.pop(seq).payload)

    def _skip(self) -> list[Step]:
        self.next = min(self._held, default=self._seen + 1)
        return [ForgetAll(), *self._drain()]

    def _drain(self) -> list[Step]:
        if self.next is None:
            return []
        steps: list[Step] = []
        while (batch := self._held.get(self.next)) is not None:
            steps.append(self._apply(batch))
        return steps

    def _apply(self, batch: NumberedBatch) -> NumberedBatch:
        self.next = batch.seq + 1
        self._let_go(batch.seq)
        self._seen = max(self._seen, batch.seq)
        self._recent.pop(batch.seq, None)
        self._recent[batch.seq] = None if self._jumped and self._asked is not None else _digest(batch)
        while len(self._recent) > _REMEMBERED:
            del self._recent[next(iter(self._recent))]
        return batch


def _digest(batch: NumberedBatch) -> int:
    return xxhash.xxh3_64_intdigest(batch.payload)


_log = logging.getLogger(__name__)

# A publisher that is silent for a second is probed every second, and gone after three probes without an answer.
_PROBES: Final = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 1, zmq.TCP_KEEPALIVE_INTVL: 1, zmq.TCP_KEEPALIVE_CNT: 3}
_QUEUE: Final = 16  # batches that may wait to be read, of MAX_PAYLOAD each; more of them wait at the publisher
_TURN: Final = 256  # batches read from one socket before the others are looked at …
_TURN_TIME: Final = 0.1  # … and seconds, and what the batch takes that is then under way
_PIECE: Final = 1024  # blocks of an event between two looks at whether to stop: some milliseconds
_YIELD: Final = 5e-5  # seconds between two of these, so that other threads get the sink's lock
_LAST: Final = 10.0  # seconds for the thread to end: that is one batch being unpacked, on a busy machine
_REPLAY_DEADLINE: Final = 5.0  # seconds without a message of a replay
_PAUSE: Final = 1.0  # seconds before a failed replay is requested anew
_SILENCE: Final = 5.0  # seconds after which to make sure that nothing was missed
_LOG_PAUSE: Final = 1.0
_OF_A_MODEL: Final = re.compile(rb"kv@[0-9a-f]{16}")  # a topic, as `topic_of` makes it
_REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)
_MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED[0] | _REFUSED[1] | _REFUSED[2]


_CHANGES: Final = count(1)

Standing: TypeAlias = Literal["live", "replaying", "stale", "refused"]
"""stale: not connected, or no answer to a request, so what is known may be wrong.

refused: its topic is of no model, or a key is wrong.
"""


class FeedState(NamedTuple):
    state: Standing
    seconds: float  # for how long
    seq: int | None  # of the last batch applied
    age: float | None  # seconds since a batch was applied; None: never
    counts: dict[str, int]  # gaps, lost, duplicates, restarts, replays, malformed, batches, events …
    why: str | None = None  # it is refused


class EventSink(Protocol):
    """What events add up to: a `PrefixIndex`, or what else is to be known of a publisher's blocks."""

    def apply(self, worker: str, event: KVEvent) -> None:
        """What a worker announced, in that order."""

    def drop(self, worker: str) -> None:
        """Forget all that it announced."""


class EventConsumer:
    """Reads the events of the publisher at `publish` into `sink` as those of `worker`, on its own thread until `close`.

    Batches are applied in order, each once. What was missed is read from `replay` first. If that is impossible, and
    whenever the connection broke, the worker is dropped and built anew. Without `replay` (None) it knows only what was
    published since it connected, and starts over at each gap. With `topic`, batches of other topics are counted but not
    applied: one publisher may announce several models. A publisher that has one topic for all of them is refused: the
    blocks of its models look alike.
    """

    last_change: ClassVar[int] = 0  # another number whenever a consumer of this process became live, or no longer is

    def __init__(
        self,
        worker: str,
        sink: EventSink,
        publish: str,
        replay: str | None = None,
        *,
        topic: str | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        """ConfigError if an address is none. The publisher need not run yet. `keys` are for tcp:// addresses."""
        self.worker, self._keys, self._sink = worker, keys, sink
        self._publish_address = publish
        self._again_at = float("inf")  # when to connect anew: libzmq does not, once its key was refused
        self._topic = None if topic is None else topic.encode()
        self._replay_address = replay
        self._sequencer = Sequencer(can_replay=replay is not None)
        self._counts: Counter[str] = Counter()
        self._connected = False
        self._answers = True  # it answered the last request for a replay
        self._applied_at: float | None = None
        self._last_message_at = self._since = time.monotonic()
        self._shown: Standing = "stale"
        self._refusal: str | None = None
        self._replay: zmq.Socket[bytes] | None = None  # while one is under way
        self._replay_due = 0.0  # when to give it up; if none is under way, when one may be requested
        self._log_from = 0.0
        self._stopped = False
        self._context = zmq.Context()
        self._subscriber = self._socket(zmq.SUB)
        self._monitor = self._subscriber.get_monitor_socket(_MONITORED)  # first: it reports no handshake before it
        try:
            self._connect(self._subscriber, "events", publish)
            if replay is not None:
                with self._socket(zmq.DEALER) as tried:
                    self._connect(tried, "replay", replay)  # is it an address at all?
        except ConfigError:
            self._subscriber.disable_monitor()
            self._context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # no caller wakes the thread by a descriptor that it has closed
        self._subscriber.subscribe(b"")
        self._thread = threading.Thread(target=self._run, name=f"kvtier-events-{worker}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> FeedState:
        now, following = time.monotonic(), self._sequencer.next
        return FeedState(
            self._shown,
            now - self._since,
            following - 1 if following else None,
            None if self._applied_at is None else now - self._applied_at,
            dict(Counter(dict(self._sequencer.counts)) + Counter(dict(self._counts))),  # copied at once, each
            self._refusal,
        )

    @property
    def is_live(self) -> bool:
        return self._shown == "live"

    def stop(self) -> None:
        """Have the thread read no more, soon; does not wait for that. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                os.eventfd_write(self._wake, 1)

    def close(self, timeout: float = _LAST) -> bool:
        """Read no more; what was held stays in the sink. False: it still unpacks a batch. Idempotent."""
        self.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD)  # more than that ends the connection
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        # The kernel's probes, not ZMQ's heartbeats. A full queue is not read, so heartbeats seem late and end the
        # connection, and then libzmq 4.3.5 aborts the process (its issue 3937).
        for option, value in _PROBES.items():
            socket.setsockopt(option, value)
        return socket

    def _connect(self, socket: "zmq.Socket[bytes]", what: str, address: str) -> None:
        if self._keys is not None and address.startswith("tcp://"):
            self._keys.present(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            fix = "name an address as ipc:///run/kvtier/events"
            raise ConfigError(f'{what} "{address}": {error.strerror}; {fix}') from None

    # the thread

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn()
            except Exception:  # what is known may be wrong now: begin anew
                self._counts["errors"] += 1
                _log.exception("KV events of %s: read anew", self.worker)
                self._sequencer.start_over()
                self._hang_up(_PAUSE)
            self._show()
        self._subscriber.disable_monitor()
        self._context.destroy(linger=0)
        with self._lock:
            os.close(self._wake)

    def _turn(self) -> None:
        for ready in self._wait():
            if ready is self._monitor:
                self._take_notice()
            elif ready is self._subscriber:
                for batch in self._received(self._subscriber):
                    self._last_message_at = time.monotonic()
                    if isinstance(batch, NumberedBatch):
                        self._do(self._sequencer.live(batch))
            elif ready is self._replay:
                self._read_replay(self._replay)
        self._pass_time()

    def _wait(self) -> "list[zmq.Socket[bytes]]":
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        sockets = [self._monitor, self._subscriber, *([self._replay] if self._replay is not None else [])]
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        seconds = min(_SILENCE, max(0.0, min(self._due, self._again_at) - time.monotonic()))
        ready = dict(poller.poll(int(1000 * seconds) + 1))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return [each for each in sockets if each in ready]

    @property
    def _due(self) -> float:
        if self._replay is not None:
            return self._replay_due
        if self._replay_address is None or not self._connected:
            return float("inf")
        if self._sequencer.wants is not None:
            return self._replay_due
        return max(self._replay_due, self._last_message_at + _SILENCE)

    def _take_notice(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._hang_up(0.0)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._again_at = time.monotonic() + _PAUSE
        if event in _REFUSED and (self._keys is not None or event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._counts["keys_refused"] += 1
            self._refuse("the handshake failed: one side wants another CURVE key, or only one side has keys")
        if self._connected:  # and another may be there now
            self._answers = True
            self._counts["connections"] += 1
            self._refusal = None
            with contextlib.suppress(zmq.Again):  # what waits unread may be of a publisher that has ended
                for _ in range(_QUEUE):
                    self._subscriber.recv_multipart(zmq.DONTWAIT)
                    self._counts["dropped"] += 1
            self._sequencer.start_over()

    def _received(self, socket: "zmq.Socket[bytes]", skip: int = 0) -> Iterator[NumberedBatch | FormatError | None]:
        """What may be read in this turn, behind the first `skip` frames; None: a replay's end."""
        end = time.monotonic() + _TURN_TIME
        for _ in range(_TURN):
            if self._stopped or time.monotonic() >= end:
                return
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)[skip:]
            except zmq.Again:
                return
            self._answers = True
            try:
                batch: NumberedBatch | FormatError | None = NumberedBatch.parse(frames)
            except FormatError as error:
                self._malformed(error)
                batch = error
            yield batch

    def _read_replay(self, socket: "zmq.Socket[bytes]") -> None:
        for batch in self._received(socket, 1):
            if isinstance(batch, FormatError):
                self._hang_up(_PAUSE)
                return
            self._do(self._sequencer.ended() if batch is None else self._sequencer.replayed(batch))
            self._last_message_at = time.monotonic()  # the time that a batch takes here is not the publisher's
            self._replay_due = self._last_message_at + _REPLAY_DEADLINE
            if not self._sequencer.is_replaying:
                self._hang_up(0.0 if batch is None else _PAUSE)
                return

    def _pass_time(self) -> None:
        now = time.monotonic()
        if now >= self._again_at:
            self._again_at = float("inf")
            with contextlib.suppress(zmq.ZMQError):  # it has given the address up itself
                self._subscriber.disconnect(self._publish_address)
            self._connect(self._subscriber, "events", self._publish_address)
        if self._replay is not None:
            if now >= self._replay_due:
                self._answers = False  # it hangs, though its kernel answers TCP's probes
                self._hang_up(_PAUSE)
            return
        first = self._sequencer.wants
        if first is None and self._replay_address is not None and now - self._last_message_at >= _SILENCE:
            first = self._sequencer.next
        if first is None or not self._connected or now < self._replay_due or self._replay_address is None:
            return
        self._last_message_at = now
        self._replay_due = now + _REPLAY_DEADLINE
        self._replay = self._socket(zmq.DEALER)
        self._connect(self._replay, "replay", self._replay_address)
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        self._sequencer.asked(first)

    def _hang_up(self, pause: float) -> None:
        self._do(self._sequencer.failed())
        self._replay_due = time.monotonic() + pause
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    def _do(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if self._stopped:
                return
            if isinstance(step, ForgetAll):
                self._sink.drop(self.worker)
                self._counts["resets"] += 1
                self._refusal = None
                continue
            self._applied_at = time.monotonic()
            self._counts["batches"] += 1
            if self._topic is not None and step.topic != self._topic:
                self._counts["other_topics"] += 1
                if not _OF_A_MODEL.fullmatch(step.topic):
                    given, wanted = (each.decode(errors="replace")[:80] for each in (step.topic, self._topic))
                    self._refuse(f'its topic is "{given}", but "{wanted}" is this model\'s; unset [events] topic there')
                continue
            try:
                events = decode_batch(step.payload).events
            except FormatError as error:
                self._malformed(error)
                continue
            self._counts["events"] += len(events)
            self._apply(events)

    def _apply(self, events: Sequence[KVEvent]) -> None:
        """Piece by piece, however much there is in one batch: others look into the sink meanwhile."""
        num_blocks = 0
        for event in events:
            for piece in pieces(event, _PIECE):
                if self._stopped:
                    return
                self._sink.apply(self.worker, piece)
                num_blocks += 1 if isinstance(piece, AllBlocksCleared) else len(piece.block_hashes)
                if num_blocks >= _PIECE:
                    num_blocks = 0
                    time.sleep(_YIELD)

    def _refuse(self, why: str) -> None:
        if self._refusal is None:
            self._refusal = why
            _log.warning("KV events of %s are not read: %s", self.worker, why)

    def _malformed(self, error: FormatError) -> None:
        self._counts["malformed"] += 1
        now = time.monotonic()
        if now >= self._log_from:
            self._log_from = now + _LOG_PAUSE
            _log.warning("KV events of %s: %s (%d malformed)", self.worker, error, self._counts["malformed"])

    def _show(self) -> None:
        shown: Standing = "stale"
        if self._refusal is not None:
            shown = "refused"
        elif self._connected and not self._sequencer.is_live:
            shown = "replaying"
        elif self._connected and self._answers:
            shown = "live"
        if shown != self._shown:
            self._shown, self._since = shown, time.monotonic()
            EventConsumer.last_change = next(_CHANGES)
