"""Segment reuse as the engine sees it: brings missing segments to L1, has requests blended, counts what came of it."""

from bisect import bisect_left
from collections import Counter, abc
from typing import Final

from kvtier.connector.segments import (
    Blender,
    BlendRequest,
    BlendResult,
    Repair,
    Segment,
    WantedReuse,
    checked_segments,
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

_BOUNDS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the histogram of deviations
_ONE_TOKEN: Final = SamplingParams(max_tokens=1, ignore_eos=True)

OUTCOMES: Final = ("held", "loaded", "computed", "lost", "short", "prefix")
"""What became of segments: in L1 when asked for, loaded whole, (partly) computed alone; gone again from L1 when its
request was admitted; too short; at the prompt's start, where it is an ordinary prefix."""

_COUNTED: Final = (
    "segment_tokens",
    "repaired_tokens",
    "blends",
    "blends_in_full",
    *(f"segments_{way}" for way in OUTCOMES),
)


_BLENDED: Final = ("llama", "mistral", "qwen2", "qwen3")  # model kinds whose decoder layers `blend.py` runs one by one


class SegmentRequests:
    """Segments of one engine's requests. ConfigError at the start if the model's KV cannot be moved.

    A segment that L1 lacks becomes a request of its own, a child, which finds or computes ordinary prefix blocks.
    """

    def __init__(self, model: Model, pool: BlockPool, scheduler: Scheduler, config: EngineConfig) -> None:
        self.stats: Counter[str] = Counter()
        self.deviations: Counter[float] = Counter()  # requests by the upper bound of what was left unrepaired
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._config = config
        if (kind := model.config.model_type) not in _BLENDED:
            known = ", ".join(_BLENDED)
            raise ConfigError(
                f'segments "on": model kind {kind!r}: a blend knows the layers of {known}; set them "off"'
            )
        self._blender = Blender(model.module, pool.tensor, require_rotatable(model.module), config.token_budget)
        self._children: dict[str, Sequence] = {}

    @property
    def figures(self) -> abc.Mapping[str, int]:
        """Counts since the start: tokens from segments, those of them computed anew, blends, segments by outcome."""
        return {**dict.fromkeys(_COUNTED, 0), **self.stats}

    def wanted(self, segments: abc.Sequence[Segment], repair: Repair | None, num_tokens: int) -> WantedReuse:
        """What a request asks for; RequestError for what this model or mode cannot do."""
        if self._config.exact:
            raise RequestError('segments: their reuse is approximate, and this engine is "exact"; leave them out')
        if not isinstance(repair, Repair | None):
            raise RequestError(f"repair {repair!r}: use Repair(rule, share)")
        repair = repair or Repair(self._config.repair_rule, self._config.repair_share)
        num_layers = self._model.num_layers
        if repair.rule == "deviation" and repair.check_layer >= num_layers:
            raise RequestError(
                f"check_layer {repair.check_layer}: this model's layers are 0 to {num_layers - 1}; use a lower one"
            )
        return WantedReuse(checked_segments(segments, num_tokens), repair)

    def open(
        self, request_id: str, prompt: NamedPrompt, wanted: WantedReuse, order: abc.Iterator[int]
    ) -> SegmentReuse | None:
        """What a new request is to reuse, its children queued; None: nothing. Call it before the request is queued."""
        kept: list[HeldSegment] = []
        children = []
        for segment in wanted.segments:
            chain = self._chain_of(prompt, segment)
            if not segment.start or segment.end - segment.start < self._config.segment_min_tokens or not chain.hashes:
                self.stats["segments_short" if segment.start else "segments_prefix"] += 1
                continue
            kept.append(HeldSegment(segment, tuple(chain.hashes)))
            if self._pool.lookup(chain.hashes) == len(chain.hashes):
                self.stats["segments_held"] += 1
            else:
                children.append(self._child(f"{request_id} segment {len(kept)}", prompt, segment, next(order)))
        return SegmentReuse(wanted.repair, tuple(kept), self._config.block_size, self.stats, children) if kept else None

    def advance(self) -> None:
        """End the children that have all their blocks: the token that follows is nobody's."""
        for child in [child for child in self._children.values() if child.state is SequenceState.RUNNING]:
            if child.num_named >= child.num_prompt_tokens // self._config.block_size:
                self._count_child(child)
                self._scheduler.abort(child.request_id)

    def blend(self, batch: Batch) -> None:
        """Blend the requests of a batch that are due: what is left of them is the last token, which the batch has."""
        sequences = [chunk.sequence for chunk in batch.chunks]
        due = [(one, one.reuse) for one in sequences if isinstance(one.reuse, SegmentReuse) and one.reuse.is_due]
        if not due:
            return
        requests = [
            BlendRequest(one.token_ids, one.block_table, one.num_computed, reuse.parts, reuse.repair)
            for one, reuse in due
        ]
        for (sequence, reuse), result in zip(due, self._blender.blend(requests), strict=True):
            self._count(sequence, result)
            reuse.let_go(self._pool)
        batch.blended()

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
        if not sequence.num_preempted:
            sequence.num_segment_tokens, sequence.num_repaired_tokens = result.num_reused, result.num_repaired
            self.stats["segment_tokens"] += result.num_reused
            self.stats["repaired_tokens"] += result.num_repaired
        self.stats["blends"] += 1
        self.stats["blends_in_full"] += result.fell_back
        self._scheduler.stats["computed_tokens"] += result.num_computed
        if result.deviation is not None:
            index = bisect_left(_BOUNDS, result.deviation)
            self.deviations[_BOUNDS[index] if index < len(_BOUNDS) else float("inf")] += 1


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
