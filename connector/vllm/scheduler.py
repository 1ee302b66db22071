"""The scheduler half of the vLLM connector: translates vLLM's requests, blocks and steps for `SchedulerSide`."""

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from msgspec.structs import replace

from kvtier.connector import Answered, CopyOp, SchedulerSide, StepPlan
from kvtier.connector.vllm import requests
from kvtier.connector.vllm.events import VllmEvents
from kvtier.connector.vllm.keys import RequestNames, ServedAdapters
from kvtier.connector.vllm.messages import CopyReports, StepMessage, WatchedOps
from kvtier.connector.vllm.segments import SegmentRequests
from kvtier.connector.vllm.slots import SlotPlan
from kvtier.connector.vllm.states import StateSide, exactly
from kvtier.connector.vllm.worker import RegionHandle, handle_of, with_blocks
from kvtier.tiers import L1, L2, ChainHash, tracing
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.hierarchy import PENDING, CacheTiers, Hierarchy, Pending
from kvtier.tiers.naming import root_hash

_log = logging.getLogger(__name__)

_ASK_AGAIN: Final = 0.05  # seconds an answer stays valid: vLLM asks at every step for every waiting request
_LOOK_AGAIN: Final = 0.002  # seconds a pending answer stays valid
_STORED_SOON: Final = 0.05  # seconds a request waits for its first answer while a store of its blocks is under way
_IDLE_WAIT: Final = 0.005  # seconds an idle step waits for the tiers, and so how long a new request may wait
_TINY: Final = 1 << 20  # a load up to this many bytes is waited for, since another step would cost more
_SHORT: Final = 256 << 20  # the same if nothing else is computed that would wait too
_PATIENCE: Final = 10.0  # seconds without a report after which an idle engine stops stepping for copies


class SchedulerHalf:
    """The part of `KVTierConnector` in vLLM's scheduler process. Called from that thread.

    Nothing here waits, except an idle step for the tiers' answer. Without that wait vLLM would step again at once. On a
    machine with fewer cores than ranks, that busy loop would leave the daemon no core to answer on.
    """

    def __init__(
        self,
        plan: SlotPlan,
        tiers: CacheTiers,
        cache: CacheConfig,
        root: bytes,
        num_blocks: int,
        num_ranks: int,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """`num_blocks` is vLLM's number of blocks. `root`: the root of kvtier's chains and the parent of vLLM's.

        `adapters`: vLLM's loaded adapters, if it serves any.
        """
        # with several KV groups vLLM's own hits end with a block in every group, and so do ours
        self.side = SchedulerSide(tiers, partial_blocks=cache.partial_blocks and plan.has_one_table, keeps_blocks=False)
        of_states = StateSide(self.side, plan, num_blocks, keeps_answers=bool(cache.store_generated))
        self._states = of_states if plan.states else None
        self._plan = plan
        self._lanes = plan.attention  # used at every step
        self._cache = cache
        self._root = root
        self._num_blocks = num_blocks
        self.memory: RegionHandle | None = None  # the handle of L2 last sent to the workers
        self._layerwise = False
        self._waits = True
        self._keeps = True
        self._shares = True
        self._stores = True
        self._was_idle = True
        self._awaits = False  # some request's lookup is pending
        self._events: VllmEvents | None = None  # None unless vLLM publishes events
        self.segments: SegmentRequests | None = None  # None unless [cache] segments is on
        self.reads_answers = requests.AnswerReader(None)
        self._rows: dict[str, requests.TrackedRequest] = {}
        self._ops = WatchedOps(num_blocks, num_ranks)
        self._arriving: dict[str, set[ChainHash]] = {}  # request → blocks being loaded into L1 for it
        self._next = requests.NextStep()
        self._final: dict[
            int, requests.Tables
        ] = {}  # stores, not planned yet, of blocks that may be reused → their tables
        self._late: dict[int, requests.Tables] = {}  # likewise, retried: the daemon was too late to grant slots
        self._reported_at = 0.0
        self.names = RequestNames(plan, cache, root, adapters)
        self._prefill = requests.PrefillClock()
        self._handovers = requests.Handovers(tiers, plan, root, cache, self._prefill)

    def configure(self, *, layerwise: bool, waits: bool, keeps: bool, shares: bool, stores: bool) -> None:
        """Set how requests are served.

        `layerwise`: every load overlaps the compute of the step that needs it. `waits`: a step may wait for a load;
        otherwise vLLM could not undo what it computed on a failed load. `keeps`: blocks are kept; otherwise every
        request passes unchanged. `shares`: vLLM shares blocks that one request loaded with the next. `stores`: what is
        computed is stored; otherwise blocks are only loaded.
        """
        self._layerwise = layerwise
        self._waits = waits and self._plan.has_one_table
        self._keeps = keeps
        self._shares = shares
        self._stores = stores

    def publish_events(self, groups: Sequence[Any], algorithm: str, *, shared: bool = True) -> None:
        """Enable `take_events`.

        `groups` are vLLM's KV groups; `algorithm` hashes its blocks; `shared` is `[events] shared`.
        """
        if self._plan.lookahead:
            _log.warning("kv events: blocks with this draft model's KV have names of their own, and are not published")
            return
        root = root_hash(self._root, cache_salt=self._cache.cache_salt) if self._plan.canonical else self._root
        if not isinstance(self.side.tiers, Hierarchy):
            _log.warning(
                "kv events: the daemon publishes the events of its tiers; this process publishes only vLLM's own"
            )
            return
        hashed = None if self._plan.canonical else (algorithm, self._plan.hash_size)
        self._events = VllmEvents(self.side.tiers, root, groups, hashed, shared=shared)

    def take_events(self) -> list[Any]:
        """vLLM's `take_events`, once for each step, when it takes the step's results."""
        if (measured := self._prefill.ended()) is not None:
            self.side.computed(*measured)
        return list(self._events.take()) if self._events is not None else []

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's `get_num_new_matched_tokens`: tokens that can be loaded, and whether the load is asynchronous."""
        row = self._row(request)
        if row is None or request.skip_reading_prefix_cache or row.most_loaded == 0:
            return 0, False
        if request.lora_request is not None and not self._is_of_its_adapter(row, num_computed_tokens):
            self._forget(row)
            return 0, False
        now = time.monotonic()
        if row.answer is not None and row.num_l1_tokens == num_computed_tokens and now < row.good_until:
            return row.answer
        row.num_l1_tokens = num_computed_tokens
        is_late = self._is_stored_soon(row, now) or self._handovers.is_coming(row, now)
        found = PENDING if is_late else self._lookup(row)
        self._awaits |= isinstance(found, Pending)
        if isinstance(found, Pending) or (found and self._is_arriving(row)):
            row.answer, row.good_until = (None, False), now + _LOOK_AGAIN
            return row.answer
        if self.segments is not None and row.most_loaded is None:
            blended = self.segments.promised(row, found)
            self._awaits |= isinstance(blended, Pending)
            if isinstance(blended, Pending):
                row.answer, row.good_until = (None, False), now + _LOOK_AGAIN
                return row.answer
            if blended:
                row.synchronous = False
                row.answer, row.good_until = (blended, True), now + _ASK_AGAIN
                return row.answer
        if row.most_loaded is not None and found > row.most_loaded:
            found = 0 if self._states is not None else row.most_loaded // self._plan.block_size * self._plan.block_size
        row.synchronous = self._is_synchronous(found)
        row.answer, row.good_until = (found, bool(found) and not row.synchronous), now + _ASK_AGAIN
        return row.answer

    def allocated(self, request: Any, tables: requests.Tables, num_external_tokens: int) -> None:
        """vLLM's `update_state_after_alloc`: load what was promised, or drop the promise."""
        row = self._rows.get(request.request_id)
        if row is None:
            return
        row.answer = None
        if self.segments is not None and self.segments.allocated(row, num_external_tokens, tables[0]):
            row.tables = tables
            self._next.targets.update(tables[0][row.num_l1_tokens // self._plan.block_size :])
            return
        if not num_external_tokens:
            self.side.allocated(row.request_id, (), 0)
            if self._states is not None:
                self._states.release(row)
            return
        size = self._plan.block_size
        first, wanted = row.num_l1_tokens // size, -(-num_external_tokens // size)  # the last one may be used in part
        row.tables = tables
        blocks = range(first + wanted)
        if self._states is not None:
            loading = self._states.load(row, num_external_tokens)
            of_states = self._states.targets(row)
        else:
            loading = self.side.allocated(row.request_id, blocks, num_external_tokens, layerwise=row.synchronous)
            of_states = []
        row.loaded += loading
        if loading and not row.synchronous:
            self._arriving[row.request_id] = set(row.chain.hashes[first : first + loading // size])
        targets = self._worker_blocks(tables, [*blocks[first:], *of_states])[0]
        self._next.targets.update(self._ops.physical(targets))
        if loading < num_external_tokens:
            arrives = first + loading // size
            self._next.lost[row.request_id] = self._worker_blocks(tables, [*blocks[arrives:], *of_states])[0]
            self.side.recompute(row.request_id)
            row.stored = min(row.stored or 0, first)
            if not row.synchronous and not loading:
                self._next.late.add(row.request_id)

    def build(self, output: Any) -> StepMessage:
        """vLLM's `build_connector_meta`: this step's copies, and the earlier stores it must wait for."""
        self._was_idle = not output.num_scheduled_tokens
        if self._was_idle and self._awaits:
            self.side.wait(_IDLE_WAIT)
        self._awaits = False
        if self._states is not None:
            self._states.begin_step()
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            row = self._rows.get(request_id)
            if row is not None and self._stores:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                self._offer(row, num_scheduled - drafts, output.kv_connector_block_state)
                if self._states is not None and not drafts and row.most_stored is None:
                    of_last_step = self._states.offer(row, num_scheduled, output)
                    self._final.update(dict.fromkeys(of_last_step, ()))
        final_stores, plan = self._planned()
        self._prefill.began(*((0, 0.0) if plan.loads else requests.prefilled_by(output)))
        self._expect(final_stores)
        step, self._next = self._next, requests.NextStep()
        is_read = self._ops.reads or self._late
        written = requests.handed_out(output, self._plan.group_sizes) | step.targets if is_read else set()
        self._keep_late(written)
        fences = self._ops.readers(written)
        self._expect(plan)
        self.memory = handle_of(self.side.tiers, self.memory, plan)
        message = StepMessage(
            region=self.memory,
            plan=plan.encode(),
            final_stores=final_stores.encode(),
            is_idle=self._was_idle,
            fences=fences,
            lost=step.lost,
            late=frozenset(step.late),
            touches=not step.targets.isdisjoint(requests.touched(output)),
        )
        if self.segments is not None:
            message.blends, message.dropped = self.segments.orders()
            message.room = self.segments.room(output.total_num_scheduled_tokens)
        return message

    def spoiled(self, blocks: set[int]) -> None:
        """These blocks could not be loaded: fail the stores of requests that computed on them.

        Called before `update` names such a store. The load may have been another connector's under MultiConnector.
        """
        if blocks:
            self._ops.spoil({row.request_id for row in self._rows.values() if blocks.isdisjoint(chain(*row.tables))})

    def update(self, reports: CopyReports | None) -> None:
        """vLLM's `update_connector_output`: apply the workers' reports of their copies."""
        if self.names.adapters.is_unsettled:
            self._look_at_adapters()
        if reports is None:
            return
        self._reported_at = time.monotonic()
        if self.segments is not None:
            self.segments.apply(reports.blended, reports.readiness)
        report, loaded = self._ops.apply(reports)
        for request_id in loaded:
            self._arriving.pop(request_id, None)
        for request_id, first_block in self.side.update(report).failed:
            if (row := self._rows.get(requests.owner(request_id))) is not None:
                row.stored = min(row.stored or 0, first_block)
                row.gives_up = True

    def finished(self, request: Any, tables: requests.Tables) -> dict[str, Any] | None:
        """vLLM's `request_finished`: store the rest of its blocks, which may be reused at once.

        Returns the `kv_transfer_params` for a decode node, if a proxy requested them.
        """
        if self.names.adapters.is_unsettled:
            self._look_at_adapters()
        row = self._rows.get(request.request_id)
        if row is None:
            return None
        if row.stored is not None and request.num_computed_tokens:
            ops = self._store(row, request.num_computed_tokens - request.num_in_flight_tokens, tables)
            self._final.update(dict.fromkeys(ops, row.tables))
        approximate = self.segments.finished(row) if self.segments is not None else None
        self._forget(row, requests.answered_of(request, self.reads_answers, self.side.tiers.metrics.hint_ignored))
        return approximate or self._handovers.offer(row)

    def found_in(self, request: Any, num_tokens: int) -> tuple[int, int]:
        """How many of the tokens to load were in host memory at the first lookup, and how many in lower tiers."""
        request_id, in_part = request.request_id, num_tokens % self._plan.block_size
        if (row := self._rows.get(request_id)) is None:
            return 0, num_tokens
        found = self.side.found((row.closed or row).request_id)
        if not self._lanes:  # a few states cover all tokens before them
            return (num_tokens, 0) if found and found[L2] == found.blocks else (0, num_tokens)
        in_host = min(num_tokens - in_part, (found[L2] if found else 0) * self._plan.block_size)
        in_host += in_part if self.side.found_in_part(request_id) == L2 else 0
        return in_host, num_tokens - in_host

    @property
    def pending(self) -> bool:
        """Whether an idle engine should keep stepping: copies are under way, or there are events to publish."""
        events = self._events
        if events is not None and events.source.waiting:
            return True
        coming = bool(self._ops or self._final or self._late or self.segments)
        coming |= events is not None and events.source.coming
        return coming and time.monotonic() - self._reported_at < _PATIENCE

    def reset(self, *, drops: bool = True) -> None:
        """Cancel every promise and, with `drops`, drop every block from every tier below vLLM's own."""
        self.side.forget_promises()
        for row in self._rows.values():
            row.answer = None
        if drops:
            self.side.tiers.reset()

    def weights_change(self) -> None:
        """The model's weights are about to change: what runs now is neither loaded nor stored any more."""
        self.names.weights_change()
        self._forget_all()

    def cache_emptied(self) -> None:
        """vLLM has emptied its own cache: requests of before may look up what was stored upon blocks of other weights.

        Their KV is computed again, so they are named anew.
        """
        if self.names.cache_emptied():
            self._forget_all()

    def _forget_all(self) -> None:
        for row in list(self._rows.values()):
            self._forget(row)

    def close(self) -> None:
        """Release what was never reported, then flush and close the tiers. Idempotent."""
        self.side.close()
        self.side.tiers.close()

    def _forget(self, row: requests.TrackedRequest, answered: Answered | None = None) -> None:
        """Stop loading and storing for this request."""
        if self.side.traces and (trace := self.side.traces.get(row.request_id)) is not None:
            self._end_trace(row, trace)
        del self._rows[row.request_id]
        if self.segments is not None:
            self.segments.finished(row)
        for known in (row, row.closed, row.states):
            if known is not None:
                self.side.finished(known.request_id, answered if known is row else None)

    def _is_of_its_adapter(self, row: requests.TrackedRequest, num_computed_tokens: int) -> bool:
        """Whether its adapter still has the weights it is named by, and vLLM's own hits are of these weights."""
        adapters, lora = self.names.adapters, row.request.lora_request
        return adapters.digest(lora) == row.adapter and not (num_computed_tokens and adapters.is_mixed(lora))

    def _look_at_adapters(self) -> None:
        """Before stores are published: drop those of adapters whose weights differ from their name."""
        adapters = self.names.adapters
        rows = [(row, row.request.lora_request) for row in self._rows.values() if row.adapter is not None]
        if adapters.look():
            self._late.clear()
            wrong = [row for row, lora in rows if row.adapter != adapters.current(lora.lora_int_id)]
            self._ops.spoil(self._rows.keys() - {row.request_id for row in wrong})
            for row in wrong:
                self._forget(row)
        for row, lora in rows:
            if row.request.num_output_tokens and row.request_id in self._rows:
                adapters.computed(lora)
        adapters.confirm({lora.lora_int_id for _, lora in rows if lora.load_inplace})

    def _lookup(self, row: requests.TrackedRequest) -> int | Pending:
        return self.side.lookup(row, row.num_l1_tokens) if self._states is None else self._states.lookup(row)

    def _is_synchronous(self, num_tokens: int) -> bool:
        """Whether the step waits for this load: it is short, or delays no other request.

        Never with several KV groups or states: a failure could not be reported to vLLM in time. Never with several
        steps in flight: the later ones would compute on a load that failed. Not layer by layer if it ends inside a
        block: vLLM writes what it computes of a layer before it waits for that layer, and the load would overwrite it.
        """
        if not self._waits or (self._layerwise and num_tokens % self._plan.block_size):
            return False
        alone = self._was_idle and not self._next.targets
        num_bytes = -(-num_tokens // self._plan.block_size) * self._plan.block_bytes
        return self._layerwise or num_bytes <= (_SHORT if alone else _TINY)

    def _is_stored_soon(self, row: requests.TrackedRequest, now: float) -> bool:
        """Whether to delay the first lookup, since another request has just computed these blocks and stores them now.

        Mostly for engines without prefix caching, which cannot share these blocks in L1.
        """
        if row.patient_until is None:
            row.patient_until = now + _STORED_SOON
        wanted = row.num_l1_tokens // self._plan.block_size, (row.num_tokens - 1) // self._plan.block_size
        if now < row.patient_until and self.side.is_storing(row.chain.hashes[slice(*wanted)]):
            return True
        row.patient_until = 0.0
        return False

    def _is_arriving(self, row: requests.TrackedRequest) -> bool:
        """Whether the first block wanted is being loaded into L1 for another request, which vLLM will share."""
        if not (self._shares and self._arriving):
            return False
        first = row.num_l1_tokens // self._plan.block_size
        wanted = row.chain.hashes[first : first + 1]  # none for a prompt's partial last block
        return bool(wanted) and any(wanted[0] in hashes for hashes in self._arriving.values())

    def _row(self, request: Any) -> requests.TrackedRequest | None:
        """The state of a request; None if its KV has no name."""
        row = self._rows.get(request.request_id)
        if row is None and self._keeps and (keys := self.names.of(request)) is not None:
            row = self._rows[request.request_id] = requests.TrackedRequest(request, request.request_id, keys)
            if request.lora_request is not None:
                row.adapter = self.names.adapters.current(request.lora_request.lora_int_id)
            self.side.admit(row)
            if tracing.ON:
                self._begin_trace(row)
            self._handovers.admit(row, len(self._rows))
            if self._states is not None:
                self._states.admit(row)
        return row

    def _begin_trace(self, row: requests.TrackedRequest) -> None:
        """A span of its own, beside vLLM's: vLLM makes that one when the request has ended."""
        under = (row.request.trace_headers or {}).get("traceparent")
        trace = tracing.begin("kv cache", under, "internal", {"request_id": row.request_id})
        if trace is not None and trace.is_recorded:
            self.side.traces[row.request_id] = trace

    def _end_trace(self, row: requests.TrackedRequest, trace: tracing.Trace) -> None:
        known, request = self.side.requests[row.request_id], row.request
        loaded = known.loaded_by_tier(row.loaded)
        loaded[L1] += row.num_l1_tokens
        hits = {f"hit_tokens.{tier}": num_tokens for tier, num_tokens in loaded.items() if num_tokens}
        counts = {"input_tokens": request.num_prompt_tokens, "output_tokens": request.num_output_tokens}
        usage = {f"gen_ai.usage.{name}": count for name, count in counts.items()}
        trace.end({**usage, **hits, **tracing.missed(known.missed)})

    def _offer(self, row: requests.TrackedRequest, num_scheduled: int, state: Any) -> None:
        """Plan stores of the blocks that a step fills."""
        request, size = row.request, self._plan.block_size
        if row.stored is None:  # blocks of vLLM's own hits are offered too; tiers that have them copy nothing
            row.stored = 0
        computed = request.num_computed_tokens + num_scheduled
        if computed // size > row.stored:
            self._store(row, computed, lambda: state.get_block_ids(row.request_id))

    def _store(self, row: requests.TrackedRequest, num_computed: int, tables: Any) -> list[int]:
        """Plan stores of blocks that are full, named, and not planned yet. Returns the ids of the ops."""
        if not self._stores:
            return []
        if not self._cache.store_generated:
            num_computed = min(num_computed, row.request.num_prompt_tokens)
        if row.most_stored is not None:
            num_computed = min(num_computed, row.most_stored)
        first, size = row.stored or 0, self._plan.block_size
        if row.refused is not None:
            first = min(first, row.refused)
        if num_computed // size <= first or not self._lanes:
            return []
        last = min(len(row.chain.hashes), num_computed // size)
        if last <= first:
            return []
        row.tables = tables() if callable(tables) else tables
        row.stored, row.refused = last, None
        return [
            self._store_run(row, run) for run in requests.whole_runs(self._lanes, row.tables, range(first, last), size)
        ]

    def _store_run(self, row: requests.TrackedRequest, run: Sequence[int]) -> int:
        op_id = self.side.store(row.request_id, run[0], run)
        if self._events is not None:
            self._events.record(row.request, row.chain, range(run[0], run[-1] + 1))
        return op_id

    def _planned(self) -> tuple[StepPlan, StepPlan]:
        """The stores that must read before the step's compute, and the step's own copies, in the workers' block ids.

        In the scheduler side's plan, block ids are positions in the request's tables.
        """
        if self._late:
            self.side.offer_again(self._late)
            self._final |= self._late
        plan, late = self.side.build_plan(), self.side.late
        for request_id, first in self.side.refused:
            if (row := self._rows.get(request_id)) is not None:  # states are not retried
                row.refused = first if row.refused is None else min(first, row.refused)
        if self.segments is not None:
            plan, of_blends = self.segments.take(plan)
            self._ops.expect(StepPlan(plan.step, plan.region, of_blends))
        final, self._final = self._final, {}
        self._late = {op_id: tables for op_id, tables in final.items() if tables and op_id in late}
        for op_id in [each for each, store in late.items() if each not in final and store.request_id in self._rows]:
            del late[op_id]  # its request retries these blocks
        of_ended = [self._translate(op, final[op.op_id]) for op in plan.stores if op.op_id in final]
        loads, stores = (
            tuple(
                self._translate(op, self._rows[requests.owner(op.request_id)].tables)
                for op in ops
                if op.op_id not in final
            )
            for ops in (plan.loads, plan.stores)
        )
        return StepPlan(plan.step, plan.region, (), tuple(of_ended)), StepPlan(plan.step, plan.region, loads, stores)

    def _keep_late(self, written: set[int]) -> None:
        """Drop the late stores whose blocks this step writes: vLLM keeps a free block until it allocates it again."""
        for op_id, tables in list(self._late.items()):
            blocks, _ = self._worker_blocks(tables, self.side.late[op_id].blocks)
            if not written.isdisjoint(self._ops.physical(blocks)):
                del self._late[op_id]
        if self._late:
            self._awaits, self._reported_at = True, time.monotonic()

    def _translate(self, op: CopyOp, tables: requests.Tables) -> CopyOp:
        return with_blocks(
            replace(op, request_id=requests.owner(op.request_id)), *self._worker_blocks(tables, op.device_blocks)
        )

    def _worker_blocks(
        self, tables: requests.Tables, positions: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """vLLM's blocks for these of kvtier's, in every lane of K and V, without those not kept; and each one's
        position.

        Positions below zero are states' blocks, encoded by `exactly`.
        """
        pairs: list[tuple[int, int]] = []
        of_blocks = [(at, position) for at, position in enumerate(positions) if position >= 0]
        for number, lane in self._lanes if of_blocks else ():  # states alone have no tables
            base, table, count, place = number * self._num_blocks, tables[lane.group], lane.count, lane.place
            pairs += [
                (base + block, at)
                for at, position in of_blocks
                if (block := table[position * count + place]) != requests.NULL
            ]
        pairs += [(exactly(position), at) for at, position in enumerate(positions) if position < 0]
        return tuple(block for block, _ in pairs), tuple(at for _, at in pairs)

    def _expect(self, plan: StepPlan) -> None:
        self._ops.expect(plan)
        if plan:
            self._reported_at = time.monotonic()
