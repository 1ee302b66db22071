"""The scheduler side of an engine that can compute a request's front while its back is loaded."""

import time
from collections.abc import Callable, Sequence

from kvtier.connector.back import Back, Group, GroupCopy
from kvtier.connector.partial import LEAST
from kvtier.connector.plan import CopyOp
from kvtier.connector.request import BlockChain, ConnectedRequest, Request, StoringOp
from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.tail_chain import TailChain
from kvtier.tiers import BlockRecord, Outcome
from kvtier.tiers.hierarchy import CacheTiers, Claim
from kvtier.tiers.pool import Lease


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
        self._clock = clock

    def leave(self, request_id: str) -> int:
        if (back := self.backs.pop(request_id, None)) is None:
            return 0
        back.forget()
        if back.num_skipped:
            self.tiers.metrics.missed(Outcome.SKIPPED, back.num_skipped)
        return back.num_skipped

    def store_tail(self, request_id: str, tail: BlockRecord, block_id: int) -> bool:
        """A request ends with this block unfinished: copy it to L2, as `store` does with whole ones.

        False, and the block is not read: nobody would ask for so few tokens, or for a part of a block at all.
        """
        request = self.requests[request_id].request
        size = request.chain.block_size
        if not self._partial_blocks or LEAST * (len(tail.tokens) // 4) < size:
            return False
        chain, epoch = TailChain(tail, request.chain.tenant, size), self.requests[request_id].epoch
        self._wanted[next(self._op_ids)] = StoringOp(
            chain.hashes, tail.parent, chain.tenant, is_tail=True,
            request_id=request_id, chain=chain, first_block=0, epoch=epoch, blocks=[block_id],
        )  # fmt: skip
        return True

    def know_as(self, request: Request) -> None:
        """Look a request up, and store what is its own, by this chain from now on. Drops what it was promised."""
        self.admit(request)
        known = self.requests[request.request_id]
        if known.request is not request:
            self._cancel(known)
            known.request = request

    def store_chain(self, request_id: str, chain: BlockChain, block_ids: Sequence[int]) -> None:
        """As `store`, of a whole chain that is not the request's: its recurrent states at a border."""
        self._wanted[next(self._op_ids)] = StoringOp(
            chain.hashes, chain.parent(0), chain.tenant, request_id=request_id, chain=chain, first_block=0,
            epoch=self.requests[request_id].epoch, blocks=list(block_ids),
        )  # fmt: skip

    def _begin_back(self, known: ConnectedRequest, claim: Claim) -> None:
        request_id, chain = known.request.request_id, known.request.chain
        if request_id not in self.backs:
            self.backs[request_id] = Back(self.tiers, chain.hashes, chain.root, claim, self._clock)

    def _seat_back(self, known: ConnectedRequest, block_ids: Sequence[int], loading: int) -> None:
        if (back := self.backs.get(known.request.request_id)) is not None:
            back.seat(block_ids, known.asked + -(-loading // known.request.chain.block_size))

    def _plan_backs(self) -> None:
        region = self.tiers.region
        if region is None or (self._planned and self._region_id != region.region_id):
            return
        for request_id, back in self.backs.items():
            for group, lease, blocks in back.collect():
                self._plan_copy(request_id, back, group, lease, blocks)
                self._region_id = region.region_id

    def _ended_behind(self, copy: GroupCopy, *, well: bool) -> None:
        copy.back.copied(copy.group, well=well)
        copy.lease.release()
        self._released += copy.op.device_blocks
        if well:
            self._moved("load", len(copy.op), self._clock() - copy.planned_at)
        else:
            self.tiers.metrics.missed(Outcome.COPY_FAILED, len(copy.op))

    def _forget_back(self, known: ConnectedRequest) -> None:
        """Copies end as they may."""
        if (back := self.backs.get(known.request.request_id)) is not None:
            back.forget()
            if known.claim is not None:  # it has no blocks yet: the next claim decides anew
                del self.backs[known.request.request_id]

    def _plan_copy(self, request_id: str, back: Back, group: Group, lease: Lease, blocks: list[int]) -> None:
        if not blocks:
            lease.release()
            return
        slots, generations = tuple(lease.slots), tuple(lease.generations)
        op = CopyOp(next(self._op_ids), request_id, tuple(blocks), slots, generations)
        self._behind[op.op_id] = GroupCopy(op, back, group, lease, self._clock())
        self._planned.append(op)
        self.writing += blocks
