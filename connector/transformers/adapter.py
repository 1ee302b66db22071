"""transformers: what `generate()` computed is kept in the tiers, and found by the next call and the next process."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

try:
    from transformers import DynamicCache, PreTrainedModel
    from transformers import __version__ as _version
except ImportError as error:
    raise ImportError("KVTier needs transformers 5.0 or newer: pip install 'kvtier[engine]'") from error

from kvtier.connector import open_tiers
from kvtier.connector.models import identity_of, kv_shape, name_of
from kvtier.tiers import L2, BlockRecord, ConfigError, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopier, BlockCopies
from kvtier.tiers.hierarchy import CacheTiers, Wanted, bring
from kvtier.tiers.naming import TokenChain, root_hash

if int(_version.partition(".")[0]) < 5:
    raise ImportError(f"KVTier needs transformers 5.0 or newer, here is {_version}: pip install -U 'kvtier[engine]'")

_log = logging.getLogger(__package__)

_SEALED: Final = 1.0  # seconds for new blocks to be hashed
_GRACE: Final = 1.0  # seconds the tiers' answer may come after their own deadline: it is what has arrived by then
_ONE: Final = ("num_beams", "num_return_sequences", "num_beam_groups")
_OWN_WAYS: Final = (  # of decoding, beside one token after the other behind the prompt as it was given
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "custom_generate",
    "token_healing",
)
_WHOLE_PROMPT: Final = ("output_attentions", "output_hidden_states")
_DYNAMIC: Final = (None, "dynamic", "hybrid")  # the cache that is made here; Gemma's checkpoints name the last


@dataclass(slots=True)
class _PromptRow:
    """One sequence of a batch."""

    chain: TokenChain
    num_tokens: int
    epoch: int  # the tiers' before anything of it was computed
    num_loaded: int = 0  # blocks


class KVTier:
    """Keeps the KV of one transformers model: `kv.generate(...)` for `model.generate(...)`. One thread at a time.

    A model or a call whose KV blocks cannot hold (MLA, recurrent state, padding, beams, images) is generated as ever
    and nothing of it is kept. Blocks are those of kvtier's own engine: for one checkpoint directory, dtype and block
    size each finds what the other stored.
    """

    def __init__(self, model: PreTrainedModel, config: Config | None = None, *, name: str | None = None) -> None:
        """`config` defaults to the environment's, `name` to the checkpoint directory's. Reads all weights once.

        Raises ConfigError where memory or disk are too small, FormatError and StoreLocked from the slab.
        """
        self.model: Any = model  # its generate() is typed as a submodule
        self.num_cached_tokens = 0  # of the last `generate`: prompt tokens that were loaded, in every row
        self._config = config or Config.load()
        self._said: set[str] = set()
        self._opened: CacheTiers | None = None
        cache = self._config.cache
        try:
            self._shape = kv_shape(model, cache.block_size)
            path = model.name_or_path  # empty for a model made from a configuration
            name = name or (name_of(Path(path)) if path else model.config.model_type)
            identity = identity_of(model, name, self._shape, hash_scheme=cache.hash, epoch=cache.epoch)
        except ConfigError as error:
            _log.warning("nothing is kept of this model: %s", error)
            return
        fingerprint = identity.fingerprint()
        self._root = root_hash(fingerprint, cache_salt=cache.cache_salt)
        self._opened = open_tiers(self._config, fingerprint, self._shape)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """`model.generate(input_ids, **options)`: loads what is known, computes the rest, keeps what is new."""
        self.num_cached_tokens = 0
        if not self._can_hold(input_ids, options):
            return self.model.generate(input_ids, **options)
        if _asked(self.model, options, "cache_implementation") is not None:
            options["cache_implementation"] = None  # generate() refuses it beside a cache, whichever it names
        rows = self._rows(input_ids)
        cache = self._load(rows)
        self.num_cached_tokens = min(row.num_loaded for row in rows) * self._shape.block_size
        result = self.model.generate(input_ids, **{**options, "past_key_values": cache})
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        self._store(rows, sequences if self._config.cache.store_generated else input_ids, cache)
        return result

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """A cache with the leading tokens of every row ([rows, tokens]) that are known, and how many these are.

        Give it to `model(input_ids[:, num_cached:], past_key_values=cache)`; at least the last token is left.
        Rows of one length without padding: what a mask would hide, this can't see.
        """
        if not self._can_hold(input_ids):
            return DynamicCache(), 0
        rows = self._rows(input_ids)
        return self._load(rows), min(row.num_loaded for row in rows) * self._shape.block_size

    def store(self, input_ids: torch.Tensor, cache: DynamicCache) -> None:
        """Keep the KV of the tokens ([rows, tokens], from the first one on) that `cache` holds."""
        if self._can_hold(input_ids):
            self._store(self._rows(input_ids), input_ids, cache)

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name."""
        return {} if self._opened is None else self._opened.stats()

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
        reason = _no_rows(self.model, input_ids)
        if reason is None and options is not None:
            reason = _not_plain(self.model, input_ids, options)
        if reason is not None:
            self._say_once(f"nothing is loaded or kept of such a call: {reason}")
            num_blocks = input_ids.numel() // self._shape.block_size
            self._opened.metrics.missed(Outcome.UNSUPPORTED, num_blocks)
        return reason is None

    def _say_once(self, warning: str) -> None:
        if warning not in self._said:
            self._said.add(warning)
            _log.warning(warning)

    def _rows(self, input_ids: torch.Tensor) -> list[_PromptRow]:
        rows = []
        for tokens in input_ids.tolist():
            chain = TokenChain(self._root, self._shape.block_size, self._config.cache.hash)
            chain.extend(tokens)
            rows.append(_PromptRow(chain, len(tokens), self._tiers.epoch))
        return rows

    @property
    def _tiers(self) -> CacheTiers:
        assert self._opened is not None
        return self._opened

    def _load(self, rows: Sequence[_PromptRow]) -> DynamicCache:
        """What is known of every row, as far as all of them go."""
        blocks = [self._fetch(row) for row in rows]
        num_blocks = min(map(len, blocks))
        cache = DynamicCache()  # every layer keeps all tokens, sliding ones too: only their masks slide
        for layer in range(self._shape.num_layers if num_blocks else 0):
            # [rows, K or V, blocks, tokens, heads, dim] → two of [rows, heads, tokens, dim]
            both = torch.stack([part[:num_blocks, layer].transpose(0, 1) for part in blocks]).to(self.model.device)
            keys, values = both.flatten(2, 3).transpose(2, 3).contiguous().unbind(1)
            cache.update(keys, values, layer)
        return cache

    def _fetch(self, row: _PromptRow) -> torch.Tensor:
        """The row's leading known blocks, `[num_blocks, *block_shape]`, in memory of their own."""
        tiers, deadline = self._tiers, self._config.cache.prefetch_deadline
        size = self._shape.block_size
        usable = row.chain.hashes[: (row.num_tokens - 1) // size]  # at least the last token is computed
        tiers.count(tiers.locate(usable, deadline))
        region = tiers.region  # before asking: a daemon that was restarted since has another
        started = time.monotonic()
        lease = bring(tiers, usable, row.chain.root, started + deadline + _GRACE, block_size=size)
        if lease is None:
            tiers.metrics.missed(Outcome.NO_SLOT, len(usable))
            return torch.empty(0, *self._shape.block_shape, dtype=self.model.dtype)
        with lease:
            blocks = torch.empty(len(lease), *self._shape.block_shape, dtype=self.model.dtype)
            if len(lease) and region is not None and region is tiers.region:
                pairs = BlockCopies(np.arange(len(lease)), lease.slots)
                if BlockCopier(blocks, region).copy("load", pairs) is None:
                    row.num_loaded = len(lease)
                    tiers.metrics.moved(L2, "load", len(lease) * region.slot_bytes, time.monotonic() - started)
                else:
                    tiers.metrics.missed(Outcome.COPY_FAILED, len(lease))
        return blocks[: row.num_loaded]

    def _store(self, rows: Sequence[_PromptRow], sequences: torch.Tensor, cache: DynamicCache) -> None:
        num_tokens = min(cache.get_seq_length(), sequences.shape[1])
        if not self._is_whole(cache, len(rows)):
            self._say_once("nothing is kept of a cache that dropped tokens or has another shape; let load() make it")
            num_blocks = len(rows) * num_tokens // self._shape.block_size
            self._tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, num_blocks)
            return
        for index, row in enumerate(rows):
            row.chain.extend(sequences[index, row.num_tokens : num_tokens].tolist())
            first, last = row.num_loaded, num_tokens // self._shape.block_size
            if last > first:
                self._store_blocks(row, range(first, last), self._blocks_of(cache, index, first, last))
        self._tiers.drain(_SEALED, below=False)  # the next call finds what this one computed

    def _store_blocks(self, row: _PromptRow, run: range, blocks: torch.Tensor) -> None:
        """Copy those of a row's blocks `run` that are not held yet to L2, and have them sealed."""
        tiers, chain = self._tiers, row.chain
        region = tiers.region  # before asking, as in `_fetch`
        [reservation] = tiers.reserve([Wanted(chain.hashes[run.start : run.stop], chain.parent(run.start), chain.root)])
        if reservation is None or not reservation.hashes:
            return
        pairs = BlockCopies(np.array(reservation.indices, np.int64), reservation.slots)
        if region is None or region is not tiers.region or BlockCopier(blocks, region).copy("store", pairs):
            tiers.abandon(reservation, Outcome.COPY_FAILED)
            return
        positions = [run[index] for index in reservation.indices]
        records = [BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in positions]
        tiers.metrics.moved(L2, "store", len(records) * region.slot_bytes, 0.0)
        tiers.seal(reservation, records, row.epoch)

    def _is_whole(self, cache: DynamicCache, num_rows: int) -> bool:
        shape = (num_rows, self._shape.num_kv_heads, cache.get_seq_length(), self._shape.head_dim)
        layers: Any = cache.layers
        return len(layers) == self._shape.num_layers and all(
            layer.keys.shape == layer.values.shape == shape and layer.keys.dtype == self.model.dtype for layer in layers
        )

    def _blocks_of(self, cache: DynamicCache, index: int, first: int, last: int) -> torch.Tensor:
        """Blocks first…last of one row of the cache, `[num_blocks, *block_shape]` in host memory."""
        size = self._shape.block_size
        blocks = torch.empty(last - first, *self._shape.block_shape, dtype=self.model.dtype)
        layers: Any = cache.layers
        for number, layer in enumerate(layers):
            for kv, tensor in enumerate((layer.keys, layer.values)):
                tokens = tensor[index, :, first * size : last * size].transpose(0, 1)  # [tokens, heads, dim]
                blocks[:, number, kv] = tokens.unflatten(0, (-1, size))
        return blocks


def _no_rows(model: Any, input_ids: torch.Tensor) -> str | None:
    """What keeps blocks from holding these tokens' KV, and the fix; None for plain rows."""
    if model.training:
        return "the model is in training mode; call model.eval()"
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        return f"input_ids has the shape {tuple(input_ids.shape)}; pass [rows, tokens]"
    return None


def _not_plain(model: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> str | None:
    """What keeps blocks from holding the KV of `generate(input_ids, **options)`, and the fix; None where they can."""
    asked = {name: _asked(model, options, name) for name in (*_ONE, *_OWN_WAYS, *_WHOLE_PROMPT)}
    if options.get("past_key_values") is not None:
        return "past_key_values is a cache of the caller's; leave it out, or use load() and store()"
    if _asked(model, options, "use_cache") is False:
        return "use_cache=False; leave it out"
    if (kind := _asked(model, options, "cache_implementation")) not in _DYNAMIC:
        return f"cache_implementation={kind!r}; leave it out, or set it to None in model.generation_config"
    if several := [name for name in _ONE if asked[name] not in (None, 1)]:
        return f"{several[0]}={asked[several[0]]}; leave it at 1, and pass a prompt several times for several answers"
    if ways := [name for name in _OWN_WAYS if asked[name]]:
        return f"{ways[0]} decodes in a way of its own; leave it out"
    if whole := [name for name in _WHOLE_PROMPT if asked[name]]:
        return f"{whole[0]} would lack the tokens that are loaded; leave it out"
    if _is_padded(model, input_ids, options):
        return "padding or a mask; generate rows of one length together, without either"
    tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
    if more := sorted(tensors - {"attention_mask", "pad_token_id", "eos_token_id", "bos_token_id"}):
        return f"{', '.join(more)}: KV that depends on more than the tokens; leave it out if it changes nothing"
    return None


def _asked(model: Any, options: dict[str, Any], name: str) -> Any:
    """The value `generate` goes by: the argument, else the generation_config argument's, else the model's."""
    if name in options:
        return options[name]
    settings = (options.get("generation_config"), model.generation_config)
    return next((value for one in settings if (value := getattr(one, name, None)) is not None), None)


def _is_padded(model: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether any token is masked. Without a mask `generate` makes one that hides the padding token."""
    mask = options.get("attention_mask")
    if mask is not None:
        return mask.shape != input_ids.shape or not bool(mask.all())
    pad, ends = (_asked(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or (ends is not None and bool(torch.isin(torch.as_tensor(ends), torch.as_tensor(pad)).any())):
        return False
    return bool((input_ids == pad).any())
