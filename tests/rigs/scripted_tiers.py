"""Tiers below L1 on a clock of the story, and an engine's scheduler over them: how long a first token takes.

One slow tier delivers so many bytes a second, in the order in which it was asked. Copies to L1 take no time.
"Computing" is believing, and takes what a formula says.
"""

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from doubles import FakeClock

from kvtier.connector.plan import WorkerReport
from kvtier.connector.scheduler import SchedulerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.requests import SampledToken, SamplingParams
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Batch
from kvtier.engine.sequence import Sequence as Live
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution, Claim, Overlap, Pending, Wanted
from kvtier.tiers.hierarchy.lower_tier import LoadPolicy, Rates, Span
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.pool.core import Lease
from kvtier.tiers.pool.eviction_log import Causes
from kvtier.tiers.reuse import RequestEnd
from kvtier.tiers.tier import ChainHash, Outcome

BLOCK: Final = 16
BLOCK_BYTES: Final = 1000
ROOT: Final = root_hash(b"f" * 32)
TICK: Final = 0.001  # seconds an engine waits at least that has nothing to compute …
WAIT: Final = 0.05  # … and at most, if nothing has arrived


class ScriptedTiers:
    """`CacheTiers` of one slow tier that holds every block but those that are `lost`."""

    def __init__(self, clock: FakeClock, rates: Rates, bytes_per_second: float) -> None:
        self.metrics = Metrics()
        self.region: Any = SimpleNamespace(region_id=1, slot_bytes=BLOCK_BYTES)
        self.epoch = 0
        self.lost: set[ChainHash] = set()  # found when asked, not there when read
        self.stalled = False  # nothing asked from now on arrives
        self.num_slots = 1 << 31
        self.max_waiting = self.num_slots // 2  # blocks that claims may be for
        self.num_leased = 0
        self.asked: list[tuple[Overlap, int]] = []  # of each claim, and how many blocks
        self._clock, self._rates, self._rate = clock, rates, bytes_per_second
        self._free_at = clock()
        self._due: dict[Claim, tuple[float, int]] = {}  # when it has arrived, and how many blocks of it

    def submit(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        overlap: Overlap = Overlap.NONE,
        trace: object = None,
    ) -> Claim:
        claim = Claim(list(hashes), parent, num_l1, block_size, overlap)
        self.asked.append((overlap, len(hashes) - num_l1))
        num_blocks = len(hashes) - num_l1
        claim.found = Attribution(len(hashes), l1=num_l1, file=num_blocks)
        needed = {"file": num_blocks * BLOCK_BYTES}
        span = Span(num_l1 * block_size, num_blocks * block_size, needed)
        if overlap is Overlap.ALLOWED:
            claim.split = self._rates.split_point(span, block_size)
        if claim.split is not None:
            return claim
        if overlap is not Overlap.BACK and not self._rates.worth_loading(span):
            claim.refusal = Outcome.RECOMPUTE
            return claim
        if sum(len(each.hashes) for each in self._due) + num_blocks > self.max_waiting:
            claim.refusal = Outcome.NO_SLOT
            return claim
        whole = next((i for i, name in enumerate(hashes[num_l1:]) if name in self.lost), num_blocks)
        self._free_at = max(self._free_at, self._clock()) + num_blocks * BLOCK_BYTES / self._rate
        self._due[claim] = (float("inf") if self.stalled else self._free_at, whole)
        return claim

    def poll(self, claim: Claim) -> int | Pending:
        due, num_blocks = self._due.get(claim, (0.0, 0))
        return num_blocks if self._clock() >= due else PENDING

    def lease(self, claim: Claim) -> Lease:
        _, num_blocks = self._due.pop(claim)
        self.num_leased += 1

        def released(lease: Lease, leaked: bool) -> None:
            assert not leaked
            self.num_leased -= lease.on_release is not None
            lease.on_release = None

        names = claim.hashes[claim.num_l1 : claim.num_l1 + num_blocks]
        return Lease(names, list(range(num_blocks)), [0] * num_blocks, released)

    def cancel(self, claim: Claim) -> None:
        self._due.pop(claim, None)

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT, causes: Causes | None = None) -> None:
        self.metrics.looked_up(found, missing)

    is_late = is_short = sends_later = offers_again = False

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[None]:
        return [None] * len(wanted)

    @property
    def wanting(self) -> dict[str, str]:
        return {}

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """The story says how fast compute is."""

    def ended(self, end: RequestEnd) -> None:
        """The story keeps every block as long as it says."""

    def tick(self) -> None:
        """Nothing is late here."""

    def lapse(self) -> None:
        """Nothing comes of what was asked for so far."""
        self._due = dict.fromkeys(self._due, (0.0, 0))

    @property
    def next_due(self) -> float:
        """When the next claim will have arrived."""
        return min((due for due, _ in self._due.values() if due > self._clock()), default=0.0)

    @property
    def num_open(self) -> int:
        """Claims that nobody took or cancelled."""
        return len(self._due)


class ScriptedEngine:
    """A scheduler, a prompt whose blocks are all held, and seconds that pass as steps compute."""

    def __init__(
        self,
        policy: LoadPolicy,
        num_tokens: int,
        load_seconds: float,
        cost: Callable[[int, int], float],
        believed: float = 1.0,
        **options: object,
    ) -> None:
        """Loading all of a prompt of `num_tokens` takes `load_seconds`; a chunk takes `cost(start, end)`.

        The tier is taken for `believed` times as fast as it is.
        """
        self.clock = FakeClock()
        rate = num_tokens // BLOCK * BLOCK_BYTES / load_seconds
        self.rates = Rates(policy)
        self.rates.loaded("file", int(rate * 1000), 1000.0 / believed)
        for start in itertools.chain.from_iterable([range(0, num_tokens, 256)] * 4):
            self.rates.computed(256, cost(start, start + 256), start + 128.0)
        self.tiers = ScriptedTiers(self.clock, self.rates, rate)
        self.side = SchedulerSide(self.tiers, clock=self.clock)  # type: ignore[arg-type] # what a scheduler calls
        config = EngineConfig(block_size=BLOCK, **{"max_num_batched_tokens": 512, **options})  # type: ignore[arg-type]
        self.pool = BlockPool(KVShape(1, 1, 1, BLOCK, "float32"), num_tokens // BLOCK * 2 + 8)
        self.scheduler = Scheduler(config, self.pool, self.side)
        self.cost = cost
        self.chunks: list[tuple[str, int, int]] = []  # what was computed
        self.first_tokens: dict[str, float] = {}
        self.num_tokens = num_tokens
        self._report = WorkerReport()
        self.copies_fail = False

    def add(self, name: str = "a", num_tokens: int | None = None, first_token: int = 0) -> Live:
        """A request: its held blocks and one token more."""
        tokens = list(range(first_token, first_token + (num_tokens or self.num_tokens) + 1))
        chain = TokenChain(ROOT, BLOCK)
        chain.extend(tokens)
        live = Live(name, tokens, SamplingParams(max_tokens=1), chain, len(self.chunks))
        self.scheduler.add(live)
        return live

    def step(self) -> None:
        """One step, and the time it takes; copies it planned have ended before the next one."""
        batch = self.scheduler.schedule(self._report)
        ops = tuple(op.op_id for op in [*batch.plan.loads, *batch.plan.stores])
        self._report = WorkerReport(failed=ops) if self.copies_fail else WorkerReport(finished=ops)
        self.chunks += [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in batch.chunks]
        computing = sum(self.cost(chunk.start, chunk.end) for chunk in batch.chunks)
        self.clock.advance(computing or min(max(TICK, self.tiers.next_due - self.clock()), WAIT))
        samples = [SampledToken(7) for chunk in batch.chunks if chunk.samples]
        for output in self.scheduler.postprocess(batch, samples):
            self.first_tokens[output.request_id] = self.clock()
        self.pool.check()

    def report_failed(self, batch: Batch) -> None:
        """What a step that raised had planned to load."""
        self._report = WorkerReport(failed=tuple(op.op_id for op in batch.plan.loads))

    def missed(self, reason: Outcome) -> float:
        """Blocks counted under this reason."""
        return self.tiers.metrics.snapshot().get(f'kvtier_miss_total{{reason="{reason}"}}', 0.0)

    def run(self) -> float:
        """Step until all is done; seconds since the start."""
        start = self.clock()
        for _ in range(1_000_000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        seconds = self.clock() - start
        self.end()
        return seconds

    def end(self) -> None:
        """Nothing lives, nothing leaked."""
        while self.scheduler.has_copies:
            self.step()
        assert not self.scheduler.has_unfinished
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert (self.tiers.num_open, self.tiers.num_leased) == (0, 0)
        assert self.side.idle
