"""transformers: `generate()` loads known KV from the tiers and stores new KV, for later calls and processes."""

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
from kvtier.connector.transformers import calls
from kvtier.connector.transformers.blocks import BlendedCache, Blocks, blocks_of, fill, is_whole
from kvtier.connector.transformers.cache_form import CacheForm, empty_cache, probe_of, require_causal
from kvtier.connector.transformers.going_on import GoingOn, how_it_goes_on
from kvtier.connector.transformers.padding import move_behind_padding, why_padding_shows
from kvtier.connector.transformers.segments import SegmentCalls, SegmentLists, lists_of, require_blendable
from kvtier.connector.transformers.state_calls import StateCalls
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers.config import Config, ConfigSource, format_size
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.naming import KVProbe, root_hash, with_lossy
from kvtier.tiers.reuse import Hint, hint_of


def report_finished(
    tiers: CacheTiers, rows: Sequence[PromptRow], num_outputs: Sequence[int], hint: Hint | None, seconds: float
) -> None:
    """Report each row's finished request: so many tokens were generated, `seconds` after the call began.

    By now the rows' chains include the stored answers. If a prompt has several answers, the first counts.
    """
    for row, num_output in zip(rows, num_outputs, strict=True):
        tiers.ended(Answered(len(row.token_ids), num_output, hint, seconds=seconds).finish_of(row.chain))
    tiers.tick()  # no other call sends it


_POSITIONS: Final = "rope_deltas"  # of M-RoPE: the offset of positions after images; only recomputed without a cache
_OF_TORCH: Final = frozenset(vars(torch.nn.Module()))


class Carried:
    """State that a model keeps between passes: M-RoPE's positions, and attributes that were None and became tensors.

    A freshly loaded model has none of it; after a pass over text alone the positions are zeros.
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
        """Reset the positions: the next pass counts them as in a freshly loaded model."""
        for own in self._positions:
            own[_POSITIONS] = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Reset them inside the context, and restore them afterwards."""
        values = [own[_POSITIONS] for own in self._positions]
        self.forget()
        try:
            yield
        finally:
            for own, value in zip(self._positions, values, strict=True):
                own[_POSITIONS] = value

    @property
    def shown(self) -> str | None:
        """The name of a state that changes the next pass over a text; None: there is none."""
        return self.unknown or next((_POSITIONS for own in self._positions if _counts(own[_POSITIONS])), None)

    @property
    def unknown(self) -> str | None:
        """The same, for attributes of unknown meaning, which must not be reset here."""
        return next((name for own, name in self._others if _counts(own.get(name))), None)


def _counts(value: object) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.any())


if int(_version.partition(".")[0]) < 5:
    raise MissingPackages(
        f"KVTier needs transformers 5.0 or newer, here is {_version}: {install_command('transformers', 'transformers')}"
    )

_log = logging.getLogger(__package__)

_TURNS: Final = Turns("KVTier")  # one per model, also if an adapter library wraps it
_CHANGED: Final = (
    "nothing is kept of a call in whose middle the model's weights, adapters or code changed; change them after it"
)


class KVTier:
    """Keeps the KV of one transformers model: `kv.generate(...)` for `model.generate(...)`.

    A call with KV that blocks cannot hold (images) is generated as usual without storing; so are all calls of a model
    with an unsupported cache, and all in a forked child. Threads take turns with a model, also to make a `KVTier` over
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

        `name`: the model's name for users, by default its checkpoint directory's. Reads all weights once. `variant`:
        your name for what your own hooks and code compute in the model, a new one for each change; without it such a
        model's KV is not stored.

        Raises ConfigError if memory or disk are too small, or segments are "on" and the model's KV cannot be moved.
        FormatError and StoreLocked come from the slab.
        """
        self.model: Any = model  # its generate() is typed as a submodule
        self.num_cached_tokens = 0  # of the last call: loaded prompt tokens, of the row with the most
        self.cached_tokens_by_row: list[int] = []  # … of each row: padded rows have fewer
        self.num_segment_tokens = 0  # of the last call: prompt tokens from segments, in all rows; approximate
        self.num_repaired_tokens = 0  # … and the recomputed ones among them
        self.segments: SegmentCalls | None = None  # None: `[cache] segments` are off
        self._config = Config.of(config)
        self._said: set[str] = set()
        self._is_sure = True  # whether the name covers all changes of the model since it was named
        self._is_tested = True  # whether it computed a few tokens since anything but adapters changed
        self._generates = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)
        self._turn = _TURNS.of(self._generates)
        self._opened: CacheTiers | None = None
        self._inherited: CacheTiers | None = None  # in a forked child: its parent's, never collected
        self._states: StateCalls | None = None  # None: the model keeps no recurrent states
        self._carried = Carried(model)
        with self._turn:
            self._open(model, name, variant)

    def _open(self, model: PreTrainedModel, name: str | None, variant: str | None) -> None:
        """Inspect the model, name its KV and open the tiers; leaves them closed if its KV cannot be stored."""
        cache = self._config.cache
        try:
            weights_of(model)  # checked before anything computes with them
            self._limit = rope_limit(model.config)  # tokens: longer texts have another RoPE, and so other KV
            self._form = CacheForm.of(model, cache.block_size)
            going_on = self._how_it_goes_on(model)
            inv_freq = require_blendable(model, self._form.shape) if cache.segments != "off" else None
            path = model.name_or_path  # empty for a model made from a configuration
            name = name or (name_of(Path(path)) if path else model.config.model_type)
            self._live = live_model(model, variant)
            identity = identity_of(self._live, name, self._form.outline, hash_scheme=cache.hash, epoch=cache.epoch)
        except ConfigError as error:
            if cache.segments != "off":
                raise
            _log.warning("nothing is kept of this model: %s", error)
            return
        named = with_lossy(self._form.named(identity), cache.lossy, self._form.block_bytes)
        self._probed = self._probe() if variant is None and self._live.refusal is None else None
        self._opened, named = open_apart(self._config, named, self._form, self._probed)
        self._own = self._live.own  # what `_probed` was computed with
        self._fingerprint = named.fingerprint()
        self._blocks = TierBlocks(self._opened, self._root(), self._form, self._config, model.device)
        self._carried = Carried(model)  # without the state that the probe's tokens left
        self._blocks.follow, self._blocks.passing = self._follow, self._passing
        if going_on is not None:
            keeps_answers = bool(cache.store_generated)
            self._states = StateCalls(model, self._blocks, going_on, self._limit, keeps_answers=keeps_answers)
        if inv_freq is not None:
            self.segments = SegmentCalls(model, self._blocks, self._config, inv_freq)

    def _how_it_goes_on(self, model: PreTrainedModel) -> GoingOn | None:
        """How a model with recurrent states continues after them; None if it has none."""
        states = self._form.states
        if states is None:
            return None
        if self._config.cache.segments != "off":
            fix = "a state depends on all text before it; leave segments off"
            raise ConfigError(f'segments "on": model kind {model.config.model_type!r} keeps recurrent states; {fix}')
        with self._carried.put_aside():
            going_on = how_it_goes_on(model, self._form)
        way = "several tokens at once" if going_on.in_pieces else "one token at a time"
        _log.info("recurrent states: %s at each border; %s behind one", format_size(states.num_bytes), way)
        return going_on

    def chat(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **options: Any
    ) -> torch.Tensor:
        """A chat's prompt ([1, tokens]) for `generate`, by the tokenizer's template, with `[chat]` applied.

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
        """`model.generate(input_ids, **options)`: loads known KV, computes the rest, stores what is new.

        The KV of `segments` (a list for each row) may be reused from another place: approximate, see `Repair`. None: as
        configured, none or those that are found; an empty list: none. `hint`: whether these conversations continue. An
        invalid one is a RequestError before anything is computed.
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
        hint = None if hint is None else hint_of(hint)
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
            self._report_finished(call, rows, result, input_ids, hint, began)
            return result
        cache = self._load(rows, wanted) if call.loads else empty_cache(self.model)
        self._blocks.watch(cache)
        if call.num_copies > 1:
            cache.batch_repeat_interleave(call.num_copies)
        given = calls.quantized_cache(self.model, cache, call.quantization) if call.is_quantized else cache
        num_assisted = cache.get_seq_length() if call.is_assisted else 0
        try:
            with calls.generating(self._live), calls.going_on_from(self._live, self._generates, num_assisted):
                result = self.model.generate(input_ids, **call.options(self.model, options, given))
        except calls.UnheldCallError as error:
            self._forget_last_call()
            self._refuse(input_ids, error)
            return self.model.generate(input_ids, **options)
        num_columns = input_ids.shape[1]
        if call.names_answers and self._config.cache.store_generated:
            sequences = result if isinstance(result, torch.Tensor) else result.sequences
            copies = [copy for row in rows for copy in row.copies(call.num_copies)]
            self._store(copies, sequences, cache, call.ends(sequences, num_columns))
        else:  # only the first row of each prompt
            self._store(rows, input_ids, cache, num_copies=call.num_copies)
        self._report_finished(call, rows, result, input_ids, hint, began)
        return result

    def load(
        self, input_ids: torch.Tensor, *, segments: SegmentLists | None = None, repair: Repair | None = None
    ) -> tuple[DynamicCache, int]:
        """A cache with the known leading tokens of all rows ([rows, tokens]), and their number.

        Pass it to `model(input_ids[:, num_tokens:], cache=cache)`; at least the last token is left. After a recurrent
        state that takes one token at a time, only the last is left: the others are computed here. Rows must have one
        length without padding, as a mask is unknown here. So are images: for a prompt with their tokens it loads
        nothing. With `segments` (see `generate`) it has all tokens but the last, and `store` keeps nothing from the
        first reused one on.
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
        """Compute texts (token ids) that will be segments, each alone, and store them as ordinary blocks in every tier.

        RequestError before anything is computed if segments are off, or a text is not a list of token ids.
        """
        if self.segments is None:
            raise self._no_segments()
        checked = self.segments.texts(texts)
        with self._my_turn():
            if all(self._can_hold(torch.tensor([text])) for text in checked):
                self.segments.precompute(checked)

    def store(self, input_ids: torch.Tensor, cache: DynamicCache, *, hint: Hint | str | None = None) -> None:
        """Store the KV in `cache` of the tokens ([rows, tokens], from the first one on).

        Nothing is stored if tokens stand for images. `hint`: whether these conversations continue; RequestError if it
        is unknown.
        """
        known_hint = None if hint is None else hint_of(hint)
        with self._my_turn():
            self._keep(input_ids, cache, known_hint)

    def _keep(self, input_ids: torch.Tensor, cache: DynamicCache, known_hint: Hint | None) -> None:
        if self._can_hold(input_ids):
            rows = self._rows(input_ids)
            if (shown := self._carried.shown) is not None:
                way = "call load() for this text before its passes"
                return self._refuse(input_ids, calls.UnheldCallError(f"the model has {shown} of another call; {way}"))
            if self._states is not None:
                if not self._states.store(rows, input_ids, cache):
                    why = "nothing is kept of a cache with other tokens than these, or without K and V"
                    self._say_once(f"{why}; let load() make it")
            else:
                for row in rows:
                    row.num_exact = cache.num_exact if isinstance(cache, BlendedCache) else None
                self._store(rows, input_ids, cache)
            report_finished(self._tiers, rows, [0] * len(rows), known_hint, 0.0)

    def stats(self) -> dict[str, float]:
        """Every counter and gauge of the tiers by its exposition name; segments' counters as in `Engine.stats`."""
        figures = {} if self.segments is None else self.segments.stats
        return {**({} if self._opened is None else self._opened.stats()), **figures}

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything stored so far is in the lowest tier; False if `timeout` seconds pass first."""
        with self._my_turn():
            return self._opened is None or self._blocks.drain(timeout)

    def reset(self) -> None:
        """Drop every block from every tier, and name new ones apart, since the weights may have changed.

        For training loops, after each step: else the next call reads all weights to name them. New blocks are
        found only by this `KVTier`, until its weights change again. Other users of a shared tier lose theirs, too.
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
        """The KV that the model's own weights compute for a few tokens."""
        with without_adapters(self.model):
            return probe_of(self.model, self._form)

    def _root(self) -> ChainHash:
        """The root of the names of blocks that the model computes now."""
        return root_hash(self._fingerprint, cache_salt=self._config.cache.cache_salt, lora_digest=self._live.variant)

    def _notice(self, *, in_pass: bool) -> None:
        """Name new rows after what the model computes now."""
        if not self._live.holds(in_pass=in_pass):
            was, own = self._live.variant, self._live.own
            self._live.look()
            if self._probed is not None and (self._live.variant == was or self._live.refusal is not None):
                self._is_sure = False  # perhaps something changed that the name does not cover
            self._is_tested = self._is_tested and self._is_sure and self._live.own == own
            self._blocks.root = self._root()

    def _follow(self) -> bool:
        """`_notice`; False if what it computes has no name."""
        self._notice(in_pass=False)
        if not self._is_tested and self._live.refusal is None:
            self._test()
            self._is_sure = self._is_tested = self._live.refusal is None
        return self._live.refusal is None

    def _test(self) -> None:
        """Refuse the model if it is not causal now, or computes other KV under the name it was given."""
        named = self._probed if not self._is_sure and self._live.own == self._own else None
        try:
            with without_adapters(self.model):
                require_causal(self.model)
            apart = 0.0 if named is None else self._probe().distance(named)
        except ConfigError as error:
            return self._live.refuse(str(error))
        if named is not None and apart > named.tolerance:
            why = f"the model computes other KV than when it was named (by {apart:.2g}), and nothing in it shows why"
            self._live.refuse(f"{why}; make another KVTier")

    def _passing(self) -> ChainHash | None:
        """Called inside a pass: the root of the names of what it computes; None if unknown."""
        if self._turn.is_mine:
            self._notice(in_pass=True)
            return self._blocks.root if self._is_sure and self._live.refusal is None else None
        # a pass of the caller, perhaps with other threads: the next call checks more
        is_plain = self._live.holds(in_pass=True) and self._live.refusal is None and self._carried.shown is None
        return self._blocks.root if is_plain else None

    def _require_named(self) -> None:
        """`_follow`; UnheldCallError if it has no name, or has state of another call that the name does not cover."""
        if not self._follow():
            raise calls.UnheldCallError(self._live.refusal)
        if (unknown := self._carried.unknown) is not None:
            raise calls.UnheldCallError(
                f"the model has {unknown} of another call; set it to None, as it was at the start"
            )

    def _my_turn(self) -> AbstractContextManager[object]:
        """Inside the context no other thread uses the model, or makes a `KVTier` over it."""
        if not self._turn.is_inherited:
            return self._turn
        if self._opened is not None:
            self._inherited, self._opened = self._opened, None
            self._say_once(f"nothing is loaded or kept: {self._turn.refusal}")
        return nullcontext()

    def _report_finished(
        self,
        call: calls.Call,
        rows: list[PromptRow],
        result: Any,
        input_ids: torch.Tensor,
        hint: Hint | None,
        began: float,
    ) -> None:
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        num_columns, num_returned = input_ids.shape[1], len(sequences) // len(rows)
        num_outputs = [end - num_columns for end in call.ends(sequences, num_columns)[::num_returned]]
        report_finished(self._tiers, rows, num_outputs, hint, time.monotonic() - began)

    def _forget_last_call(self) -> None:
        self.num_cached_tokens = self.num_segment_tokens = self.num_repaired_tokens = 0
        self.cached_tokens_by_row = []

    def _note_cached(self, num_tokens: int, num_rows: int) -> None:
        self.num_cached_tokens = num_tokens
        self.cached_tokens_by_row = [num_tokens] * num_rows

    def _held_call(self, input_ids: torch.Tensor, options: dict[str, Any]) -> calls.Call | None:
        """The call as blocks see it. None if they cannot hold its KV, which is logged once, and counted."""
        if self._opened is None:
            return None
        try:
            self._require_named()
            call = calls.read_call(self.model, input_ids, options, self._limit)
            if self._states is not None:
                calls.require_plain_rows(call, in_pieces=self._states.in_pieces)
            if any(call.pads) and (trait := self._why_padding_shows):
                kind = self.model.config.model_type
                raise calls.UnheldCallError(f"model kind {kind!r} has {trait}; pass rows of one length together")
        except calls.UnheldCallError as error:
            self._refuse(input_ids, error)
            return None
        self._carried.forget()
        return call

    @cached_property
    def _other_tokens(self) -> Mapping[int, str] | None:
        return calls.other_tokens(self.model.config)

    @cached_property
    def _why_padding_shows(self) -> str | None:
        return why_padding_shows(self.model, self._form)

    def _can_hold(self, input_ids: torch.Tensor) -> bool:
        """Whether blocks can hold the KV of these rows. If not, that is logged once, and counted."""
        if self._opened is None:
            return False
        try:
            self._require_named()
            calls.require_rows(self.model, input_ids, self._limit)
            calls.require_text(self._other_tokens, input_ids)
        except calls.UnheldCallError as error:
            self._refuse(input_ids, error)
            return False
        return True

    def _refuse(self, input_ids: torch.Tensor, error: calls.UnheldCallError) -> None:
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
        if input_ids.ndim != 2:
            return []  # no rows: nothing will be loaded
        if segments is None and self.segments is not None and self.segments.unmarked is not None:
            return self.segments.wanted([None] * len(input_ids), repair, input_ids.shape[1])
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
    def repair_share(self) -> float | None:
        """Of the last call: the share of the tokens from segments that was recomputed; None: there were none."""
        return self.num_repaired_tokens / self.num_segment_tokens if self.num_segment_tokens else None

    @property
    def _tiers(self) -> CacheTiers:
        assert self._opened is not None
        return self._opened

    def _load(self, rows: Sequence[PromptRow], wanted: Sequence[WantedReuse]) -> DynamicCache:
        """Known tokens of every row, as far as all rows have them; with segments, all tokens but the last."""
        size, pads = self._form.block_size, [row.num_pads for row in rows]
        blocks = [self._fetch(row) for row in rows]
        num_columns = min(pad + len(each) * size for pad, each in zip(pads, blocks, strict=True))
        self.cached_tokens_by_row = [max(0, num_columns - pad) for pad in pads]
        self.num_cached_tokens = max(self.cached_tokens_by_row)
        if self.segments is not None and wanted:
            if any(pads):
                self._say_once("no segments are reused behind padding; pass such a prompt as a batch of its own")
            elif (blended := self._blend(self.segments, rows, blocks, wanted)) is not None:
                self.num_segment_tokens = self.segments.num_segment_tokens
                self.num_repaired_tokens = self.segments.num_repaired_tokens
                return blended
        cache = empty_cache(self.model)
        fill(cache, self._form, blocks, num_columns, self.model.device)
        move_behind_padding(cache, self._form, pads)
        return cache

    def _blend(
        self, segments: SegmentCalls, rows: Sequence[PromptRow], blocks: Sequence[Blocks], wanted: Sequence[WantedReuse]
    ) -> DynamicCache | None:
        try:
            return segments.blend(rows, blocks, wanted)
        except ConfigError as error:
            self._say_once(f"no segments are reused: {error}")
            return None

    def _fetch(self, row: PromptRow) -> Blocks:
        """The row's leading known blocks, copied to memory of their own."""
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
        """Store what is new and exact of every row. Each has `num_copies` rows in the cache, and ends before `ends`."""
        if self._limit is not None and cache.get_seq_length() > self._limit:
            return  # RoPE changed during the call
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
        self._blocks.wait_sealed()
