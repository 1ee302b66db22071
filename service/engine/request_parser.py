"""Request bodies become the engine's inputs: parsed, checked, converted. Called on any thread."""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kvtier.connector.segments import Repair, Segment
from kvtier.engine import Engine, Guide, SamplingParams, wanted_reuse
from kvtier.service import Json, openai
from kvtier.service.engine import completion
from kvtier.service.engine.completion import ChatLogprobs, TextLogprobs
from kvtier.service.engine.loop import EngineLoop, SequenceInput
from kvtier.service.openai import CallForm, ChatBody, CompletionBody, OpenAIError, Prompts, bad_field, parse
from kvtier.tiers import MissingPackages, RequestError, require_extra
from kvtier.tiers.config import ServerConfig
from kvtier.tiers.reuse import Hint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

_SPACE: Final = r"[ \t\n\r]{0,16}"  # between JSON's tokens: bounded, so that a model cannot write white space for ever


class JsonGuides:
    """Guides of one model's answers by JSON schema. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`tokenizer` returns the content of a `tokenizer.json`: some ten megabytes, when they are needed."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._made: LLTokenizer | None = None
        self._lock = Lock()

    def of(self, schema: Json, param: str) -> Guide:
        """A guide for a JSON schema. Raises OpenAIError, about the field `param`, if it cannot be followed."""
        if not self._eos_token_ids:
            raise bad_field(param, "this model has no token that ends an answer", "unsupported_parameter")
        try:
            require_extra(param, "engine")
            from llguidance import LLMatcher
        except MissingPackages as error:
            raise bad_field(param, str(error), "unsupported_parameter") from None
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _SPACE})
        except (ValueError, RecursionError) as error:
            raise bad_field(param, f"no JSON schema ({_first_line(str(error))}); fix it") from None
        tokenizer = self._opened()
        is_wrong, why = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        if is_wrong:
            raise bad_field(param, f"a schema that cannot be followed ({_first_line(' '.join(why))}); fix it")
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # finds schemas without a beginning, such as a reference to itself
        if matcher.is_error():
            raise bad_field(param, f"a schema that cannot be followed ({_first_line(matcher.get_error())}); fix it")
        return _SchemaGuide(matcher, self._vocab_size, self._eos_token_ids)

    def _opened(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        with self._lock:
            if self._made is None:
                self._made = LLTokenizer(self._tokenizer(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            return self._made


class _SchemaGuide:
    def __init__(self, matcher: "LLMatcher", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)

    def start(self, token_ids: Sequence[int], num_prompt_tokens: int) -> "_SchemaAnswer":
        return _SchemaAnswer(self._matcher.deep_copy(), self._ends, token_ids, num_prompt_tokens)


class _SchemaAnswer:
    """Follows its answer by the sequence's tokens, so a step that failed or was repeated leaves no trace."""

    def __init__(self, matcher: "LLMatcher", ends: NDArray[np.uint32], token_ids: Sequence[int], num_seen: int) -> None:
        self._matcher, self._ends, self._token_ids, self._num_seen = matcher, ends, token_ids, num_seen
        self.is_cut = False

    def allowed(self) -> NDArray[np.uint32]:
        if len(self._token_ids) > self._num_seen:
            self._matcher.consume_tokens(list(self._token_ids[self._num_seen :]))
            self._num_seen = len(self._token_ids)
        mask = self._ends if self._matcher.is_error() else np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():  # too complex: the answer ends here
            if not self.is_cut:
                _log.warning("a guided answer ended early: %s", _first_line(self._matcher.get_error()))
            self.is_cut = True
            return self._ends
        return mask[: len(self._ends)]


def _first_line(text: str) -> str:
    """The first line of llguidance's message; its state and the client's schema follow."""
    return text.strip().partition("\n")[0][:200]


AnyBody = CompletionBody | ChatBody

# --- sampling parameters ---------------------------------------------------------------------------------------------

_SHORT_ANSWER: Final = 16  # OpenAI's default for max_tokens of a text completion
_SEEDS: Final = 2**64


def params_of(loop: EngineLoop, body: AnyBody, prompt: list[int], guide: Guide | None = None) -> SamplingParams:
    """The parameters of the first choice. Raises OpenAIError if the engine does not support them."""
    is_chat = isinstance(body, ChatBody)
    left = loop.room - len(prompt)
    wanted = body.max_completion_tokens or body.max_tokens if isinstance(body, ChatBody) else body.max_tokens
    if wanted == 0:  # the prompt alone: what is computed behind it is not sent
        wanted = 1
    max_tokens = wanted or max(1, left if is_chat else min(_SHORT_ANSWER, left))
    require_computable(loop, "messages" if is_chat else "prompt", prompt, max_tokens)
    _require_tokens(loop, "logit_bias", body.logit_bias or ())
    if body.min_tokens and (body.min_tokens > max_tokens or guide is not None):
        why = "a response_format or tool_choice decides where the answer ends; leave out one of the two"
        raise bad_field(
            "min_tokens", why if guide is not None else f"more than the answer's {max_tokens} at most; lower it"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=None if body.seed is None else body.seed % _SEEDS,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        stop_token_ids=body.stop_token_ids or (),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=_of_prompt(loop, body),
        guide=guide,
        is_call=isinstance(body, ChatBody) and body.must_call,
        hint=body.hint,
    )


def require_computable(loop: EngineLoop, param: str, prompt: list[int], num_asked: int) -> None:
    """Raise OpenAIError if the model cannot compute a prompt and an answer of so many tokens."""
    if not prompt:
        raise bad_field(param, "it has no tokens; write some text")
    _require_tokens(loop, param, prompt)
    if num_asked > loop.room - len(prompt):
        raise openai.too_long(param, len(prompt), num_asked, loop.room)


def _require_tokens(loop: EngineLoop, param: str, token_ids: Collection[int]) -> None:
    vocab_size = loop.engine.model.vocab_size
    if token_ids and (largest := max(token_ids)) >= vocab_size:
        raise bad_field(param, f"token id {largest}; this model's are 0 to {vocab_size - 1}")


def _of_prompt(loop: EngineLoop, body: AnyBody) -> int | None:
    """How many likeliest tokens the prompt's logprobs include; None: no logprobs wanted. Raises OpenAIError."""
    if isinstance(body, ChatBody) or not body.echo or body.logprobs is None:
        return None
    if loop.engine.config.exact or loop.engine.model.has_own_cache:
        why = "this engine is exact" if loop.engine.config.exact else "this kind of model keeps a cache of its own"
        message = f"echo true: with logprobs it wants those of the prompt, and {why}; leave out one of the two"
        raise OpenAIError(400, message, param="echo", code="unsupported_parameter")
    return body.logprobs


# --- segments --------------------------------------------------------------------------------------------------------

_SEGMENTS: Final = "kvtier.segments"
_PAIRS: Final = "a list of pairs, [[start, end], …], for one prompt of token ids, or such a list for each of several"


def segments_of(
    body: AnyBody, prompts: Sequence[openai.TokenizedPrompt], repair: Repair | None, engine: Engine
) -> list[list[Segment] | None]:
    """The segments of each prompt: marked parts, or `kvtier.segments`. Raises OpenAIError if the engine refuses one.

    None if there are none and the engine looks for them, unless the body has an empty list of segments.
    """
    named = _named(body, len(prompts))
    field = _SEGMENTS if named else "messages" if isinstance(body, ChatBody) else "prompt"
    wanted: list[list[Segment] | None] = [*named] or [_segments(prompt.segments) for prompt in prompts]
    finds = engine.segments is not None and engine.segments.unmarked is not None
    if finds and not any(wanted) and (body.kvtier is None or "segments" not in body.kvtier.model_fields_set):
        wanted = [None] * len(prompts)
    for segments, prompt in zip(wanted, prompts, strict=True):
        try:
            wanted_reuse(segments, repair, len(prompt.token_ids), engine.segments)
        except RequestError as error:
            raise _bad_reuse(engine, field, str(error)) from None
    return wanted


def repair_of(body: AnyBody, engine: Engine) -> Repair | None:
    wanted = None if body.kvtier is None else body.kvtier.repair
    if wanted is None:
        return None
    given = {name: value for name, value in wanted.model_dump().items() if value is not None}
    return Repair(**{"rule": engine.config.repair_rule, "share": engine.config.repair_share, **given})


def _named(body: AnyBody, num_prompts: int) -> list[list[Segment]]:
    if isinstance(body, ChatBody) or body.kvtier is None or not body.kvtier.segments:
        return []
    first = body.prompt[0] if isinstance(body.prompt, list) else None
    if not isinstance(first, int | list):
        raise bad_field(
            _SEGMENTS, "they count tokens, but the prompt is text; give token ids, or mark parts of type text"
        )
    named: list[Any] = body.kvtier.segments
    is_several = not any(named) or any(isinstance(each, list) for one in named for each in one)
    if isinstance(first, list) != is_several:
        raise bad_field(_SEGMENTS, f"not of the prompt's shape; give {_PAIRS}")
    if is_several and len(named) != num_prompts:
        raise bad_field(_SEGMENTS, f"{len(named)} lists for {num_prompts} prompts; give {_PAIRS}")
    return [_segments(pairs) for pairs in named] if is_several else [_segments(named)]


def _segments(pairs: Sequence[Any]) -> list[Segment]:
    return [Segment(start, end) for start, end in pairs]


def _bad_reuse(engine: Engine, field: str, why: str) -> OpenAIError:
    if engine.segments is None or engine.config.exact:
        message = f"{field}: {why}" if field != _SEGMENTS else f"kvtier.{why}"
        return OpenAIError(400, message, param=field, code="unsupported_parameter")
    if why.startswith("check_layer"):
        return OpenAIError(400, f"kvtier.repair.{why}", param="kvtier.repair.check_layer", code="invalid_value")
    return bad_field(field, why)


# --- tool calls ------------------------------------------------------------------------------------------------------

_VALUES: Final = ("const", "enum", "default", "examples")  # keys of a schema whose values are no schemas
_NO_ARGUMENTS: Final[Json] = {"type": "object", "properties": {}}


def form_of(configured: str, prompts: Prompts) -> CallForm | None:
    return (
        prompts.call_form if configured == "auto" else next((form for form in openai.MARKS if form == configured), None)
    )


def reader_of(body: AnyBody, form: CallForm | None) -> openai.CallReader | None:
    if isinstance(body, ChatBody) and body.must_call:
        return openai.GuidedReader(body.chosen_tool)
    if form is None or isinstance(body, CompletionBody) or not _reads_calls(body):
        return None
    most = 1 if body.parallel_tool_calls is False else None
    return openai.HermesReader(most) if form == "hermes" else openai.LlamaReader(body.tool_names, most)


def calls_schema(body: AnyBody) -> Json | None:
    """The schema of an answer that has to call a tool: the arguments of the chosen one, or a list of calls."""
    if isinstance(body, CompletionBody) or not body.must_call:
        return None
    tools: list[Any] = body.tools or []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_ARGUMENTS for tool in tools}
    if body.chosen_tool is not None:
        schema: Json = schemas[body.chosen_tool]
        return schema
    # each schema is whole at a place of its own, and its references point there
    places = {f"tool{number}": schema for number, schema in enumerate(schemas.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in zip(schemas, places, strict=True)
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    defined = {place: _moved(schema, f"#/$defs/{place}") for place, schema in places.items()}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": defined}


def _moved(schema: Json, place: str) -> Json:
    """A copy whose references to its own root point to `place`. Values that only look like schemas stay."""
    copy: Json = json.loads(json.dumps(schema))
    left: list[Any] = [copy]
    while left:
        inside = left.pop()
        if isinstance(inside, dict):
            reference = inside.get("$ref")
            if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
                inside["$ref"] = place + reference[1:]
            left += [value for name, value in inside.items() if name not in _VALUES]
        elif isinstance(inside, list):
            left += inside
    return copy


def _reads_calls(body: AnyBody) -> bool:
    return isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"


# --- whole requests --------------------------------------------------------------------------------------------------

B = TypeVar("B", bound=BaseModel)


@dataclass(slots=True)
class Served:
    """What the API needs. `events`, `node`: where this process and its daemon publish KV events, if they do."""

    loop: EngineLoop
    prompts: Prompts
    name: str
    config: ServerConfig  # a reload changes it
    guides: JsonGuides
    events: Mapping[str, str | None] | None = None
    node: Mapping[str, str | None] | None = None
    call_form: CallForm | None = None  # how its answers call tools


def require_model(served: Served, name: str | None) -> None:
    if name is not None and name != served.name:
        raise openai.unknown_model(name, served.name)


def completion_of(
    served: Served, kind: type[AnyBody], data: bytes, deadline: float, *, is_last: bool = False
) -> completion.CompletionRequest:
    """What a body requests, with `n` inputs for each prompt. Raises OpenAIError if it cannot be computed.

    `is_last`: a header says that its session ends, unless the body has a hint.
    """
    body: AnyBody = parsed(served, kind, data)
    loop, num_choices = served.loop, body.n or 1
    require_model(served, body.model)
    num_prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
    _require_room(loop, "n" if num_choices > 1 else "prompt", num_prompts * num_choices)
    if isinstance(body, ChatBody) and body.tools and not (body.must_call or served.prompts.takes_tools):
        why = "this model's chat template has no place for them; leave them out, or require a call by tool_choice"
        raise bad_field("tools", why, "unsupported_parameter")
    prompts = served.prompts.tokenized(body)
    guide = _guide_of(served, body)
    params = [params_of(loop, body, prompt.token_ids, guide) for prompt in prompts]
    if is_last and body.hint is None:
        params = [replace(each, hint=Hint.FINISHED) for each in params]
    repair = repair_of(body, loop.engine)
    segments = segments_of(body, prompts, repair, loop.engine)
    named = [loop.engine.prompt(prompt.token_ids, body.cache_salt) for prompt in prompts]
    inputs = [
        SequenceInput(
            prompt,
            options if options.seed is None else replace(options, seed=(options.seed + choice) % _SEEDS),
            some,
            repair,
        )
        for prompt, options, some in zip(named, params, segments, strict=True)
        for choice in range(num_choices)
    ]
    echoes = _echoes(served.prompts, body, [prompt.token_ids for prompt in prompts])
    marks = openai.MARKS[served.call_form] if served.call_form is not None and _reads_calls(body) else ()
    logprobs = None if body.num_logprobs is None else ChatLogprobs if isinstance(body, ChatBody) else TextLogprobs
    return completion.CompletionRequest(
        model=served.name,
        fingerprint=f"kvtier-{loop.fingerprint[:16]}",
        inputs=inputs,
        texts=[
            completion.AnswerText(
                served.prompts.detokenizer(each.prompt.token_ids, marks), body.stop or (), body.min_tokens or 0
            )
            for each in inputs
        ],
        logprobs=[None if logprobs is None else logprobs(served.prompts.token_texts) for _ in inputs],
        readers=[reader_of(body, served.call_form) for _ in inputs],
        echoes=[echo for echo in echoes for _ in range(num_choices)],
        num_choices=num_choices,
        deadline=deadline,
        streams=bool(body.stream),
        only_echoes=not isinstance(body, ChatBody) and body.max_tokens == 0,
        wants_usage=body.wants_usage,
    )


def precomputation_of(served: Served, data: bytes, deadline: float) -> completion.PrecomputeRequest:
    """The texts to precompute. Raises OpenAIError if one cannot be computed."""
    body, loop = parse(openai.PrecomputeBody, data), served.loop
    require_model(served, body.model)
    _require_room(loop, "texts", len(body.each))
    texts = [served.prompts.segment("texts", one) if isinstance(one, str) else one for one in body.each]
    for text in texts:
        require_computable(loop, "texts", text, 1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    inputs = [SequenceInput(loop.engine.prompt(text, body.cache_salt), params, in_pieces=True) for text in texts]
    return completion.PrecomputeRequest(served.name, inputs, deadline)


def tokens_of(served: Served, data: bytes) -> Json:
    body, prompts = parsed(served, openai.TokenizeBody, data), served.prompts
    require_model(served, body.model)
    if body.prompt is None:
        ids = prompts.chat(body.chat(prompts.prefix)).token_ids
    else:
        ids = prompts.prompt(body.prompt, add_special_tokens=body.add_special_tokens is not False).token_ids
    strings = prompts.token_strings(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": served.loop.room, "tokens": ids, "token_strs": strings}


def count_of(served: Served, data: bytes) -> Json:
    """Answers `/v1/messages/count_tokens`. Raises OpenAIError."""
    body, prompts = parsed(served, openai.CountBody, data), served.prompts
    require_model(served, body.model)
    try:
        chat = parse(openai.ChatPrompt, json.dumps(body.prompt).encode())
        return {"input_tokens": len(prompts.chat(chat.chat(prompts.prefix)).token_ids)}
    except OpenAIError as error:
        raise error.renamed(body.names) from None


def text_of_tokens(served: Served, data: bytes) -> Json:
    """Answers `/detokenize` in vLLM's shape, special tokens included. Raises OpenAIError."""
    body = parsed(served, openai.DetokenizeBody, data)
    require_model(served, body.model)
    _require_tokens(served.loop, "tokens", body.tokens)
    return {"prompt": served.prompts.text(body.tokens)}


def parsed(served: Served, body_type: type[B], data: bytes) -> B:
    """The body of a request. Unknown fields are ignored, and counted."""
    unknown: set[str] = set()
    body = parse(body_type, data, unknown)
    if unknown:
        served.loop.tally.ignored.record(unknown)
    return body


def _require_room(loop: EngineLoop, param: str, num: int) -> None:
    """Raise OpenAIError if there is no room for so many sequences, now or ever. Call it before work is done."""
    if num > loop.capacity:
        raise bad_field(param, f"{num} answers at once; this server has room for {loop.capacity}: ask for fewer")
    loop.require_room(num)


def _guide_of(served: Served, body: AnyBody) -> Guide | None:
    """The guide of the answer; None: any text. Raises OpenAIError if there cannot be one."""
    if (calls := calls_schema(body)) is not None:
        try:
            return served.guides.of(calls, "tool_choice")
        except OpenAIError:
            tools: list[Any] = (body.tools if isinstance(body, ChatBody) else None) or []
            for number, tool in enumerate(tools):
                served.guides.of(tool["function"].get("parameters") or {}, f"tools.{number}.function.parameters")
            raise  # the schema joins several tools'
    wanted = openai.schema_of(body.response_format)
    return None if wanted is None else served.guides.of(*wanted)


def _echoes(prompts: Prompts, body: AnyBody, token_ids: Sequence[list[int]]) -> Sequence[completion.Echo | None]:
    if isinstance(body, ChatBody) or not body.echo:
        return [None] * len(token_ids)
    return [
        completion.Echo(given if isinstance(given, str) else prompts.text(tokens), tokens)
        for given, tokens in zip(body.prompts, token_ids, strict=True)
    ]
