"""Scheduler, connector and hierarchy together, without a model: the KV of a token is a digest of all tokens before it.

A forward checks every byte it attends over and writes what is right. Whatever copies, tiers, requests and the operator
do meanwhile, wrong KV is never attended over, no answer is wrong, nobody waits for ever and nothing leaks.
"""

import hashlib
import random
import time
from typing import Any

import numpy as np
import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, MemoryTier, hierarchy_of
from extent import brief
from manual_copies import ManualCopyStream
from numpy.typing import NDArray

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import start_copies
from kvtier.engine.requests import FinishReason, SampledToken, SamplingParams
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Batch, Chunk
from kvtier.engine.sequence import Sequence as Live
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.copies.transfer import CopyEvent
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, LoadPolicy, PortSettings
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.naming.identity import KVShape

NUM_LAYERS = 4
LAYER_BYTES = SLOT_BYTES // NUM_LAYERS
TOKEN_BYTES = LAYER_BYTES // BLOCK_SIZE
KV_BYTES = 16  # of a token in a layer that are looked at
ROOTS = {salt: root_hash(b"f" * 32, cache_salt=salt) for salt in (None, "a")}
NUM_REQUESTS = 25
STALL = 60.0  # seconds without a computed token while requests live


def kv_of(salt: str | None, tokens: list[int]) -> NDArray[np.uint8]:
    """[token, layer, byte]: what any wrong token before it, order, tenant or layer changes."""
    state = hashlib.blake2b(repr(salt).encode(), digest_size=NUM_LAYERS * KV_BYTES)
    rows = []
    for token in tokens:
        state.update(token.to_bytes(2, "little"))
        rows.append(state.digest())
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, NUM_LAYERS, KV_BYTES)


def next_token(salt: str | None, tokens: list[int]) -> int:
    """What the model says: of few tokens, so that answers share blocks."""
    return 1 + hashlib.blake2b(repr((salt, tokens)).encode()).digest()[0] % 7


class FlakyStream(ManualCopyStream):
    """Copies end when the dice say so, now and then badly: their targets are then rubbish."""

    def __init__(self, l1: NDArray[np.uint8], region: Any, dice: random.Random) -> None:
        super().__init__(l1, region)
        self._l1, self._slots, self._dice = l1, region, dice

    def progress(self) -> None:
        if not self.num_pending:
            return
        if self._dice.random() > 0.1:
            self.complete_next()
            return
        task = self.take()
        rubbish = self._dice.randrange(256)
        if task.direction == "load":
            self._l1[task.copies.device_blocks] = rubbish
        else:
            for slot in task.copies.host_slots.tolist():
                self._slots.slot(slot)[:] = bytes([rubbish]) * SLOT_BYTES
        self._end(task, "the dice failed this copy")

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        while not event.done() and self._dice.random() < 0.95:
            self.progress()
        return event.done()


class UncheckedTier(MemoryTier):
    """Its bytes are digests, not those `doubles` derives from keys."""

    def check(self) -> None:
        pass


class World:
    """One throw of the dice: sizes, policies, and everything that happens."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.num_blocks = dice.choice([6, 9, 14, 24])
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=dice.choice([4, 8, 17]),
            max_num_seqs=dice.choice([1, 3, 4]),
            preemption=dice.choice(["recompute", "offload"]),
            loading=dice.choice(["async", "layerwise"]),
            max_passed_over=dice.choice([0, 2, 8]),
            store_generated=dice.random() < 0.7,
        )
        self.tier = UncheckedTier()
        settings = HierarchySettings(
            write_policy=dice.choice(["write_through", "write_back"]),
            admit_after=dice.choice([1, 1, 2]),
            prefetch_deadline=dice.choice([0.0005, 0.05, 0.5]),
            lease_deadline=dice.choice([0.001, 0.01, 60.0]),
        )
        patience = PortSettings(deadline=1.0, failures=2, retry_after=0.005, num_threads=2)
        slots = dice.choice([8, 16, 48])
        policy: LoadPolicy = "load" if dice.random() < 0.5 else "auto"
        self.hierarchy = hierarchy_of(slots, self.tier, settings, load_policy=policy, port_settings=patience)
        self.pool = BlockPool(KVShape(1, 1, 1, BLOCK_SIZE, "float32"), self.num_blocks)
        self.l1 = np.zeros((self.num_blocks, NUM_LAYERS, LAYER_BYTES), np.uint8)
        self.stream = FlakyStream(self.l1, self.hierarchy.host.region, dice)
        self.side = SchedulerSide(self.hierarchy)
        self.worker = WorkerSide(self.stream, NUM_LAYERS, LAYER_BYTES, deadline=0.0)
        self.scheduler = Scheduler(self.config, self.pool, self.side)
        self.live: dict[str, Live] = {}
        self.salts: dict[str, str | None] = {}
        self.ended: dict[str, tuple[list[int], int, str | None]] = {}  # all tokens, how many were asked, the salt
        self.num_added = 0

    def add(self) -> None:
        """A request: fresh, sharing a beginning, or the next turn of one that ended."""
        dice, room = self.dice, self.num_blocks * BLOCK_SIZE
        length = dice.randrange(1, room)
        common = [dice.choice([10, 20])] * dice.choice([length, length, length // 2])
        tokens = (common + [dice.randrange(1, 9) for _ in range(length)])[:length]
        if self.ended and dice.random() < 0.4:
            before, *_ = self.ended[dice.choice(list(self.ended))]
            tokens = [*before, dice.randrange(1, 9)][: room - 1]
        name = f"r{dice.randrange(12)}"
        if name in self.live or name in self.scheduler.live or name in self.scheduler.orphans:
            return
        salt = dice.choice([None, None, None, "a"])
        params = SamplingParams(max_tokens=dice.randrange(1, min(room - len(tokens), 20) + 1), ignore_eos=True)
        chain = TokenChain(ROOTS[salt], BLOCK_SIZE)
        chain.extend(tokens)
        self.live[name] = Live(name, list(tokens), params, chain, self.num_added)
        self.salts[name] = salt
        self.num_added += 1
        self.scheduler.add(self.live[name])

    def step(self) -> bool:
        """As `Engine` steps; now and then the forward raises. Whether anything was computed."""
        batch = self.scheduler.schedule(self.worker.poll())
        assert batch.num_tokens <= self.config.token_budget
        assert len(self.scheduler.running) + len(self.scheduler.loading) <= self.config.max_num_seqs
        if self.dice.random() < 0.03:  # nothing was started
            self.scheduler.give_up(batch, self.worker.unstarted(batch.plan))
            return True
        self.worker.start_load(batch.plan)
        if batch.chunks and self.dice.random() < 0.03:
            self.scheduler.give_up(batch, self.worker.unstarted(batch.plan))
            return True
        wrong = self.forward(batch)
        self.worker.start_store(batch.plan)
        batch.arrived = self.worker.arrived() and batch.arrived if batch.chunks else True
        for chunk, where in wrong:
            assert chunk.sequence.num_loading, f"attended over wrong KV at {where}"
            assert not batch.arrived, f"attended over KV that never came, at {where}"
        samples = [self.sample(chunk) for chunk in batch.chunks if chunk.samples]
        for output in self.scheduler.postprocess(batch, samples):
            if output.finish_reason is not None:
                ended = self.live.pop(output.request_id)
                if output.finish_reason is not FinishReason.ABORT:
                    salt = self.salts[output.request_id]
                    self.ended[output.request_id] = (list(ended.token_ids), ended.num_prompt_tokens, salt)
        if batch.plan.loads:
            self.scheduler.take_in(self.worker.poll())
        return bool(batch.chunks)

    def sample(self, chunk: Chunk) -> SampledToken:
        return SampledToken(next_token(self.salts[chunk.sequence.request_id], chunk.sequence.token_ids))

    def forward(self, batch: Batch) -> list[tuple[Chunk, tuple[int, int]]]:
        """Layer by layer: look at all KV before the chunk, write the chunk's own; where something wrong was seen."""
        wrong = []
        places = self.l1.reshape(self.num_blocks, NUM_LAYERS, BLOCK_SIZE, TOKEN_BYTES)[..., :KV_BYTES]  # a view
        seen = []
        for chunk in batch.chunks:
            positions, table = np.arange(chunk.end), np.array(chunk.sequence.block_table)
            right = kv_of(self.salts[chunk.sequence.request_id], chunk.sequence.token_ids[: chunk.end])
            seen.append((chunk, table[positions // BLOCK_SIZE], positions % BLOCK_SIZE, right))
        for layer in range(NUM_LAYERS if batch.chunks else 0):
            batch.arrived &= self.worker.wait_layer(layer)
            for chunk, blocks, offsets, right in seen:
                start = chunk.start
                is_right = places[blocks[:start], layer, offsets[:start]] == right[:start, layer]
                wrong += [(chunk, (int(position), layer)) for position in np.flatnonzero(~is_right.all(axis=1))]
                places[blocks[start:], layer, offsets[start:]] = right[start:, layer]
        return wrong

    def disturb(self) -> None:
        """Aborts, a disk that breaks and works again, blocks lost below, an emptied L1."""
        dice = self.dice
        if self.live and dice.random() < 0.02:
            self.scheduler.abort(dice.choice(list(self.live)))
        if dice.random() < 0.02:
            self.tier.broken = not self.tier.broken
        if self.tier.blocks and dice.random() < 0.03:
            self.tier.discard([dice.choice(list(self.tier.blocks))])
        if dice.random() < 0.02:
            self.pool.reset()
        for _ in range(dice.randrange(4)):
            self.stream.progress()

    def run(self) -> None:
        """Until every request has ended, and then the laws."""
        num_left, moved = NUM_REQUESTS, time.monotonic()
        while num_left or self.scheduler.has_unfinished:
            if num_left and self.dice.random() < 0.4:
                self.add()
                num_left -= 1
            self.disturb()
            if self.step():
                moved = time.monotonic()
            elif not self.stream.num_pending:
                time.sleep(0.0005)  # a lookup waits for the tier
            assert time.monotonic() - moved < STALL or not self.live, "nobody moves"
        self.tier.broken = False
        while self.stream.num_pending or self.scheduler.has_copies:
            start_copies(self.worker, self.scheduler.flush())
            self.stream.progress()
            self.scheduler.take_in(self.worker.poll())
        self.end()

    def end(self) -> None:
        for tokens, num_asked, salt in self.ended.values():
            for position in range(num_asked, len(tokens)):
                assert tokens[position] == next_token(salt, tokens[:position])
        self.pool.check()
        assert self.pool.num_free_blocks == self.num_blocks
        assert self.side.idle
        assert self.hierarchy.drain(60)
        deadline = time.monotonic() + 60
        while not self.hierarchy.promoter.idle and time.monotonic() < deadline:
            self.hierarchy.tick()
            time.sleep(0.001)
        self.hierarchy.check()
        counts = self.hierarchy.host.pool.counts()
        assert (counts.leased, counts.filling, counts.quarantined) == (0, 0, 0)
        assert self.hierarchy.host.pool.num_leaked == 0
        self.hierarchy.close()


@pytest.mark.parametrize("first_seed", range(0, brief(12, 48), 6))
def test_whatever_happens_no_wrong_kv_no_stall_no_leak(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 6):
        World(seed).run()
