"""Requests, and replicas of an engine on a simulated clock: continuous batching over the pools that kvtier itself uses.

Requests come from a trace in Mooncake's form, or are made up if there is none. A replica prefills in chunks and
decodes, step by step, as an engine does. Its L1 and L2 are `SlotPool`s: two-phase stores, leases, LRU, nothing evicted
that is in use or has a resident child. Time is what the figures of `Hardware` say.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.service.events import prompt_hashes
from kvtier.service.traces import TraceLine, read_trace
from kvtier.tiers import BlockRecord, FormatError
from kvtier.tiers.hierarchy import Event, events_of
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.pool import Lease, Reservation, SlotPool

SMALL: Final = 16  # tokens of the block that stands for one of the trace's
FINGERPRINT: Final = b"routing".ljust(32, b".")
_LAST_TICK: Final = 1000  # milliseconds from the last timestamp to the end of the trace
_SESSION_BLOCKS: Final = 2
_EVERYTHING: Final = 1 << 30  # blocks told at a time


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """One request of a trace. Lengths are the trace's; its blocks are small ones, one for each of the trace's."""

    arrival: float  # seconds since the trace began
    num_tokens: int
    num_answer: int  # tokens, at least one
    blocks: Sequence[BlockRecord]  # its full ones
    sequence: Sequence[int]  # the same by Dynamo's hashes, as a router names them
    session: bytes


def read_prompts(path: Path, block_size: int, limit: int | None) -> list[TracePrompt]:
    """The first `limit` requests of a trace whose blocks have `block_size` tokens.

    ConfigError if it cannot be read, FormatError with the line and the field that is wrong.
    """
    lines = list(islice(read_trace(path), limit))
    if not lines:
        raise FormatError(f"{path}: no requests; name a trace in Mooncake's form")
    for number, line in enumerate(lines, 1):
        if not line.input_length:
            raise FormatError(f"{path}:{number}: input_length 0: a prompt has tokens")
        if not 0 <= len(line.hash_ids) * block_size - line.input_length + block_size < 2 * block_size:
            raise FormatError(
                f"{path}:{number}: hash_ids: {len(line.hash_ids)} blocks for an input_length of {line.input_length}: "
                f"not blocks of {block_size}; give a trace whose blocks are"
            )
    return prompts_of(lines, block_size)


def prompts_of(lines: Sequence[TraceLine], block_size: int) -> list[TracePrompt]:
    """Prompts of a trace's lines. Those with one timestamp arrive evenly spread over the time up to the next one."""
    records: dict[bytes, BlockRecord] = {}
    prompts = []
    for arrival, line in zip(_arrivals(lines), lines, strict=True):
        ids = line.hash_ids[: line.input_length // block_size]
        # A block's content is its number, and its name comes from its parents' too, as in an engine.
        tokens = np.tile(np.array(ids, "<u8").view("<u4").reshape(-1, 2), SMALL // 2).ravel()
        chain = TokenChain(root_hash(FINGERPRINT), SMALL)
        chain.extend(tokens)
        blocks = [
            records.setdefault(name, BlockRecord(name, chain.parent(i), chain.block_tokens(i), 0))
            for i, name in enumerate(chain.hashes)
        ]
        session = repr(line.hash_ids[:_SESSION_BLOCKS]).encode()
        sequence = prompt_hashes(tokens, SMALL)
        prompts.append(TracePrompt(arrival, line.input_length, max(1, line.output_length), blocks, sequence, session))
    return prompts


def made_up(num_requests: int, block_size: int) -> list[TracePrompt]:
    """Conversations that begin with one of four system prompts and grow by a question and an answer each turn."""
    draw = np.random.default_rng(1)
    lines: list[tuple[float, int, list[int], int]] = []
    fresh = iter(range(4, 1 << 62))
    begun = 0.0
    while len(lines) < num_requests:
        begun += float(draw.exponential(1000))
        now, ids = begun, [int(draw.integers(4))]
        for _ in range(int(draw.geometric(0.25))):
            ids = ids + list(islice(fresh, 1 + int(draw.lognormal(1.5, 1.0))))
            length = len(ids) * block_size - int(draw.integers(block_size))
            lines.append((now, length, ids, 1 + int(draw.exponential(300))))
            now += float(draw.exponential(60_000))
    lines = sorted(lines, key=lambda line: line[0])[:num_requests]
    return prompts_of(
        [TraceLine(int(when), length, answer, tuple(ids)) for when, length, ids, answer in lines], block_size
    )


def _arrivals(lines: Sequence[TraceLine]) -> Iterator[float]:
    at_once = Counter(line.timestamp for line in lines)
    ticks = sorted(at_once)
    nexts = dict([*pairwise(ticks), (ticks[-1], ticks[-1] + _LAST_TICK)])
    seen = Counter[int]()
    for line in lines:
        now = line.timestamp
        yield (now + (nexts[now] - now) * seen[now] / at_once[now]) / 1000
        seen[now] += 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a replica can do. The defaults are an 8 B model (128 KiB of KV a token) on one 80 GB GPU."""

    l1_blocks: int = 768  # of 512 tokens: 48 GiB
    l2_blocks: int = 2048  # 128 GiB of host memory
    tokens_per_second: float = 30_000.0  # of prefill, if there is no context yet
    context_that_doubles: float = 30_000.0  # tokens of context at which a token costs twice as much, by attention
    step_seconds: float = 0.008  # of any step: the weights are read once
    decode_seconds: float = 4e-8  # of a step, for each token of context that is read to decode
    load_bytes_per_second: float = 25e9  # L2 → L1
    token_bytes: int = 128 << 10
    step_tokens: int = 2048  # prefilled in one step at most
    max_running: int = 64  # requests that prefill or decode at once

    def times(self, number: int) -> "Hardware":
        """One replica that is as much as `number` of these, with all their cache in one place."""
        grow = ("l1_blocks", "l2_blocks", "tokens_per_second", "load_bytes_per_second", "step_tokens", "max_running")
        whole: dict[str, Any] = {name: getattr(self, name) * number for name in grow}
        return replace(self, **whole, decode_seconds=self.decode_seconds / number)


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    prompt: TracePrompt
    cached: dict[str, int] = field(default_factory=dict)  # blocks, by tier
    first_token: float | None = None
    done: bool = False
    # While it is served:
    loaded_at: float = 0.0
    to_prefill: int = 0  # tokens
    to_decode: int = 0
    reservations: list[Reservation] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)


class SimulatedReplica:
    """One engine with its L1 and L2. Whoever drives it calls `advance` at `wake_at`, and takes `events` after it."""

    def __init__(self, name: str, hardware: Hardware, block_size: int) -> None:
        self.name = name
        self.pools = {"l1": SlotPool(hardware.l1_blocks), "l2": SlotPool(hardware.l2_blocks)}
        self.wake_at: float | None = None
        self.num_computed = 0  # tokens of prefill
        self._hardware = hardware
        self._block_size = block_size
        self._load_seconds = block_size * hardware.token_bytes / hardware.load_bytes_per_second
        self._records: dict[str, list[BlockRecord | None]]
        self._records = {tier: [None] * pool.num_slots for tier, pool in self.pools.items()}
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: list[SimulatedRequest] = []
        self._decoding: list[SimulatedRequest] = []
        self._chunks: list[tuple[SimulatedRequest, int]] = []  # of the step under way
        self._begun = self._pace = self._link_free_at = 0.0
        self._num_steps = 0  # under way: one with chunks, or as many as change nothing
        self._num_scratch = 0
        for pool in self.pools.values():
            pool.listen()

    def submit(self, request: SimulatedRequest, now: float) -> None:
        """A request arrives: it is looked at when the step under way ends."""
        self._waiting.append(request)
        if not self._num_steps:
            self._begin(now)
        elif not self._chunks:
            self._num_steps = min(self._num_steps, max(1, ceil((now - self._begun) / self._pace)))
            self.wake_at = self._begun + self._num_steps * self._pace

    def advance(self, now: float) -> None:
        for request, num_tokens in self._chunks:
            request.to_prefill -= num_tokens
            self.num_computed += num_tokens
            if not request.to_prefill:
                self._prefilled(request, now)
        for request in self._decoding:
            if request.first_token != now:
                request.to_decode -= self._num_steps
        for request in [request for request in self._decoding if request.to_decode <= 0]:
            self._finish(request)
        self._begin(now)

    def events(self) -> Iterator[Event]:
        """What came to its tiers and left them since the last time."""
        for tier, pool in self.pools.items():
            if pool.has_changes:
                yield from events_of(tier, pool.changes(self._records[tier], _EVERYTHING))

    def holdings(self) -> dict[str, int]:
        counts = {tier: pool.counts().ready for tier, pool in self.pools.items()}
        return {tier: count for tier, count in counts.items() if count}

    def check(self) -> None:
        """AssertionError if requests left something behind, or a pool's law is broken."""
        assert not [*self._waiting, *self._prefilling, *self._decoding]
        for pool in self.pools.values():
            counts = pool.check()
            assert counts.filling == counts.leased == 0, counts

    def _begin(self, now: float) -> None:
        self._admit(now)
        hardware = self._hardware
        self._begun, self._chunks, self._num_steps = now, self._next_chunks(now), 0
        context = sum(request.prompt.num_tokens for request in self._decoding)
        self._pace = hardware.step_seconds + context * hardware.decode_seconds
        for request, num_tokens in self._chunks:
            before = request.prompt.num_tokens - request.to_prefill + num_tokens / 2
            self._pace += num_tokens * (1 + before / hardware.context_that_doubles) / hardware.tokens_per_second
        coming = min((request.loaded_at for request in self._prefilling), default=None)
        if self._chunks:
            self._num_steps = 1
        elif self._decoding:
            self._num_steps = min(request.to_decode for request in self._decoding)
            if coming is not None:
                self._num_steps = min(self._num_steps, max(1, ceil((coming - now) / self._pace)))
        self.wake_at = now + self._num_steps * self._pace if self._num_steps else coming

    def _next_chunks(self, now: float) -> list[tuple[SimulatedRequest, int]]:
        room = self._hardware.step_tokens - len(self._decoding)
        chunks = []
        for request in self._prefilling:
            if request.loaded_at <= now and room > 0:
                chunks.append((request, min(room, request.to_prefill)))
                room -= chunks[-1][1]
        return chunks

    def _admit(self, now: float) -> None:
        """First come, first served, as long as there are slots for all that the first one will need."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._hardware.max_running:
            request = self._waiting[0]
            if not self._take_slots(request):
                return
            self._waiting.popleft()
            num_loaded = request.cached["l2"]
            request.loaded_at = now
            if num_loaded:
                self._link_free_at = max(self._link_free_at, now) + num_loaded * self._load_seconds
                request.loaded_at = self._link_free_at
            request.to_prefill = request.prompt.num_tokens - sum(request.cached.values()) * self._block_size
            self._prefilling.append(request)

    def _take_slots(self, request: SimulatedRequest) -> bool:
        l1, l2, size = self.pools["l1"], self.pools["l2"], self._block_size
        names = [record.chain_hash for record in request.prompt.blocks]
        usable = names[: (request.prompt.num_tokens - 1) // size]  # at least the last token is computed
        held = l1.lease(usable)
        with l2.lease(usable[len(held) :]) as below:
            num_scratch = ceil((request.prompt.num_tokens + request.prompt.num_answer) / size) - len(names)
            scratch = [self._scratch_name() for _ in range(num_scratch)]
            filling = l1.reserve(names[len(held) :], names[len(held) - 1] if held.hashes else None)
            rest = l1.reserve(scratch) if filling is not None else None
            if filling is None or rest is None:
                if filling is not None:
                    l1.abandon(filling)
                held.release()
                return False
            request.cached = {"l1": len(held), "l2": len(below)}
        request.leases, request.reservations = [held], [filling, rest]
        return True

    def _scratch_name(self) -> bytes:
        self._num_scratch += 1
        return b"scratch".ljust(24, b".") + self._num_scratch.to_bytes(8, "big")

    def _prefilled(self, request: SimulatedRequest, now: float) -> None:
        """Its first token is out; its blocks can be found, in L1 and, written through, in L2."""
        request.first_token, request.to_decode = now, request.prompt.num_answer - 1
        self._prefilling.remove(request)
        self._decoding.append(request)
        request.leases.append(self._seal("l1", request, request.reservations[0]))
        stored = self.pools["l2"].reserve([record.chain_hash for record in request.prompt.blocks])
        if stored is not None:
            self._seal("l2", request, stored).release()

    def _seal(self, tier: str, request: SimulatedRequest, reservation: Reservation) -> Lease:
        lease = self.pools[tier].seal(reservation)
        records = {record.chain_hash: record for record in request.prompt.blocks}
        for name, slot in zip(lease.hashes, lease.slots, strict=True):
            self._records[tier][slot] = records[name]
        return lease

    def _finish(self, request: SimulatedRequest) -> None:
        self._decoding.remove(request)
        self.pools["l1"].abandon(request.reservations[1])
        for lease in request.leases:
            lease.release()
        request.done = True
