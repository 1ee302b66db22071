"""L3 in Redis or Valkey: blocks that nodes share, each record verified whole before it is used (docs/format.md)."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import redis
from redis.cluster import RedisCluster

from kvtier.tiers import (
    BlockRecord,
    ChainHash,
    ConfigError,
    Direction,
    LastRoom,
    Outcome,
    StoragePlace,
    TierUnavailable,
    require_buffers,
    require_records,
    require_space,
)
from kvtier.tiers.config import RedisConfig
from kvtier.tiers.naming import PROBE_BYTES
from kvtier.tiers.redis.lanes import Batches, BlockResult, Lane, LaneWork, command, epoch_command
from kvtier.tiers.redis.names import Keyspace, LearnedExpiries
from kvtier.tiers.redis.nodes import ClusterNodes, Nodes
from kvtier.tiers.redis.options import (
    MAX_VALUE,
    RedisClient,
    connect,
    judge,
    no_epoch,
    parse,
    read_settings,
    servers_room,
)
from kvtier.tiers.redis.wire import RedisReply, Refusal, WireError
from kvtier.tiers.reuse import ClassifiedEnd
from kvtier.tiers.shared import KnownNames, SharedEpoch, SharedTier, cut_off, form_of, format_epoch, parse_epoch

_log = logging.getLogger(__name__)

_NOT_OURS: Final = "WRONGTYPE"  # another program uses the key: as if there were none


class Epoch(SharedEpoch):
    """The epoch in a key of its own. Every batch reads it along, so other processes see a reset in their next batch.

    If a server has lost it (was emptied, evicted it), a process that knows it writes it again. A process that knows
    none begins a new one: blocks stored before are lost, as they may be from before a reset.
    """

    serves_on = True

    def __init__(self, batches: Batches, forget: Callable[[], None]) -> None:
        super().__init__(forget)
        self._batches = batches
        self._key = batches.space.epoch_key
        self._lost = False  # the servers have lost it since
        self.refusal: Refusal | None = None  # the server's last refusal to take or return it

    def learn(self, used: int, seen: RedisReply) -> bool:
        """A batch used epoch `used`, and its server had `seen`. False if the batch's results are not valid any more."""
        if isinstance(seen, Refusal) and seen.code != _NOT_OURS:  # not read, or an error
            return self.value == used
        number = parse_epoch(seen)
        with self._lock:
            if number > self._known:
                self._take(number)
            self._lost = number < self._known
            return self._agreed and self._known == used

    def _is_settled(self) -> bool:
        return self._agreed and not self._lost

    def _agree(self, deadline: float) -> None:
        """Write our epoch if it is higher than the stored one, or a new one if there is none."""
        get, exists = epoch_command(self._batches.space), command(b"EXISTS", self._key)
        seen, there = self._batches.ask(self._key, [get, exists], deadline)
        answer = seen
        known, number = self._known, parse_epoch(seen)
        if number < max(known, 1) and (not isinstance(seen, Refusal) or seen.code == _NOT_OURS):
            self.num_begun += 1
            only_new = [b"NX"] if there == 0 else []  # another process may write its own right now
            write = command(b"SET", self._key, format_epoch(known or time.time_ns() // 1000), *only_new)
            answer, seen = self._batches.ask(self._key, [write, get], deadline)
            number = parse_epoch(seen)
        if number < max(known, 1):
            self.refusal = answer if isinstance(answer, Refusal) else None
            is_full = self.refusal is not None and self.refusal.code == "OOM"
            raise WireError(Outcome.FULL if is_full else Outcome.IO_ERROR, "no epoch")
        with self._lock:
            self._lost = number < self._known  # reset meanwhile: once more
            self._take(number)


_LOCATE_WINDOW: Final = 512  # keys looked up at once
_NAME_LIFETIME: Final = 300.0  # seconds until a known name expires: servers evict without notice
_MISSING: Final = (Outcome.ABSENT, Outcome.CHECKSUM, Outcome.KEY_MISMATCH)
_BAD: Final = (Outcome.CHECKSUM, Outcome.KEY_MISMATCH)
_warned: Final[set[tuple[str, str]]] = set()  # (server, warning)


class RedisStore(SharedTier):
    """A `SharedTier` over one server or a cluster.

    It knows the names of blocks that it wrote, read or located. A batch is one pipeline per server, all servers in
    parallel, so a slow or dead server costs its own keys only. No store is tried twice. Blocks from before a reset
    stay until they expire.
    """

    def __init__(self, config: RedisConfig, space: Keyspace, nodes: Nodes, max_value: int = MAX_VALUE) -> None:
        """Over servers already reached. Use `RedisStore.open`."""
        super().__init__("redis", config, space.form, space.value_bytes)
        self.space = space
        self._config: RedisConfig = config
        self._oversized = space.value_bytes > max_value
        self._names = KnownNames[bool](min(config.ttl, _NAME_LIFETIME))
        self._batches = Batches(space, nodes, max(1, int(config.ttl * 1000)), config.in_flight)
        self._expiries = LearnedExpiries(config.ttl) if config.expiry == "learned" else None
        self._epoch: Epoch = Epoch(self._batches, self._forget_all)
        self._room = LastRoom(lambda: servers_room(nodes.clients()))

    @classmethod
    def open(cls, config: RedisConfig, fingerprint: bytes, *, slot_bytes: int, block_size: int) -> "RedisStore":
        """Reach the servers of `config.url` for the blocks of `fingerprint` (32 bytes).

        ConfigError for mistakes to fix; TierUnavailable if no server answers in time: try again later.
        """
        require_space(fingerprint, slot_bytes, block_size)
        form = form_of("redis", config, fingerprint, slot_bytes, block_size)
        space = Keyspace(config.prefix, form, slot_bytes, block_size)
        if space.value_bytes > config.in_flight:
            raise ConfigError(
                f'[redis] in_flight "{config.in_flight}": a block takes {space.value_bytes} bytes; raise it to that'
            )
        servers = parse(config)
        client = connect(config, servers)
        max_value = _check_settings(client, servers.label, space.value_bytes, by_expiry=config.expiry == "learned")
        nodes = (
            ClusterNodes(client, config.connect_timeout)
            if isinstance(client, RedisCluster)
            else Nodes(client, servers.label, config.connect_timeout)
        )
        store = cls(config, space, nodes, max_value)
        failure = store._epoch.settle(time.monotonic() + config.connect_timeout + config.deadline)
        if failure is not None:
            store.close()
            raise no_epoch(servers, store._epoch.refusal or failure.outcome)
        if config.compression != "none" and (servers.label, config.compression) not in _warned:
            _warned.add((servers.label, config.compression))
            _log.info("[redis] compression: %s, level 1, of bytes split by their place in a number", config.compression)
        return store

    # Names: no I/O.

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        return self._names.leading(hashes)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [is_there is not None for is_there in self._names.of(hashes)]

    def locate(self, hashes: Sequence[ChainHash]) -> int | Outcome:
        deadline = self._deadline(0)
        found = 0
        while found < len(hashes):
            window = hashes[found : found + _LOCATE_WINDOW]
            answers = self._batch(window, deadline, Lane.exists)
            there = next((i for i, answer in enumerate(answers) if answer is not True), len(window))
            self._names.add(window[:there], True)
            found += there
            if there < len(window):
                answer = answers[there]
                self._names.forget(window[there : there + 1])
                if answer is False or answer is Outcome.ABSENT:
                    self.change_feed.missed(window[there : there + 1])
                failure = answer if isinstance(answer, Outcome) and answer is not Outcome.ABSENT else None
                self._counts.add("locate", [failure or Outcome.OK])
                return failure if failure is not None and not found else found
        self._counts.add("locate", [Outcome.OK])
        return found

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        require_buffers(len(hashes), into, self.space.slot_bytes)
        deadline = self._deadline(len(hashes))
        answers = self._batch(hashes, deadline, lambda lane, own, report: lane.get(hashes, into, own, report))
        if set(map(type, answers)) == {BlockRecord}:
            return self._all_read(hashes, cast("list[BlockRecord]", answers))
        results = [answer if isinstance(answer, BlockRecord | Outcome) else Outcome.IO_ERROR for answer in answers]
        self._names.add([h for h, result in zip(hashes, results, strict=True) if isinstance(result, BlockRecord)], True)
        self.change_feed.seen(result for result in results if isinstance(result, BlockRecord))
        missing = [position for position, result in enumerate(results) if result in _MISSING]
        known = self._names.forget(hashes[position] for position in missing)
        self.change_feed.missed(hashes[position] for position in missing)
        for position, was_known in zip(missing, known, strict=True):
            if was_known and results[position] is Outcome.ABSENT:
                results[position] = Outcome.EVICTED
        self._counts.add("read", results)
        if bad := [h for h, result in zip(hashes, results, strict=True) if result in _BAD]:
            _log.warning("[redis] %d records are not what their keys say, first %s; deleted", len(bad), bad[0].hex())
            self._discard(bad, deadline)
        return results

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`. After a failure the rest is PARENT_FAILED or FULL, though some may have been written."""
        require_records(records, payloads, self.space.slot_bytes, self.space.block_size)
        hashes = [record.chain_hash for record in records]
        answers: Sequence[BlockResult | None] = [Outcome.UNSUPPORTED] * len(records)
        deadline = self._deadline(len(records))
        if not self._oversized:
            answers = self._batch(hashes, deadline, lambda lane, own, report: lane.set(records, payloads, own, report))
        outcomes = cut_off([answer if isinstance(answer, Outcome) else Outcome.PARENT_FAILED for answer in answers])
        self._names.add([h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.OK], True)
        self._names.forget(h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is not Outcome.OK)
        self.change_feed.seen(
            record for record, outcome in zip(records, outcomes, strict=True) if outcome is Outcome.OK
        )
        self._counts.add("write", outcomes)
        if self._expiries is not None:
            self._expiries.stored(h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.OK)
            self._set_expiries(self._expiries, deadline)
        return outcomes

    def ended(self, end: ClassifiedEnd) -> None:
        """The expiries are sent with the next writes, so that no call waits for them."""
        if self._expiries is not None:
            self._expiries.ended(end, self.holds(end.names))

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        """Delete blocks (bad or by request) for all processes. Without a server's reply they are forgotten here."""
        answers = self._discard(hashes, self._deadline(0))
        if unsure := sum(answer is not Outcome.OK for answer in answers) * (not self._is_closed):
            _log.warning("[redis] %d blocks may be there still: no server confirmed that it deleted them", unsure)

    def kv_probe(self) -> bytes | None:
        """Each epoch has its own probe: none stored before counts."""
        reply = self._kv_probe_command(b"GETRANGE", b"0", b"%d" % (PROBE_BYTES - 1))  # any value in that key
        return reply if isinstance(reply, bytes) and reply else None

    def keep_kv_probe(self, packed: bytes) -> None:
        """The server keeps it without an expiry."""
        self._kv_probe_command(b"SET", packed, b"NX")

    def _kv_probe_command(self, verb: bytes, *arguments: bytes) -> RedisReply:
        deadline = self._deadline(0)
        failure, epoch = self._epoch.settle(deadline), self._epoch.value
        if failure is not None or epoch is None:
            why = "reset at this moment" if failure is None else failure.outcome
            raise TierUnavailable(f"[redis] url: {why}; the Redis tier is off")
        key = self.space.kv_probe_key(epoch)
        try:
            [reply] = self._batches.ask(key, [command(verb, key, *arguments)], deadline)
        except WireError as error:
            raise TierUnavailable(f"[redis] url: {error}; the Redis tier is off") from error
        return reply

    def probe(self, direction: Direction) -> bool:
        """Whether a server answers and, if there is one alone, takes writes (a full one does, in principle)."""
        endpoints = self._batches.nodes.endpoints()
        deadline = self._deadline(0)
        if len(endpoints) > 1 or direction == "read":
            return any(endpoint.ping(min(self._config.deadline, deadline - time.monotonic())) for endpoint in endpoints)
        try:
            write = command(b"SET", self.space.probe_key, b"1", b"PX", b"1000")
            (reply,) = self._batches.ask(self.space.probe_key, [write], deadline)
        except WireError:
            return False
        return reply == b"OK" or (isinstance(reply, Refusal) and reply.code == "OOM")

    def stats(self) -> Mapping[str, int]:
        """As `SharedTier`, of verbs read, write, locate, expire; and names known now."""
        return {**super().stats(), "names": len(self._names)}

    def room(self) -> Sequence[StoragePlace]:
        """The memory of each server."""
        return () if self._is_closed else self._room.latest()

    def check(self) -> None:
        self._names.check()
        for endpoint in self._batches.nodes.endpoints():
            endpoint.check()

    def close(self) -> None:
        """Refuse new calls; a reset that is not stored yet is stored first, within its deadline. Idempotent."""
        if self._close(self._config.connect_timeout + self._config.deadline):
            self._batches.close()

    def _batch(self, hashes: Sequence[ChainHash], deadline: float, work: LaneWork) -> list[BlockResult | None]:
        """Each block's result of `work`, in the epoch of all processes. None: stopped before it."""
        if self._is_closed:
            return [Outcome.CLOSED] * len(hashes)
        if not hashes:
            return []
        if (failure := self._epoch.settle(deadline)) is not None:
            return [failure.outcome] * len(hashes)
        epoch = self._epoch.value
        if epoch is None:  # reset just now
            return [Outcome.EPOCH] * len(hashes)
        if self._is_other_kv():
            return [Outcome.IO_ERROR] * len(hashes)
        answers, seen = self._batches.run(hashes, epoch, deadline, work)
        return answers if self._epoch.learn(epoch, seen) else [Outcome.EPOCH] * len(hashes)

    def _discard(self, hashes: Sequence[ChainHash], deadline: float) -> Sequence[BlockResult | None]:
        """`discard` before `deadline`. After it no command is sent, and no failure of a server counted."""
        self._names.forget(hashes)
        self.change_feed.missed(hashes)
        return self._batch(hashes, deadline, Lane.unlink) if time.monotonic() < deadline else []

    def _set_expiries(self, expiries: LearnedExpiries, deadline: float) -> None:
        """Send expiries that are due, before `deadline`. A block without a reply keeps the expiry it has."""
        if time.monotonic() >= deadline or not (due := expiries.take(_LOCATE_WINDOW)):
            return
        names, milliseconds = list(due), list(due.values())
        answers = self._batch(names, deadline, lambda lane, own, report: lane.expire(milliseconds, own, report))
        missing = [name for name, answer in zip(names, answers, strict=True) if answer is Outcome.ABSENT]
        self._names.forget(missing)
        self.change_feed.missed(missing)
        self._counts.add("expire", [each if isinstance(each, Outcome) else Outcome.IO_ERROR for each in answers])

    def _all_read(self, hashes: Sequence[ChainHash], records: list[BlockRecord]) -> list[BlockRecord | Outcome]:
        """`read`'s end if all records are whole, as in nearly every batch: few steps."""
        self._names.add(hashes, True)
        self.change_feed.seen(records)
        self._counts.count("read_ok", len(records))
        return list(records)

    def _forget_all(self) -> None:
        """Another epoch has begun."""
        self._names.clear()
        self.change_feed.clear()
        if self._expiries is not None:
            self._expiries.clear()


def _check_settings(client: RedisClient, label: str, value_bytes: int, *, by_expiry: bool) -> int:
    """Warn, once, of settings that hurt; returns the longest value every server takes. ConfigError."""
    servers: list[tuple[str, redis.Redis]] = [(label, client)] if isinstance(client, redis.Redis) else []
    if isinstance(client, RedisCluster):
        servers = [(node.name, client.get_redis_connection(node)) for node in client.get_primaries()]
    max_value = MAX_VALUE
    warnings: dict[str, str] = {}
    for where, server in servers:
        found = read_settings(server)
        max_value = min(max_value, found.max_value)
        for warning in judge(found, where, value_bytes, cluster=isinstance(client, RedisCluster), by_expiry=by_expiry):
            warnings.setdefault(warning, where)
        server.connection_pool.disconnect()  # only payload connections stay open
    for warning, where in warnings.items():
        if (where, warning) not in _warned:  # a tier that attaches repeatedly logs it once
            _warned.add((where, warning))
            _log.warning("[redis] %s: %s", where, warning)
    return max_value
