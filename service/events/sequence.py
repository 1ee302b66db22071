"""Sequencer: puts one publisher's batches in order, whatever got lost, doubled or late on the way. No I/O, no clock."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvtier.tiers import FormatError

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence number behind the last replayed batch."""

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


Step = NumberedBatch | ForgetAll
"""What to do next: apply a batch, or forget everything."""


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
        self._missing = False  # it was asked for because something is missing, not to make sure
        self._held: dict[int, NumberedBatch] = {}
        self._num_held = 0  # bytes
        self._seen = -1  # the highest number that arrived
        self._recent: dict[int, int | None] = {}  # number → the batch's digest; None: a summary's

    @property
    def wants(self) -> int | None:
        """Where a replay has to begin. None if none is needed, or one is under way."""
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
        """Whether everything that arrived was applied."""
        return self.next is not None and self.next > self._seen

    def start_over(self) -> None:
        """The publisher may be another one now: begin by a replay, whose first batch comes with a ForgetAll."""
        self.next = self._asked = None
        self._held.clear()
        self._num_held = 0
        self._recent.clear()
        self._seen = -1

    def asked(self, first: int) -> None:
        """A replay from `first` on was asked for: what `wants` said, or `next` to make sure that nothing is missing."""
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
        """The replay under way has brought all there is."""
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
        """The replay under way broke off: ask for it anew."""
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
        """Go on with what there is behind the hole."""
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
