"""The scheduler side: what an engine's scheduler calls, request by request. Sans-IO, no torch, never waits."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final

from kvtier.connector.overlapped import OverlappedLoad
from kvtier.connector.plan import CopyOp, StepPlan, WorkerReport
from kvtier.connector.request import (
    LEAST,
    Answered,
    BlockChain,
    ConnectedRequest,
    LoadingOp,
    PartialView,
    Request,
    StoringOp,
    best_child,
    is_named_by_tokens,
    pays,
    tier_of_last,
)
from kvtier.tiers import L2, BlockRecord, ChainHash, Outcome, tracing, value
from kvtier.tiers.hierarchy import PENDING, Attribution, CacheTiers, Claim, Filled, Overlap, Pending, end_lookup
from kvtier.tiers.pool import Reservation
from kvtier.tiers.reuse import RequestEnd

_NO_OVERLAP: Final = Overlap.NONE  # a member of an enum costs a request more than a name
_LOOK_AGAIN: Final = 0.05  # seconds before a view is searched again: a waiting request is looked up at every step
_OFFERED: Final = 2.0  # seconds in which a store that got no answer or no slot is retried


@value
class ConnectorUpdate:
    """The meaning of a worker's report for the engine."""

    loaded: tuple[str, ...] = ()  # requests whose load succeeded
    failed: tuple[tuple[str, int], ...] = ()  # requests whose load failed, and the first block of that load
    released: tuple[int, ...] = ()  # L1 blocks that no copy reads any more; named once per `store`


class SchedulerSide:
    """The tiers below L1 as one engine's scheduler sees them. Called from that scheduler's thread only.

    Per request: `lookup` (again and again, idempotent) → `allocated` → `store` as blocks fill → `finished`.
    Per step: `build_plan` → the worker → `update` with its report. Where the tiers are a daemon's, `build_plan` makes
    the step's one round trip, and only if there is something to store.

    A request looked up while `computes_alone` may load its last blocks while it computes those before. From its lookup
    on it has an `OverlappedLoad`. In each step the engine queries how far it may compute, and calls `end_overlapped`
    when it is over or the request loses its blocks. Copies under way continue: `writing` names the blocks that a plan's
    copies write to, and an update names each in `released`.
    """

    def __init__(
        self,
        tiers: CacheTiers,
        *,
        partial_blocks: bool = False,
        keeps_blocks: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`partial_blocks`: the engine accepts promises that end inside a block; only for `NamedByTokens` chains.

        `keeps_blocks`: blocks to be stored keep their content until an update releases them, so late stores are
        retried. Otherwise only those are retried that the engine passes to `offer_again` before a plan.
        """
        self.tiers = tiers
        self.requests: dict[str, ConnectedRequest] = {}  # the live ones; read-only
        self.computes_alone = False  # only the request that is looked up needs compute
        self.overlapped: dict[str, OverlappedLoad] = {}  # of requests with an overlapped load
        self.writing: list[int] = []  # L1 blocks that the last plan's copies fill, except those of `allocated`
        self.refused: list[tuple[str, int]] = []  # of the last plan: requests, and their first block without a slot
        self.late: dict[int, StoringOp] = {}  # of the last plan: stores that may be retried
        self.traces: dict[str, tracing.Trace] = {}  # of live requests that are traced: the engine adds them
        self._clock = clock
        self._keeps_blocks = tiers.offers_again = keeps_blocks
        self._partial_blocks = partial_blocks
        self._op_ids = count(1)
        self._steps = count(1)
        self._loads: dict[int, LoadingOp] = {}
        self._stores: dict[int, StoringOp] = {}
        self._planned: list[CopyOp] = []  # loads
        self._region_id = 0  # of the planned loads
        self._wanted: dict[int, StoringOp] = {}
        self.released: list[int] = []  # L1 blocks that the next update names
        self._finished: list[RequestEnd] = []  # not reported to the tiers yet
        self._has_lookups = False  # since the last plan: lookups go out as one message
        self._lost = False  # the worker's device is lost: no more loads or stores

    def admit(self, request: Request) -> None:
        """Register a request that only stores. `lookup` does this too. Idempotent."""
        self.requests.setdefault(request.request_id, ConnectedRequest(request, self.tiers.epoch))

    def lookup(self, request: Request, num_computed_tokens: int, in_part: int = 0, *, spares: int = 0) -> int | Pending:
        """How many tokens beyond the `num_computed_tokens` in L1 can be loaded, or PENDING: call again next step.

        A number is a promise: those blocks are in L2, verified and leased. The first call may start a prefetch, later
        ones renew the promise. The last token of a request is never promised. With `partial_blocks` the promise may end
        inside a block, if that is more than the `in_part` tokens of the next block that are in L1. `spares`: only the
        whole chain is useful, and each of its blocks spares so many tokens.
        """
        block_size = request.chain.block_size
        in_l1 = num_computed_tokens // block_size
        if self._lost:
            self.admit(request)
            return 0
        if (known := self.requests.get(request.request_id)) is None:
            known = self.requests[request.request_id] = ConnectedRequest(request, self.tiers.epoch)
        elif (claim := known.claim) is not None:
            is_past = known.view is not None and in_l1 > known.view.num_own
            if is_past or in_l1 < claim.num_l1:  # L1 has more than the view's own blocks, or fewer than claimed
                self._cancel(known)
        known.num_l1, known.spares = in_l1, spares
        is_fresh = known.claim is None and not known.recompute
        if is_fresh:
            self._submit(known)
        least = in_l1 * block_size + in_part
        covered = self._answer(known, least, is_fresh=is_fresh)
        if (claim := known.claim) is not None and claim.split is not None and request.request_id not in self.overlapped:
            chain = request.chain
            back = OverlappedLoad(self.tiers, chain.hashes, chain.root, claim, self._clock)
            self.overlapped[request.request_id] = back
        if covered is None:
            return PENDING
        return covered - in_l1 * block_size if covered > least else 0

    def is_storing(self, hashes: Sequence[ChainHash]) -> bool:
        """Whether some of these blocks are being stored. After the worker's report a lookup finds them."""
        stores = [store.hashes for store in (*self._wanted.values(), *self.late.values())]
        stores += [store.reservation.hashes for store in self._stores.values() if store.reservation is not None]
        wanted = set(hashes) if stores else set()
        return any(not wanted.isdisjoint(stored) for stored in stores)

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        """The request got its L1 blocks (`block_ids`: its whole table): load the promised tokens.

        Returns how many tokens are being loaded: fewer, maybe 0, if the promise expired because no lookup renewed it;
        the rest must be computed. With `layerwise` the request computes in the step that loads it; otherwise after
        `update` names it. Called again for the same request, or with 0, it only releases the promise.
        """
        known, loading = self.requests[request_id], 0
        if (claim := known.claim) is not None:
            view, size, num_l1 = known.view, known.request.chain.block_size, known.num_l1
            known.claim = known.view = None
            num_blocks = num_external_tokens // size
            if view is not None:  # the last block is loaded whole, but only its shared tokens count
                num_external_tokens = min(num_external_tokens, view.num_tokens - num_l1 * size)
                num_blocks = -(-num_external_tokens // size)
            lease = self.tiers.lease(claim) if num_blocks else None
            first, region = num_l1 - claim.num_l1, self.tiers.region
            slots = lease.slots if lease is not None else []
            if first or num_blocks < len(slots):
                slots = slots[first : first + num_blocks]
            if lease is None:
                self.tiers.cancel(claim)
            elif not slots or region is None:
                lease.release()
            else:
                num_blocks, generations = len(slots), lease.generations
                if len(generations) > num_blocks:
                    generations = generations[first : first + num_blocks]
                if view is not None and num_l1 + num_blocks > view.num_own:
                    known.found_in_part = tier_of_last(claim.found, known.found)
                self._region_id = region.region_id
                ids, op_id = block_ids[num_l1 : num_l1 + num_blocks], next(self._op_ids)
                blocks = tuple(ids) if type(ids[0]) is int else tuple(map(int, ids))  # as msgpack takes them
                op = CopyOp(op_id, request_id, blocks, tuple(slots), tuple(generations), layerwise)
                self._loads[op_id] = LoadingOp(op, num_l1, lease, num_blocks * region.slot_bytes, self._clock())
                self._planned.append(op)
                loading = num_blocks * size if view is None else min(num_external_tokens, num_blocks * size)
        if (back := self.overlapped.get(request_id)) is not None:
            back.seat(block_ids, known.num_l1 + -(-loading // known.request.chain.block_size))
        return loading

    def forget_promises(self) -> None:
        """Release all promises that were not allocated: after a reset they would be stale."""
        for known in self.requests.values():
            self._cancel(known)

    def recompute(self, request_id: str) -> None:
        """Promise this request nothing more: its load failed."""
        self.requests[request_id].recompute = True

    def found(self, request_id: str) -> Attribution | None:
        """Where the blocks of a live request were when it was first looked up."""
        return self.requests[request_id].found

    def is_cut(self, request_id: str, num_loaded: int) -> bool:
        """Whether so many tokens were the most that one request may use of L2: the next `lookup` promises the rest."""
        known = self.requests.get(request_id)
        return known is not None and num_loaded >= self.tiers.num_slots // 2 * known.request.chain.block_size > 0

    def found_in_part(self, request_id: str) -> str | None:
        """The tier that had the block of which a live request was promised a part; None: no such promise."""
        return self.requests[request_id].found_in_part

    def store(
        self, request_id: str, first_block: int, block_ids: Sequence[int], chain: BlockChain | None = None
    ) -> int:
        """Blocks `first_block…` of the request's table became full in this step; copy those that L2 lacks.

        Returns the id of the op that the next plan has, if there is anything to copy. Every block named here must keep
        its content until an update names it in `released`: the engine keeps it referenced in L1, or has the worker
        `fence` the op before the block is overwritten. `chain`: another one than the request's, such as `StatePieces`.
        """
        known, blocks = self.requests[request_id], [*map(int, block_ids)]
        chain = known.request.chain if chain is None else chain
        self._wanted[op_id := next(self._op_ids)] = StoringOp(
            chain.hashes[first_block : first_block + len(blocks)], chain.parent(first_block), chain.tenant,
            request_id=request_id, tokens_of=chain.block_tokens, first_block=first_block, epoch=known.epoch,
            blocks=blocks,
        )  # fmt: skip
        if self.traces:
            self._wanted[op_id].trace = self._trace_of(request_id)
        return op_id

    def offer_again(self, op_ids: Iterable[int]) -> None:
        """Retry these `late` stores in the next plan: their blocks still have their content."""
        self._wanted = {op_id: self.late.pop(op_id) for op_id in op_ids} | self._wanted

    def drop_late(self, *, short_only: bool = False) -> None:
        """Retry no late store: the blocks were overwritten, or never filled.

        `short_only`: only those that wait for slots, since L1 is needed.
        """
        for op_id, store in list(self.late.items()):
            if store.is_rest or not short_only:
                self._drop(self.late.pop(op_id), Outcome.NO_SLOT if store.is_rest else Outcome.TIMEOUT)

    def end_overlapped(self, request_id: str) -> int:
        """End a request's overlapped load. Returns how many loadable blocks were computed instead. Idempotent."""
        if (back := self.overlapped.pop(request_id, None)) is None:
            return 0
        back.cancel()
        if back.num_skipped:
            self.tiers.metrics.missed(Outcome.SKIPPED, back.num_skipped)
        return back.num_skipped

    def store_partial(self, request_id: str, partial: BlockRecord, block_id: int) -> bool:
        """A request ends with this partial block: copy it to L2, as `store` does with full ones.

        False: the block is not stored, as it has too few tokens to be worth a load, or partial blocks are off.
        """
        chain, epoch = self.requests[request_id].request.chain, self.requests[request_id].epoch
        if not self._partial_blocks or LEAST * (len(partial.tokens) // 4) < chain.block_size:
            return False
        self._wanted[next(self._op_ids)] = StoringOp(
            [partial.chain_hash], partial.parent, chain.tenant, is_partial=True,
            request_id=request_id, tokens_of=lambda _: partial.tokens, first_block=0, epoch=epoch, blocks=[block_id],
        )  # fmt: skip
        return True

    def know_as(self, request: Request) -> None:
        """Use this request's chain for lookups and stores of its own from now on. Cancels its promise."""
        self.admit(request)
        known = self.requests[request.request_id]
        if known.request is not request:
            self._cancel(known)
            known.request = request

    def build_plan(self) -> StepPlan:
        """This step's copies; sends everything buffered since the last plan."""
        self.writing, self.refused = [], []
        if self.late:
            if self._keeps_blocks:
                self.offer_again(list(self.late))
            self.drop_late()
        if self.overlapped:
            self._plan_overlapped()
        stores = self._reserved() if self._wanted else []
        if self._finished:
            self._report_finished()
        if (self._has_lookups or self.overlapped) and not stores and self.tiers.sends_later:
            self.tiers.tick()  # no `reserve` has sent the lookups
        self._has_lookups = False
        loads, self._planned = tuple(self._planned), []
        if not (loads or stores):
            return StepPlan(next(self._steps), 0)
        region = self.tiers.region
        region_id = 0 if region is None else region.region_id
        if loads and self._region_id != region_id:  # the daemon was restarted: the loads' slots are in its old memory
            region_id = self._region_id
            for op in stores:
                self._drop(self._stores.pop(op.op_id), Outcome.CLOSED)
            stores = []
        return StepPlan(next(self._steps), region_id, loads, tuple(stores))

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        """Apply the worker's report: release leases, seal stores, name what failed."""
        loaded: list[str] = []
        failed: list[tuple[str, int]] = []
        filled: list[Filled] = []
        stores = self._stores
        for op_id in report.finished:
            if stores and (store := stores.pop(op_id, None)) is not None:
                self.released += store.blocks
                reservation, tokens_of, first = store.reservation, store.tokens_of, store.first_block
                assert reservation is not None
                tokens = [tokens_of(first + index) for index in reservation.indices]
                filled.append((reservation, tokens, store.epoch))
            elif (load := self._loads.pop(op_id, None)) is not None:
                self.tiers.metrics.moved(L2, "load", load.num_bytes, self._clock() - load.planned_at)
                load.lease.release()
                if load.copied is not None:
                    load.copied(True)
                    self.released += load.op.device_blocks
                    continue
                loaded.append(load.op.request_id)
                if self.traces and (trace := self._trace_of(load.op.request_id)) is not None:
                    trace.record("load", load.planned_at, {"blocks": len(load.op), "bytes": load.num_bytes})
        for op_id in report.failed:
            if (store := stores.pop(op_id, None)) is not None:
                self._drop(store, Outcome.COPY_FAILED, is_lost=op_id in report.lost)
            elif (load := self._loads.pop(op_id, None)) is not None:
                self.tiers.metrics.missed(Outcome.COPY_FAILED, len(load.op))
                load.lease.release()
                if load.copied is not None:
                    load.copied(False)
                    self.released += load.op.device_blocks
                    continue
                failed.append((load.op.request_id, load.first_block))
                if (known := self.requests.get(load.op.request_id)) is not None:
                    known.recompute = True  # final, or it would be retried for ever
        if filled:
            self.tiers.seal_each(filled)
            if (region := self.tiers.region) is not None:
                num_blocks = sum([len(tokens) for _, tokens, _ in filled])
                self.tiers.metrics.moved(L2, "store", num_blocks * region.slot_bytes, 0.0)
        if report.lost and not self._lost:
            self._lost = True
            self.forget_promises()
        if self._finished and not self._wanted:
            self._report_finished()
        if self.tiers.sends_later and self.idle and (report.finished or report.failed):
            self.tiers.tick()  # an idle engine sends no more messages: send the buffered ones
        released, self.released = self.released, []
        return ConnectorUpdate(tuple(loaded), tuple(failed), tuple(released))

    def finished(self, request_id: str, answered: Answered | None = None) -> None:
        """The request finished or was aborted. Copies under way continue and are reported by `update`. Idempotent.

        `answered`, for a finished one: passed to the tiers after its last stores; at once if no stores are planned,
        since an idle engine makes no more plans.
        """
        if self.overlapped:
            self.end_overlapped(request_id)
        known = self.requests.pop(request_id, None)
        if self.traces:
            self.traces.pop(request_id, None)
        if known is None:
            return
        if known.claim is not None:
            self._cancel(known)
        if answered is not None:
            end = answered.finish_of(known.request.chain, request_id)
            if self._wanted:
                self._finished.append(end)
            else:
                self.tiers.ended(end)
                if not self.requests:
                    self.tiers.tick()

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step prefilled `num_tokens` in `seconds`, after `position` others: loading is weighed against it."""
        self.tiers.computed(num_tokens, seconds, position)

    def wait(self, timeout: float) -> None:
        """Wait until a pending lookup may have an answer, at most `timeout` seconds. For an idle engine."""
        self.tiers.wait_progress(timeout)

    @property
    def idle(self) -> bool:
        """Whether no copy is planned or under way."""
        return not (self._loads or self._stores or self._wanted or self.late)

    def close(self) -> None:
        """Release every promise and every copy that was never reported. Idempotent."""
        for request_id in list(self.requests):
            self.finished(request_id)
        for load in self._loads.values():
            load.lease.release()
        for store in (*self._stores.values(), *self._wanted.values(), *self.late.values()):
            self._drop(store, Outcome.CLOSED)
        for left in (self._loads, self._stores, self._wanted, self.late):
            left.clear()

    def _report_finished(self) -> None:
        """Report finished requests to the tiers; their last stores have slots by now."""
        for end in self._finished:
            self.tiers.ended(end)
        self._finished = []

    def _submit(self, known: ConnectedRequest) -> None:
        """Claim the request's blocks, as far as they may be promised."""
        chain = known.request.chain
        hashes, size = chain.hashes, chain.block_size
        usable = (known.request.num_tokens - 1) // size
        if usable < len(hashes):
            hashes = hashes[:usable]
        overlap = Overlap.ALLOWED if self.computes_alone else _NO_OVERLAP
        if known.spares:
            size, overlap = known.spares, Overlap.WHOLE
        num_l1 = known.num_l1 if known.num_l1 < len(hashes) else len(hashes)  # `min` is a call
        if self.traces:
            trace = self._begin_lookup(known, len(hashes))
            claim = self.tiers.submit(hashes, chain.root, num_l1, block_size=size, overlap=overlap, trace=trace)
        else:  # without the argument, which a hit would notice
            claim = self.tiers.submit(hashes, chain.root, num_l1, block_size=size, overlap=overlap)
        known.claim = claim
        self._has_lookups |= claim.promised is None

    def _begin_lookup(self, known: ConnectedRequest, num_blocks: int) -> tracing.Trace | None:
        trace = self._trace_of(known.request.request_id)
        return None if trace is None else trace.begin("lookup", {"blocks": num_blocks}, "client")

    def _trace_of(self, request_id: str) -> tracing.Trace | None:
        return self.traces.get(request_id.partition("\0")[0])  # an engine may have more requests for one: "ID\0…"

    def _answer(self, known: ConnectedRequest, least: int, *, is_fresh: bool = False) -> int | None:
        """How many leading tokens L1 and the promise cover, 0 without a promise; None: pending.

        If another block in the tiers begins like the request's next one and so covers more than `least` tokens, the
        claim is extended to it. `is_fresh`: it was just made, so a poll would find nothing.
        """
        claim = known.claim
        if claim is None:
            return 0
        promised: int | Pending = PENDING
        if claim.promised is not None and not claim.is_reported:
            promised, claim.is_reported = claim.promised, True  # from now on it is polled, which renews it
        elif not is_fresh:
            promised = self.tiers.poll(claim)
        if (found := claim.found) is not None and known.found is None:
            known.found = found
            known.causes = None if claim.why is None else claim.why()
            self.tiers.count(found, claim.missing, known.causes)
        if self._partial_blocks and found is not None and claim.behind is not None and known.view is None:
            room = known.request.num_tokens - 1 - (found.blocks - found.miss) * known.request.chain.block_size
            if room > 0 and self._take_view(known, claim, room, least):
                return self._answer(known, least)
        if isinstance(promised, Pending):
            return None
        if claim.trace is not None:
            end_lookup(claim, promised)
        covered = claim.num_l1 + promised
        tokens = covered * known.request.chain.block_size if known.view is None else known.view.covered(covered)
        if claim.refusal is None and (found is None or found.loadable):
            return tokens
        if known.view is not None and claim.refusal is not None:
            known.whole_only = True
            self._cancel(known)
            self._submit(known)
            return self._answer(known, least)
        known.recompute |= claim.refusal is Outcome.RECOMPUTE
        if claim.refusal is Outcome.NO_SLOT and claim.found is not None and not known.was_crowded:
            known.was_crowded = True
            self.tiers.metrics.missed(Outcome.NO_SLOT, claim.found.loadable)
        if time.monotonic() >= claim.good_until:  # a failure is final; an empty lookup may be repeated
            self._cancel(known)
        return tokens

    def _take_view(self, known: ConnectedRequest, claim: Claim, room: int, least: int) -> bool:
        """Claim the request's blocks in the tiers and the best child after them, instead of its own blocks alone.

        `room`: tokens after these blocks that may be loaded.
        """
        chain, size = known.request.chain, known.request.chain.block_size
        if known.whole_only or claim.found is None or claim.refusal is not None:
            return False
        num_found = claim.found.blocks - claim.found.miss
        if num_found * size + min(room, size) <= least or not is_named_by_tokens(chain):
            return False
        if known.looked_behind == num_found and time.monotonic() < known.look_again:
            return False
        own, behind, claim.behind = chain.next_tokens(num_found)[: 4 * room], claim.behind, None  # searched once
        children = behind(claim, own[:4]) if own and behind is not None else ()
        best = best_child(chain, children, num_found, own) if children else None
        if best is None:
            known.looked_behind, known.look_again = num_found, time.monotonic() + _LOOK_AGAIN
        if best is None or not pays(num_found, best[1], size, in_l1=known.num_l1, least=least):
            return False
        self.tiers.cancel(claim)
        known.view = PartialView([*chain.hashes[:num_found], best[0].chain_hash], best[1], size)
        self._has_lookups = True
        known.claim = self.tiers.submit(
            known.view.hashes, known.request.chain.root, claim.num_l1, block_size=size, trace=claim.trace
        )
        return True

    # overlapped loads

    def _plan_overlapped(self) -> None:
        region = self.tiers.region
        if region is None or (self._planned and self._region_id != region.region_id):
            return
        for request_id, back in self.overlapped.items():
            for group, lease, blocks in back.collect():
                self._region_id = region.region_id
                if not blocks:
                    lease.release()
                    continue
                slots, generations = tuple(lease.slots), tuple(lease.generations)
                op = CopyOp(next(self._op_ids), request_id, tuple(blocks), slots, generations)
                about = group.first, lease, len(op) * region.slot_bytes, self._clock(), partial(back.copied, group)
                self._loads[op.op_id] = LoadingOp(op, *about)
                self._planned.append(op)
                self.writing += blocks

    def _cancel_overlapped(self, known: ConnectedRequest) -> None:
        """Copies under way continue."""
        if (back := self.overlapped.get(known.request.request_id)) is not None:
            back.cancel()
            if known.claim is not None:  # it has no L1 blocks yet: the next claim decides again
                del self.overlapped[known.request.request_id]

    def _cancel(self, known: ConnectedRequest) -> None:
        if self.overlapped:
            self._cancel_overlapped(known)
        claim, known.claim, known.view = known.claim, None, None
        if claim is not None:
            self.tiers.cancel(claim)
            if claim.trace is not None:
                claim.trace.end()

    def _reserved(self) -> list[CopyOp]:
        """Reserve slots for all wanted stores in one call; returns the copies."""
        wanted, self._wanted = self._wanted, {}
        stores = list(wanted.values())
        if self._lost or {store.epoch for store in stores} != {self.tiers.epoch}:
            for op_id in [op_id for op_id, store in wanted.items() if self._lost or store.epoch != self.tiers.epoch]:
                self._drop(wanted.pop(op_id), Outcome.COPY_FAILED if self._lost else Outcome.EPOCH)
            stores = list(wanted.values())
        if behind := {store.request_id for store in stores if store.is_rest}:
            for store in stores:  # a request's stores stay in order
                store.is_rest |= store.request_id in behind
        reservations = self.tiers.reserve(stores, may_retry=True) if stores else []
        ops = []
        for op_id, store, reservation in zip(wanted, stores, reservations, strict=True):
            is_less = reservation is None or len(reservation.indices) < len(store.blocks)
            if is_less and self.tiers.is_short and self._offer_rest(op_id, store, reservation):
                if reservation is None:
                    continue
            elif reservation is None and self.tiers.is_late:
                self.refused.append((store.request_id, store.first_block))
                now = time.monotonic()
                store.until = store.until or now + _OFFERED
                if now < store.until:
                    self.late[op_id] = store
                else:
                    self._drop(store, Outcome.TIMEOUT)
                continue
            indices = [] if reservation is None else reservation.indices
            if is_less and len(indices) < len(store.blocks):
                kept = set(indices)
                self.released += [block for i, block in enumerate(store.blocks) if i not in kept]
                store.blocks = [store.blocks[i] for i in indices]
            if reservation is None:
                self.refused.append((store.request_id, store.first_block))
            if reservation is None or not indices:
                continue
            store.reservation = reservation
            self._stores[op_id] = store
            slots, generations = tuple(reservation.slots), tuple(reservation.generations)
            ops.append(CopyOp(op_id, store.request_id, tuple(store.blocks), slots, generations))
        return ops

    def _offer_rest(self, op_id: int, store: StoringOp, reservation: Reservation | None) -> bool:
        """Retry what got no slot while L1 keeps it and the lower tiers make room, or count it as dropped."""
        indices = [] if reservation is None else reservation.indices
        num_taken = 0 if reservation is None else indices[-1] + 1 if indices else len(store.blocks)
        if not (rest := store.blocks[num_taken:]):
            return False
        now, until = time.monotonic(), 0.0 if num_taken else store.until
        until = until or now + _OFFERED
        if not self._keeps_blocks or not self.tiers.has_lower or store.is_partial or now >= until:
            self.tiers.metrics.dropped(L2, Outcome.NO_SLOT, len(rest))
            return False
        parent = store.hashes[num_taken - 1] if num_taken else store.parent
        first, hashes = store.first_block + num_taken, store.hashes[num_taken:]
        store.blocks = store.blocks[:num_taken]
        self.late[next(self._op_ids) if num_taken else op_id] = replace(
            store, hashes=hashes, parent=parent, first_block=first, blocks=rest, until=until, is_rest=True
        )
        return True

    def _drop(self, store: StoringOp, reason: Outcome, *, is_lost: bool = False) -> None:
        self.released += store.blocks
        if store.reservation is not None:
            (self.tiers.quarantine if is_lost else self.tiers.abandon)(store.reservation, reason)
        else:
            self.tiers.metrics.dropped(L2, reason, len(store.blocks))
