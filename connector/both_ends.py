"""The scheduler side of an engine that can compute a request's front while its back is loaded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtier.connector.back import Back, Group
from kvtier.connector.partial import LEAST
from kvtier.connector.plan import CopyOp, StepPlan, WorkerReport
from kvtier.connector.scheduler import ConnectedRequest, ConnectorUpdate, Request, SchedulerSide, StoringOp
from kvtier.connector.tail_chain import TailChain
from kvtier.tiers import BlockRecord, Outcome
from kvtier.tiers.hierarchy import CacheTiers, Ends, Pending, Wanted
from kvtier.tiers.pool import Lease


@dataclass(slots=True)
class _GroupCopy:
    op: CopyOp
    back: Back
    group: Group
    lease: Lease
    planned_at: float


class BothEndsSide(SchedulerSide):
    """As `SchedulerSide`; a request asked for while `computes_alone` may come to its blocks from both ends.

    Such a request has a `Back` from its lookup on. The engine asks that in each step how far it may compute, and calls
    `leave` when it is over or the request loses its blocks. What is copied goes on then: `writing` names the blocks
    that a plan's copies write to, and an update names each in `released`.
    """

    def __init__(
        self, tiers: CacheTiers, *, partial_blocks: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(tiers, partial_blocks=partial_blocks)
        self.computes_alone = False  # nobody but the request that is looked up wants the compute
        self.writing: list[int] = []  # L1 blocks that copies of the last plan fill, besides those of `allocated`
        self._clock = clock
        self._backs: dict[str, Back] = {}
        self._copies: dict[int, _GroupCopy] = {}

    def lookup(self, request: Request, num_computed_tokens: int, in_part: int = 0) -> int | Pending:
        """As `SchedulerSide.lookup`. Where both ends are worth it, the number is of what the front begins with."""
        self._ends = Ends.BOTH if self.computes_alone else Ends.FRONT
        answer = super().lookup(request, num_computed_tokens, in_part)
        request_id, claim = request.request_id, self._requests[request.request_id].claim
        if claim is not None and claim.meeting is not None and request_id not in self._backs:
            chain = request.chain
            self._backs[request_id] = Back(self.tiers, chain.hashes, chain.parent(0), claim, self._clock)
        return answer

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        """As `SchedulerSide.allocated`; from now on its back is copied to these blocks, too."""
        known = self._requests[request_id]
        loading = super().allocated(request_id, block_ids, num_external_tokens, layerwise=layerwise)
        if (back := self._backs.get(request_id)) is not None:
            back.seat(block_ids, known.asked + -(-loading // known.request.chain.block_size))
        return loading

    def back(self, request_id: str) -> Back | None:
        """What is loaded behind this request's front; None: nothing."""
        return self._backs.get(request_id)

    def leave(self, request_id: str) -> int:
        """Ask no more for the back of a request. Returns how many held blocks its front has computed. Idempotent."""
        if (back := self._backs.pop(request_id, None)) is None:
            return 0
        back.forget()
        if back.num_skipped:
            self.tiers.metrics.missed(Outcome.SKIPPED, back.num_skipped)
        return back.num_skipped

    def store_tail(self, request_id: str, tail: BlockRecord, block_id: int) -> bool:
        """A request ends with this block unfinished: copy it to L2, as `store` does with whole ones.

        False, and the block is not read: nobody would ask for so few tokens, or for a part of a block at all.
        """
        request = self._requests[request_id].request
        size = request.chain.block_size
        if not self._partial_blocks or LEAST * (len(tail.tokens) // 4) < size:
            return False
        chain, epoch = TailChain(tail, request.chain.tenant, size), self._requests[request_id].epoch
        wanted = Wanted(chain.hashes, tail.parent, chain.tenant, is_tail=True)
        self._wanted[next(self._op_ids)] = StoringOp(request_id, chain, 0, wanted, epoch, [block_id])
        return True

    def build_plan(self) -> StepPlan:
        """As `SchedulerSide.build_plan`; with what has come of the backs."""
        self.writing = []
        region = self.tiers.region
        if region is not None and not (self._planned and self._region_id != region.region_id):
            for request_id, back in self._backs.items():
                for group, lease, blocks in back.collect():
                    self._plan_copy(request_id, back, group, lease, blocks)
                    self._region_id = region.region_id
        return super().build_plan()

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        """As `SchedulerSide.update`."""
        released: list[int] = []
        for op_id in (*report.finished, *report.failed):
            if (copy := self._copies.pop(op_id, None)) is None:
                continue
            well = op_id in report.finished
            copy.back.copied(copy.group, well=well)
            copy.lease.release()
            released += copy.op.device_blocks
            if well:
                self._moved("load", len(copy.op), self._clock() - copy.planned_at)
            else:
                self.tiers.metrics.missed(Outcome.COPY_FAILED, len(copy.op))
        update = super().update(report)
        return replace(update, released=(*update.released, *released)) if released else update

    def finished(self, request_id: str) -> None:
        """As `SchedulerSide.finished`."""
        self.leave(request_id)
        super().finished(request_id)

    @property
    def idle(self) -> bool:
        return not self._copies and super().idle

    def close(self) -> None:
        """As `SchedulerSide.close`."""
        super().close()
        for copy in self._copies.values():
            copy.lease.release()
        self._copies.clear()

    def _cancel(self, known: ConnectedRequest) -> None:
        """The claim goes, and with it what was asked for beside it; copies end as they may."""
        if (back := self._backs.get(known.request.request_id)) is not None:
            back.forget()
            if known.claim is not None:  # it has no blocks yet: the next claim decides anew
                del self._backs[known.request.request_id]
        super()._cancel(known)

    def _plan_copy(self, request_id: str, back: Back, group: Group, lease: Lease, blocks: list[int]) -> None:
        if not blocks:
            lease.release()
            return
        slots, generations = tuple(lease.slots.tolist()), tuple(lease.generations.tolist())
        op = CopyOp(next(self._op_ids), request_id, tuple(blocks), slots, generations)
        self._copies[op.op_id] = _GroupCopy(op, back, group, lease, self._clock())
        self._planned.append(op)
        self.writing += blocks
