"""Both connector sides over a hierarchy and an L1 in numpy; the test ends the copies."""

import time
from dataclasses import dataclass

import numpy as np
from doubles import BLOCK_SIZE, SLOT_BYTES, FakeClock, MemoryTier, chain_of, hierarchy_of, payload_of, store
from manual_copies import ManualCopyStream

from kvtier.connector.plan import StepPlan
from kvtier.connector.scheduler import ConnectorUpdate, SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, LoadPolicy
from kvtier.tiers.naming.chain import TokenChain

NUM_LAYERS = 4
LAYER_BYTES = SLOT_BYTES // NUM_LAYERS


@dataclass
class Request:
    request_id: str
    chain: TokenChain
    num_tokens: int


def request_of(num_blocks: int, name: str = "a", first_token: int = 0) -> Request:
    """A prompt of `num_blocks` full blocks and one token more."""
    return Request(name, chain_of(num_blocks, first_token), num_blocks * BLOCK_SIZE + 1)


class Bench:
    """A hierarchy, an L1 of sixteen blocks in numpy, both sides, and a stream the test completes."""

    def __init__(
        self,
        tier: MemoryTier | None = None,
        clock: FakeClock | None = None,
        slots: int = 32,
        load_policy: LoadPolicy = "load",
        partial_blocks: bool = False,
    ) -> None:
        settings = HierarchySettings(prefetch_deadline=0.5)
        self.tier = tier
        self.hierarchy = hierarchy_of(slots, tier, settings, clock or time.monotonic, load_policy=load_policy)
        self.l1 = np.zeros((16, NUM_LAYERS, LAYER_BYTES), np.uint8)
        self.stream = ManualCopyStream(self.l1, self.hierarchy.host.region)
        self.scheduler = SchedulerSide(self.hierarchy, partial_blocks=partial_blocks)
        self.worker = WorkerSide(self.stream, NUM_LAYERS, LAYER_BYTES, deadline=0.01)

    def step(self) -> StepPlan:
        """One scheduling step: the plan crosses as bytes, as it would between processes."""
        plan = StepPlan.decode(self.scheduler.build_plan().encode())
        self.worker.start_load(plan)
        self.worker.start_store(plan)
        return plan

    def update(self) -> ConnectorUpdate:
        return self.scheduler.update(self.worker.poll())

    def load(self, request: Request, blocks: list[int], *, layerwise: bool = False) -> None:
        """Store a request's chain in L2, and plan to load all of it into these L1 blocks."""
        store(self.hierarchy, request.chain)
        promised = len(request.chain.hashes) * BLOCK_SIZE
        assert self.scheduler.lookup(request, 0) == promised
        assert self.scheduler.allocated(request.request_id, blocks, promised, layerwise=layerwise) == promised

    def keep(self, request: Request, blocks: list[int]) -> None:
        """Compute a request from its start into these L1 blocks, and have them stored."""
        self.scheduler.admit(request)
        self.compute(request, 0, blocks)
        self.scheduler.store(request.request_id, 0, blocks)

    def compute(self, request: Request, first: int, block_ids: list[int]) -> None:
        """What the engine's forward does: fill L1 blocks with the KV of their tokens."""
        for i, block in enumerate(block_ids):
            self.l1[block] = np.frombuffer(payload_of(request.chain.hashes[first + i]), np.uint8).reshape(
                NUM_LAYERS, -1
            )

    def close(self) -> None:
        self.scheduler.update(self.worker.close(0.01))
        self.scheduler.close()
        assert self.hierarchy.drain(60)
        self.hierarchy.check()
        counts = self.hierarchy.host.pool.counts()
        assert (counts.leased, counts.filling, counts.quarantined) == (0, 0, 0)
        assert self.hierarchy.host.pool.num_leaked == 0
        self.hierarchy.close()
