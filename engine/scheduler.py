"""Decides what each step computes: continuous batching over a paged pool, longest cached prefix first. No torch."""

import time
from collections import Counter, abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from kvtier.connector import Answered, ConnectorUpdate, StepPlan, WorkerReport, prefill_of
from kvtier.connector.models import Reasoning
from kvtier.engine.admission import Admission
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import NoOffload
from kvtier.engine.requests import FinishReason, Output, SampledToken
from kvtier.engine.sequence import ALL, Batch, Chunk, Sequence, SequenceState
from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import Pending
from kvtier.tiers.reuse import Hint

if TYPE_CHECKING:
    from kvtier.connector import SchedulerSide
    from kvtier.tiers.copies import BlockPool


class HeldBlocks:
    """Counts the copies of each block."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self.copies: Counter[int] = Counter()  # under way, by block
        self.left: set[int] = set()  # blocks released by their request

    def hold(self, blocks: abc.Sequence[int]) -> None:
        self._pool.hold(blocks)
        self.copies.update(blocks)

    def release_request(self, blocks: abc.Sequence[int]) -> None:
        """Their request releases them. Those with copies under way will soon be free."""
        self.left.update(block for block in blocks if block in self.copies)

    def copied(self, blocks: abc.Sequence[int]) -> None:
        distinct = len(set(blocks)) == len(blocks)
        for some in [blocks] if distinct else [(block,) for block in blocks]:
            self._pool.free(some)
            self.copies.subtract(some)
        for block in blocks:
            if not self.copies[block]:
                del self.copies[block]
                self.left.discard(block)


CallsTool = Callable[[abc.Sequence[int]], bool]
"""Whether an answer of these tokens calls a tool."""


_LOOK_AHEAD: Final = 0.05  # seconds between lookups while no seat is free: they cost milliseconds, but start prefetches


class Scheduler:
    """Decides which requests compute what, in which blocks.

    Per step: `schedule` → the runner → `postprocess`; `fail` instead if the runner raised. No block is named in L1
    before it was computed or loaded: a request whose next block is being computed by another waits for it instead.
    Under pressure the latest running request is preempted; an answer under way precedes a new prompt.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: "BlockPool",
        connector: "SchedulerSide | NoOffload | None" = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.loading: dict[str, Sequence] = {}
        self.running: list[Sequence] = []  # by admission
        self.stats: Counter[str] = Counter()
        self.segment_stats: Counter[str] = Counter()  # the same for segments, which are not users' requests
        self.live: dict[str, Sequence] = {}
        self.orphans: dict[str, list[int]] = {}  # aborted request → blocks that its load still writes to
        self._config = config
        self._token_budget = config.token_budget
        self._pool = pool
        self.offloads = connector is not None  # else there is no tier below L1
        self._connector = NoOffload() if connector is None else connector
        self._eos_token_ids = eos_token_ids
        self._admission = Admission(config, pool, self._connector)
        self.waiting = self._admission.waiting  # by arrival
        self._held = HeldBlocks(pool)
        self._look_ahead_at = 0.0
        self._ended: list[Output] = []  # aborts not reported yet
        self.calls_tool: CallsTool | None = None  # detects a tool call in an answer's tokens; None: unknown
        self.reasoning: Reasoning | None = None  # the part of answers that no later turn has, so that it is not stored

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.loading or self.running or self._ended)

    @property
    def has_copies(self) -> bool:
        return bool(self.loading or self._held.copies or self.orphans)

    def add(self, sequence: Sequence, *, is_segment: bool = False, before: Sequence | None = None) -> None:
        """Queue it, `before` a waiting one or last. `is_segment`: a segment by itself, not a user's request."""
        sequence.stats = self.segment_stats if is_segment else self.stats
        if self.reasoning is not None and self.reasoning.is_open(sequence.token_ids):
            self._lasts(sequence, sequence.num_tokens)
        self.live[sequence.request_id] = sequence
        self.waiting.insert(len(self.waiting) if before is None else self.waiting.index(before), sequence)

    def schedule(self, report: WorkerReport) -> Batch:
        """Apply ended copies; choose what the step computes, loads and stores."""
        if report.finished or report.failed or self._connector.released:
            self.apply(report)
        num_preempted = self.stats["preempted"]
        only = next(iter(self.live.values())) if len(self.live) == 1 else None
        self._connector.computes_alone = only is not None and only.reuse is None and only.find is None
        chunks, budget = self._continue() if self.running else ([], self._token_budget)
        if self.waiting and budget and self.stats["preempted"] == num_preempted:
            budget = self._admit(budget, chunks)
        block_size = self._config.block_size
        for chunk in chunks:
            sequence = chunk.sequence
            end = min(chunk.end, sequence.num_shareable) // block_size
            if end > sequence.num_stored and not sequence.num_loading:  # a layerwise load's is stored a step later
                self._store(sequence, end)
        self.stats["steps"] += 1
        return Batch(chunks, self._token_budget - budget, self.flush(), self._admission.copies)

    def postprocess(self, batch: Batch, samples: Iterable[SampledToken]) -> list[Output]:
        """Apply the step's results; `samples` has one for each chunk that samples, in order."""
        outputs, self._ended = self._ended, []
        if self._admission.copies:
            self._admission.release_sources()
        if not batch.plan.loads and not batch.has_blended:  # these slow a step down
            chunks = [(num_new, each.start) for each in batch.chunks if (num_new := each.end - each.start) > 1]
            num_prefilled, position = prefill_of(chunks, batch.num_tokens) if chunks else (0, 0.0)
            if num_prefilled:
                self._connector.computed(num_prefilled, time.perf_counter() - batch.started, position)
        left = iter(samples)
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sample = next(left) if chunk.samples else None
            if sequence.num_loading and not batch.arrived:
                self._await_load(sequence)
                continue
            if sequence.num_loading:
                self._count_loaded(sequence)
            sequence.num_computed = chunk.end
            self.stats["computed_tokens"] += chunk.end - chunk.start
            self._name(sequence)
            if sample is not None:
                outputs.append(self._append(sequence, sample))
        return outputs

    def fail(self, batch: Batch, unstarted: tuple[int, ...]) -> None:
        """The step raised: its results are dropped, its requests wait again. `unstarted`: copies without a report."""
        if self._admission.copies:
            self._admission.release_sources()
        for chunk in batch.chunks:
            if chunk.sequence.num_loading:
                self._await_load(chunk.sequence)
            else:
                self._requeue(chunk.sequence)
        self._connector.drop_late()
        self.apply(WorkerReport(failed=unstarted))  # requests that wait for these loads compute instead

    def flush(self) -> StepPlan:
        """The copies due with the next step, for an engine that makes none."""
        plan = self._connector.build_plan()
        if self._connector.writing:
            self._held.hold(self._connector.writing)
        return plan

    def compute_exactly(self, sequence: Sequence) -> None:
        """Compute an admitted request like any other, without its segment reuse."""
        sequence.num_exact = ALL
        sequence.num_shareable = self._admission.num_shareable(sequence)

    def abort(self, request_id: str) -> bool:
        """Abort a request in any state; the next step's outputs report it. False: there is no such request."""
        if (sequence := self.live.get(request_id)) is None:
            return False
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.LOADING:
            del self.loading[request_id]
        else:
            self.running.remove(sequence)
        self._end(sequence, FinishReason.ABORT)
        sequence.stats["aborted"] += 1
        self._ended.append(Output(request_id, None, FinishReason.ABORT))
        return True

    def apply(self, report: WorkerReport) -> None:
        """Apply ended copies: loaded requests run, released blocks lose their store's reference."""
        update: ConnectorUpdate = self._connector.update(report)
        for request_id in update.loaded:
            self._loaded(request_id, None)
        for request_id, first_block in update.failed:
            self._loaded(request_id, first_block)
        if update.released:
            self._held.copied(update.released)

    # running: every sequence computes its next tokens, answers before prompts

    def _continue(self) -> tuple[list[Chunk], int]:
        """The chunks, and the step's remaining budget of tokens."""
        budget = self._token_budget
        chunks: list[Chunk] = []
        answers = [each for each in self.running if each.num_tokens - each.num_computed <= 1]
        for sequence in answers + [each for each in self.running if each.num_tokens - each.num_computed > 1]:
            if sequence.state is not SequenceState.RUNNING or not budget or not self._grow(sequence, chunks):
                continue
            budget -= self._compute(sequence, budget, chunks)
        return chunks, budget

    def _compute(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Add its chunk of this step, of `budget` tokens at most. Returns its tokens; 0 if it waits for a load."""
        if sequence.is_in_pieces and self._takes_piece(sequence):
            return 0
        end = self._meet(sequence) if sequence.request_id in self._connector.overlapped else sequence.num_tokens
        start = sequence.num_computed
        if sequence.reuse is not None and sequence.reuse.is_due:
            end = min(end, sequence.num_exact)
            if start == end:  # the rest is the blend's, except the last token
                if blends := sequence.reuse.claim(sequence, budget):
                    chunks.append(Chunk(sequence, sequence.num_tokens - 1, sequence.num_tokens, True, blends))
                return blends
        end = min(start + budget, end)
        if end > start:
            chunks.append(Chunk(sequence, start, end, samples=end == sequence.num_tokens))
        return end - start

    def _meet(self, sequence: Sequence) -> int:
        """Apply what an overlapped load has loaded. Returns up to which token the request may compute in this step."""
        back = self._connector.overlapped[sequence.request_id]
        if (reached := back.reach(sequence.num_computed)) > sequence.num_computed:
            self._store(sequence, min(sequence.num_computed, sequence.num_shareable) // self._config.block_size)
            num_joined = reached - sequence.num_computed  # the tiers have them, so they are not stored again
            sequence.num_computed = reached
            sequence.num_stored = max(sequence.num_stored, reached // self._config.block_size)
            if not sequence.num_preempted:
                sequence.num_external_tokens += num_joined
            self.stats["external_tokens"] += num_joined
            self._name(sequence)
        if back.is_over(sequence.num_computed):
            self._end_overlapped(sequence)
            return sequence.num_tokens
        return min(back.limit(sequence.num_computed, alone=self._connector.computes_alone), sequence.num_tokens)

    def _end_overlapped(self, sequence: Sequence) -> None:
        """It has all of its blocks, or loses them."""
        self.stats["skipped_tokens"] += self._connector.end_overlapped(sequence.request_id) * self._config.block_size

    def _grow(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        """Allocate missing blocks, preempting the latest request that is not in `chunks`. False: not in this step."""
        if not (num_missing := -(-sequence.num_tokens // self._config.block_size) - len(sequence.block_table)):
            return True
        scheduled = {chunk.sequence.request_id for chunk in chunks}
        while (blocks := self._pool.allocate(num_missing)) is None:
            self._connector.drop_late(short_only=True)
            if self._held.left:  # there is room once their copies end
                return False
            victim = next(other for other in reversed(self.running) if other.request_id not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self._config.preemption == "offload":
            self._store(sequence, min(sequence.num_computed, sequence.num_exact) // self._config.block_size)
        self._requeue(sequence)
        sequence.num_preempted += 1
        self.stats["preempted"] += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        self._admission.put_back(sequence)

    # admission: the longest cached prefix first, unless an earlier request was passed over too often

    def _admit(self, budget: int, chunks: list[Chunk]) -> int:
        """Admit what fits, in the order of ranking, and add its chunks. Returns the step's remaining budget."""
        now, max_num_seqs = time.perf_counter(), self._config.max_num_seqs
        if now < self._look_ahead_at and len(self.running) + len(self.loading) >= max_num_seqs:
            return budget
        self._look_ahead_at = now + _LOOK_AHEAD
        while budget:
            num_seats = max_num_seqs - len(self.running) - len(self.loading)
            ranked = self._admission.rank(num_seats)
            for request_id in self._admission.absent:
                self.abort(request_id)
            for candidate in ranked:
                if not budget:
                    break
                room_to_grow = len(self.running) + len(self.loading)  # a block each, or they would preempt it at once
                seated = self._admission.seat(candidate, room_to_grow) if num_seats > 0 else None
                if seated is None:
                    self._connector.drop_late(short_only=True)
                    if budget == self._token_budget and not self.has_copies:
                        self._make_way()
                    break  # a large request is not overtaken
                if seated:
                    num_seats -= 1
                    budget -= self._begin(candidate.sequence, budget, chunks)
            if not self._admission.has_changed:  # else segments were queued, or ended as no tier has them
                break
        return budget

    def _make_way(self) -> None:
        """Nothing progresses, and a request waits for room or a seat: preempt one that waits for its segments."""
        early = [each for each in self.running if each.reuse is not None and each.reuse.is_early]
        if early:
            self._preempt(early[-1])

    def _begin(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """A request has its blocks: it computes in this step unless it loads. Returns how many tokens."""
        num_l1, loading, request_id = sequence.num_named, sequence.num_loading, sequence.request_id
        if num_l1:
            self._store(sequence, num_l1)  # lower tiers may have evicted or refused L1's blocks
        sequence.num_stored = num_l1 + loading // self._config.block_size
        if not sequence.num_preempted:
            sequence.num_l1_tokens = sequence.num_computed
            sequence.lookup = self._connector.requests.get(request_id)
            sequence.stats["prompt_tokens"] += sequence.num_prompt_tokens
            sequence.stats["l1_tokens"] += sequence.num_computed
        if sequence.state is SequenceState.LOADING:
            self.loading[request_id] = sequence
            return 0
        sequence.num_computed += loading
        self.running.append(sequence)
        num_tokens = self._compute(sequence, budget, chunks)
        if not num_tokens and sequence.num_loading:
            self._await_load(sequence)  # it waits for an overlapped load: no compute of its own in this step
        return num_tokens

    # loads

    def _loaded(self, request_id: str, first_failed: int | None) -> None:
        """A load has ended; the request computes from block `first_failed` on."""
        if (orphaned := self.orphans.pop(request_id, None)) is not None:
            self._pool.free(orphaned)
            return
        sequence = self.loading.pop(request_id, None)
        if sequence is None:  # a layerwise load, confirmed by the step that waited for it
            return
        end = sequence.num_computed + sequence.num_loading
        if first_failed is not None:
            end = min(end, first_failed * self._config.block_size)
            self.stats["failed_loads"] += 1
        sequence.num_loading = end - sequence.num_computed
        sequence.num_computed = end
        sequence.num_stored = end // self._config.block_size
        sequence.is_in_pieces = first_failed is None and sequence.is_in_pieces
        self._count_loaded(sequence)
        self._name(sequence)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)

    def _count_loaded(self, sequence: Sequence) -> None:
        if sequence.num_loading and not sequence.num_preempted:
            sequence.num_external_tokens += sequence.num_loading
        sequence.stats["external_tokens"] += sequence.num_loading
        sequence.num_loading = 0

    def _takes_piece(self, sequence: Sequence) -> bool:
        """Whether the next piece is being loaded for a request whose blocks exceed what L2 can load at once."""
        answer = self._connector.lookup(sequence, sequence.num_computed)
        if isinstance(answer, Pending):
            return True
        if answer:
            answer = self._connector.allocated(sequence.request_id, sequence.block_table, answer)
        sequence.is_in_pieces = bool(answer) and self._connector.is_cut(sequence.request_id, answer)
        if answer:
            sequence.num_loading = answer
            self._await_load(sequence)
        return bool(answer)

    def _await_load(self, sequence: Sequence) -> None:
        """A layerwise load was late: its request waits for the report like any other load."""
        self.running.remove(sequence)
        sequence.num_computed = min(sequence.num_computed, sequence.num_named * self._config.block_size)
        sequence.state, sequence.cache = SequenceState.LOADING, None
        self.loading[sequence.request_id] = sequence

    # a block's life: computed or loaded → named in L1 → stored; released at the end

    def _name(self, sequence: Sequence) -> None:
        """Publish blocks that became full: only exact ones, perhaps only the prompt's."""
        start, end = sequence.num_named, min(sequence.num_computed, sequence.num_shareable) // self._config.block_size
        if end <= start:
            return
        chain, numbers = sequence.chain, range(start, end) if self._pool.wants_tokens else ()
        hashes, parent = chain.hashes[start:end], chain.hashes[start - 1] if start else chain.root
        self._pool.publish(sequence.block_table[start:end], hashes, parent, [*map(chain.block_tokens, numbers)])
        sequence.num_named = end
        self._forget(sequence, hashes)

    def _forget(self, sequence: Sequence, hashes: Iterable[ChainHash]) -> None:
        """These blocks are in L1 now, or will not be."""
        computing = self._admission.computing
        for chain_hash in hashes:
            if computing.get(chain_hash) == sequence.request_id:
                del computing[chain_hash]

    def _store(self, sequence: Sequence, end: int) -> None:
        start = sequence.num_stored
        if not self.offloads or end <= start:
            return
        blocks = sequence.block_table[start:end]
        self._held.hold(blocks)
        self._connector.store(sequence.request_id, start, blocks)
        sequence.num_stored = end

    def _append(self, sequence: Sequence, sample: SampledToken) -> Output:
        if sequence.ttft is None:
            sequence.ttft = time.monotonic() - sequence.arrived
        sequence.token_ids.append(sample.token_id)  # the next step computes its KV
        sequence.num_tokens += 1
        sequence.num_generated += 1
        sequence.looks_up = True
        if sequence.is_named:
            sequence.chain.extend([sample.token_id])
        if self.reasoning is not None and sample.token_id == self.reasoning.begins:
            self._lasts(sequence, sequence.num_tokens - 1)
        sequence.stats["generated_tokens"] += 1
        reason, params, guided = None, sequence.params, sequence.sampling.guided
        ends = sample.token_id in self._eos_token_ids and not params.ignore_eos
        if ends or sample.token_id in params.stop_token_ids:
            reason = FinishReason.LENGTH if guided is not None and guided.is_cut else FinishReason.STOP
        elif sequence.num_generated >= params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.running.remove(sequence)
            self._end(sequence, reason)
            sequence.stats["finished"] += 1
        return Output(sequence.request_id, sample.token_id, reason, sample.logits, sample.logprobs)

    def _lasts(self, sequence: Sequence, num_tokens: int) -> None:
        """The next turn shares so many leading tokens. With partial blocks, the block they end in is kept, too."""
        size = self._config.block_size
        num_lasting = -(-num_tokens // size) * size if self._pool.partial_blocks else num_tokens
        self._admission.lasting.setdefault(sequence.request_id, num_lasting)
        sequence.num_shareable = self._admission.num_shareable(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        lasts = self._admission.lasting.pop(sequence.request_id, None) is None
        if not lasts and reason is FinishReason.STOP and not sequence.num_loading:
            assert self.reasoning is not None
            if self.reasoning.lasts_in_calls and self._is_call(sequence):  # then the next turn has the reasoning, too
                sequence.num_shareable = self._admission.num_shareable(sequence)
                self._name(sequence)
                self._store(sequence, min(sequence.num_computed, sequence.num_shareable) // self._config.block_size)
        if sequence.num_loading and sequence.block_table:  # a copy still writes: the blocks stay until it ends
            self.orphans[sequence.request_id], sequence.block_table = sequence.block_table, []
        elif self._pool.partial_blocks and sequence.block_table:
            self._keep_partial(sequence)
        self._release(sequence)
        del self.live[sequence.request_id]
        answered: Answered | None = None
        if sequence.num_generated:
            hint, is_derived = sequence.params.hint, False
            if hint is None and reason is FinishReason.STOP and self._is_call(sequence):
                hint, is_derived = Hint.TOOL, True  # an answer that was cut off calls no tool
            counts, seconds = (sequence.num_prompt_tokens, sequence.num_generated), time.monotonic() - sequence.arrived
            answered = Answered(*counts, hint, is_derived, seconds, sequence.ttft or 0.0)
        self._connector.finished(sequence.request_id, answered)
        sequence.state = SequenceState.FINISHED

    def _is_call(self, sequence: Sequence) -> bool:
        return sequence.params.is_call or (self.calls_tool is not None and self.calls_tool(sequence.generated))

    def _keep_partial(self, sequence: Sequence) -> None:
        """Name the partial last block, in which a conversation's next turn begins, and store it if that is worth it."""
        num_kept = min(sequence.num_computed, sequence.num_shareable)
        is_next = num_kept // self._config.block_size == sequence.num_named
        if not is_next or (partial := sequence.chain.partial_block(num_kept)) is None:
            return
        block = sequence.block_table[sequence.num_named]
        if sequence.stats is self.stats and self._connector.store_partial(sequence.request_id, partial, block):
            self._held.hold([block])
        self._pool.publish([block], [partial.chain_hash], partial.parent, [partial.tokens], is_partial=True)

    def _release(self, sequence: Sequence) -> None:
        if sequence.request_id in self._connector.overlapped:
            self._end_overlapped(sequence)
        if self._admission.computing:
            self._forget(sequence, sequence.hashes[sequence.num_named :])
        if sequence.reuse is not None:
            sequence.reuse.release()
        if self._held.copies:
            self._held.release_request(sequence.block_table)
        self._pool.free(sequence.block_table)
        sequence.block_table, sequence.cache = [], None
        sequence.num_computed = sequence.num_named = sequence.num_stored = sequence.num_loading = 0
