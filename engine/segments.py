"""Segment reuse in the engine: missing segments are loaded or computed into L1, then blended into requests.

No torch: the scheduler calls this.
"""

from collections import Counter, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier.connector.segments import (
    BlendCounts,
    Blender,
    BlendRequest,
    BlendResult,
    FoundSegments,
    Repair,
    ReusedPart,
    Segment,
    TransformersDecoder,
    UnmarkedSegments,
    WantedReuse,
    checked_repair,
    checked_segments,
    require_rotatable,
)
from kvtier.engine.config import EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.requests import FinishReason, NamedPrompt, Output, SamplingParams
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Batch, Sequence, SequenceState
from kvtier.tiers import ChainHash, ConfigError, RequestError
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import TokenChain

if TYPE_CHECKING:
    from kvtier.connector.segments import Blend


@dataclass(slots=True)
class HeldSegment:
    segment: Segment
    hashes: tuple[ChainHash, ...]  # names of its blocks, in its own chain
    child: Sequence | None  # the request that loads or computes it
    first: int = 0  # where its use begins: earlier tokens are the previous one's
    blocks: list[int] | None = None  # referenced; None: not in L1 yet, or released

    @property
    def is_coming(self) -> bool:
        return self.child is not None and self.child.state is not SequenceState.FINISHED


@dataclass(slots=True)
class SegmentReuse:
    """One request's reuse. It references segments' blocks until the request releases its own.

    Its children load missing segments → it is admitted and references segments' blocks (`allocate`, `resolve`) → it is
    blended, step by step (`claim`) → `release`. With a check pass it may be admitted once while children still load,
    since a check needs no segment. It references the others as they arrive (`take`).
    """

    repair: Repair
    wanted: tuple[HeldSegment, ...]
    block_size: int
    stats: Counter[str]  # counts segments missing from L1 when their request needed them
    blender: Blender
    pool: BlockPool
    found: FoundSegments | None = None  # of a prompt without marks: reused only if that saves something
    blend: "Blend | None" = None  # under way
    num_reused: int = 0  # tokens of the prompt, when the first token was computed
    num_repaired: int = 0  # of these: recomputed
    _parts: list[ReusedPart] = field(default_factory=list)  # to be copied when the request is blended; then empty
    _awaits: bool = False  # it was admitted before its segments arrived
    _may_be_early: bool = True
    _reach: tuple[int, int] = (0, 0)  # tokens cached at admission, and all tokens but the last

    @property
    def children(self) -> list[Sequence]:
        coming = [wanted.child for wanted in self.wanted if wanted.child is not None and wanted.is_coming]
        return list({child.request_id: child for child in coming}.values())  # equal segments have one

    @property
    def is_waiting(self) -> bool:
        return any(wanted.is_coming for wanted in self.wanted)

    @property
    def is_due(self) -> bool:
        return bool(self._parts) or self._awaits

    @property
    def is_early(self) -> bool:
        return self._awaits and self.is_waiting

    def may_start(self, num_seats: int) -> bool:
        if not self.is_waiting:
            return True
        is_checked = self.repair.rule == "deviation" and self.repair.measures
        queued = [child for child in self.children if child.state is SequenceState.WAITING]
        is_sure = not any(child.only_loads for child in queued)
        return self._may_be_early and is_checked and is_sure and len(queued) < num_seats

    def allocate(self, num_blocks: int, leaving: int) -> list[int] | None:
        """The request's own blocks, as `BlockPool.allocate`, with references on those of its segments.

        If both do not fit, the request's own take precedence, and the remaining segments are reused. A request whose
        segments are still loading leaves room for them.
        """
        self._reference()
        coming = [child for child in self.children if child.state is SequenceState.WAITING]
        leaving += sum(-(-child.num_tokens // self.block_size) for child in coming)
        fresh = self.pool.allocate(num_blocks, leaving=leaving)
        if fresh is None and not self.is_waiting and any(wanted.blocks for wanted in self.wanted):
            self.release()
            if (fresh := self.pool.allocate(num_blocks, leaving=leaving)) is not None:
                self._reference()
        if fresh is None:
            self.release()
        return fresh

    def resolve(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused after `num_cached` tokens; returns where that begins at the earliest.

        None: nothing is. The last token is never reused, since its logits are needed.
        """
        self._reach = (num_cached if self.found is None else max(num_cached, self.found.num_exact), num_tokens - 1)
        self._parts = []
        for wanted in self.wanted:
            if wanted.blocks is not None:
                self._reuse(wanted, len(wanted.blocks))
        coming = [self._part(wanted, len(wanted.hashes)) for wanted in self.wanted if wanted.is_coming]
        expected = [part for part in coming if part is not None]
        num_reused = sum(part.end - part.start for part in self._parts + expected)
        if self.found is not None and num_reused < self.found.num_least:
            self.stats["segments_few"] += len(self.wanted)
            self.release()
            self.wanted = ()  # whatever comes: its answer begins exactly
            return None
        self._awaits = bool(expected)
        self._may_be_early = self._may_be_early and not expected
        return min((part.start for part in self._parts + expected), default=None)

    def most(self, num_cached: int, num_tokens: int) -> int:
        """How many tokens are reused if all of its segments' blocks arrive."""
        self._reach = (num_cached, num_tokens - 1)
        parts = [self._part(wanted, len(wanted.hashes)) for wanted in self.wanted]
        return sum(part.end - part.start for part in parts if part is not None)

    def take(self) -> bool:
        """Reference segments that arrived since admission. False: nothing is left to reuse."""
        for wanted in self.wanted if self._awaits else ():
            if wanted.blocks is None and not wanted.is_coming:
                wanted.blocks = self.pool.match(wanted.hashes)
                self._reuse(wanted, len(wanted.blocks))
        self._awaits = self._awaits and self.is_waiting
        return self.is_due

    def claim(self, sequence: Sequence, budget: int) -> int:
        if self.blend is None:
            tokens, table = sequence.token_ids, sequence.block_table
            request = BlendRequest(tokens, table, sequence.num_computed, None, self.repair)
            self.blend = self.blender.begin(request)
        self.blend.bring(self._parts, whole=not self._awaits)
        return min(budget, self.blend.num_tokens_left)

    def release_sources(self) -> None:
        """Release the segments' blocks: they were copied, or will not be."""
        for wanted in self.wanted:
            blocks, wanted.blocks = wanted.blocks, None
            if blocks:
                self.pool.free(blocks)

    def release(self) -> None:
        self.release_sources()
        self.blend, self._parts, self._awaits = None, [], False

    def _reference(self) -> None:
        """Reference the blocks in L1; those of loading segments only once they are complete."""
        for wanted in self.wanted:
            wanted.blocks = None if wanted.is_coming else self.pool.match(wanted.hashes)

    def _reuse(self, wanted: HeldSegment, num_blocks: int) -> None:
        is_absent = wanted.child is not None and wanted.child.only_loads and not num_blocks  # and counted as new
        self.stats["segments_lost"] += num_blocks < len(wanted.hashes) and not is_absent
        if (part := self._part(wanted, num_blocks)) is not None:
            self._parts.append(part)

    def _part(self, wanted: HeldSegment, num_blocks: int) -> ReusedPart | None:
        """The part of a segment that is reused if so many of its blocks are there; None: none."""
        origin, (num_cached, most) = wanted.segment.start, self._reach
        start, end = (
            max(origin, wanted.first, num_cached),
            min(origin + num_blocks * self.block_size, wanted.segment.end, most),
        )
        return ReusedPart(start, end, origin, tuple(wanted.blocks or ())) if start < end else None


_ONE_TOKEN: Final = SamplingParams(max_tokens=1, ignore_eos=True)


_BLENDED: Final = ("llama", "mistral", "qwen2", "qwen3")  # model kinds whose decoder layers `Blender` runs one by one


class SegmentRequests:
    """Segments of one engine's requests. ConfigError at start if the model's KV cannot be moved.

    For a segment that L1 lacks it queues a request, a child, which loads or computes ordinary prefix blocks.
    """

    def __init__(self, model: Model, pool: BlockPool, scheduler: Scheduler, config: EngineConfig) -> None:
        self.counts = BlendCounts()
        self.stats = self.counts.stats
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._config = config
        if (kind := model.kind) not in _BLENDED:
            known = ", ".join(_BLENDED)
            raise ConfigError(
                f'segments "on": model kind {kind!r}: a blend supports the layers of {known}; set them "off"'
            )
        self.follow()
        self._children: dict[str, Sequence] = {}
        is_unmarked = config.segments == "auto"
        self.unmarked = UnmarkedSegments(config.block_size, config.segment_min_tokens) if is_unmarked else None

    def follow(self) -> None:
        """Move keys by the model's RoPE as it is now. ConfigError if they cannot be moved."""
        module = self._model.module
        self._blender = Blender(
            TransformersDecoder(module), self._pool.tensor, require_rotatable(module), self._config.token_budget
        )

    def wanted(self, segments: abc.Sequence[Segment] | None, repair: Repair | None, num_tokens: int) -> WantedReuse:
        """A request's reuse, validated; RequestError if this model or mode does not support it."""
        if self._config.exact:
            raise RequestError('segments: their reuse is approximate, and this engine is "exact"; leave them out')
        default = Repair(self._config.repair_rule, self._config.repair_share)
        repair = checked_repair(repair, default, self._model.num_layers)
        return WantedReuse(None if segments is None else checked_segments(segments, num_tokens), repair)

    def open(
        self, request_id: str, prompt: NamedPrompt, wanted: WantedReuse, order: abc.Iterator[int]
    ) -> SegmentReuse | None:
        """A new request's reuse, its children queued; None: none. Call it before the request is queued."""
        kept: list[HeldSegment] = []
        for segment in wanted.segments or ():
            chain = self._chain_of(prompt, segment)
            if not segment.start or segment.end - segment.start < self._config.segment_min_tokens or not chain.hashes:
                self.stats["segments_short" if segment.start else "segments_prefix"] += 1
                continue
            child = None
            if self._pool.lookup(chain.hashes) == len(chain.hashes):
                self.stats["segments_held"] += 1
            else:
                name = f"{request_id} segment {len(kept) + 1}"
                child = self._child(name, prompt, segment, len(chain.hashes), next(order))
                self._scheduler.add(child, is_segment=True)
            kept.append(HeldSegment(segment, tuple(chain.hashes), child))
        return self._reuse_of(wanted.repair, kept) if kept else None

    def find(self, repair: Repair, sequence: Sequence, num_cached: int) -> SegmentReuse | None:
        """The reuse of a request without marks, once its exact prefix is known; None: nothing is reused.

        Segments that were seen before, or that a lower tier may have, get a child, queued before the request.
        """
        assert self.unmarked is not None
        found = self.unmarked.find(sequence.chain, sequence.token_ids, num_cached)
        self.unmarked.note(sequence.chain, found)
        kept: list[HeldSegment] = []
        missing: dict[int, bool] = {}  # by place in `kept`: whether no child may compute it
        for each in found.segments:
            num_l1 = self._pool.lookup(each.hashes)
            num_blocks = max(num_l1, each.num_seen)
            if not num_blocks and not self._scheduler.offloads:
                self.stats["segments_new"] += 1
                continue
            if num_l1 < num_blocks or not num_blocks:
                missing[len(kept)] = not num_blocks
            # A segment's first tokens deviate most: nothing precedes them. Where the one before reaches, it is used.
            hashes, first = each.hashes[: num_blocks or None], kept[-1].segment.end if kept else 0
            end = each.segment.start + len(hashes) * self._config.block_size
            kept.append(HeldSegment(Segment(each.segment.start, end), hashes, None, first))
        reuse = self._reuse_of(repair, kept, found)
        if not self.unmarked.pays(found, reuse.most(found.num_exact, sequence.num_tokens)):
            self.stats["segments_few"] += len(kept)
            return None
        self.stats["segments_held"] += len(kept) - len(missing)
        prompt, children = NamedPrompt(sequence.token_ids, sequence.chain), dict[ChainHash, Sequence]()
        for number, only_loads in missing.items():
            held = kept[number]
            if (child := children.get(held.hashes[-1])) is None:
                name = f"{sequence.request_id} segment {number + 1}"
                rest = Segment(held.segment.start, sequence.num_tokens)
                child = self._child(name, prompt, rest, len(held.hashes), sequence.order)
                child.only_loads = only_loads
                self._scheduler.add(child, is_segment=True, before=sequence)
                children[held.hashes[-1]] = child
            held.child = child
        return reuse

    def queue_pieces(self, sequence: Sequence) -> None:
        """Queue a child for each segment that "auto" finds of this sequence's prompt behind another text."""
        texts = [] if self.unmarked is None else self.unmarked.texts(sequence.token_ids)
        for number, text in enumerate(texts):
            prompt, name = NamedPrompt(text, sequence.chain), f"{sequence.request_id} segment {number + 1}"
            num_blocks = len(text) // self._config.block_size
            child = self._child(name, prompt, Segment(0, len(text)), num_blocks, sequence.order)
            self._scheduler.add(child, is_segment=True)

    def advance(self) -> None:
        """End children that have all their blocks; their next token is not needed.

        Requests admitted before their segments arrived reference those that are there now.
        """
        for child in [child for child in self._children.values() if child.state is SequenceState.RUNNING]:
            if child.num_named >= child.num_prompt_tokens // self._config.block_size:
                self._count_child(child)
                self._scheduler.abort(child.request_id)
        for sequence in [*self._scheduler.running, *self._scheduler.loading.values()]:
            if isinstance(reuse := sequence.reuse, SegmentReuse) and reuse.is_due and not reuse.take():
                reuse.release()
                self._scheduler.compute_exactly(sequence)

    def blend(self, batch: Batch) -> None:
        """Blend as far as the batch has tokens for. After a blend that ends now, the batch has the last token."""
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
                reuse.release_sources()
            if blend.result is None:
                unfinished.append(chunk)
                continue
            self._count(chunk.sequence, reuse, blend.result)
            reuse.release()
            if not over:  # for the last token
                chunk.sequence.num_computed = chunk.start
                unfinished.append(chunk)
        batch.blended(unfinished)
        if not batch.chunks:
            self._blender.synchronize()  # no sampling waits for this step's work

    def takes(self, output: Output) -> bool:
        """Whether an output is a child's, which is not delivered."""
        child = self._children.get(output.request_id)
        if child is None:
            return False
        if output.finish_reason is not None:
            del self._children[output.request_id]
            if output.finish_reason is not FinishReason.ABORT:
                self._count_child(child)
            elif child.only_loads and not child.num_l1_tokens + child.num_external_tokens:
                self.stats["segments_new"] += 1
        return True

    def abort(self, sequence: Sequence) -> None:
        for child in sequence.reuse.children if isinstance(sequence.reuse, SegmentReuse) else ():
            if child.state is not SequenceState.FINISHED:
                self._scheduler.abort(child.request_id)

    def _reuse_of(
        self, repair: Repair, kept: abc.Sequence[HeldSegment], found: FoundSegments | None = None
    ) -> SegmentReuse:
        size = self._config.block_size
        return SegmentReuse(repair, tuple(kept), size, self.stats, self._blender, self._pool, found)

    def _child(self, name: str, prompt: NamedPrompt, segment: Segment, num_blocks: int, order: int) -> Sequence:
        """The segment alone: its blocks and one more token, since a last token is never loaded."""
        size = self._config.block_size
        end = segment.start + num_blocks * size
        tokens = prompt.token_ids[segment.start : end]
        tokens.append(prompt.token_ids[end if end < segment.end else end - 1])
        assert prompt.chain is not None
        chain = TokenChain(prompt.chain.root, size, self._config.hash_scheme)
        chain.extend(tokens)
        while name in self._scheduler.live or name in self._scheduler.orphans:
            name += "'"
        child = Sequence(name, tokens, _ONE_TOKEN, chain, order)
        self._children[name] = child
        return child

    def _chain_of(self, prompt: NamedPrompt, segment: Segment) -> TokenChain:
        assert prompt.chain is not None
        chain = TokenChain(prompt.chain.root, self._config.block_size, self._config.hash_scheme)
        chain.extend(prompt.token_ids[segment.start : segment.end])
        return chain

    def _count_child(self, child: Sequence) -> None:
        num_tokens = child.num_prompt_tokens - 1
        found = {"held": child.num_l1_tokens, "loaded": child.num_l1_tokens + child.num_external_tokens}
        outcome = next((way for way, number in found.items() if number >= num_tokens), "computed")
        self.stats[f"segments_{outcome}"] += 1

    def _count(self, sequence: Sequence, reuse: SegmentReuse, result: BlendResult) -> None:
        if not sequence.num_generated:  # as of its first token; a repeated blend counts once
            self.stats["segment_tokens"] += result.num_reused - reuse.num_reused
            self.stats["repaired_tokens"] += result.num_repaired - reuse.num_repaired
            reuse.num_reused, reuse.num_repaired = result.num_reused, result.num_repaired
        self.counts.add(result)
        self._scheduler.stats["computed_tokens"] += result.num_computed


def wanted_reuse(
    segments: abc.Sequence[Segment] | None, repair: Repair | None, num_tokens: int, reuse: SegmentRequests | None
) -> WantedReuse | None:
    """A request's reuse, validated; None: none. `reuse` is the engine's, None if segments are off.

    `segments` None: those that are found, if the engine looks for them.
    """
    if segments is None and reuse is not None and reuse.unmarked is not None:
        return reuse.wanted(None, repair, num_tokens)
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
    lists = [None] * len(prompts) if segments is None else segments
    if len(lists) != len(prompts):
        raise RequestError(f"segments of {len(lists)} prompts for {len(prompts)}: give one list each")
    return [wanted_reuse(one, repair, len(prompt), reuse) for one, prompt in zip(lists, prompts, strict=True)]
