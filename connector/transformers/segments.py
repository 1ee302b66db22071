"""Segments of `KVTier`'s calls: the check of a model, and segments loaded, computed and blended into prompts."""

from collections import abc
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvtier.connector.models import cache_option
from kvtier.connector.segments import (
    PAGED_ATTENTION,
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
    attending,
    checked_repair,
    checked_segments,
    require_rotatable,
)
from kvtier.connector.transformers.blocks import BlendedCache, Blocks, blocks_of, fill
from kvtier.connector.transformers.cache_form import tolerance_of
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers import ChainHash, ConfigError, RequestError
from kvtier.tiers.config import Config
from kvtier.tiers.naming import KVShape

_NUM_TOKENS: Final = 24
_BLOCK: Final = 8  # tokens
_TABLE: Final = [0, 1, 2]  # the blocks of 24 tokens
_DECODER: Final = ("embed_tokens", "rotary_emb", "layers")
_LAYER: Final = ("input_layernorm", "self_attn")
_ATTENTION: Final = ("layer_idx", "head_dim", "k_proj", "v_proj")
_PROBE: Final = "kvtier-probe"
_UNHEEDED: Final = ("attention_mask", "softcap", "s_aux")  # a layer's own mask, capped scores, attention sinks
# raised by a layer with another signature
_FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


def require_blendable(model: PreTrainedModel, shape: KVShape | None) -> torch.Tensor:
    """The model's `inv_freq`, if segments can be reused in it. ConfigError names the obstacle.

    Tests it: 24 tokens, computed layer by layer as in a blend, must have the K and V that the model computes.
    """
    kind = model.config.model_type
    if shape is None:
        raise _refusal(kind, "layers whose K and V differ in shape")
    if model.training:
        raise ConfigError('segments "on": the model is in training mode; call model.eval() before KVTier(model)')
    try:
        inv_freq = require_rotatable(model)
    except _FAILURES as error:
        raise _refusal(kind, _failure(error)) from error
    trait = _missing(model)
    if trait:
        raise _refusal(kind, trait)
    try:
        own, trait = _own_cache(model), _unheeded(model)
        with attending(model, PAGED_ATTENTION):
            trait = trait or _difference(model, own, shape, inv_freq)
    except _FAILURES as error:
        raise _refusal(kind, _failure(error)) from error
    if trait:
        raise _refusal(kind, trait)
    return inv_freq


def _missing(model: PreTrainedModel) -> str | None:
    """A part of the decoder that a blend needs, and this model lacks or names differently."""
    decoder: Any = getattr(model, "model", None)
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("model", decoder, _DECODER)]
    for number, layer in enumerate(getattr(decoder, "layers", ())):
        place = f"model.layers.{number}"
        parts += [(place, layer, _LAYER), (f"{place}.self_attn", getattr(layer, "self_attn", None), _ATTENTION)]
    for place, part, names in parts:
        if absent := [name for name in names if not hasattr(part, name)]:
            return f"no {place}.{absent[0]}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "weights on several devices"
    return None


def _noting(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention that computes nothing, and records each layer's arguments."""
    noted: dict[int, dict[str, Any]] = options.get("noted", {})
    layer: int = module.layer_idx  # type: ignore[assignment]
    noted[layer] = {"attention_mask": attention_mask, **options}
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(_PROBE, _noting)


@torch.inference_mode()
def _unheeded(model: PreTrainedModel) -> str | None:
    """An attention argument of some layer that a blend's attention ignores."""
    config: Any = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    noted: dict[int, dict[str, Any]] = {}
    decoder: Any = model.model
    with attending(model, _PROBE):
        decoder(input_ids=_token_ids(model)[None], use_cache=False, noted=noted)
    for layer, kind in enumerate(kinds):
        if (used := noted.get(layer)) is None:
            return f"a layer {layer} whose attention a blend does not reach"
        if odd := [name for name in _UNHEEDED if used.get(name) is not None]:
            return f"a layer {layer} whose attention takes {odd[0]}"
        expected = window if kind == "sliding_attention" else None
        if kind == "chunked_attention" or used.get("sliding_window") != expected:
            return f"a layer {layer} of kind {kind}, whose window is only in a mask"
    return None


@torch.inference_mode()
def _difference(model: PreTrainedModel, own: DynamicCache, shape: KVShape, inv_freq: torch.Tensor) -> str | None:
    """How a blend's K and V differ from the model's own; None: they agree."""
    tolerance = tolerance_of(model)
    size = (shape.num_layers, 2, _BLOCK, shape.num_kv_heads, shape.head_dim)
    tensor = torch.zeros(2 * len(_TABLE), *size, dtype=model.dtype, device=model.device)
    blender = Blender(TransformersDecoder(model), tensor, inv_freq, _NUM_TOKENS)
    ids: list[int] = _token_ids(model).tolist()
    blender.blend([BlendRequest(ids, _TABLE, 0, (), Repair(share=1.0))])
    layers: Any = own.layers
    for layer, states in enumerate(layers):
        for name, half, expected in (("K", 0, states.keys), ("V", 1, states.values)):
            found = tensor[: len(_TABLE), layer, half].flatten(0, 1)[: _NUM_TOKENS - 1].float()
            wanted = expected[0, :, : _NUM_TOKENS - 1].transpose(0, 1).float()
            if not float((found - wanted).norm() / wanted.norm()) <= tolerance:
                return f"a layer {layer} whose {name} a blend computes otherwise"
    # The deviation check: the same tokens, copied from where they were just computed, must not deviate.
    second = [block + len(_TABLE) for block in _TABLE]
    part = ReusedPart(_BLOCK, _NUM_TOKENS - 1, 0, tuple(_TABLE))
    for layer in sorted({1, shape.num_layers - 1}) if shape.num_layers > 1 else ():
        repair = Repair(share=0.5, check_layer=layer, max_deviation=float("inf"))
        [result] = blender.blend([BlendRequest(ids, second, 0, (part,), repair)])
        if result.deviation is None or not result.deviation <= tolerance:
            return f"a layer {layer} whose K and V are not its projections, rotated"
    return None


@torch.inference_mode()
def _own_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache()  # keeps every token in every layer
    model(input_ids=_token_ids(model)[None], use_cache=True, **cache_option(model, cache))
    return cache


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    numbers = torch.arange(_NUM_TOKENS, device=model.device)
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return (numbers * 7919 + 3) % vocab_size


def _failure(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"parts that a blend cannot run ({type(error).__name__}: {reason})"


def _refusal(kind: str, trait: str) -> ConfigError:
    return ConfigError(
        f'segments "on": model kind {kind!r} has {trait}; '
        'models built as Llama, Mistral, Qwen2 and Qwen3 work, for others set them "off"'
    )


SegmentLists = abc.Sequence[Segment] | abc.Sequence[abc.Sequence[Segment]]
"""One list of segments per row; for a single row also its list alone."""

_MAX_ROWS: Final = 4096  # tokens that pass a layer at once, which bounds a blend's memory
_IN_FULL: Final = Repair(share=1.0)  # for a row without segments among others


@dataclass(frozen=True, slots=True)
class _Use:
    """Tokens `start … end` of a prompt, to be copied from a segment whose first token is at `origin`."""

    start: int
    end: int
    origin: int
    source: PromptRow  # the segment alone

    @property
    def name(self) -> ChainHash:
        """The name of its last full block: equal names, equal segments."""
        return self.source.chain.hashes[-1]


class SegmentCalls:
    """Segment reuse in one model's calls, and its counters. One thread at a time."""

    def __init__(self, model: PreTrainedModel, blocks: TierBlocks, config: Config, inv_freq: torch.Tensor) -> None:
        self.counts = BlendCounts()
        self.stats = self.counts.stats  # under the names of `Engine.stats`
        self.num_segment_tokens = 0  # of the last blend, over all of its rows
        self.num_repaired_tokens = 0
        self._model = model
        self._blocks = blocks
        assert blocks.form.shape is not None  # see `require_blendable`
        self._shape = blocks.form.shape
        self._config = config.cache
        self._inv_freq = inv_freq
        self._tested = blocks.root  # what computes so: blends agreed with it
        is_unmarked = config.cache.segments == "auto"
        size = self._shape.block_size
        self.unmarked = UnmarkedSegments(size, config.cache.segment_min_tokens) if is_unmarked else None

    def wanted(
        self, segments: abc.Sequence[abc.Sequence[Segment] | None], repair: Repair | None, num_tokens: int
    ) -> list[WantedReuse]:
        """Each row's requested reuse, None: what is found; RequestError if it is invalid."""
        default = Repair(self._config.repair_rule, self._config.repair_share)
        chosen = checked_repair(repair, default, self._shape.num_layers)
        return [WantedReuse(None if row is None else checked_segments(row, num_tokens), chosen) for row in segments]

    def texts(self, texts: abc.Sequence[Any]) -> list[list[int]]:
        """Texts to compute, as token ids; RequestError if one is invalid."""
        if not _is_list(texts):
            raise RequestError(f"texts {texts!r}: use a list of lists of token ids")
        embeddings: Any = self._model.get_input_embeddings()
        checked: list[list[int]] = []
        for number, text in enumerate(texts):
            try:
                tokens = np.asarray(text.tolist() if isinstance(text, torch.Tensor) else text)
            except ValueError:  # lists of different lengths
                tokens = np.empty(0)
            if tokens.ndim != 1 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
                raise RequestError(f"text {number}: use a list of token ids, at least one")
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < embeddings.num_embeddings:
                raise RequestError(f"text {number}: token ids must be from 0 to {embeddings.num_embeddings - 1}")
            checked.append(tokens.tolist())
        return checked

    def precompute(self, texts: abc.Sequence[list[int]]) -> None:
        pieces = [] if self.unmarked is None else [piece for text in texts for piece in self.unmarked.texts(text)]
        for text in [*texts, *pieces]:
            source = self._blocks.row(text)
            if source.chain.hashes:
                self._brought(source, self._blocks.deadline)
        self._blocks.wait_sealed()

    def blend(
        self, rows: abc.Sequence[PromptRow], loaded: abc.Sequence[Blocks], wanted: abc.Sequence[WantedReuse]
    ) -> BlendedCache | None:
        """A cache of all tokens of every row but the last, after its `loaded` ones; None: nothing is reused.

        Sets each row's `num_exact`. ConfigError if the model was changed, and its KV cannot be moved any more.
        """
        self.num_segment_tokens = self.num_repaired_tokens = 0
        found = [self._found(row) if one.segments is None else None for row, one in zip(rows, wanted, strict=True)]
        uses = [
            self._uses(row, one.segments or ()) if each is None else self._found_uses(row, each)
            for row, one, each in zip(rows, wanted, found, strict=True)
        ]
        if not any(uses):
            return None
        if self._tested != (root := self._blocks.root):  # it computes something else now
            self._inv_freq, self._tested = require_blendable(self._model, self._shape), root
        sources = self._gather([use for row in uses for use in row])
        tensor, tables = self._paged([*sources.values(), *loaded], len(rows), len(rows[0].token_ids))
        blocks_of_segment = dict(zip(sources, tables, strict=False))
        requests = []
        for row, own, one, table in zip(rows, uses, wanted, tables[len(sources) :], strict=True):
            parts = [ReusedPart(use.start, use.end, use.origin, tuple(blocks_of_segment[use.name])) for use in own]
            num_computed = row.num_loaded * self._blocks.form.block_size
            requests.append(BlendRequest(row.token_ids, table, num_computed, parts, one.repair if parts else _IN_FULL))
            row.num_exact = parts[0].start if parts else None
        with attending(self._model, PAGED_ATTENTION):
            results = Blender(TransformersDecoder(self._model), tensor, self._inv_freq, _MAX_ROWS).blend(requests)
        for own, result in zip(uses, results, strict=True):
            if own:
                self._count(result)
        cache = BlendedCache()
        cache.num_exact = min(row.num_exact for row in rows if row.num_exact is not None)
        slots = [tensor[table[0] : table[-1] + 1].flatten(1) for table in tables[len(sources) :]]
        own_blocks = [Blocks.of(each, self._blocks.form, len(each)) for each in slots]
        fill(cache, self._blocks.form, own_blocks, len(rows[0].token_ids) - 1, self._model.device)
        return cache

    def _uses(self, row: PromptRow, segments: abc.Sequence[Segment]) -> list[_Use]:
        """What is worth copying: full blocks of long segments, after the exact prefix, up to the last token."""
        size = self._blocks.form.block_size
        uses = []
        for segment in segments:
            length = segment.end - segment.start
            start = max(segment.start, row.num_loaded * size)
            end = min(segment.start + length // size * size, len(row.token_ids) - 1)
            if not segment.start:
                self.stats["segments_prefix"] += 1
            elif length < max(self._config.segment_min_tokens, size):
                self.stats["segments_short"] += 1
            elif start >= end:  # the exact prefix has it
                self.stats["segments_prefix"] += 1
            else:
                source = self._blocks.row(row.token_ids[segment.start : segment.end])
                uses.append(_Use(start, end, segment.start, source))
        return uses

    def _found(self, row: PromptRow) -> FoundSegments:
        assert self.unmarked is not None
        return self.unmarked.find(row.chain, row.token_ids, row.num_loaded * self._blocks.form.block_size)

    def _found_uses(self, row: PromptRow, found: FoundSegments) -> list[_Use]:
        """What is worth copying of a row without marks: what the tiers have, and what was seen before."""
        assert self.unmarked is not None
        self.unmarked.note(row.chain, found)
        size, deadline, uses = self._blocks.form.block_size, self._blocks.deadline, list[_Use]()
        for each in found.segments:
            num_held = self._blocks.found(each.hashes, deadline).loadable
            origin, num_tokens = each.segment.start, max(num_held, each.num_seen) * size
            # A segment's first tokens deviate most: nothing precedes them. Where the one before reaches, it is used.
            start = max(origin, found.num_exact, uses[-1].end if uses else 0)
            end = min(origin + num_tokens, len(row.token_ids) - 1)
            if start < end:
                uses.append(_Use(start, end, origin, self._blocks.row(row.token_ids[origin : origin + num_tokens])))
            self.stats["segments_new"] += not num_tokens
        if not self.unmarked.pays(found, sum(use.end - use.start for use in uses)):
            self.stats["segments_few"] += len(uses)
            return []
        return uses

    def _gather(self, uses: abc.Sequence[_Use]) -> dict[ChainHash, Blocks]:
        """The blocks of each distinct segment, by name. One deadline for all."""
        deadline = self._blocks.deadline
        sources: dict[ChainHash, Blocks] = {}
        for use in uses:
            if use.name in sources:
                self.stats["segments_held"] += 1  # in this call
                continue
            sources[use.name], was_loaded = self._brought(use.source, deadline)
            self.stats["segments_loaded" if was_loaded else "segments_computed"] += 1
        self._blocks.wait_sealed()
        return sources

    def _brought(self, source: PromptRow, deadline: float) -> tuple[Blocks, bool]:
        """All full blocks of a segment, and whether all were loaded. Missing ones are computed and stored."""
        names, size = source.chain.hashes, self._blocks.form.block_size
        blocks = self._blocks.load(names, deadline)
        run = range(len(blocks), len(names))
        if not run:
            return blocks, True
        cache = DynamicCache()
        fill(cache, self._blocks.form, [blocks], run.start * size, self._model.device)
        tokens = torch.tensor([source.token_ids[run.start * size : run.stop * size]], device=self._model.device)
        with torch.inference_mode():
            self._model.model(input_ids=tokens, use_cache=True, **cache_option(self._model.model, cache))
        self._blocks.store(source, run, blocks_of(cache, 0, run, self._blocks.form))
        return blocks_of(cache, 0, range(len(names)), self._blocks.form), False

    def _paged(
        self, parts: abc.Sequence[Blocks], num_rows: int, num_tokens: int
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """All parts in one paged tensor, the last `num_rows` with room for their tokens; and each one's blocks."""
        shape = self._shape
        num_sources = len(parts) - num_rows
        num_blocks = [len(part) for part in parts[:num_sources]] + [-(-num_tokens // shape.block_size)] * num_rows
        starts = np.cumsum([0, *num_blocks]).tolist()
        tensor = torch.zeros(starts[-1], *shape.block_shape, dtype=self._model.dtype, device=self._model.device)
        planes = tensor.flatten(1, 2)  # [blocks, layers * (K, V), block_size, heads, dim]
        for start, part in zip(starts, parts, strict=False):
            end = start + len(part)
            for index, plane in enumerate(part.take()):
                planes[start:end, index] = plane
        return tensor, [list(range(start, start + number)) for start, number in zip(starts, num_blocks, strict=False)]

    def _count(self, result: BlendResult) -> None:
        self.num_segment_tokens += result.num_reused
        self.num_repaired_tokens += result.num_repaired
        self.stats["segment_tokens"] += result.num_reused
        self.stats["repaired_tokens"] += result.num_repaired
        self.counts.add(result)


def lists_of(segments: SegmentLists | None, num_rows: int) -> list[abc.Sequence[Segment]]:
    """A list of segments for each row; RequestError for any other structure."""
    if segments is None:
        return [()] * num_rows
    if not _is_list(segments):
        raise RequestError(f"segments {segments!r}: use one list of Segment(start, end) for each row")
    given: list[Any] = list(segments)
    if num_rows == 1 and all(isinstance(one, Segment) for one in given):
        return [given]
    if any(isinstance(one, Segment) for one in given):
        raise RequestError(f"segments in one list for {num_rows} rows: use one list for each row")
    if len(given) != num_rows:
        raise RequestError(f"segments of {len(given)} rows for {num_rows}: use one list for each row")
    for one in given:
        if not _is_list(one):
            raise RequestError(f"segments {one!r} of a row: use a list of Segment(start, end)")
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, abc.Sequence) and not isinstance(value, str | bytes)
