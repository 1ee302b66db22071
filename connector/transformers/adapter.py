"""transformers: what `generate()` computed is kept in the tiers, and found by the next call and the next process."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Self

from kvtier.tiers import (
    L2,
    ChainHash,
    ConfigError,
    MissingPackages,
    Outcome,
    RequestError,
    install_command,
    require_extra,
)

try:
    import torch
    from transformers import DynamicCache, PreTrainedModel
    from transformers import __version__ as _version
except ModuleNotFoundError:
    require_extra("KVTier", "transformers")
    raise

from kvtier.connector import Answered, ChatPrefix, Turns, open_apart
from kvtier.connector.models import identity_of, live_model, name_of, rope_limit, weights_of, without_adapters
from kvtier.connector.segments import Repair, WantedReuse
from kvtier.connector.transformers.blocks import BlendedCache, Blocks, blocks_of, fill, is_whole
from kvtier.connector.transformers.cache_form import CacheForm, empty_cache, probe_of
from kvtier.connector.transformers.calls import (
    Call,
    UnheldCallError,
    going_on_from,
    other_tokens,
    quantized_cache,
    read_call,
    require_plain_rows,
    require_rows,
    require_text,
)
from kvtier.connector.transformers.going_on import GoingOn, how_it_goes_on
from kvtier.connector.transformers.padding import move_behind_padding, why_padding_shows
from kvtier.connector.transformers.segments import SegmentCalls, SegmentLists, lists_of, require_blendable
from kvtier.connector.transformers.state_calls import StateCalls
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers.config import Config, ConfigSource, format_size
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.naming import KVProbe, root_hash, with_lossy
from kvtier.tiers.reuse import Hint, hint_of


def tell_ends(
    tiers: CacheTiers, rows: Sequence[PromptRow], num_outputs: Sequence[int], hint: Hint | None, seconds: float
) -> None:
    """Tell of each row that its request ended: so many tokens were answered, `seconds` after the call began.

    The rows' chains have what was stored of the answers by now. Of several answers to one prompt, the first counts.
    """
    for row, num_output in zip(rows, num_outputs, strict=True):
        tiers.ended(Answered(len(row.token_ids), num_output, hint, seconds=seconds).end_of(row.chain))
    tiers.tick()  # nobody else sends it


_POSITIONS: Final = (
    "rope_deltas"  # of M-RoPE: how far an image moved all later positions; renewed without a cache alone
)
_OF_TORCH: Final = frozenset(vars(torch.nn.Module()))


class Carried:
    """M-RoPE's positions, and other attributes that a model may set to a tensor while it computes: they were None.

    A model that was just loaded has none of it, and of the positions one that went through a text alone has zeros.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        owners = list(map(vars, model.modules()))
        self._positions = [own for own in owners if _POSITIONS in own]
        self._others = [
            (own, name)
            for own in owners
            for name, value in own.items()
            if value is None and name != _POSITIONS and name not in _OF_TORCH
        ]

    def forget(self) -> None:
        """The next pass counts positions as if the model was just loaded."""
        for own in self._positions:
            own[_POSITIONS] = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """The same while it is open."""
        held = [own[_POSITIONS] for own in self._positions]
        self.forget()
        try:
            yield
        finally:
            for own, value in zip(self._positions, held, strict=True):
                own[_POSITIONS] = value

    @property
    def shown(self) -> str | None:
        """The name of what changes the next pass over a text; None: nothing does."""
        return self.unknown or next((_POSITIONS for own in self._positions if _counts(own[_POSITIONS])), None)

    @property
    def unknown(self) -> str | None:
        """The same of attributes of which nothing is known, so that nobody here may change them."""
        return next((name for own, name in self._others if _counts(own.get(name))), None)


def _counts(value: object) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.any())


if int(_version.partition(".")[0]) < 5:
    raise MissingPackages(
        f"KVTier needs transformers 5.0 or newer, here is {_version}: {install_command('transformers', 'transformers')}"
    )

_log = logging.getLogger(__package__)

_TURNS: Final = Turns("KVTier")  # one for a model, also where an adapter library's is around it
_CHANGED: Final = (
    "nothing is kept of a call in whose middle the model's weights, adapters or code changed; change them after it"
)


class KVTier:
    """Keeps the KV of one transformers model: `kv.generate(...)` for `model.generate(...)`.

    A call whose KV blocks cannot hold (images) is generated as ever, and nothing of it is kept; so is a model's whose
    cache they cannot hold, and all in a forked child. Threads take turns with a model, also to make a `KVTier` over
    it; RequestError refuses a call from inside another. Blocks are those of kvtier's own engine: for one checkpoint
    directory, dtype and block size each finds what the other stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ConfigSource | None = None,
        *,
        name: str | None = None,
        variant: str | None = None,
    ) -> None:
        """`config`: a Config, `{section: {option: value}}` or the name of a TOML file; default: the environment.

        `name` is what people call the model, by default its checkpoint directory's. Reads all weights once. `variant`
        is your name for what hooks and code of your own compute in the model, another one for each way of computing;
        without it, nothing is kept of such a model.

        Raises ConfigError where memory or disk are too small, or segments are "on" and the model's KV cannot be moved.
        FormatError and StoreLocked come from the slab.
        """
        self.model: Any = model  # its generate() is typed as a submodule
        self.num_cached_tokens = 0  # of the last call: prompt tokens that were loaded, in the row that had most
        self.cached_tokens_by_row: list[int] = []  # … in each row: rows behind padding have fewer
        self.num_segment_tokens = 0  # of the last call: prompt tokens from segments, in all rows; approximate
        self.num_repaired_tokens = 0  # … and those of them that were computed anew
        self.segments: SegmentCalls | None = None  # None: `[cache] segments` are off
        self._config = Config.of(config)
        self._said: set[str] = set()
        self._is_sure = True  # that the name holds what changed in the model since it was named
        self._turn = _TURNS.of(next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model))
        self._opened: CacheTiers | None = None
        self._inherited: CacheTiers | None = None  # in a forked child: its parent's, which nobody may even collect
        self._states: StateCalls | None = None  # None: the model keeps no recurrent states
        self._carried = Carried(model)
        with self._turn:
            self._open(model, name, variant)

    def _open(self, model: PreTrainedModel, name: str | None, variant: str | None) -> None:
        """Measure the model, name its KV and open the tiers; none if its KV cannot be kept."""
        cache = self._config.cache
        try:
            weights_of(model)  # refused by name before anything computes with them
            self._limit = rope_limit(model.config)  # tokens: behind them RoPE is another, and so is all KV
            self._form = CacheForm.of(model, cache.block_size)
            going_on = self._how_it_goes_on(model)
            inv_freq = require_blendable(model, self._form.shape) if cache.segments == "on" else None
            path = model.name_or_path  # empty for a model made from a configuration
            name = name or (name_of(Path(path)) if path else model.config.model_type)
            self._live = live_model(model, variant)
            identity = identity_of(self._live, name, self._form.outline, hash_scheme=cache.hash, epoch=cache.epoch)
        except ConfigError as error:
            if cache.segments == "on":
                raise
            _log.warning("nothing is kept of this model: %s", error)
            return
        named = with_lossy(self._form.named(identity), cache.lossy, self._form.block_bytes)
        self._probed = self._probe() if variant is None and self._live.refusal is None else None
        self._opened, named = open_apart(self._config, named, self._form, self._probed)
        self._fingerprint = named.fingerprint()
        self._blocks = TierBlocks(self._opened, self._root(), self._form, self._config, model.device)
        self._carried = Carried(model)  # what the tokens of the start left is no other call's
        self._blocks.follow, self._blocks.passing = self._follow, self._passing
        if going_on is not None:
            keeps_answers = bool(cache.store_generated)
            self._states = StateCalls(model, self._blocks, going_on, self._limit, keeps_answers=keeps_answers)
        if inv_freq is not None:
            self.segments = SegmentCalls(model, self._blocks, self._config, inv_freq)

    def _how_it_goes_on(self, model: PreTrainedModel) -> GoingOn | None:
        """How a model with recurrent states goes on behind them; None if it has none."""
        states = self._form.states
        if states is None:
            return None
        if self._config.cache.segments == "on":
            fix = "a state depends on all text before it; leave segments off"
            raise ConfigError(f'segments "on": model kind {model.config.model_type!r} keeps recurrent states; {fix}')
        with self._carried.put_aside():
            going_on = how_it_goes_on(model, self._form)
        way = "several tokens at once" if going_on.in_pieces else "one token at a time"
        _log.info("recurrent states: %s at each border; %s behind one", format_size(states.num_bytes), way)
        return going_on

    def chat(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """A chat's prompt ([1, tokens]) for `generate`, by the tokenizer's template, with messages as `[chat]` says.

        `options` are those of `apply_chat_template`.
        """
        prefix, given = ChatPrefix.of(self._config.chat), None if tools is None else list(tools)
        options = {"add_generation_prompt": True, **options, "return_tensors": "pt", "return_dict": False}
        made: torch.Tensor = tokenizer.apply_chat_template(
            prefix.messages(list(messages)), tools=prefix.tools(given), **options
        )
        return made

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        segments: SegmentLists | None = None,
        repair: Repair | None = None,
        hint: Hint | str | None = None,
        **options: Any,
    ) -> Any:
        """`model.generate(input_ids, **options)`: loads what is known, computes the rest, keeps what is new.

        Of `segments` (a list for each row) the KV may come from another place: approximate, see `Repair`. `hint` says
        whether these conversations go on. RequestError before anything is computed if one of them is bad.
        """
        with self._my_turn():
            return self._generate(input_ids, segments, repair, hint, options)

    def _generate(
        self,
        input_ids: torch.Tensor,
        segments: SegmentLists | None,
        repair: Repair | None,
        hint: Hint | str | None,
        options: dict[str, Any],
    ) -> Any:
        began = time.monotonic()
        said = None if hint is None else hint_of(hint)
        wanted = self._wanted(input_ids, segments, repair)
        self._forget_last_call()
        call = self._held_call(input_ids, options)
        if call is None:
            return self.model.generate(input_ids, **options)
        rows = self._rows(input_ids, call.pads)
        if self._states is not None:
            ends = partial(call.ends, num_columns=input_ids.shape[1])
            result = self._states.generate(rows, input_ids, call.options(self.model, options, None), ends)
            self._note_cached(self._states.num_cached_tokens, len(rows))
            self._tell_ends(call, rows, result, input_ids, said, began)
            return result
        cache = self._load(rows, wanted) if call.loads else empty_cache(self.model)
        self._blocks.watch(cache)
        if call.num_copies > 1:
            cache.batch_repeat_interleave(call.num_copies)
        given = quantized_cache(self.model, cache, call.quantization) if call.is_quantized else cache
        with going_on_from(self.model, cache.get_seq_length() if call.is_assisted else 0):
            result = self.model.generate(input_ids, **call.options(self.model, options, given))
        num_columns = input_ids.shape[1]
        if call.names_answers and self._config.cache.store_generated:
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            copies = [copy for row in rows for copy in row.copies(call.num_copies)]
            self._store(copies, sequences, cache, call.ends(sequences, num_columns))
        else:  # of each prompt its first row
            self._store(rows, input_ids, cache, num_copies=call.num_copies)
        self._tell_ends(call, rows, result, input_ids, said, began)
        return result

    def load(
        self, input_ids: torch.Tensor, *, segments: SegmentLists | None = None, repair: Repair | None = None
    ) -> tuple[DynamicCache, int]:
        """A cache with the leading tokens of every row ([rows, tokens]) that are known, and how many it has.

        Give it to `model(input_ids[:, num_tokens:], cache=cache)`; at least the last token is left. Behind a
        recurrent state that takes one token at a time, it is the only one: the others are computed here.
        Rows of one length without padding: what a mask would hide, this can't see. Nor can it see images: of a prompt
        with tokens that stand for some it has nothing. With `segments` (see `generate`) it has all tokens but the last,
        and `store` keeps none of it behind the first reused one.
        """
        with self._my_turn():
            wanted = self._wanted(input_ids, segments, repair)
            self._forget_last_call()
            if not self._can_hold(input_ids):
                return empty_cache(self.model), 0
            self._carried.forget()
            if self._states is not None:
                rows = self._rows(input_ids)
                loaded = self._states.load(rows, input_ids)
                self._note_cached(self._states.num_cached_tokens, len(rows))
                return loaded
            cache = self._load(self._rows(input_ids), wanted)
            self._blocks.watch(cache)
            return cache, cache.get_seq_length()

    def precompute(self, texts: Sequence[Any]) -> None:
        """Compute texts (token ids) that are going to be segments, each alone: ordinary blocks, in every tier.

        RequestError before anything is computed if segments are off, or a text is no list of token ids.
        """
        if self.segments is None:
            raise self._no_segments()
        checked = self.segments.texts(texts)
        with self._my_turn():
            if all(self._can_hold(torch.tensor([text])) for text in checked):
                self.segments.precompute(checked)

    def store(self, input_ids: torch.Tensor, cache: DynamicCache, *, hint: Hint | str | None = None) -> None:
        """Keep the KV of the tokens ([rows, tokens], from the first one on) that `cache` holds.

        Nothing is kept where tokens stand for images. `hint` says whether these conversations go on; RequestError if it
        is none.
        """
        said = None if hint is None else hint_of(hint)
        with self._my_turn():
            self._keep(input_ids, cache, said)

    def _keep(self, input_ids: torch.Tensor, cache: DynamicCache, said: Hint | None) -> None:
        if self._can_hold(input_ids):
            rows = self._rows(input_ids)
            if (shown := self._carried.shown) is not None:
                way = "call load() for this text before its passes"
                return self._refuse(input_ids, UnheldCallError(f"the model has {shown} of another call; {way}"))
            if self._states is not None:
                if not self._states.store(rows, input_ids, cache):
                    why = "nothing is kept of a cache with other tokens than these, or without K and V"
                    self._say_once(f"{why}; let load() make it")
            else:
                for row in rows:
                    row.num_exact = cache.num_exact if isinstance(cache, BlendedCache) else None
                self._store(rows, input_ids, cache)
            tell_ends(self._tiers, rows, [0] * len(rows), said, 0.0)

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name; what came of segments as in `Engine.stats`."""
        figures = {} if self.segments is None else self.segments.figures
        return {**({} if self._opened is None else self._opened.stats()), **figures}

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything stored so far is in the lowest tier; False when `timeout` seconds pass first."""
        with self._my_turn():
            return self._opened is None or self._blocks.drain(timeout)

    def reset(self) -> None:
        """Forget every block in every tier, and name new ones apart: the weights may be others now. Reads no weights.

        For training loops, after each step: else the next call reads all weights to name them. Blocks kept from then on
        are found by this `KVTier` alone, until its weights change again. Whoever shares a tier forgets, too.
        """
        with self._my_turn():
            if self._opened is not None:
                self._opened.reset()
                self._live.renew()
                self._blocks.root = self._root()

    def close(self) -> None:
        """Flush and close the tiers. Idempotent; later calls generate without them."""
        with self._my_turn():
            tiers, self._opened = self._opened, None
            if tiers is not None:
                self._blocks.close()
                tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _probe(self) -> KVProbe:
        """What the model's own weights make of a few tokens."""
        with without_adapters(self.model):
            return probe_of(self.model, self._form)

    def _root(self) -> ChainHash:
        """Where the names of blocks begin that the model computes as it is now."""
        return root_hash(self._fingerprint, cache_salt=self._config.cache.cache_salt, lora_digest=self._live.variant)

    def _notice(self, *, in_pass: bool) -> None:
        """Have new rows named after what the model computes now."""
        if not self._live.holds(in_pass=in_pass):
            was = self._live.variant
            self._live.look()
            self._is_sure = not self._live.variant is was is None  # else what changed is none of what names tell
            self._blocks.root = self._root()

    def _follow(self) -> bool:
        """The same. False if that has no name."""
        self._notice(in_pass=False)
        if not self._is_sure:
            self._require_same_kv()
            self._is_sure = True
        return self._live.refusal is None

    def _require_same_kv(self) -> None:
        """Have the model refused if its own weights make other KV now than when it was named."""
        if self._live.refusal is not None or self._probed is None:
            return
        try:
            apart = self._probe().distance(self._probed)
        except ConfigError as error:
            return self._live.refuse(str(error))
        if apart > self._probed.tolerance:
            why = f"the model computes other KV than when it was named (by {apart:.2g}), and nothing in it shows why"
            self._live.refuse(f"{why}; make another KVTier")

    def _passing(self) -> ChainHash | None:
        """Asked inside a pass: where the names begin of what it computes; None if nothing tells."""
        if self._turn.is_mine:
            self._notice(in_pass=True)
            return self._blocks.root if self._is_sure and self._live.refusal is None else None
        # a caller's own pass, with other threads about: the next call looks closer
        is_plain = self._live.holds(in_pass=True) and self._live.refusal is None and self._carried.shown is None
        return self._blocks.root if is_plain else None

    def _require_named(self) -> None:
        """The same; UnheldCallError if it has no name, or keeps something of another call that no name tells."""
        if not self._follow():
            raise UnheldCallError(self._live.refusal)
        if (unknown := self._carried.unknown) is not None:
            raise UnheldCallError(f"the model has {unknown} of another call; set it to None, as it was at the start")

    def _my_turn(self) -> AbstractContextManager[object]:
        """While it is open, no other thread is in here, or makes a `KVTier` over this model."""
        if not self._turn.is_inherited:
            return self._turn
        if self._opened is not None:
            self._inherited, self._opened = self._opened, None
            self._say_once(f"nothing is loaded or kept: {self._turn.refusal}")
        return nullcontext()

    def _tell_ends(
        self, call: Call, rows: list[PromptRow], result: Any, input_ids: torch.Tensor, hint: Hint | None, began: float
    ) -> None:
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        num_columns, num_returned = input_ids.shape[1], len(sequences) // len(rows)
        num_outputs = [end - num_columns for end in call.ends(sequences, num_columns)[::num_returned]]
        tell_ends(self._tiers, rows, num_outputs, hint, time.monotonic() - began)

    def _forget_last_call(self) -> None:
        self.num_cached_tokens = self.num_segment_tokens = self.num_repaired_tokens = 0
        self.cached_tokens_by_row = []

    def _note_cached(self, num_tokens: int, num_rows: int) -> None:
        """All rows of the last call went on behind so many tokens."""
        self.num_cached_tokens = num_tokens
        self.cached_tokens_by_row = [num_tokens] * num_rows

    def _held_call(self, input_ids: torch.Tensor, options: dict[str, Any]) -> Call | None:
        """The call as blocks see it. None if they cannot hold its KV: that is said once, and counted."""
        if self._opened is None:
            return None
        try:
            self._require_named()
            call = read_call(self.model, input_ids, options, self._limit)
            if self._states is not None:
                require_plain_rows(call, in_pieces=self._states.in_pieces)
            if any(call.pads) and (trait := self._why_padding_shows):
                kind = self.model.config.model_type
                raise UnheldCallError(f"model kind {kind!r} has {trait}; pass rows of one length together")
        except UnheldCallError as error:
            self._refuse(input_ids, error)
            return None
        self._carried.forget()
        return call

    @cached_property
    def _other_tokens(self) -> Mapping[int, str] | None:
        return other_tokens(self.model.config)

    @cached_property
    def _why_padding_shows(self) -> str | None:
        return why_padding_shows(self.model, self._form)

    def _can_hold(self, input_ids: torch.Tensor) -> bool:
        """Whether blocks can hold what the caller computes of these rows. If not, that is said once, and counted."""
        if self._opened is None:
            return False
        try:
            self._require_named()
            require_rows(self.model, input_ids, self._limit)
            require_text(self._other_tokens, input_ids)
        except UnheldCallError as error:
            self._refuse(input_ids, error)
            return False
        return True

    def _refuse(self, input_ids: torch.Tensor, error: UnheldCallError) -> None:
        self._say_once(f"nothing is loaded or kept of such a call: {error}")
        self._tiers.metrics.missed(Outcome.UNSUPPORTED, input_ids.numel() // self._form.block_size)

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

    def _rows(self, input_ids: torch.Tensor, pads: Sequence[int] | None = None) -> list[PromptRow]:
        rows = zip(input_ids.tolist(), pads or (0,) * len(input_ids), strict=True)
        return [self._blocks.row(tokens[pad:], pad) for tokens, pad in rows]

    @property
    def _tiers(self) -> CacheTiers:
        assert self._opened is not None
        return self._opened

    def _load(self, rows: Sequence[PromptRow], wanted: Sequence[WantedReuse]) -> DynamicCache:
        """What is known of every row, as far as all of them go; with segments, all tokens but the last."""
        size, pads = self._form.block_size, [row.num_pads for row in rows]
        blocks = [self._fetch(row) for row in rows]
        num_columns = min(pad + len(each) * size for pad, each in zip(pads, blocks, strict=True))
        self.cached_tokens_by_row = [max(0, num_columns - pad) for pad in pads]
        self.num_cached_tokens = max(self.cached_tokens_by_row)
        if self.segments is not None and wanted:
            if any(pads):
                self._say_once("no segments are reused behind padding; pass such a prompt as a batch of its own")
            elif (blended := self.segments.blend(rows, blocks, wanted)) is not None:
                self.num_segment_tokens = self.segments.num_segment_tokens
                self.num_repaired_tokens = self.segments.num_repaired_tokens
                return blended
        cache = empty_cache(self.model)
        fill(cache, self._form, blocks, num_columns, self.model.device)
        move_behind_padding(cache, self._form, pads)
        return cache

    def _fetch(self, row: PromptRow) -> Blocks:
        """The row's leading known blocks, in memory of their own."""
        usable = (len(row.token_ids) - 1) // self._form.block_size  # at least the last token is computed
        blocks = self._blocks.load(row.chain.hashes[:usable])
        row.num_loaded = len(blocks)
        return blocks

    def _store(
        self,
        rows: Sequence[PromptRow],
        sequences: torch.Tensor,
        cache: DynamicCache,
        ends: Sequence[int] | None = None,
        num_copies: int = 1,
    ) -> None:
        """Keep what is new and exact of every row. Each has `num_copies` rows in the cache, and ends before `ends`."""
        if self._limit is not None and cache.get_seq_length() > self._limit:
            return  # RoPE changed on the way
        if not self._blocks.are_current(rows, cache):
            return self._say_once(_CHANGED)
        num_columns = min(cache.get_seq_length(), sequences.shape[1])
        if not is_whole(cache, len(rows) * num_copies, self._form, self.model):
            self._say_once("nothing is kept of a cache that dropped tokens or has another shape; let load() make it")
            num_blocks = len(rows) * num_columns // self._form.block_size
            self._tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, num_blocks)
            return
        for index, row in enumerate(rows):
            end = num_columns if ends is None else min(num_columns, ends[index])
            row.chain.extend(sequences[index, row.num_pads + len(row.token_ids) : end].tolist())
            num_tokens = end - row.num_pads
            num_named = num_tokens if row.num_exact is None else min(num_tokens, row.num_exact)
            if run := range(row.num_loaded, num_named // self._form.block_size):
                self._blocks.store(row, run, blocks_of(cache, index * num_copies, run, self._form, row.num_pads))
        self._blocks.settle()
