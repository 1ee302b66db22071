"""Which calls of `generate` blocks can hold, the layout of each call's prompts, and the caches that some need."""

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, QuantizedCache
from transformers import __version__ as _version

from kvtier.connector.models import LiveModel, cache_option, given_cache
from kvtier.connector.transformers.padding import ends_of_answers, inferred_mask, pads_of

_PREPARE: Final = "prepare_inputs_for_generation"


@contextmanager
def generating(live: LiveModel) -> Iterator[None]:
    """Around `generate`: PEFT's models for causal LMs put a method of theirs on what they wrap, which is no change."""
    model = live.model
    if "base_model" in model._modules and hasattr(model, f"base_model_{_PREPARE}"):
        with live.watch.expecting(model.base_model, _PREPARE, getattr(model, _PREPARE)):
            yield
    else:
        yield


@contextmanager
def going_on_from(live: LiveModel, generates: Any, num_columns: int) -> Iterator[None]:
    """Inside the context, `generate` with an assistant continues after `num_columns` of its cache.

    `generates`: the part of the model whose `generate` runs, which an adapter library may wrap. For every other way of
    decoding transformers does that itself. With an assistant its first pass has the whole prompt, whatever the cache
    has (from 5.6 on; before, the positions in the cache decided). UnheldCallError if it cannot continue there.
    """
    prepare, own = generates.prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation
    if not num_columns or "next_sequence_length" not in inspect.signature(own).parameters:
        yield
        return

    @functools.wraps(prepare)
    def prepare_the_rest(input_ids: Any, *arguments: Any, **options: Any) -> Any:
        if not options.get("is_first_iteration") or options.get("next_sequence_length") is not None:
            return prepare(input_ids, *arguments, **options)
        num_left = input_ids.shape[1] - num_columns
        inputs = prepare(input_ids, *arguments, **{**options, "next_sequence_length": num_left})
        given = inputs.get("input_ids")
        if given is None or given.shape[1] != num_left:  # a model's own method may ignore it
            raise UnheldCallError("this model's assisted decoding begins at a prompt's start; leave the assistant out")
        return inputs

    with live.watch.expecting(generates, _PREPARE, prepare_the_rest):
        yield


def quantized_cache(model: Any, loaded: DynamicCache, settings: Mapping[str, Any] | None) -> QuantizedCache:
    """The cache that `generate` makes of `cache_config` settings, for a prompt that continues after the loaded tokens.

    As if everything were computed, the prompt's first pass attends to exact KV, all of which is then quantized at once.
    In this pass the rest of the prompt is added to `loaded`, exact. Nothing is added to it later.
    """
    options = {"config": model.config.get_text_config(decoder=True), **copy.deepcopy(dict(settings or {}))}
    cache = QuantizedCache(backend=options.pop("backend", "quanto"), **options)
    layers: Any = cache.layers
    for number, layer in enumerate(layers):
        _join(layer, loaded, number)
    return cache


def _join(layer: Any, loaded: DynamicCache, number: int) -> None:
    update = layer.update

    def first(keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        del layer.update  # the class's own again
        layer.cumulative_length = 0
        return update(*loaded.update(keys, values, number), *arguments, **options)

    layer.cumulative_length = loaded.get_seq_length(number)  # the mask and the rest of the prompt depend on it
    layer.update = first


# decoding methods whose cache or prompt differs from what `generate` was given
_OWN_WAYS: Final = (
    "assistant_early_exit", "use_mtp", "custom_generate", "token_healing", "penalty_alpha", "dola_layers",
    "constraints", "force_words_ids",
)  # fmt: skip
_ASSISTED: Final = ("assistant_model", "prompt_lookup_num_tokens")
_BY_ROW: Final = ("adapter_names", "alora_offsets")  # of PEFT: different adapters for rows of one call
_WHOLE_PROMPT: Final = ("output_attentions", "output_hidden_states")
_DYNAMIC: Final = (None, "dynamic", "hybrid")  # the kind of cache made here; Gemma's checkpoints use the last name
_QUANTIZED: Final = "quantized"
# words in the names of configuration fields
_OTHER_THAN_TEXT: Final = frozenset((
    "audio", "boa", "boi", "eoa", "eoi", "frame", "image", "img", "media", "patch", "pixel", "sound", "speech",
    "video", "vision", "visual",
))  # fmt: skip
_SPECIAL_TOKENS: Final = ("pad_token_id", "eos_token_id", "bos_token_id")
_OF_GENERATE: Final = frozenset(
    {*inspect.signature(GenerationMixin.generate).parameters, *vars(cast(Any, GenerationConfig)()), "logits_to_keep"}
    | {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # which it takes from its other options
)
_CHUNKS_GO_ON: Final = tuple(map(int, _version.split(".")[:2])) >= (5, 23)  # else chunks count from position 0


class UnheldCallError(Exception):
    """Blocks cannot hold the KV of a call: the reason, and the fix."""


@dataclass(frozen=True, slots=True)
class Call:
    pads: tuple[int, ...]  # masked columns before each prompt
    mask: torch.Tensor | None = None  # [rows, tokens], if it hides any column
    num_copies: int = 1  # consecutive rows of the cache for each prompt
    names_answers: bool = True  # whether row i of the cache is row i of what `generate` returns
    in_chunks: bool = False  # the prompt is computed some tokens at a time: `prefill_chunk_size`
    is_assisted: bool = False
    is_quantized: bool = False
    quantization: Mapping[str, Any] | None = None  # `cache_config`
    pad_token: int | None = None  # the token that `generate` appends to a finished answer
    pad_ends: bool = False  # whether that token ends an answer, too

    @property
    def loads(self) -> bool:
        """Whether `generate` can continue after loaded tokens."""
        return not self.in_chunks or _CHUNKS_GO_ON

    def options(self, model: Any, given: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        options = {**given, **cache_option(model, cache), "cache_implementation": None}  # invalid beside a cache
        return options if self.mask is None else {**options, "attention_mask": self.mask}

    def ends(self, sequences: torch.Tensor, num_columns: int) -> list[int]:
        """Where each answer ends after `num_columns` of prompt, without the padding of rows that finished early."""
        return ends_of_answers(sequences, num_columns, self.pad_token, self.pad_ends)


def require_rows(model: Any, input_ids: torch.Tensor, limit: int | None) -> None:
    """UnheldCallError if blocks cannot hold these tokens' KV, whatever the options.

    Texts of more than `limit` tokens have another RoPE than shorter ones. None: all have the same.
    """
    if model.training:
        raise UnheldCallError("the model is in training mode; call model.eval()")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise UnheldCallError(f"input_ids has the shape {tuple(input_ids.shape)}; pass [rows, tokens]")
    if limit is not None and input_ids.shape[1] > limit:
        trait = f"this model's RoPE is another for texts above {limit}"
        raise UnheldCallError(f"{input_ids.shape[1]} tokens: {trait}; use vLLM for long ones")


def require_text(named: Mapping[int, str] | None, input_ids: torch.Tensor) -> None:
    """UnheldCallError if tokens stand for images, sound or video, whose content is unknown here.

    For callers that run the model themselves: a call of `generate` has such inputs as arguments. `named` is the result
    of `other_tokens`.
    """
    if named is None:
        trait = "this model takes more than text, and its configuration does not name the tokens that stand for it"
        raise UnheldCallError(f"{trait}; let generate() compute its prompts")
    if named and (found := torch.isin(input_ids, torch.tensor(sorted(named), device=input_ids.device))).any():
        token = int(input_ids[found][0])
        raise UnheldCallError(
            f"token {token} ({named[token]}) stands for what load() and store() are not shown; let generate() compute "
            "such prompts, or pass those without images, sound and video"
        )


def other_tokens(config: Any) -> Mapping[int, str] | None:
    """Prompt tokens that stand for something other than text → the configuration's field that defines them.

    None: the model has a part for other inputs, but no such field.
    """
    named: dict[int, str] = {}

    def visit(fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, Mapping):
                visit(value)
            elif _names_other(str(name)):
                tokens = value if isinstance(value, list | tuple) else [value]
                named.update((token, name) for token in tokens if type(token) is int)

    visit(config.to_dict())
    return named if named or config.get_text_config(decoder=True) is config else None


def _names_other(field: str) -> bool:
    *words, last = field.split("_")
    return last in ("id", "ids", "index") and not _OTHER_THAN_TEXT.isdisjoint(words)


def read_call(model: Any, input_ids: torch.Tensor, options: Mapping[str, Any], limit: int | None = None) -> Call:
    """`generate(input_ids, **options)` as blocks see it; UnheldCallError if they cannot hold its KV."""
    require_rows(model, input_ids, limit)
    name, own = given_cache(options)
    if own is not None:
        raise UnheldCallError(f"{name} is a cache of the caller's; leave it out, or use load() and store()")
    if asked_for(model, options, "use_cache") is False:
        raise UnheldCallError("use_cache=False computes no KV to keep; leave it out, the text is the same")
    kind = asked_for(model, options, "cache_implementation")
    if kind not in (*_DYNAMIC, _QUANTIZED):
        way = "leave it out, or set it to None in model.generation_config; a dynamic and a quantized cache work"
        raise UnheldCallError(f"cache_implementation={kind!r} has no room for loaded tokens; {way}")
    if groups := _first(model, options, ("num_beam_groups",), ordinary=(None, 1)):
        raise UnheldCallError(f"{groups} decodes in a way of its own; leave it at 1, num_beams alone works")
    if ways := _first(model, options, _OWN_WAYS):
        way = "leave it out; greedy, sampled, beam, assisted and prompt lookup decoding work"
        raise UnheldCallError(f"{ways} decodes in a way of its own; {way}")
    if by_row := _first(model, options, _BY_ROW):
        way = "leave it out, and set_adapter() for all rows of a call"
        raise UnheldCallError(f"{by_row} gives rows of a call adapters of their own; {way}")
    if whole := _first(model, options, _WHOLE_PROMPT):
        way = "leave it out, or call model.generate() for such outputs"
        raise UnheldCallError(f"{whole} would lack the tokens that are loaded; {way}")
    num_beams, num_returned = (asked_for(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    assistant = _first(model, options, _ASSISTED) if num_beams == 1 else None  # beams ignore it
    if assistant is not None and limit is not None:
        trait = f"may guess past {limit} tokens, where this model's RoPE becomes another"
        raise UnheldCallError(f"{assistant} {trait}; leave it out, greedy and sampled decoding work")
    _require_tokens_alone(options)
    pad_token, ends = _special(model, options)
    mask = options.get("attention_mask")
    mask = inferred_mask(input_ids, pad_token, ends) if mask is None else mask
    pads = pads_of(mask, input_ids)
    if pads is None:
        way = "pad on the left alone (tokenizer.padding_side = 'left'), and leave rows without a token out"
        raise UnheldCallError(f"a mask that hides more than padding in front of each prompt; {way}")
    is_quantized, in_chunks = kind == _QUANTIZED, asked_for(model, options, "prefill_chunk_size") is not None
    if is_quantized and any(pads):
        way = "pass rows of one length together, or leave cache_implementation out"
        raise UnheldCallError(f"padding in a quantized cache changes how all rows are rounded; {way}")
    if is_quantized and in_chunks:
        raise UnheldCallError("prefill_chunk_size rounds parts of a prompt in a quantized cache; leave one of both out")
    return Call(
        pads=pads,
        mask=mask if any(pads) else None,
        num_copies=max(num_beams, num_returned),
        names_answers=num_beams == 1 and not is_quantized,
        in_chunks=in_chunks,
        is_assisted=assistant is not None,
        is_quantized=is_quantized,
        quantization=asked_for(model, options, "cache_config") if is_quantized else None,
        pad_token=ends[0] if pad_token is None and ends else pad_token,
        pad_ends=pad_token is None or pad_token in ends,
    )


def require_plain_rows(call: Call, *, in_pieces: bool) -> None:
    """UnheldCallError unless the call only adds tokens to rows of one length: states support nothing else.

    Unless `in_pieces` the model loses its state if several tokens follow it, as chunks of a prompt do.
    """
    ways = {
        "padding": any(call.pads),
        "several answers or beams": call.num_copies > 1,
        "an assistant": call.is_assisted,
        "a quantized cache": call.is_quantized,
        "prefill_chunk_size": call.in_chunks and not (call.loads and in_pieces),
    }
    if odd := [way for way, is_used in ways.items() if is_used]:
        way = "leave it out, greedy and sampled decoding of rows of one length work"
        raise UnheldCallError(f"{odd[0]}, of a model with recurrent states; {way}")


def asked_for(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """The value that `generate` uses: the argument, else the generation_config argument's, else the model's."""
    if name in options:
        return options[name]
    settings = (options.get("generation_config"), model.generation_config)
    return next((value for one in settings if (value := getattr(one, name, None)) is not None), None)


def _first(
    model: Any, options: Mapping[str, Any], names: Iterable[str], ordinary: tuple[Any, ...] = (None, False)
) -> str | None:
    """The first of these options with an unusual value, as text."""
    for name in names:
        value = asked_for(model, options, name)
        if value not in ordinary:
            return f"{name}={value!r}" if isinstance(value, int | float | str) else name
    return None


def _special(model: Any, options: Mapping[str, Any]) -> tuple[int | None, list[int]]:
    pad, ends = (asked_for(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    return (
        None if pad is None else int(torch.as_tensor(pad).flatten()[0]),
        [] if ends is None else [int(end) for end in torch.as_tensor(ends).flatten()],
    )


def _require_tokens_alone(options: Mapping[str, Any]) -> None:
    """UnheldCallError if more than tokens and mask may shape the KV: images, positions, options of the passes."""
    plain = {"attention_mask", *_SPECIAL_TOKENS}
    others = {name: value for name, value in options.items() if name not in plain}
    if more := sorted(name for name, value in others.items() if _holds_tensors(value) or _is_of_pass(name, value)):
        way = "leave it out if it changes nothing; prompts of tokens alone work"
        raise UnheldCallError(f"{', '.join(more)}: KV that depends on more than the tokens; {way}")


def _is_of_pass(name: str, value: Any) -> bool:
    """Whether `generate` knows nothing of this option, and gives it to the model's passes."""
    return value is not None and name not in _OF_GENERATE and not name.startswith(("output_", "return_"))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)
