"""transformers: what `generate()` computed is kept in the tiers, and found by the next call and the next process."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

try:
    from transformers import DynamicCache, PreTrainedModel
    from transformers import __version__ as _version
except ImportError as error:
    raise ImportError("KVTier needs transformers 5.0 or newer: pip install 'kvtier[engine]'") from error

from kvtier.connector import open_tiers
from kvtier.connector.models import identity_of, kv_shape, name_of
from kvtier.connector.segments import Repair, WantedReuse
from kvtier.connector.transformers.calls import asked_for, no_rows, not_plain
from kvtier.connector.transformers.kv_cache import BlendedCache, blocks_of, fill, is_whole
from kvtier.connector.transformers.segment_gate import require_blendable
from kvtier.connector.transformers.segments import SegmentCalls, SegmentLists, lists_of
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers import L2, ConfigError, Outcome, RequestError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.naming import root_hash

if int(_version.partition(".")[0]) < 5:
    raise ImportError(f"KVTier needs transformers 5.0 or newer, here is {_version}: pip install -U 'kvtier[engine]'")

_log = logging.getLogger(__package__)


class KVTier:
    """Keeps the KV of one transformers model: `kv.generate(...)` for `model.generate(...)`. One thread at a time.

    A model or a call whose KV blocks cannot hold (MLA, recurrent state, padding, beams, images) is generated as ever
    and nothing of it is kept. Blocks are those of kvtier's own engine: for one checkpoint directory, dtype and block
    size each finds what the other stored.
    """

    def __init__(self, model: PreTrainedModel, config: Config | None = None, *, name: str | None = None) -> None:
        """`config` defaults to the environment's, `name` to the checkpoint directory's. Reads all weights once.

        Raises ConfigError where memory or disk are too small, or segments are "on" and the model's KV cannot be moved.
        FormatError and StoreLocked come from the slab.
        """
        self.model: Any = model  # its generate() is typed as a submodule
        self.num_cached_tokens = 0  # of the last call: prompt tokens that were loaded, in every row
        self.num_segment_tokens = 0  # of the last call: prompt tokens from segments, in all rows; approximate
        self.num_repaired_tokens = 0  # … and those of them that were computed anew
        self.segments: SegmentCalls | None = None  # None: `[cache] segments` are off
        self._config = config or Config.load()
        self._said: set[str] = set()
        self._opened: CacheTiers | None = None
        cache = self._config.cache
        try:
            self._shape = kv_shape(model, cache.block_size)
            inv_freq = require_blendable(model, self._shape) if cache.segments == "on" else None
            path = model.name_or_path  # empty for a model made from a configuration
            name = name or (name_of(Path(path)) if path else model.config.model_type)
            identity = identity_of(model, name, self._shape, hash_scheme=cache.hash, epoch=cache.epoch)
        except ConfigError as error:
            if cache.segments == "on":
                raise
            _log.warning("nothing is kept of this model: %s", error)
            return
        fingerprint = identity.fingerprint()
        root = root_hash(fingerprint, cache_salt=cache.cache_salt)
        self._opened = open_tiers(self._config, fingerprint, self._shape)
        self._blocks = TierBlocks(self._opened, root, self._shape, model.dtype, self._config)
        if inv_freq is not None:
            self.segments = SegmentCalls(model, self._blocks, self._config, inv_freq)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        segments: SegmentLists | None = None,
        repair: Repair | None = None,
        **options: Any,
    ) -> Any:
        """`model.generate(input_ids, **options)`: loads what is known, computes the rest, keeps what is new.

        Of `segments` (a list for each row) the KV may come from another place: approximate, see `Repair`. RequestError
        before anything is computed if they are off, or bad.
        """
        wanted = self._wanted(input_ids, segments, repair)
        self.num_cached_tokens = self.num_segment_tokens = self.num_repaired_tokens = 0
        if not self._can_hold(input_ids, options):
            return self.model.generate(input_ids, **options)
        if asked_for(self.model, options, "cache_implementation") is not None:
            options["cache_implementation"] = None  # generate() refuses it beside a cache, whichever it names
        rows = self._rows(input_ids)
        cache = self._load(rows, wanted)
        result = self.model.generate(input_ids, **{**options, "past_key_values": cache})
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        self._store(rows, sequences if self._config.cache.store_generated else input_ids, cache)
        return result

    def load(
        self, input_ids: torch.Tensor, *, segments: SegmentLists | None = None, repair: Repair | None = None
    ) -> tuple[DynamicCache, int]:
        """A cache with the leading tokens of every row ([rows, tokens]) that are known, and how many it has.

        Give it to `model(input_ids[:, num_tokens:], past_key_values=cache)`; at least the last token is left.
        Rows of one length without padding: what a mask would hide, this can't see. With `segments` (see `generate`) it
        has all tokens but the last, and `store` keeps none of it behind the first reused one.
        """
        wanted = self._wanted(input_ids, segments, repair)
        self.num_cached_tokens = self.num_segment_tokens = self.num_repaired_tokens = 0
        if not self._can_hold(input_ids):
            return DynamicCache(), 0
        cache = self._load(self._rows(input_ids), wanted)
        return cache, cache.get_seq_length()

    def precompute(self, texts: Sequence[Any]) -> None:
        """Compute texts (token ids) that are going to be segments, each alone: ordinary blocks, in every tier.

        RequestError before anything is computed if segments are off, or a text is no list of token ids.
        """
        if self.segments is None:
            raise self._no_segments()
        checked = self.segments.texts(texts)
        if all(self._can_hold(torch.tensor([text])) for text in checked):
            self.segments.precompute(checked)

    def store(self, input_ids: torch.Tensor, cache: DynamicCache) -> None:
        """Keep the KV of the tokens ([rows, tokens], from the first one on) that `cache` holds."""
        if self._can_hold(input_ids):
            rows = self._rows(input_ids)
            for row in rows:
                row.num_exact = cache.num_exact if isinstance(cache, BlendedCache) else None
            self._store(rows, input_ids, cache)

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name; what came of segments as in `Engine.stats`."""
        figures = {} if self.segments is None else self.segments.figures
        return {**({} if self._opened is None else self._opened.stats()), **figures}

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything stored so far is in the lowest tier; False when `timeout` seconds pass first."""
        return self._opened is None or self._opened.drain(timeout)

    def close(self) -> None:
        """Flush and close the tiers. Idempotent; later calls generate without them."""
        tiers, self._opened = self._opened, None
        if tiers is not None:
            tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _can_hold(self, input_ids: torch.Tensor, options: dict[str, Any] | None = None) -> bool:
        """Whether blocks can hold the KV of this call (None: no `generate`). If not, it is said once and counted."""
        if self._opened is None:
            return False
        reason = no_rows(self.model, input_ids)
        if reason is None and options is not None:
            reason = not_plain(self.model, input_ids, options)
        if reason is not None:
            self._say_once(f"nothing is loaded or kept of such a call: {reason}")
            num_blocks = input_ids.numel() // self._shape.block_size
            self._opened.metrics.missed(Outcome.UNSUPPORTED, num_blocks)
        return reason is None

    def _say_once(self, warning: str) -> None:
        if warning not in self._said:
            self._said.add(warning)
            _log.warning(warning)

    def _no_segments(self) -> RequestError:
        return RequestError('segments: this KVTier reuses none; set [cache] segments = "on", or leave them out')

    def _wanted(
        self, input_ids: torch.Tensor, segments: SegmentLists | None, repair: Repair | None
    ) -> list[WantedReuse]:
        """What each row asks for, checked; empty: nothing at all."""
        if input_ids.ndim != 2:
            return []  # no rows: nothing is going to be loaded
        lists = lists_of(segments, len(input_ids))
        if not any(lists):
            return []
        if self.segments is None:
            raise self._no_segments()
        return self.segments.wanted(lists, repair, input_ids.shape[1])

    def _rows(self, input_ids: torch.Tensor) -> list[PromptRow]:
        return [self._blocks.row(tokens) for tokens in input_ids.tolist()]

    @property
    def _tiers(self) -> CacheTiers:
        assert self._opened is not None
        return self._opened

    def _load(self, rows: Sequence[PromptRow], wanted: Sequence[WantedReuse]) -> DynamicCache:
        """What is known of every row, as far as all of them go; with segments, all tokens but the last."""
        blocks = [self._fetch(row) for row in rows]
        num_blocks = min(map(len, blocks))
        self.num_cached_tokens = num_blocks * self._shape.block_size
        if self.segments is not None and wanted:
            blended = self.segments.blend(rows, blocks, wanted)
            self.num_segment_tokens = self.segments.num_segment_tokens
            self.num_repaired_tokens = self.segments.num_repaired_tokens
            if blended is not None:
                return blended
        cache = DynamicCache()
        fill(cache, [each[:num_blocks] for each in blocks], self.num_cached_tokens, self.model.device)
        return cache

    def _fetch(self, row: PromptRow) -> torch.Tensor:
        """The row's leading known blocks, `[num_blocks, *block_shape]`, in memory of their own."""
        usable = (len(row.token_ids) - 1) // self._shape.block_size  # at least the last token is computed
        blocks = self._blocks.load(row.chain.hashes[:usable])
        row.num_loaded = len(blocks)
        return blocks

    def _store(self, rows: Sequence[PromptRow], sequences: torch.Tensor, cache: DynamicCache) -> None:
        """Keep what is new and exact of every row."""
        num_tokens = min(cache.get_seq_length(), sequences.shape[1])
        if not is_whole(cache, len(rows), self._shape, self.model.dtype):
            self._say_once("nothing is kept of a cache that dropped tokens or has another shape; let load() make it")
            num_blocks = len(rows) * num_tokens // self._shape.block_size
            self._tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, num_blocks)
            return
        for index, row in enumerate(rows):
            end = num_tokens if row.num_exact is None else min(num_tokens, row.num_exact)
            row.chain.extend(sequences[index, len(row.token_ids) : end].tolist())
            if run := range(row.num_loaded, end // self._shape.block_size):
                self._blocks.store(row, run, blocks_of(cache, index, run, self._shape))
        self._blocks.settle()
