"""Blocks as objects in a bucket: runs of a chain, each record verified whole before it is used (docs/format.md)."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from kvtier.tiers import (
    BATCH_BYTES,
    BlockRecord,
    ChainHash,
    Direction,
    Outcome,
    require_buffers,
    require_records,
    require_space,
)
from kvtier.tiers.config import ObjectsConfig
from kvtier.tiers.naming import PROBE_BYTES
from kvtier.tiers.objects.bucket import EXISTS, Bucket, ObjectRange, SentPart, explanation
from kvtier.tiers.objects.index import NAME_LIFETIME, ObjectIndex, StoredObject
from kvtier.tiers.objects.layout import MAX_BLOCKS, ArrivingRecords, ObjectSpace
from kvtier.tiers.shared import SharedEpoch, SharedTier, StorageFailed, cut_off, form_of, format_epoch, parse_epoch

_log = logging.getLogger(__name__)

LOOKED_AT: Final = 10.0  # seconds: for so long after a reset others may continue in the epoch before
_FIRST: Final = 1  # before the first reset there is no object, and readers need not write one


class ObjectEpoch(SharedEpoch):
    """The content of an object of its own, read every `LOOKED_AT` seconds, before a request that needs it."""

    serves_on = False

    def __init__(
        self, bucket: Bucket, key: str, forget: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(forget)
        self._bucket = bucket
        self._key = key
        self._clock = clock
        self._fresh_until = 0.0

    def _is_settled(self) -> bool:
        with self._lock:
            return self._agreed and self._clock() < self._fresh_until

    def _agree(self, deadline: float) -> None:
        known, number = self._known, self._stored(deadline)
        if number < max(known, 1):
            number = known or time.time_ns() // 1000
            self.num_begun += 1
            self._bucket.put(self._key, [format_epoch(number)])
        with self._lock:
            self._take(number)
            self._fresh_until = self._clock() + LOOKED_AT

    def _stored(self, deadline: float) -> int:
        """The stored epoch; 0 if the object's content is none."""
        try:
            return parse_epoch(bytes(self._bucket.get(ObjectRange(self._key, 0, 64), deadline)))
        except StorageFailed as error:
            if error.outcome is Outcome.ABSENT:
                return _FIRST
            if error.outcome is Outcome.CHECKSUM:  # an empty object
                return 0
            raise


_ObjectRun = tuple[StoredObject, int, list[int]]  # one request: an object, a position, the blocks from there on

_TIER: Final = "objects"
_MOST_TABLES: Final = 16  # read at once
_MOST_LOGGED: Final = 16
_BAD: Final = (Outcome.CHECKSUM, Outcome.KEY_MISMATCH)
_EPOCH_CHANGED: Final = StorageFailed(Outcome.EPOCH, "reset meanwhile")
_OTHER_KV: Final = StorageFailed(Outcome.IO_ERROR, "blocks may be another model's")


class ObjectStore(SharedTier):
    """A `SharedTier` over one bucket.

    An object holds consecutive blocks of one chain, is named by the first of them, and never changes. With a chain's
    names its objects are found one behind the other. The store knows the names of blocks it wrote, read or located.
    """

    def __init__(self, config: ObjectsConfig, space: ObjectSpace, bucket: Bucket) -> None:
        """Sends no request. Use `ObjectStore.open`."""
        super().__init__(_TIER, config, space.form, space.record_bytes)
        self.space = space
        self._config: ObjectsConfig = config
        self._bucket = bucket
        self._index = ObjectIndex(min(config.ttl, NAME_LIFETIME))
        self._epoch: ObjectEpoch = ObjectEpoch(bucket, space.epoch_key, self._forget_all)
        self._logged: set[str] = set()  # S3's codes, each logged once: counters say no more than `io_error`
        self._part_blocks = max(1, config.part_size // space.record_bytes)

    @classmethod
    def open(cls, config: ObjectsConfig, fingerprint: bytes, *, slot_bytes: int, block_size: int) -> "ObjectStore":
        """Reach the bucket for the blocks of `fingerprint` (32 bytes).

        ConfigError for mistakes to fix; TierUnavailable without a reply in time: try again later.
        """
        require_space(fingerprint, slot_bytes, block_size)
        form = form_of(_TIER, config, fingerprint, slot_bytes, block_size)
        space = ObjectSpace(config.prefix, form, slot_bytes, block_size)
        bucket = Bucket.connect(config, max(BATCH_BYTES, space.record_bytes))
        store = cls(config, space, bucket)
        failure = store._epoch.settle(time.monotonic() + bucket.timeout)
        if failure is not None:
            store.close()
            raise explanation(config, failure)
        return store

    stays_open = True

    # Names: no I/O.

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        return self._index.leading(hashes)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [place is not None for place in self._index.places(hashes)]

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        """Reads the tables of the chain's objects, one behind the other. The next objects likely have as many blocks
        as the first one, so more and more of them are read at once.
        """
        deadline = self._deadline(0)
        epoch = self._usable(deadline)
        if isinstance(epoch, StorageFailed):
            return self._located(0, epoch)
        found, step, width = self._index.leading(hashes), 1, 1
        at = found - self._index.in_part(hashes[:found])  # an object of which more may belong to this chain
        while found < len(hashes):
            learned = self._read_tables(hashes, range(at, len(hashes), step)[:width], epoch, deadline)
            first = learned[0]
            if isinstance(first, StorageFailed):  # a failure of a later object says nothing about the chain
                if first.outcome is Outcome.ABSENT:
                    self._missed(hashes[at])
                return self._located(min(found, at), first)
            found += self._index.leading(hashes[found:])
            if found == at:  # forgotten at once
                return self._located(found, None)
            at, step, width = found, first, min(2 * width, _MOST_TABLES)
        return self._located(found, None)

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        require_buffers(len(hashes), into, self.space.slot_bytes)
        deadline = self._deadline(len(hashes))
        epoch = self._usable(deadline)
        results: list[BlockRecord | Outcome]
        if isinstance(epoch, StorageFailed):
            results = [epoch.outcome] * len(hashes)
        else:
            results = self._read(hashes, into, epoch, deadline)
            if self._epoch.value != epoch:
                results = [Outcome.EPOCH] * len(hashes)
        self.change_feed.seen(result for result in results if isinstance(result, BlockRecord))
        self._counts.add("read", results)
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`. After a failure the rest of the chain is PARENT_FAILED."""
        require_records(records, payloads, self.space.slot_bytes, self.space.block_size)
        deadline = self._deadline(len(records))
        epoch = self._usable(deadline)
        done, failure = 0, epoch if isinstance(epoch, StorageFailed) else None
        if not isinstance(epoch, StorageFailed):
            done, failure = self._write(records, payloads, epoch, deadline)
            if self._epoch.value != epoch:
                done, failure = 0, _EPOCH_CHANGED
        outcomes = [Outcome.OK] * done
        if failure is not None:
            outcomes = cut_off([*outcomes, *[failure.outcome] * (len(records) - done)])
        self.change_feed.seen(records[:done])
        self._counts.add("write", outcomes)
        return outcomes

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Delete these blocks' objects for all processes, with other blocks in them; of an unknown block, its own."""
        places = self._index.places(hashes)
        names = {place[0].first for place in places if place is not None}
        unknown = [h for h, place in zip(hashes, places, strict=True) if place is None]
        names.update(self.space.names(unknown))
        missing = self._index.forget(dict.fromkeys(place[0] for place in places if place is not None))
        self.change_feed.missed([*missing, *unknown])
        if not self._delete(names, self._deadline(0)) and not self._is_closed:
            _log.warning("[objects] %d may be there still: the bucket did not confirm that it deleted them", len(names))

    def kv_probe(self) -> bytes | None:
        """Each epoch has its own probe: none stored before counts."""
        deadline, key = self._kv_probe_at()
        try:
            return bytes(self._bucket.get(ObjectRange(key, 0, PROBE_BYTES), deadline)) or None
        except StorageFailed as error:
            if error.outcome in (Outcome.ABSENT, Outcome.CHECKSUM):  # none, or an empty object
                return None
            raise explanation(self._config, error) from None

    def keep_kv_probe(self, packed: bytes) -> None:
        """Outside of what lifecycle rules remove. A reader without write permission stores none."""
        _, key = self._kv_probe_at()
        try:
            self._bucket.put(key, [packed], only_new=True)
        except StorageFailed as error:
            if error.code != EXISTS:
                self._log_refusal(error)

    def probe(self, direction: Direction) -> bool:
        """Whether the bucket replies, or takes a small object, which the lifecycle rule removes."""
        try:
            if direction == "write":
                self._bucket.put(self.space.probe_key, [b"1"])
            else:
                self._bucket.get(ObjectRange(self.space.epoch_key, 0, 64), self._deadline(0))
        except StorageFailed as error:
            return error.outcome is Outcome.ABSENT
        return True

    def stats(self) -> Mapping[str, int]:
        """As `SharedTier`, of verbs read, write, locate; requests_{kind}, bytes_{way}, and known names."""
        return {**super().stats(), **self._bucket.counts(), "names": len(self._index)}

    def check(self) -> None:
        self._index.check()

    def close(self) -> None:
        """Refuse new calls; a reset that is not stored yet is stored first, within its deadline. Idempotent."""
        if self._close(self._bucket.timeout):
            self._bucket.close()

    def _kv_probe_at(self) -> tuple[float, str]:
        """A deadline for a request now, and the probe's key. As `open`."""
        deadline = time.monotonic() + self._bucket.timeout
        epoch = self._current(deadline)
        if isinstance(epoch, StorageFailed):
            raise explanation(self._config, epoch)
        return deadline, self.space.kv_probe_key(epoch)

    def _usable(self, deadline: float) -> int | StorageFailed:
        """The epoch for blocks, or why there is none."""
        epoch = self._current(deadline)
        return _OTHER_KV if not isinstance(epoch, StorageFailed) and self._is_other_kv() else epoch

    def _current(self, deadline: float) -> int | StorageFailed:
        """The epoch of all processes, or why it is not known."""
        if self._is_closed:
            return StorageFailed(Outcome.CLOSED, "closed")
        if (failure := self._epoch.settle(deadline)) is not None:
            return failure
        return self._epoch.value or _EPOCH_CHANGED  # reset just now

    def _read_tables(
        self, hashes: Sequence[ChainHash], places: range, epoch: int, deadline: float
    ) -> list[int | StorageFailed]:
        """Learn the blocks of the objects that begin at these places. Returns how many each has, or its failure."""
        firsts = self.space.names([hashes[place] for place in places])
        wanted = [ObjectRange(self.space.key(first, epoch), 0, self.space.table_bytes) for first in firsts]
        learned: list[int | StorageFailed] = [StorageFailed(Outcome.IO_ERROR, "nothing came")] * len(firsts)
        for i, answer in self._bucket.fetch(wanted, deadline):
            if isinstance(answer, StorageFailed):
                learned[i] = answer
                continue
            table = self.space.parse(answer, firsts[i])
            if table is None:
                learned[i] = StorageFailed(Outcome.CHECKSUM, "no object of ours")
                continue
            learned[i] = len(names := table.names)
            if self._epoch.value == epoch:
                chain = hashes[places[i] : places[i] + len(names)]
                pairs = zip(self.space.names(chain), names, strict=False)
                same = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), len(chain))
                self._index.learn(names[0], chain[:same], table.edges)
        return learned

    def _missed(self, first: ChainHash) -> None:
        """There is no object that begins with this block."""
        missing = [place[0] for place in self._index.places([first]) if place is not None and place[1] == 0]
        self.change_feed.missed([first, *self._index.forget(missing)])

    def _located(self, found: int, failure: StorageFailed | None) -> int | Outcome:
        failed = failure is not None and failure.outcome is not Outcome.ABSENT
        self._counts.add("locate", [failure.outcome if failed and failure is not None else Outcome.OK])
        return failure.outcome if failed and failure is not None and not found else found

    def _read(
        self, hashes: Sequence[ChainHash], into: Sequence[memoryview], epoch: int, deadline: float
    ) -> list[BlockRecord | Outcome]:
        results: list[BlockRecord | Outcome] = [Outcome.ABSENT] * len(hashes)
        parts = list(self._parts(hashes))
        wanted = [
            ObjectRange(self.space.key(stored.first, epoch), stored.edges[first], stored.edges[first + len(blocks)])
            for stored, first, blocks in parts
        ]
        records = [self._arriving(part, hashes, into, epoch, results) for part in parts]
        expired: dict[StoredObject, None] = {}
        bad: dict[StoredObject, list[int]] = {}
        for i, failure in self._bucket.read_each(wanted, [each.take for each in records], deadline):
            stored, _, blocks = parts[i]
            if failure is None:
                self._index.confirm([stored])
                missing = Outcome.CHECKSUM  # the object is shorter
            elif failure.outcome is Outcome.ABSENT:
                expired[stored] = None
                missing = Outcome.EVICTED
            else:
                missing = failure.outcome
            for block in blocks[records[i].num_whole :]:
                results[block] = missing
            if damaged := [block for block in blocks if results[block] in _BAD]:
                bad.setdefault(stored, []).extend(damaged)
        self.change_feed.missed(self._index.forget([*expired, *bad]))
        for stored, blocks in bad.items():
            if self._is_another(stored, epoch, deadline):
                for block in blocks:
                    results[block] = Outcome.EVICTED
            else:
                _log.warning("[objects] %s holds other bytes than were stored; deleted", stored.first.hex())
                self._delete({stored.first}, deadline)
        return results

    def _is_another(self, stored: StoredObject, epoch: int, deadline: float) -> bool:
        """Whether other blocks were stored under its name since, as may happen after an object has expired."""
        wanted = ObjectRange(self.space.key(stored.first, epoch), 0, self.space.table_bytes)
        try:
            found = self._bucket.get(wanted, deadline)
        except StorageFailed as error:
            return error.outcome is not Outcome.CHECKSUM  # missing, or not readable now
        table = self.space.parse(found, stored.first)
        ours = self.space.names(stored.blocks)
        return table is not None and (table.edges != stored.edges or table.names[: len(ours)] != ours)

    def _parts(self, hashes: Sequence[ChainHash]) -> Iterator[_ObjectRun]:
        """Requests for the blocks known here: an object, a position in it, the blocks from there on."""
        part: _ObjectRun | None = None
        for block, place in enumerate(self._index.places(hashes)):
            if place is None:
                continue
            stored, position = place
            is_next = part is not None and part[0] is stored and part[1] + len(part[2]) == position
            if part is not None and is_next and len(part[2]) < self._part_blocks:
                part[2].append(block)
                continue
            if part is not None:
                yield part
            part = (stored, position, [block])
        if part is not None:
            yield part

    def _arriving(
        self,
        part: _ObjectRun,
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        epoch: int,
        results: list[BlockRecord | Outcome],
    ) -> ArrivingRecords:
        """The records of a part: each is verified when it is whole, on the thread that receives it."""
        (stored, position, blocks), form = part, self.space.form
        edges = stored.edges[position : position + len(blocks) + 1]
        lengths = [end - start for start, end in pairwise(edges)]

        def verify(number: int, head: bytes) -> None:
            block = blocks[number]
            if form.stored_bytes is not None and len(head) + form.stored_bytes(head) != lengths[number]:
                results[block] = Outcome.CHECKSUM
            else:
                results[block] = form.decode(head, into[block], hashes[block], epoch)

        return ArrivingRecords(lengths, form.head_bytes, [into[block] for block in blocks], verify)

    def _write(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], epoch: int, deadline: float
    ) -> tuple[int, StorageFailed | None]:
        """How many leading blocks are stored now, and why not the others."""
        hashes = [record.chain_hash for record in records]
        done = self._index.leading(hashes)
        try:
            while done < len(records):
                if time.monotonic() >= deadline:
                    return done, StorageFailed(Outcome.TIMEOUT, "not in time")
                end = min(len(records), done + MAX_BLOCKS)
                done += self._put(records[done:end], payloads[done:end], epoch, deadline)
        except StorageFailed as error:
            self._log_refusal(error)
            return done, error
        return done, None

    def _put(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], epoch: int, deadline: float) -> int:
        """Store an object, or find a stored one. Returns how many of its leading blocks are stored. StorageFailed."""
        hashes = [record.chain_hash for record in records]
        names = self.space.names(hashes)
        key = self.space.key(names[0], epoch)
        encoded = [self.space.form.encode(*each, epoch) for each in zip(records, payloads, strict=True)]
        edges = self.space.edges([len(head) + body.nbytes for head, body in encoded])
        parts: list[SentPart] = [self.space.table(names, edges)]
        for head, body in encoded:
            parts += (head, body)
        try:
            self._bucket.put(key, parts, only_new=True)
        except StorageFailed as error:
            if error.code != EXISTS:
                raise
            (learned,) = self._read_tables(hashes, range(1), epoch, deadline)
            if isinstance(learned, StorageFailed) and learned.outcome not in (Outcome.ABSENT, Outcome.CHECKSUM):
                raise learned from None
            if there := self._index.leading(hashes):
                return there
            self._bucket.put(key, parts)  # the object there is not ours
        if self._epoch.value == epoch:
            self._index.learn(names[0], hashes, edges)
        return len(records)

    def _delete(self, names: set[bytes], deadline: float) -> bool:
        """Whether all are deleted. After the deadline no request is sent: damaged objects are found again."""
        epoch = self._epoch.value
        if not names or epoch is None or self._is_closed or time.monotonic() >= deadline:
            return not names
        try:
            self._bucket.delete([self.space.key(name, epoch) for name in names])
        except StorageFailed as error:
            self._counts.add("delete", [error.outcome])
            return False
        return True

    def _log_refusal(self, refused: StorageFailed) -> None:
        if refused.code and refused.code not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(refused.code)
            _log.warning("blocks are not stored: %s", explanation(self._config, refused))

    def _forget_all(self) -> None:
        """Another epoch has begun."""
        self._index.clear()
        self.change_feed.clear()
