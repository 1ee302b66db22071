"""Segments of vLLM's requests, in its scheduler's process: their marks, where their KV is, and what becomes of them."""

import hashlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from kvtier.connector import CopyOp, SchedulerSide, StepPlan
from kvtier.connector.segments import BlendResult, Repair, Segment, checked_repair, checked_segments
from kvtier.connector.vllm.requests import TrackedRequest, params_of, part_id
from kvtier.tiers import RequestError
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.hierarchy import PENDING, Pending
from kvtier.tiers.naming import TokenChain

if TYPE_CHECKING:
    from kvtier.connector.vllm.slots import SlotPlan

_log = logging.getLogger(__name__)

MARKS: Final = "kvtier_segments"  # in a request's `kv_transfer_params`: a list of [start, end]
REPAIR: Final = "kvtier_repair"  # … with rule, share, check_layer and max_deviation
APPROXIMATE: Final = "kvtier_approximate"  # in those of its answer

UNSUPPORTED: Final = "unsupported"
_MOST: Final = 1024  # segments of one request
_SHARE: Final = 2  # all blends have memory for half of vLLM's blocks
_LEAST: Final = 8  # 1/8 of a step's tokens is a blend's, however many others want
_PATIENCE: Final = 5.0  # seconds until the worker has said whether it blends: it says so in its first step


@dataclass(slots=True)
class BlendSource:
    """Blocks in L2 with the KV of tokens `start … end` of a prompt; the first block's first token is at `origin`."""

    start: int
    end: int
    origin: int
    slots: tuple[int, ...] = ()  # set with `op_id` when the step is planned
    op_id: int = 0


@dataclass(slots=True)
class BlendOrder:
    """One request to blend, from the scheduler's half to the worker's."""

    token_ids: list[int]
    blocks: list[int]  # vLLM's, of all tokens but the last
    num_l1: int  # leading tokens whose KV vLLM has
    repair: Repair
    exact: BlendSource | None = None  # the rest of the prompt's exact prefix
    parts: list[BlendSource] = field(default_factory=list)

    @property
    def sources(self) -> list[BlendSource]:
        return [*self.parts] if self.exact is None else [self.exact, *self.parts]


def why_not(vllm_config: Any, plan: "SlotPlan") -> str | None:
    """Why nothing is blended with this configuration; None if it can be. The worker checks the model."""
    parallel, transfer, events = (
        getattr(vllm_config, f"{name}_config") for name in ("parallel", "kv_transfer", "kv_events")
    )
    reasons = {
        'blocks without canonical form; set "keys" to "kvtier"': not plan.canonical,
        'kv_load_failure_policy "fail"; set it to "recompute"': transfer.kv_load_failure_policy != "recompute",
        "[cache] share_across_tp, which cuts blocks by ranks": (plan.num_pieces or 1) > 1,
        "several ranks": parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1,
        "adapters": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "several KV groups, or recurrent states": not plan.has_one_table,
        "sliding windows": any(lane.window or lane.chunk for lane in plan.lanes),
        "KV events, which would announce blended blocks": events is not None and events.enable_kv_cache_events,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(slots=True)
class _Lookup:
    """The lookup of a segment's own blocks: those of a prompt that is the segment alone. A `Request`."""

    request_id: str
    segment: Segment
    chain: TokenChain
    num_tokens: int  # of its blocks, and one more: a request's last token is never promised
    promised: int = 0

    def source(self, first: int, last: int) -> BlendSource | None:
        """What is reused of a prompt's tokens `first … last`, if as much comes as was promised; None: nothing."""
        origin = self.segment.start
        start, end = max(origin, first), min(origin + self.promised, self.segment.end, last)
        return BlendSource(start, end, origin) if start < end else None


@dataclass(slots=True)
class _Marked:
    """A live request's segments."""

    lookups: list[_Lookup] = field(default_factory=list)
    repair: Repair | None = None
    num_exact: int = 0  # promised tokens of the exact prefix, beyond those in L1
    num_blocks: int = 0  # in the worker's memory
    is_promised: bool = False
    is_over: bool = False  # it is blended, or computed
    result: BlendResult | None = None


class SegmentRequests:
    """The segments of one engine's requests. Called from the scheduler's thread; never waits."""

    def __init__(
        self, side: SchedulerSide, plan: "SlotPlan", cache: CacheConfig, num_blocks: int, step_tokens: int
    ) -> None:
        """`num_blocks`: vLLM's; `step_tokens`: the most that one of its steps computes."""
        self._side = side
        self._size, self._hash_size = plan.block_size, plan.hash_size
        self._num_layers = len(plan.layers)
        self._cache = cache
        self._room = num_blocks // _SHARE
        self._step_tokens = step_tokens
        self._metrics = side.tiers.metrics
        self._marked: dict[str, _Marked] = {}
        self._sources: dict[str, BlendSource] = {}  # by the id of the request or lookup whose load is not planned yet
        self._coming: dict[str, BlendOrder] = {}  # for the next step
        self._running: dict[str, int] = {}  # ordered, and not reported yet → blocks in the worker's memory
        self._dropped: set[str] = set()
        self._asked_at: float | None = None
        self._refusal: str | None = None
        self._is_ready = False  # the worker has said that it blends

    def __bool__(self) -> bool:
        """Whether the worker has a blend to go on with, or to end."""
        return bool(self._running)

    def refuse(self, reason: str) -> None:
        """From now on every prompt is computed as usual."""
        if self._refusal is None:
            _log.warning("[cache] segments: prompts are computed as usual: %s", reason)
        self._refusal = reason

    def promised(self, row: TrackedRequest, num_exact: int) -> int | Pending:
        """How many tokens beyond L1's a blend brings, of which the tiers have `num_exact` exactly; 0: there is none."""
        if (marked := self._marked.get(row.request_id)) is None:
            marked = self._marked[row.request_id] = self._read(row)
        marked.is_promised = False
        if marked.is_over:
            return 0
        if not self._is_ready:
            self._asked_at = self._asked_at or time.monotonic()
            is_late = time.monotonic() - self._asked_at > _PATIENCE
            return self._compute(marked, UNSUPPORTED) if is_late or self._refusal is not None else PENDING
        exact, found = row.num_l1_tokens + num_exact, dict[str, int | Pending]()
        for each in marked.lookups:
            each.promised, is_known = 0, each.segment.end <= exact
            found[each.request_id] = 0 if is_known else self._side.lookup(each, 0)
        if any(isinstance(each, Pending) for each in found.values()):
            return PENDING
        for each in marked.lookups:
            tokens = found[each.request_id]
            each.promised = tokens if isinstance(tokens, int) and tokens >= self._size else 0
        last = row.num_tokens - 1
        if all(each.source(exact, last) is None for each in marked.lookups):
            return self._compute(marked, "absent")
        marked.num_blocks = sum(-(-tokens // self._size) for tokens in (last, *(e.promised for e in marked.lookups)))
        if sum(self._running.values()) + marked.num_blocks > self._room:
            return self._compute(marked, "no_room")
        marked.num_exact, marked.is_promised = num_exact, True
        return last - row.num_l1_tokens

    def allocated(self, row: TrackedRequest, num_external_tokens: int, blocks: Sequence[int]) -> bool:
        """The request has its blocks: order its blend, if it was promised one and not all of its segments are lost."""
        marked = self._marked.get(row.request_id)
        if marked is None or marked.is_over:
            return False
        last = row.num_tokens - 1
        exact = row.num_l1_tokens + marked.num_exact
        is_wanted = marked.is_promised and num_external_tokens == last - row.num_l1_tokens
        assert marked.repair is not None
        order = BlendOrder(list(row.request.all_token_ids), list(blocks), row.num_l1_tokens, marked.repair)
        for each in marked.lookups:
            if each.request_id not in self._side.requests:
                continue
            wanted = each.promised if is_wanted and each.source(exact, last) is not None else 0
            table = range(-(-wanted // self._size))
            each.promised = self._side.allocated(each.request_id, table, wanted)
            if (source := each.source(exact, last)) is not None:
                order.parts.append(source)
                self._sources[each.request_id] = source
        if not order.parts:
            if is_wanted:
                self._compute(marked, "absent")
            return False
        first = row.num_l1_tokens // self._size
        table = range(first + -(-marked.num_exact // self._size))
        loading = self._side.allocated(row.request_id, table, marked.num_exact)
        if loading:
            end = row.num_l1_tokens + loading
            order.exact = self._sources[row.request_id] = BlendSource(row.num_l1_tokens, end, row.num_l1_tokens)
        self._begin(row, marked, order, loading)
        return True

    def take(self, plan: StepPlan) -> tuple[StepPlan, tuple[CopyOp, ...]]:
        """The plan without the loads of blends, which their orders get; and these."""
        mine = tuple(op for op in plan.loads if op.request_id in self._sources)
        for op in mine:
            source = self._sources.pop(op.request_id)
            source.slots, source.op_id = op.host_slots, op.op_id
        return (replace(plan, loads=tuple(op for op in plan.loads if op not in mine)) if mine else plan), mine

    def orders(self) -> tuple[dict[str, BlendOrder], set[str]]:
        """What the next step's worker begins, and what it ends."""
        coming, self._coming = self._coming, {}
        dropped, self._dropped = self._dropped, set()
        return coming, dropped

    def room(self, num_scheduled: int) -> int:
        """How many tokens blends may compute in a step beside these."""
        return max(self._step_tokens - num_scheduled, self._step_tokens // _LEAST)

    def apply(self, ended: Mapping[str, BlendResult | str], readiness: str | None) -> None:
        """The worker's report. `readiness`: "", or why it blends nothing; None: as before."""
        if readiness is not None:
            self._is_ready = not readiness and self._refusal is None
            if readiness:
                self.refuse(readiness)
        for request_id, result in ended.items():
            self._running.pop(request_id, None)
            if isinstance(result, str):
                self._metrics.blended(result)
                continue
            if (marked := self._marked.get(request_id)) is not None:
                marked.result = result
            self._metrics.blended("in_full" if result.fell_back else "blended", result.num_reused, result.num_repaired)
            about = request_id, result.num_reused, result.num_repaired
            _log.info("%s is approximate: %d tokens are of segments, %d of them were computed again", *about)

    def finished(self, row: TrackedRequest) -> dict[str, Any] | None:
        """Forget a request. Returns what its answer says of it; None: it is exact."""
        if (marked := self._marked.pop(row.request_id, None)) is None:
            return None
        for each in marked.lookups:
            self._side.finished(each.request_id)
        if row.request_id in self._running:
            self._dropped.add(row.request_id)
        if (result := marked.result) is None or not result.num_reused:
            return None
        about = {"segment": result.num_reused, "repaired": result.num_repaired}
        return {APPROXIMATE: {**about, "repair_share": round(result.num_repaired / result.num_reused, 4)}}

    def _read(self, row: TrackedRequest) -> _Marked:
        """A request's marks, each with a lookup of its own."""
        request, given = row.request, params_of(row.request)
        marked = _Marked()
        if given.get(MARKS) is None:
            marked.is_over = True
            return marked
        if given.get("do_remote_decode") or given.get("do_remote_prefill"):
            self._compute(marked, "handover")
            return marked
        if self._refusal is not None or request.num_output_tokens or request.resumable:
            self._compute(marked, UNSUPPORTED)
            return marked
        try:
            segments, marked.repair = self._parsed(given, request.num_prompt_tokens)
        except (RequestError, TypeError, ValueError) as error:
            _log.warning("kv_transfer_params, %s: ignored: %s", MARKS, error)
            self._compute(marked, "wrong_marks")
            return marked
        least = max(self._cache.segment_min_tokens, self._size)
        for segment in segments:
            num_blocks = (segment.end - segment.start) // self._size
            if not segment.start or segment.end - segment.start < least:
                continue
            chain = TokenChain(row.chain.root, self._size, self._cache.hash)
            chain.extend(request.all_token_ids[segment.start : segment.start + num_blocks * self._size])
            name = part_id(row.request_id, f"segment {segment.start}")
            marked.lookups.append(_Lookup(name, segment, chain, num_blocks * self._size + 1))
        return marked

    def _parsed(self, given: Mapping[str, Any], num_tokens: int) -> tuple[Sequence[Segment], Repair]:
        marks, repair = given[MARKS], given.get(REPAIR) or {}
        if not isinstance(marks, list) or len(marks) > _MOST:
            raise RequestError(f"use a list of at most {_MOST} [start, end]")
        default = Repair(self._cache.repair_rule, self._cache.repair_share)
        chosen = Repair(**{"rule": default.rule, "share": default.share, **repair})
        segments = checked_segments([Segment(*mark) for mark in marks], num_tokens)
        return segments, checked_repair(chosen, default, self._num_layers)

    def _compute(self, marked: _Marked, why: str) -> int:
        """The request is computed as usual."""
        marked.is_over = True
        self._metrics.blended(why)
        for each in marked.lookups:
            self._side.finished(each.request_id)
        return 0

    def _begin(self, row: TrackedRequest, marked: _Marked, order: BlendOrder, num_loaded: int) -> None:
        """From now on nothing of the request behind its exact prefix has a name that anything exact has."""
        num_exact = row.num_l1_tokens + num_loaded
        most = num_exact if row.most_stored is None else min(row.most_stored, num_exact)
        row.most_stored = most // self._size * self._size
        # Set in the request, too: if the connector forgets it, as when weights change, it reads this bound again.
        row.request.kv_transfer_params = {**params_of(row.request), "max_offload_tokens": row.most_stored}
        _rename(row.request, num_exact // self._hash_size)
        if (stats := row.request.prefill_stats) is not None:  # segments are not cached tokens
            stats.set(row.request.num_prompt_tokens, row.num_l1_tokens, num_loaded)
        self._coming[row.request_id] = order
        self._running[row.request_id] = marked.num_blocks
        marked.is_over = True


def _rename(request: Any, num_kept: int) -> None:
    """Give a request's blocks, all but the first, names in vLLM that no other request can have; later blocks, too.

    So vLLM's own prefix cache, which names blocks by these, finds them for this request alone.
    """
    nonce, hasher = secrets.token_bytes(32), request._block_hasher

    def renamed(names: Sequence[bytes]) -> list[bytes]:
        return [hashlib.sha256(nonce + name).digest()[: len(name)] for name in names]

    request.block_hashes[num_kept:] = renamed(request.block_hashes[num_kept:])
    if hasher is not None:
        request._block_hasher = lambda growing: renamed(hasher(growing))
