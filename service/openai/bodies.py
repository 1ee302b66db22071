"""Parses request bodies: every field is typed and bounded, and every error names its field."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from kvtier.connector import ChatPrefix, agent_hint, hint_in, is_cache_mark
from kvtier.service import Json, first_error, object_in, shown, writable
from kvtier.service.openai.chat import Chat, PromptPiece, chat_of, text_pieces
from kvtier.service.openai.errors import OpenAIError
from kvtier.tiers.reuse import Hint

MAX_NUMBER: Final = 2**31 - 1
MAX_LIST: Final = 4096  # prompts, messages, parts
_MAX_TOKENS: Final = 2**20  # of a prompt
_MAX_FIELDS: Final = 128  # fields of an object; the API has fifty
CACHING: Final = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")  # of providers' own caches
_MAX_NOTED: Final = 64  # unknown names of one body
_DECODE: Final = msgspec.json.Decoder().decode


def must_be(*neutral: object, fix: str = "leave it out") -> BeforeValidator:
    """A field that is not supported. Its neutral values are accepted, since they have no effect."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise ValueError(f"not supported; {fix}")
        return None

    return BeforeValidator(check)


def kind_of(value: object) -> str | None:
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    kinds: dict[type, str] = {str: "=texts", list: "=lists", dict: "=parts"}
    return kinds.get(type(value[0]), "=tokens") if value else "=texts"


def by_kind(field: str, message: str, kind: Callable[[Any], str | None] = kind_of) -> Discriminator:
    """Chooses among tagged types by a value's kind; `message` is the error for a value of no kind."""
    return Discriminator(kind, custom_error_type=field, custom_error_message=message)


def by_type(field: str, message: str, *known: str, default: str = "") -> Discriminator:
    """`by_kind`, by an object's own `type`."""

    def kind(value: object) -> str | None:
        named = str(value.get("type", default)) if isinstance(value, dict) else ""
        return f"={named}" if named in known else None

    return by_kind(field, message, kind)


@cache
def _known(body_type: type[BaseModel]) -> frozenset[str]:
    neutral: list[frozenset[str]] = [getattr(each, "neutral", frozenset()) for each in body_type.__mro__]
    return frozenset(field.alias or name for name, field in body_type.model_fields.items()).union(*neutral)


class _Bounded(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _object(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            raise ValueError("not an object; give one, or leave it out")
        if len(value) > _MAX_FIELDS:  # pydantic would collect an error for each
            raise ValueError(f"an object of {len(value)} fields; at most {_MAX_FIELDS} are read")
        if cls.model_config["extra"] == "ignore" and isinstance(info.context, set) and len(info.context) < _MAX_NOTED:
            info.context.update(value.keys() - _known(cls))
        return value


class Strict(_Bounded):
    """An object of kvtier's own: an unknown field is an error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Tolerant(_Bounded):
    """An object of OpenAI's, in which an unknown field is ignored, as vLLM ignores it.

    Its name is added to the validation's context, if that is a set and the field changes answers elsewhere.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)
    neutral: ClassVar[frozenset[str]] = frozenset()  # fields that are ignored since they change no answer


T = TypeVar("T")
Text = Annotated[str, pydantic.AfterValidator(writable)]
ApiTokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
ApiTokenIds = Annotated[list[ApiTokenId], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True)]
ApiCacheSalt = Annotated[Text, Field(min_length=1, max_length=1024)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
ApiTokenIdLists = Annotated[list[ApiTokenIds], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
Documents = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[ApiTokenIds, Tag("=tokens")]
    | Annotated[ApiTokenIdLists, Tag("=lists")],
    by_kind("texts", "not texts; give a text, token ids, or a list of either"),
]
Off = Annotated[None, must_be(False)]


# --- kvtier's own fields of a request, under kvtier ------------------------------------------------------------------


def _shape(value: object) -> str:
    """Tag of a segments field: for one prompt, or a list for each of several."""
    lists = [each for each in value if isinstance(each, list)] if isinstance(value, list) else []
    is_nested = any(isinstance(each, list) for one in lists for each in one) or (lists and not any(lists))
    return "=lists" if is_nested else "=pairs"


class RepairFields(Strict):
    rule: Literal["deviation", "question", "first", "borders", "random"] | None = None
    share: (
        Annotated[
            Annotated[float, Field(ge=0, le=1), Tag("=number")] | Annotated[Literal["auto"], Tag("=word")],
            Discriminator(lambda value: "=word" if value == "auto" else "=number"),
        ]
        | None
    ) = None
    check_layer: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    max_deviation: Annotated[float, Field(ge=0)] | None = None


SaidHint = Annotated[Hint, Field(strict=False)]  # JSON has strings, not members of an enumeration


def _note_unknown(info: ValidationInfo, name: str) -> None:
    if isinstance(info.context, set):
        info.context.add(name)


def _mark(value: object, info: ValidationInfo) -> bool:
    if not (is_mark := is_cache_mark(value)) and value is not None:
        _note_unknown(info, "cache_control")
    return is_mark


def _hint_by(read: Callable[[object, Callable[[str], None]], Hint | None], name: str) -> BeforeValidator:
    def check(value: object, info: ValidationInfo) -> Hint | None:
        return None if value is None else read(value, lambda _: _note_unknown(info, name))

    return BeforeValidator(check)


CacheMark = Annotated[bool, BeforeValidator(_mark)]
"""Anthropic's `cache_control`: whether it is one. Other values are ignored."""

# vLLM's `kv_hints` and Dynamo's `nvext`. Unknown values are ignored.
KVHints = Annotated[Hint | None, _hint_by(hint_in, "kv_hints")]
AgentHints = Annotated[Hint | None, _hint_by(agent_hint, "nvext")]


class ChatReuse(Strict):
    hint: SaidHint | None = None
    repair: RepairFields | None = None
    segments: Annotated[None, must_be([], fix="mark a part of type text in messages, and only it")] = None


TokenPlace = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
SegmentPair = Annotated[list[TokenPlace], Field(min_length=2, max_length=2, fail_fast=True)]
SegmentPairs = Annotated[list[SegmentPair], Field(max_length=MAX_LIST, fail_fast=True)]


class CompletionReuse(Strict):
    """The same of a completion. Segments are pairs of start and end in tokens: of a prompt, or a list for each."""

    hint: SaidHint | None = None
    repair: RepairFields | None = None
    segments: (
        Annotated[
            Annotated[SegmentPairs, Tag("=pairs")]
            | Annotated[Annotated[list[SegmentPairs], Field(max_length=MAX_LIST, fail_fast=True)], Tag("=lists")],
            Discriminator(_shape),
        ]
        | None
    ) = None


# --- tools, the choice among them, and calls of earlier turns --------------------------------------------------------

_MAX_TOOLS: Final = 1024


def _as_sent(value: Any, check: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Checked, and kept as it was sent: a template may read any part of it."""
    check(value)
    return value


class _Function(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Tolerant):
    type: Literal["function"] = "function"
    function: _Function
    cache_control: CacheMark = False


class _CalledFunction(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text | dict[str, Any] | None = None  # JSON text, or its value


class _SentCall(Tolerant):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChosenFunction(Tolerant):
    name: Text


class ChosenTool(Tolerant):
    type: Literal["function"] = "function"
    function: _ChosenFunction


Tools = Annotated[
    list[Annotated[_Tool, pydantic.WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
SentCalls = Annotated[
    list[Annotated[_SentCall, pydantic.WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=word")] | Annotated[ChosenTool, Tag("=tool")],
    Discriminator(lambda value: "=word" if isinstance(value, str) else "=tool"),
]


# --- messages: turns of roles, with a text or parts of type text -----------------------------------------------------


class PartOptions(Strict):
    segment: bool | None = None  # its KV may be reused at any position


class TextPart(Tolerant):
    """A part of a message or a prompt. Only text is supported. The longer names are from OpenAI's other APIs."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    kvtier: PartOptions | None = None
    cache_control: CacheMark = False

    @property
    def is_segment(self) -> bool:
        return self.kvtier is not None and bool(self.kvtier.segment)

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.is_segment and not self.text:
            raise ValueError("an empty segment; write some text, or leave out its mark")
        return self


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[ApiTokenIds, Tag("=tokens")]
    | Annotated[ApiTokenIdLists, Tag("=lists")]
    | Annotated[Parts, Tag("=parts")],
    by_kind("prompt", "not a prompt; give a text, token ids, a list of either, or parts of type text"),
]
TextOr = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[T, Tag("=parts")],
    by_kind(
        "content",
        "not a content; give a text, or a list of parts",
        lambda value: "=text" if isinstance(value, str) else "=parts" if isinstance(value, list) else None,
    ),
]
Content = TextOr[Parts]


class Message(Tolerant):
    neutral = frozenset(["annotations"])  # part of an answer that a client sends back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: SentCalls | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None  # of an answer that a client sends back, under its original name
    reasoning_content: Text | None = None
    thinking: Text | None = None
    refusal: Annotated[None, must_be()] = None
    audio: Annotated[None, must_be()] = None
    function_call: Annotated[None, must_be(fix="send tool_calls instead")] = None
    cache_control: CacheMark = False

    @property
    def is_marked(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return self.cache_control or any(part.cache_control for part in parts)

    @property
    def sent(self) -> Json:
        sent = {name: value for name in _READ if (value := getattr(self, name)) is not None}
        return sent if self.content is None else sent | {"content": sent_content(self.content)}

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: missing; only an assistant's turn may have none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: of role {self.role}; only an assistant's turn has them")
        return self


_READ: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")


def sent_content(content: str | Sequence[TextPart]) -> str | list[Json]:
    """A content as a chat's body has it."""
    if isinstance(content, str):
        return content
    marks = [{"kvtier": {"segment": True}} if part.is_segment else {} for part in content]
    return [{"type": part.type, "text": part.text, **mark} for part, mark in zip(content, marks, strict=True)]


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]


# --- response_format: a text, or JSON, maybe of a schema -------------------------------------------------------------


class _NamedSchema(Tolerant):
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # a schema is always followed


class ResponseFormat(Tolerant):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: missing; give an object with a schema")
        return self


def schema_of(wanted: ResponseFormat | None) -> tuple[Json, str] | None:
    """The schema of the answer, and the field that has it; None: any text."""
    if wanted is None or wanted.type == "text":
        return None
    schema = None if wanted.type == "json_object" or wanted.json_schema is None else wanted.json_schema.schema_
    field = "response_format" if wanted.type == "json_object" else "response_format.json_schema.schema"
    return ({"type": "object"} if schema is None else schema), field


# --- how to answer ---------------------------------------------------------------------------------------------------

_MAX_CHOICES: Final = 128
_MAX_STOPS: Final = 16
_MAX_STOP: Final = 256  # characters
_MAX_BIASES: Final = 1024
_AS_FORMAT: Final = "send response_format instead"
_DIGITS: Final = 11  # more than a token id has


def _by_token(value: object) -> object:
    """JSON has only strings as names of fields."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("not an object; give numbers by token id")
    if len(value) > _MAX_BIASES:
        raise ValueError(f"{len(value)} tokens; at most {_MAX_BIASES} are taken")
    if wrong := next((name for name in value if not (name.isdecimal() and len(name) < _DIGITS)), None):
        raise ValueError(f"{wrong[:20]!r} is no token id; name tokens by their numbers")
    return {int(name): bias for name, bias in value.items()}


Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[Text, Field(min_length=1, max_length=_MAX_STOP)]
TokenLimit = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class StreamOptions(Tolerant):
    neutral = frozenset(["include_obfuscation"])
    include_usage: bool | None = None
    continuous_usage_stats: Off = None


class Sampling(Tolerant):
    """Defaults are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` and `ignore_eos` are vLLM's."""

    neutral: ClassVar[frozenset[str]] = frozenset(["user", "metadata"])

    max_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None  # 0, -1: all
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[Stop],
            Field(max_length=_MAX_STOPS, fail_fast=True),
            BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[ApiTokenId], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # of others no logits are left
    logit_bias: Annotated[dict[ApiTokenId, Bias], BeforeValidator(_by_token)] | None = None
    response_format: ResponseFormat | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    # vLLM's; they would change the answer
    bad_words: Annotated[None, must_be([])] = None
    allowed_token_ids: Annotated[None, must_be()] = None
    structured_outputs: Annotated[None, must_be({}, fix=_AS_FORMAT)] = None
    guided_json: Annotated[None, must_be(fix=_AS_FORMAT)] = None
    guided_regex: Annotated[None, must_be()] = None
    guided_choice: Annotated[None, must_be()] = None
    guided_grammar: Annotated[None, must_be()] = None
    use_beam_search: Off = None
    length_penalty: Annotated[None, must_be(1)] = None
    prompt_logprobs: Annotated[None, must_be()] = None
    truncate_prompt_tokens: Annotated[None, must_be()] = None
    skip_special_tokens: Annotated[None, must_be(True)] = None
    include_stop_str_in_output: Off = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not getattr(self, "stream", None):
            raise ValueError("stream_options: allowed only if stream is true; leave it out")
        return self


# --- the bodies ------------------------------------------------------------------------------------------------------

MOST_LOGPROBS: Final = 20  # OpenAI's limit of a chat, and vLLM's default for both

_FOR_TEMPLATES: Final = (
    "tools",
    "documents",
    "reasoning_effort",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)

B = TypeVar("B", bound=BaseModel)

AnyPrompt = str | list[int] | tuple[PromptPiece, ...]  # a text, token ids, or a text in pieces


class RequestBody(BaseModel):
    """The fields that decide which KV a request can use: the only ones a router reads."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    model: Text
    cache_salt: ApiCacheSalt | None = None
    stream: bool | None = None


class CompletionPrompt(RequestBody):
    prompt: Prompt

    @property
    def prompts(self) -> Sequence[AnyPrompt]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        if isinstance(self.prompt[0], TextPart):
            parts = [(part.text, part.is_segment) for part in self.prompt]
            return [tuple(text_pieces("prompt", parts))]
        return self.prompt


class TemplateFields(BaseModel):
    tools: Tools | None = None
    documents: list[Any] | None = None
    reasoning_effort: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    def chat_with(self, messages: Messages, prefix: ChatPrefix) -> Chat:
        """Raises OpenAIError if the template cannot be given this."""
        given = {name: getattr(self, name) for name in _FOR_TEMPLATES}
        return chat_of({**given, "messages": [message.sent for message in messages]}, prefix)


class ChatPrompt(RequestBody, TemplateFields):
    messages: Messages

    def chat(self, prefix: ChatPrefix) -> Chat:
        return self.chat_with(self.messages, prefix)


class CompletionBody(CompletionPrompt, Sampling):
    """`POST /v1/completions`."""

    model_config = Tolerant.model_config

    kvtier: CompletionReuse | None = None
    kv_hints: KVHints = None
    nvext: AgentHints = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_NUMBER)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None  # of so many likeliest tokens
    suffix: Annotated[None, must_be("")] = None
    best_of: Annotated[None, must_be(1)] = None

    @model_validator(mode="after")
    def _computes_or_echoes(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is for echo true alone; write at least 1")
        return self

    @property
    def hint(self) -> Hint | None:
        return (None if self.kvtier is None else self.kvtier.hint) or self.kv_hints or self.nvext

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(ChatPrompt, Sampling):
    """`POST /v1/chat/completions`."""

    model_config = Tolerant.model_config
    neutral = frozenset([*CACHING, "prediction", "safety_identifier", "service_tier", "store", "verbosity"])

    kvtier: ChatReuse | None = None
    kv_hints: KVHints = None
    nvext: AgentHints = None
    cache_control: CacheMark = False
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, must_be([], fix="send tools instead")] = None
    function_call: Annotated[None, must_be("none", "auto", fix="send tool_choice instead")] = None
    chat_template: Annotated[None, must_be(fix="it is the checkpoint's own; leave it out")] = None
    modalities: Annotated[None, must_be(["text"])] = None
    audio: Annotated[None, must_be()] = None
    web_search_options: Annotated[None, must_be()] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens, max_completion_tokens: give one of the two")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: allowed only if logprobs is true; leave it out, or set that")
        return self

    @model_validator(mode="after")
    def _has_chosen(self) -> Self:
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice: required, but there are no tools; give some, or leave it out")
        if (name := self.chosen_tool) is not None and name not in self.tool_names:
            raise ValueError(f"tool_choice: {name!r} is none of the tools; name one of them")
        return self

    @property
    def hint(self) -> Hint | None:
        if hint := (None if self.kvtier is None else self.kvtier.hint) or self.kv_hints or self.nvext:
            return hint
        tools: list[Any] = self.tools or []
        is_marked = self.cache_control or any(message.is_marked for message in self.messages)
        return Hint.GOES_ON if is_marked or any(is_cache_mark(tool.get("cache_control")) for tool in tools) else None

    @property
    def chosen_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or self.chosen_tool is not None

    @property
    def tool_names(self) -> frozenset[str]:
        tools: list[Any] = self.tools or []
        return frozenset(tool["function"]["name"] for tool in tools)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class PrecomputeBody(Strict):
    """`POST /v1/kvtier/precompute`."""

    texts: Documents
    model: Text | None = None
    cache_salt: ApiCacheSalt | None = None

    @property
    def each(self) -> Sequence[str | list[int]]:
        return [self.texts] if isinstance(self.texts, str) or isinstance(self.texts[0], int) else self.texts


def json_object(data: bytes) -> Json:
    """The JSON object in a body. Raises OpenAIError (400) if there is none."""
    try:
        return object_in(data, _loads)
    except ValueError as error:
        raise OpenAIError(400, str(error), code="bad_json") from None


def _loads(data: bytes) -> Any:
    """`json.loads` in a third of its time. What msgspec refuses (NaN, half a surrogate) the other judges."""
    try:
        return _DECODE(data)
    except (msgspec.MsgspecError, RecursionError):
        return json.loads(data)


def parse(body_type: type[B], data: bytes, unknown: set[str] | None = None) -> B:
    """Parse a request's body. OpenAIError (400) names the field. Unknown fields' names are added to `unknown`."""
    values = json_object(data)
    try:
        return body_type.model_validate(values, context=unknown)
    except pydantic.ValidationError as error:
        raise _refused(error) from None
    except ValueError as error:
        raise OpenAIError(400, f"body: {error}", code="invalid_value") from None


def _refused(error: pydantic.ValidationError) -> OpenAIError:
    field, why, kind, value = first_error(error)
    param = field[:80]
    if not param:
        clash = why.partition(":")[0].partition(",")[0] if kind == "value_error" and ":" in why else None
        return OpenAIError(400, f"{'' if clash else 'body: '}{why}", param=clash, code="invalid_value")
    if kind == "missing":
        return OpenAIError(400, f"{param}: missing; it must be given", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return OpenAIError(
            400, f"{param} {shown(value)}: unknown field; leave it out", param=param, code="unknown_parameter"
        )
    code = "unsupported_parameter" if why.startswith("not supported") else "invalid_value"
    return OpenAIError(400, f"{param} {shown(value)}: {why}", param=param, code=code)


class TokenizeBody(TemplateFields, Tolerant):
    model_config = Tolerant.model_config

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None
    chat_template: Annotated[None, must_be()] = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt, messages: give one of the two")
        return self

    def chat(self, prefix: ChatPrefix) -> Chat:
        """Of the messages, which are there. Raises OpenAIError if the template cannot be given this."""
        assert self.messages is not None
        return self.chat_with(self.messages, prefix)


class DetokenizeBody(Tolerant):
    model: Text | None = None
    tokens: ApiTokenIds


class ExplainBody(Strict):
    """`POST /explain`: a prompt as the API takes it, or a request's id: one of the three."""

    model: Text | None = None
    cache_salt: ApiCacheSalt | None = None
    prompt: Prompt | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # beside messages
    request: Annotated[Text, Field(min_length=1, max_length=512)] | None = None
    tokens: ApiTokenIds | None = None  # the text's tokens by another tokenizer

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(each is not None for each in (self.prompt, self.messages, self.request)) != 1:
            raise ValueError("prompt, messages, request: give one of the three")
        return self

    @property
    def wanted_prompt(self) -> "CompletionPrompt | ChatPrompt | None":
        if self.messages is not None:
            return ChatPrompt.model_construct(model="", messages=self.messages, tools=self.tools)
        return None if self.prompt is None else CompletionPrompt.model_construct(model="", prompt=self.prompt)
