"""Segment reuse as the engine sees it: brings missing segments to L1, has requests blended, counts what came of it."""

from collections import Counter, abc
from typing import Final

from kvtier.connector.segments import (
    COUNTED,
    DEVIATION_BOUNDS,
    Blender,
    BlendResult,
    Repair,
    Segment,
    WantedReuse,
    checked_repair,
    checked_segments,
    deviation_bound,
    require_rotatable,
)
from kvtier.engine.batch import Batch
from kvtier.engine.config import EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.reuse import HeldSegment, SegmentReuse
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import (
    FinishReason,
    NamedPrompt,
    Output,
    SamplingParams,
    Sequence,
    SequenceState,
)
from kvtier.tiers import ConfigError, RequestError
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import TokenChain

_ONE_TOKEN: Final = SamplingParams(max_tokens=1, ignore_eos=True)


_BLENDED: Final = ("llama", "mistral", "qwen2", "qwen3")  # model kinds whose decoder layers `blend.py` runs one by one


class SegmentRequests:
    """Segments of one engine's requests. ConfigError at the start if the model's KV cannot be moved.

    A segment that L1 lacks becomes a request of its own, a child, which finds or computes ordinary prefix blocks.
    """

    def __init__(self, model: Model, pool: BlockPool, scheduler: Scheduler, config: EngineConfig) -> None:
        self.stats: Counter[str] = Counter()
        # Requests by the upper bound of what was left unrepaired, and the sum of it.
        self.deviations: Counter[float] = Counter(dict.fromkeys(DEVIATION_BOUNDS, 0))
        self.deviation_sum = 0.0
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._config = config
        if (kind := model.kind) not in _BLENDED:
            known = ", ".join(_BLENDED)
            raise ConfigError(
                f'segments "on": model kind {kind!r}: a blend knows the layers of {known}; set them "off"'
            )
        self._blender = Blender(model.module, pool.tensor, require_rotatable(model.module), config.token_budget)
        self._children: dict[str, Sequence] = {}

    @property
    def figures(self) -> abc.Mapping[str, int]:
        """Counts since the start: tokens from segments, those of them computed anew, blends, segments by outcome."""
        return {**dict.fromkeys(COUNTED, 0), **self.stats}

    def wanted(self, segments: abc.Sequence[Segment], repair: Repair | None, num_tokens: int) -> WantedReuse:
        """What a request asks for; RequestError for what this model or mode cannot do."""
        if self._config.exact:
            raise RequestError('segments: their reuse is approximate, and this engine is "exact"; leave them out')
        default = Repair(self._config.repair_rule, self._config.repair_share)
        repair = checked_repair(repair, default, self._model.num_layers)
        return WantedReuse(checked_segments(segments, num_tokens), repair)

    def open(
        self, request_id: str, prompt: NamedPrompt, wanted: WantedReuse, order: abc.Iterator[int]
    ) -> SegmentReuse | None:
        """What a new request is to reuse, its children queued; None: nothing. Call it before the request is queued."""
        kept: list[HeldSegment] = []
        for segment in wanted.segments:
            chain = self._chain_of(prompt, segment)
            if not segment.start or segment.end - segment.start < self._config.segment_min_tokens or not chain.hashes:
                self.stats["segments_short" if segment.start else "segments_prefix"] += 1
                continue
            child = None
            if self._pool.lookup(chain.hashes) == len(chain.hashes):
                self.stats["segments_held"] += 1
            else:
                child = self._child(f"{request_id} segment {len(kept) + 1}", prompt, segment, next(order))
            kept.append(HeldSegment(segment, tuple(chain.hashes), child))
        size = self._config.block_size
        return SegmentReuse(wanted.repair, tuple(kept), size, self.stats, self._blender) if kept else None

    def advance(self) -> None:
        """End the children that have all their blocks: the token that follows is nobody's.

        A request that was admitted before its segments were there holds those that are there now.
        """
        for child in [child for child in self._children.values() if child.state is SequenceState.RUNNING]:
            if child.num_named >= child.num_prompt_tokens // self._config.block_size:
                self._count_child(child)
                self._scheduler.abort(child.request_id)
        for sequence in [*self._scheduler.running, *self._scheduler.loading.values()]:
            if isinstance(reuse := sequence.reuse, SegmentReuse) and reuse.is_due and not reuse.take(self._pool):
                reuse.let_go(self._pool)
                self._scheduler.compute_exactly(sequence)

    def blend(self, batch: Batch) -> None:
        """Blend what the batch has tokens for. Behind a blend that ends in this step, the batch has the last token."""
        blends = [
            (chunk, chunk.sequence.reuse, chunk.sequence.reuse.blend)
            for chunk in batch.chunks
            if chunk.blends and isinstance(chunk.sequence.reuse, SegmentReuse)
        ]
        if not blends:
            return
        left = self._blender.advance([(blend, chunk.blends) for chunk, _, blend in blends if blend is not None])
        unfinished = []
        for (chunk, reuse, blend), over in zip(blends, left, strict=True):
            assert blend is not None
            if blend.has_copied:
                reuse.let_go_of_sources(self._pool)
            if blend.result is None:
                unfinished.append(chunk)
                continue
            self._count(chunk.sequence, blend.result)
            reuse.let_go(self._pool)
            if not over:  # for the last token
                chunk.sequence.num_computed = chunk.start
                unfinished.append(chunk)
        batch.blended(unfinished)
        if not batch.chunks:
            self._blender.synchronize()  # nobody else waits for this step's work

    def takes(self, output: Output) -> bool:
        """Whether an output is a child's, which nobody is told."""
        child = self._children.get(output.request_id)
        if child is None:
            return False
        if output.finish_reason is not None:
            del self._children[output.request_id]
            if output.finish_reason is not FinishReason.ABORT:
                self._count_child(child)
        return True

    def abort(self, sequence: Sequence) -> None:
        """End what a request waits for: whoever else wants the same segments has children of their own."""
        for child in sequence.reuse.children if isinstance(sequence.reuse, SegmentReuse) else ():
            if child.state is not SequenceState.FINISHED:
                self._scheduler.abort(child.request_id)

    def _child(self, name: str, prompt: NamedPrompt, segment: Segment, order: int) -> Sequence:
        """Queue the segment alone: its full blocks, and one token more, since a last one is never loaded."""
        size = self._config.block_size
        num_tokens = (segment.end - segment.start) // size * size
        tokens = prompt.token_ids[segment.start : segment.start + num_tokens]
        tokens.append(prompt.token_ids[min(segment.start + num_tokens, segment.end - 1)])
        assert prompt.chain is not None
        chain = TokenChain(prompt.chain.root, size, self._config.hash_scheme)
        chain.extend(tokens)
        while self._scheduler.knows(name):
            name += "'"
        child = Sequence(name, tokens, _ONE_TOKEN, chain, order)
        child.is_segment = True
        self._children[name] = child
        self._scheduler.add(child)
        return child

    def _chain_of(self, prompt: NamedPrompt, segment: Segment) -> TokenChain:
        assert prompt.chain is not None
        chain = TokenChain(prompt.chain.root, self._config.block_size, self._config.hash_scheme)
        chain.extend(prompt.token_ids[segment.start : segment.end])
        return chain

    def _count_child(self, child: Sequence) -> None:
        num_tokens = child.num_prompt_tokens - 1
        had = {"held": child.num_l1_tokens, "loaded": child.num_l1_tokens + child.num_external_tokens}
        outcome = next((way for way, number in had.items() if number >= num_tokens), "computed")
        self.stats[f"segments_{outcome}"] += 1

    def _count(self, sequence: Sequence, result: BlendResult) -> None:
        if not sequence.num_generated:  # what its first token saw; a blend that had to be made again counts once
            self.stats["segment_tokens"] += result.num_reused - sequence.num_segment_tokens
            self.stats["repaired_tokens"] += result.num_repaired - sequence.num_repaired_tokens
            sequence.num_segment_tokens, sequence.num_repaired_tokens = result.num_reused, result.num_repaired
        self.stats["blends"] += 1
        self.stats["blends_in_full"] += result.fell_back
        self._scheduler.stats["computed_tokens"] += result.num_computed
        if result.deviation is not None:
            self.deviations[deviation_bound(result.deviation)] += 1
            self.deviation_sum += result.deviation


def wanted_reuse(
    segments: abc.Sequence[Segment], repair: Repair | None, num_tokens: int, reuse: SegmentRequests | None
) -> WantedReuse | None:
    """What a request asks for, checked; None: nothing. `reuse` is the engine's, None where segments are off."""
    if not segments:
        return None
    if reuse is None:
        raise RequestError('segments: this engine reuses none; set [cache] segments = "on", or leave them out')
    return reuse.wanted(segments, repair, num_tokens)


def wanted_by_each(
    segments: abc.Sequence[abc.Sequence[Segment]] | None,
    repair: Repair | None,
    prompts: abc.Sequence[abc.Sequence[int]],
    reuse: SegmentRequests | None,
) -> list[WantedReuse | None]:
    """The same for several requests, of which each has a list of segments."""
    if segments is None:
        return [None] * len(prompts)
    if len(segments) != len(prompts):
        raise RequestError(f"segments of {len(segments)} prompts for {len(prompts)}: give one list each")
    return [wanted_reuse(one, repair, len(prompt), reuse) for one, prompt in zip(segments, prompts, strict=True)]
