"""Request bodies become the engine's inputs: read, checked, converted. Called on any thread."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from kvtier.connector.segments import Repair, Segment
from kvtier.engine import Engine, Guide, SamplingParams, wanted_reuse
from kvtier.service import Json
from kvtier.service.engine.completion import (
    AnswerText,
    ChatLogprobs,
    CompletionRequest,
    Echo,
    PrecomputeRequest,
    TextLogprobs,
)
from kvtier.service.engine.guides import JsonGuides
from kvtier.service.engine.loop import EngineLoop, SequenceInput
from kvtier.service.openai import (
    MARKS,
    CallForm,
    CallReader,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GuidedReader,
    HermesReader,
    LlamaReader,
    OpenAIError,
    PrecomputeBody,
    Prompts,
    TokenizeBody,
    TokenizedPrompt,
    parse,
    schema_of,
    too_long,
    unknown_model,
)
from kvtier.tiers import RequestError
from kvtier.tiers.config import ServerConfig

# --- sampling parameters ---------------------------------------------------------------------------------------------

_SHORT_ANSWER: Final = 16  # OpenAI's default for max_tokens of a text completion
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class ChoiceParams:
    """The parameters of a prompt's choices. Each choice has its own random stream."""

    params: SamplingParams
    seed: int | None

    def of_choice(self, choice: int) -> SamplingParams:
        return self.params if self.seed is None else replace(self.params, seed=(self.seed + choice) % _SEEDS)


def params_of(
    loop: EngineLoop, body: CompletionBody | ChatBody, prompt: list[int], guide: Guide | None = None
) -> ChoiceParams:
    """Raises OpenAIError if the engine cannot answer so."""
    is_chat = isinstance(body, ChatBody)
    left = loop.room - len(prompt)
    wanted = body.max_completion_tokens or body.max_tokens if isinstance(body, ChatBody) else body.max_tokens
    max_tokens = wanted or max(1, left if is_chat else min(_SHORT_ANSWER, left))
    require_computable(loop, "messages" if is_chat else "prompt", prompt, max_tokens)
    _require_tokens(loop, "logit_bias", body.logit_bias or ())
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=_of_prompt(loop, body),
        guide=guide,
        is_call=isinstance(body, ChatBody) and body.must_call,
        hint=body.hint,
    )
    return ChoiceParams(params, body.seed)


def require_computable(loop: EngineLoop, param: str, prompt: list[int], num_asked: int) -> None:
    """Raise OpenAIError if the model cannot compute a prompt, and an answer of so many tokens."""
    if not prompt:
        raise OpenAIError(400, f"{param}: it has no tokens; write some text", param=param, code="invalid_value")
    _require_tokens(loop, param, prompt)
    if num_asked > loop.room - len(prompt):
        raise too_long(param, len(prompt), num_asked, loop.room)


def _require_tokens(loop: EngineLoop, param: str, token_ids: Collection[int]) -> None:
    vocab_size = loop.engine.model.vocab_size
    if token_ids and (largest := max(token_ids)) >= vocab_size:
        message = f"{param}: token id {largest}; this model's are 0 to {vocab_size - 1}"
        raise OpenAIError(400, message, param=param, code="invalid_value")


def _of_prompt(loop: EngineLoop, body: CompletionBody | ChatBody) -> int | None:
    """Of how many likeliest tokens the prompt's logprobs are told; None: they are not. Raises OpenAIError."""
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
    body: CompletionBody | ChatBody, prompts: Sequence[TokenizedPrompt], repair: Repair | None, engine: Engine
) -> list[list[Segment]]:
    """The segments of each prompt: the parts that are marked, or what `kvtier.segments` names.

    Raises OpenAIError if the latter do not fit the prompts, or the engine would refuse one of them.
    """
    named = _named(body, len(prompts))
    field = _SEGMENTS if named else "messages" if isinstance(body, ChatBody) else "prompt"
    wanted = named or [_segments(prompt.segments) for prompt in prompts]
    for segments, prompt in zip(wanted, prompts, strict=True):
        try:
            wanted_reuse(segments, repair, len(prompt.token_ids), engine.segments)
        except RequestError as error:
            raise _bad_reuse(engine, field, str(error)) from None
    return wanted


def repair_of(body: CompletionBody | ChatBody, engine: Engine) -> Repair | None:
    """How the request wants its segments repaired; None: as configured."""
    wanted = None if body.kvtier is None else body.kvtier.repair
    if wanted is None:
        return None
    given = {name: value for name, value in wanted.model_dump().items() if value is not None}
    return Repair(**{"rule": engine.config.repair_rule, "share": engine.config.repair_share, **given})


def _named(body: CompletionBody | ChatBody, num_prompts: int) -> list[list[Segment]]:
    """The segments that `kvtier.segments` names, a list for each prompt; none: it names none."""
    if isinstance(body, ChatBody) or body.kvtier is None or not body.kvtier.segments:
        return []
    first = body.prompt[0] if isinstance(body.prompt, list) else None
    if not isinstance(first, int | list):
        raise _bad_segments("they count tokens, but the prompt is text; give token ids, or mark parts of type text")
    named: list[Any] = body.kvtier.segments
    is_several = not any(named) or any(isinstance(each, list) for one in named for each in one)
    if isinstance(first, list) != is_several:
        raise _bad_segments(f"not of the prompt's shape; give {_PAIRS}")
    if is_several and len(named) != num_prompts:
        raise _bad_segments(f"{len(named)} lists for {num_prompts} prompts; give {_PAIRS}")
    return [_segments(pairs) for pairs in named] if is_several else [_segments(named)]


def _segments(pairs: Sequence[Any]) -> list[Segment]:
    return [Segment(start, end) for start, end in pairs]


def _bad_reuse(engine: Engine, field: str, why: str) -> OpenAIError:
    """What the engine says of segments, with the field at fault."""
    if engine.segments is None or engine.config.exact:
        message = f"{field}: {why}" if field != _SEGMENTS else f"kvtier.{why}"
        return OpenAIError(400, message, param=field, code="unsupported_parameter")
    if why.startswith("check_layer"):
        return OpenAIError(400, f"kvtier.repair.{why}", param="kvtier.repair.check_layer", code="invalid_value")
    return OpenAIError(400, f"{field}: {why}", param=field, code="invalid_value")


def _bad_segments(why: str) -> OpenAIError:
    return OpenAIError(400, f"{_SEGMENTS}: {why}", param=_SEGMENTS, code="invalid_value")


# --- tool calls ------------------------------------------------------------------------------------------------------

_NO_MARKS: Final[tuple[str, ...]] = ()
_VALUES: Final = ("const", "enum", "default", "examples")  # of a schema: what they hold is none
_NO_ARGUMENTS: Final[Json] = {"type": "object", "properties": {}}


def form_of(configured: str, prompts: Prompts) -> CallForm | None:
    """The form of `[server] tool_parser`; None: answers are not read."""
    if configured == "auto":
        return prompts.call_form
    return "hermes" if configured == "hermes" else "llama" if configured == "llama" else None


def marks_of(body: CompletionBody | ChatBody, form: CallForm | None) -> tuple[str, ...]:
    """Special tokens that are text of this request's answers."""
    return MARKS[form] if form is not None and _reads_calls(body) else _NO_MARKS


def reader_of(body: CompletionBody | ChatBody, form: CallForm | None) -> CallReader | None:
    """What reads one answer to this request; None: all of it is text."""
    if isinstance(body, ChatBody) and body.must_call:
        return GuidedReader(body.chosen_tool)
    if form is None or isinstance(body, CompletionBody) or not _reads_calls(body):
        return None
    most = 1 if body.parallel_tool_calls is False else None
    return HermesReader(most) if form == "hermes" else LlamaReader(body.tool_names, most)


def calls_schema(body: CompletionBody | ChatBody) -> Json | None:
    """What an answer must be that has to call a tool: the arguments of the chosen one, or a list of calls."""
    if isinstance(body, CompletionBody) or not body.must_call:
        return None
    tools: list[Any] = body.tools or []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_ARGUMENTS for tool in tools}
    if body.chosen_tool is not None:
        schema: Json = schemas[body.chosen_tool]
        return schema
    # each schema stands whole in a place of its own, and its references lead there
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
    """A copy whose references to its own beginning lead to `place`. Values that only look like schemas stay."""
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


def _reads_calls(body: CompletionBody | ChatBody) -> bool:
    return isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"


# --- /tokenize and /detokenize ---------------------------------------------------------------------------------------


def tokenized(prompts: Prompts, body: TokenizeBody, room: int) -> Json:
    """The tokens of a text or chat. `room`: tokens of the longest request. Raises OpenAIError if there are none."""
    if body.prompt is None:
        found = prompts.chat(body.chat(prompts.prefix))
    else:
        found = prompts.prompt(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    ids = found.token_ids
    strings = prompts.token_strings(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": strings}


def detokenized(prompts: Prompts, body: DetokenizeBody, vocab_size: int) -> Json:
    """The text of tokens, special ones too. Raises OpenAIError if the model has no such token."""
    if (largest := max(body.tokens)) >= vocab_size:
        message = f"tokens: token id {largest}; this model's are 0 to {vocab_size - 1}"
        raise OpenAIError(400, message, param="tokens", code="invalid_value")
    return {"prompt": prompts.text(body.tokens)}


# --- whole requests --------------------------------------------------------------------------------------------------

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Served:
    """What the API needs. `events`: where KV events are published, if they are; `node`: where its daemon's are."""

    loop: EngineLoop
    prompts: Prompts
    name: str
    config: ServerConfig
    guides: JsonGuides
    events: Mapping[str, str | None] | None = None
    node: Mapping[str, str | None] | None = None
    call_form: CallForm | None = None  # how its answers call tools


def require_model(served: Served, name: str | None) -> None:
    """Raise OpenAIError if that is not the model here; None is."""
    if name is not None and name != served.name:
        raise unknown_model(name, served.name)


def completion_of(
    served: Served, body_type: type[CompletionBody] | type[ChatBody], data: bytes, deadline: float
) -> CompletionRequest:
    """What a body asks for, with `n` inputs for each prompt. Raises OpenAIError if it cannot be computed."""
    body: CompletionBody | ChatBody = _parsed(served, body_type, data)
    loop, num_choices = served.loop, body.n or 1
    require_model(served, body.model)
    num_prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
    _require_room(loop, "n" if num_choices > 1 else "prompt", num_prompts * num_choices)
    if isinstance(body, ChatBody) and body.tools and not (body.must_call or served.prompts.takes_tools):
        why = "this model's chat template has no place for them; leave them out, or require a call by tool_choice"
        raise OpenAIError(400, f"tools: {why}", param="tools", code="unsupported_parameter")
    prompts = served.prompts.tokenized(body)
    guide = _guide_of(served, body)
    params = [params_of(loop, body, prompt.token_ids, guide) for prompt in prompts]
    repair = repair_of(body, loop.engine)
    segments = segments_of(body, prompts, repair, loop.engine)
    named = [loop.engine.prompt(prompt.token_ids, body.cache_salt) for prompt in prompts]
    inputs = [
        SequenceInput(prompt, options.of_choice(choice), some, repair)
        for prompt, options, some in zip(named, params, segments, strict=True)
        for choice in range(num_choices)
    ]
    echoes = _echoes(served.prompts, body, [prompt.token_ids for prompt in prompts])
    marks = marks_of(body, served.call_form)
    return CompletionRequest(
        model=served.name,
        fingerprint=f"kvtier-{loop.fingerprint[:16]}",
        inputs=inputs,
        texts=[AnswerText(served.prompts.detokenizer(marks), body.stop or ()) for _ in inputs],
        logprobs=[_logprobs_of(served.prompts, body) for _ in inputs],
        readers=[reader_of(body, served.call_form) for _ in inputs],
        echoes=[echo for echo in echoes for _ in range(num_choices)],
        num_choices=num_choices,
        deadline=deadline,
        streams=bool(body.stream),
        wants_usage=body.wants_usage,
    )


def precomputation_of(served: Served, data: bytes, deadline: float) -> PrecomputeRequest:
    """The texts to precompute. Raises OpenAIError if one cannot be computed."""
    body, loop = parse(PrecomputeBody, data), served.loop
    require_model(served, body.model)
    _require_room(loop, "texts", len(body.each))
    texts = [served.prompts.segment("texts", one) if isinstance(one, str) else one for one in body.each]
    for text in texts:
        require_computable(loop, "texts", text, 1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    inputs = [SequenceInput(loop.engine.prompt(text, body.cache_salt), params) for text in texts]
    return PrecomputeRequest(served.name, inputs, deadline)


def tokens_of(served: Served, data: bytes) -> Json:
    """Answers `/tokenize`. Raises OpenAIError."""
    body = _parsed(served, TokenizeBody, data)
    require_model(served, body.model)
    return tokenized(served.prompts, body, served.loop.room)


def text_of_tokens(served: Served, data: bytes) -> Json:
    """Answers `/detokenize`. Raises OpenAIError."""
    body = _parsed(served, DetokenizeBody, data)
    require_model(served, body.model)
    return detokenized(served.prompts, body, served.loop.engine.model.vocab_size)


def _parsed(served: Served, body_type: type[B], data: bytes) -> B:
    """The body of a request. What nobody here knows of it is ignored, and counted."""
    unknown: set[str] = set()
    body = parse(body_type, data, unknown)
    if unknown:
        served.loop.tally.ignored.note(unknown)
    return body


def _require_room(loop: EngineLoop, param: str, num: int) -> None:
    """Raise OpenAIError if there is no room for so many sequences, now or ever; called before work is done."""
    if num > loop.capacity:
        message = f"{param}: {num} answers at once; this server has room for {loop.capacity}: ask for fewer"
        raise OpenAIError(400, message, param=param, code="invalid_value")
    loop.require_room(num)


def _logprobs_of(prompts: Prompts, body: CompletionBody | ChatBody) -> ChatLogprobs | TextLogprobs | None:
    """What tells how likely the tokens of one choice were; None: nobody asks."""
    if body.num_logprobs is None:
        return None
    return ChatLogprobs(prompts.token_texts) if isinstance(body, ChatBody) else TextLogprobs(prompts.token_texts)


def _guide_of(served: Served, body: CompletionBody | ChatBody) -> Guide | None:
    """What the answer may be; None: any text. Raises OpenAIError if that cannot be."""
    if (calls := calls_schema(body)) is not None:
        try:
            return served.guides.of(calls, "tool_choice")
        except OpenAIError:
            tools: list[Any] = (body.tools if isinstance(body, ChatBody) else None) or []
            for number, tool in enumerate(tools):
                served.guides.of(tool["function"].get("parameters") or {}, f"tools.{number}.function.parameters")
            raise  # it is not one tool's schema alone
    wanted = schema_of(body.response_format)
    return None if wanted is None else served.guides.of(*wanted)


def _echoes(prompts: Prompts, body: CompletionBody | ChatBody, token_ids: Sequence[list[int]]) -> Sequence[Echo | None]:
    """What each prompt's answers begin with."""
    if isinstance(body, ChatBody) or not body.echo:
        return [None] * len(token_ids)
    return [
        Echo(given if isinstance(given, str) else prompts.text(tokens), tokens)
        for given, tokens in zip(body.prompts, token_ids, strict=True)
    ]
