"""Where requests go, and what it is worth: a trace replayed to four replicas under each routing policy.

Clocks and hardware are simulated (continuous batching, chunked prefill, L1 and L2 of given sizes, an 8 B model on one
GPU each); the policy, the prefix index, the events it hears, and the pools with their evictions are kvtier's own.
`--trace` is in Mooncake's form, and each of its blocks is one small block here: 512 tokens of cost, 16 of content.
Requests of one timestamp arrive spread over the time up to the next. The trace says nothing of the text of answers, so
only prompts are cached. The index learns of blocks a tenth of a second late.

A session is known by the first two blocks of its prompt, which is more than a cookie knows. "session cookie" sends its
first turn to the replica with the least to do, and all others to the same; "session hash" is `sticky`. The oracle is
one replica with the memory, the processors and the links of all: its cached share is about what routing can preserve,
its times are out of reach. The policy's two figures were tuned on the first third of the conversation trace. All
figures are of the rest: caches and queues are as the first third left them.
"""

import argparse
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from _eviction_traces import lines_of, made_up
from _report import RESULTS, Given, Result, Row, option, program, progress
from numpy.typing import NDArray

from kvtier.service import Chart, Line, save_png
from kvtier.service.events import AnnouncedBlocks, KVEvent, PrefixIndex, prompt_hashes
from kvtier.service.router import Candidate, Choice, Reason, choose, sticky
from kvtier.service.traces import TraceLine, read_trace
from kvtier.tiers import TIERS, BlockRecord, FormatError
from kvtier.tiers.hierarchy import Event, events_of
from kvtier.tiers.naming import TokenChain, root_hash
from kvtier.tiers.pool import Lease, Reservation, SlotPool

OURS: Final = "prefix-aware"
ORACLE: Final = "oracle: one replica"
RUNNING: Final = 1.0  # blocks of work in an answer that has begun, as the router counts
NEVER: Final = float("inf")
QUICK: Final = 300  # requests
BLOCK_SIZE: Final = 512  # tokens of the trace's blocks
EVENT_DELAY: Final = 0.1  # seconds until the index knows of a block
SMALL: Final = 16  # tokens of the block that stands for one of the trace's
FINGERPRINT: Final = b"routing".ljust(32, b".")


# requests, and replicas of an engine on a simulated clock


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """One request of a trace. Lengths are the trace's; its blocks are small ones, one for each of the trace's."""

    arrival: float  # seconds since the trace began
    num_tokens: int
    num_answer: int  # tokens, at least one
    blocks: Sequence[BlockRecord]  # its full ones
    sequence: Sequence[int]  # the same by Dynamo's hashes, as a router names them
    session: bytes


def read(trace: Path | None, limit: int | None) -> list[TracePrompt]:
    """Of a trace's first requests, or of a made-up one's.

    ConfigError if it cannot be read; FormatError with the line and the field that is wrong, also if a request alone is
    more than a replica's L1 holds, or there are too few to measure.
    """
    lines = list(islice(read_trace(trace), limit)) if trace else lines_of(made_up("chats", limit=limit))
    if not lines:
        raise FormatError(f"{trace}: no requests; name a trace in Mooncake's form")
    if len(lines) < 3:
        raise FormatError(f"{len(lines)} requests: too few to measure; give more, by --requests or another --trace")
    for number, line in enumerate(lines, 1):
        if not line.input_length:
            raise FormatError(f"{trace}:{number}: input_length 0: a prompt has tokens")
        if not 0 <= len(line.hash_ids) * BLOCK_SIZE - line.input_length + BLOCK_SIZE < 2 * BLOCK_SIZE:
            raise FormatError(
                f"{trace}:{number}: hash_ids: {len(line.hash_ids)} blocks for an input_length of {line.input_length}: "
                f"not blocks of {BLOCK_SIZE}; give a trace whose blocks are"
            )
        if line.input_length + max(1, line.output_length) > (HARDWARE.l1_blocks - 1) * BLOCK_SIZE:
            told = f"more than a replica's {HARDWARE.l1_blocks} blocks of L1; leave it out"
            raise FormatError(f"{trace}:{number}: input_length {line.input_length}: with its answer {told}")
    return prompts_of(lines, BLOCK_SIZE)


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
        session = repr(line.hash_ids[:2]).encode()
        sequence = prompt_hashes(tokens, SMALL)
        prompts.append(TracePrompt(arrival, line.input_length, max(1, line.output_length), blocks, sequence, session))
    return prompts


def _arrivals(lines: Sequence[TraceLine]) -> Iterator[float]:
    at_once = Counter(line.timestamp for line in lines)
    ticks = sorted(at_once)
    nexts = dict([*pairwise(ticks), (ticks[-1], ticks[-1] + 1000)])
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
                yield from events_of(tier, pool.changes(self._records[tier], 1 << 30))

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


HARDWARE: Final = Hardware()


# policies, and the router

Policy = Callable[[Sequence[Candidate], TracePrompt, int], Choice]


def prefix_aware(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    return choose(candidates, len(prompt.blocks), turn=turn)


def round_robin(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    able = [candidate.name for candidate in candidates if candidate.can_take]
    return Choice(able[turn % len(able)] if able else None, Reason.EQUAL, ())


def least_load(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
    return choose(candidates, len(prompt.blocks), weights={}, crowd=NEVER, turn=turn)


def cookies() -> Policy:
    homes: dict[bytes, str | None] = {}

    def stay(candidates: Sequence[Candidate], prompt: TracePrompt, turn: int) -> Choice:
        if prompt.session not in homes:
            homes[prompt.session] = least_load(candidates, prompt, turn).name
        return Choice(homes[prompt.session], Reason.SESSION, ())

    return stay


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    OURS: lambda: prefix_aware,
    "session cookie": cookies,
    "session hash": lambda: lambda candidates, prompt, turn: sticky(candidates, prompt.session),
    "least load": lambda: least_load,
    "round robin": lambda: round_robin,
}


class SimulatedRouter:
    """The router's half: the index, the work given and not finished, the policy."""

    def __init__(self, names: Sequence[str], policy: Policy) -> None:
        self.index, self._policy, self._turn = PrefixIndex(SMALL), policy, 0
        self._given: dict[str, list[tuple[SimulatedRequest, float]]] = {name: [] for name in names}

    def choose(self, request: SimulatedRequest) -> str:
        prefixes = self.index.matches(request.prompt.sequence)
        candidates = []
        for name, given in self._given.items():
            load = sum(blocks if each.first_token is None else RUNNING for each, blocks in given)
            candidates.append(Candidate(name, prefixes.get(name, {}), load, num_requests=len(given)))
        choice = self._policy(candidates, request.prompt, self._turn)
        assert choice.name is not None
        self._turn += 1
        cached = sum(prefixes.get(choice.name, {}).values())
        self._given[choice.name].append((request, max(len(request.prompt.blocks) - cached, RUNNING)))
        return choice.name

    def finished(self, name: str) -> None:
        self._given[name] = [(request, blocks) for request, blocks in self._given[name] if not request.done]


def replay(prompts: Sequence[TracePrompt], policy: Policy, fleet: Sequence[SimulatedReplica]) -> list[SimulatedRequest]:
    """Send all prompts through a router to a fleet. Checks everybody's books at the end."""
    replicas = {replica.name: replica for replica in fleet}
    router = SimulatedRouter(list(replicas), policy)
    blocks = {name: AnnouncedBlocks(FINGERPRINT) for name in replicas}
    told: deque[tuple[float, str, list[KVEvent]]] = deque()
    requests = [SimulatedRequest(prompt) for prompt in prompts]
    coming = deque(requests)
    while True:
        arrival = coming[0].prompt.arrival if coming else NEVER
        heard = told[0][0] if told else NEVER
        ending = min(fleet, key=lambda replica: NEVER if replica.wake_at is None else replica.wake_at)
        ended = NEVER if ending.wake_at is None else ending.wake_at
        now = min(arrival, heard, ended)
        if now == NEVER:
            break
        if heard == now:
            _, name, events = told.popleft()
            for event in events:
                router.index.apply(name, event)
        elif ended == now:
            ending.advance(now)
            router.finished(ending.name)
            events = [event for each in ending.events() for event in blocks[ending.name].apply(each)]
            if events:
                told.append((now + EVENT_DELAY, ending.name, events))
        else:
            request = coming.popleft()
            replicas[router.choose(request)].submit(request, now)
    for replica in fleet:
        replica.check()
        held = {TIERS[tier].medium: count for tier, count in replica.holdings().items()}
        assert router.index.holdings(replica.name) == held, "the index is not what the replica holds"
    router.index.check()
    assert not router.index.counts, router.index.counts
    return requests


class Figures(NamedTuple):
    row: dict[str, float]
    ttft: NDArray[np.float64]  # seconds, of each request


def run(prompts: Sequence[TracePrompt], name: str, policy: Policy, replicas: int, *, whole: bool = False) -> Figures:
    """Replay to the replicas, or to the one that is all of them; figures of all but the first third."""
    progress(name)
    hardware = HARDWARE.times(replicas) if whole else HARDWARE
    fleet = [SimulatedReplica(f"replica-{i}", hardware, BLOCK_SIZE) for i in range(1 if whole else replicas)]
    requests = replay(prompts, policy, fleet)[len(prompts) // 3 :]
    ttft = np.array([(request.first_token or NEVER) - request.prompt.arrival for request in requests])
    tokens = sum(request.prompt.num_tokens for request in requests)
    in_l1, in_l2 = (sum(each.cached[m] for each in requests) * BLOCK_SIZE / tokens for m in ("l1", "l2"))
    row = {"cached": in_l1 + in_l2, "in L1": in_l1, "in L2": in_l2}
    row |= {f"TTFT p{q} s": float(np.percentile(ttft, q)) for q in (50, 90, 99)}
    return Figures(row | {"TTFT mean s": float(ttft.mean())}, ttft)


def chart(runs: Mapping[str, Figures]) -> Chart:
    shares, lines = np.linspace(0, 100, 201), list[Line]()
    for name, each in runs.items():
        label = f"{name}, {100 * each.row['cached']:.1f} % of prompt tokens cached"
        lines.append(Line(label, np.percentile(each.ttft, shares).tolist(), shares.tolist(), name == ORACLE))
    return Chart("Simulated replicas", "time to first token, s", "% of requests within", lines, log_x=True)


def _whole(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")
    return int(text)


@program(
    option("--trace", type=Path, help="JSON lines in Mooncake's form, .gz or not; without: made up"),
    option("--requests", type=_whole, help="only the first so many"),
    option("--replicas", type=_whole, default=4, help="of the engine (4)"),
)
def main(args: Given) -> Result:
    prompts = read(args.trace, min(args.requests or QUICK, QUICK) if args.quick else args.requests)
    setup: Row = {"trace": args.trace.name if args.trace else "made up", "replicas": args.replicas}
    setup |= {"measured": f"requests {len(prompts) // 3 + 1} to {len(prompts)}", "event delay s": EVENT_DELAY}
    setup |= {"L1 blocks": HARDWARE.l1_blocks, "L2 blocks": HARDWARE.l2_blocks}
    runs = {name: run(prompts, name, make(), args.replicas) for name, make in POLICIES.items()}
    runs[ORACLE] = run(prompts, ORACLE, prefix_aware, args.replicas, whole=True)
    best = runs[ORACLE].row["cached"]
    rows = [{"policy": name, **each.row, "of oracle": each.row["cached"] / best} for name, each in runs.items()]
    if args.save:
        save_png(RESULTS / "routing.png", [chart(runs)])
    return rows, [], setup
