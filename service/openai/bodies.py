"""Parses OpenAI request bodies: every field is typed and bounded, and every error names its field."""

from collections.abc import Sequence
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from kvtier.service import Json, first_error, object_in, shown, writable
from kvtier.service.openai.chat_turns import Chat, Turn
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.pieces import PromptPiece, text_pieces
from kvtier.tiers.returns import Hint

B = TypeVar("B", bound=BaseModel)

AnyPrompt = str | list[int] | tuple[PromptPiece, ...]
"""A text, token ids, or a text in pieces."""

_MAX_CHOICES: Final = 128
_MAX_STOPS: Final = 16
_MAX_STOP: Final = 256  # characters
_MAX_NUMBER: Final = 2**31 - 1
_MAX_LIST: Final = 4096  # prompts, messages, parts
_MAX_TOKENS: Final = 2**20  # of a prompt
_MAX_FIELDS: Final = 128  # fields of an object; the API has fifty


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _kind(value: object) -> str | None:
    """The kind of a prompt or content: one of the tags below."""
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    kinds: dict[type, str] = {str: "=texts", list: "=lists", dict: "=parts"}
    return kinds.get(type(value[0]), "=tokens") if value else "=texts"


def _shape(value: object) -> str:
    """Whether segments are those of one prompt, or a list for each of several: one of the tags below."""
    lists = [each for each in value if isinstance(each, list)] if isinstance(value, list) else []
    is_nested = any(isinstance(each, list) for one in lists for each in one) or (lists and not any(lists))
    return "=lists" if is_nested else "=pairs"


def _must_be(*neutral: object, fix: str = "leave it out") -> BeforeValidator:
    """A field that is not supported. Its neutral values are accepted, since they change nothing."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise ValueError(f"not supported; {fix}")
        return None

    return BeforeValidator(check)


def _few_fields(value: object) -> object:
    """Refuse an object of too many fields, since pydantic would collect an error for each."""
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"an object of {len(value)} fields; at most {_MAX_FIELDS} are read")
    return value


def _options(value: object) -> object:
    if value is not None and not isinstance(value, dict):
        raise ValueError("not an object of options; give one, or leave it out")
    return _few_fields(value)


def _ignored(value: object) -> None:
    """Accept any value: the field changes no answer."""


Text = Annotated[str, AfterValidator(writable)]
ApiTokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
ApiTokenIds = Annotated[list[ApiTokenId], Field(min_length=1, max_length=_MAX_TOKENS, fail_fast=True)]
ApiCacheSalt = Annotated[Text, Field(min_length=1, max_length=1024)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=_MAX_LIST, fail_fast=True)]
ApiTokenIdLists = Annotated[list[ApiTokenIds], Field(min_length=1, max_length=_MAX_LIST, fail_fast=True)]
Documents = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[ApiTokenIds, Tag("=tokens")]
    | Annotated[ApiTokenIdLists, Tag("=lists")],
    Discriminator(
        _kind,
        custom_error_type="texts",
        custom_error_message="not texts; give a text, token ids, or a list of either",
    ),
]
Stop = Annotated[Text, Field(min_length=1, max_length=_MAX_STOP)]
TokenLimit = Annotated[int, Field(ge=1, le=_MAX_NUMBER)]
Ignored = Annotated[None, BeforeValidator(_ignored)]
Off = Annotated[None, _must_be(False)]
Zero = Annotated[None, _must_be(0)]
Empty = Annotated[None, _must_be([], {})]


class RequestBody(BaseModel):
    """The fields that decide which KV a request can use: all that a router reads."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    model: Text
    cache_salt: ApiCacheSalt | None = None
    stream: bool | None = None


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class PartOptions(_Strict):
    """What only kvtier's engine knows of a part."""

    segment: bool | None = None  # its KV may come from another place


class TextPart(_Strict):
    """A part of a message or a prompt. Only text is supported."""

    type: Literal["text"]
    text: Text
    kvtier: Annotated[PartOptions | None, BeforeValidator(_options)] = None

    @property
    def is_segment(self) -> bool:
        return self.kvtier is not None and bool(self.kvtier.segment)

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.is_segment and not self.text:
            raise ValueError("an empty segment; write some text, or leave out its mark")
        return self


Parts = Annotated[
    list[Annotated[TextPart, BeforeValidator(_few_fields)]],
    Field(min_length=1, max_length=_MAX_LIST, fail_fast=True),
]
Prompt = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[ApiTokenIds, Tag("=tokens")]
    | Annotated[ApiTokenIdLists, Tag("=lists")]
    | Annotated[Parts, Tag("=parts")],
    Discriminator(
        _kind,
        custom_error_type="prompt",
        custom_error_message="not a prompt; give a text, token ids, a list of either, or parts of type text",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[Parts, Tag("=parts")],
    Discriminator(
        _kind,
        custom_error_type="content",
        custom_error_message="not a message content; give a text, or parts of type text",
    ),
]


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    refusal: Annotated[None, _must_be()] = None
    audio: Annotated[None, _must_be()] = None
    annotations: Ignored = None  # part of an answer that a client sends back
    tool_calls: Empty = None
    function_call: Annotated[None, _must_be()] = None

    @property
    def turn(self) -> Turn:
        whole, parts = (self.content, ()) if isinstance(self.content, str) else (None, self.content)
        content = [{"type": part.type, "text": part.text} for part in parts] if whole is None else whole
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


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


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(_few_fields)]],
    Field(min_length=1, max_length=_MAX_LIST, fail_fast=True),
]


class ChatPrompt(RequestBody):
    messages: Messages

    @property
    def chat(self) -> Chat:
        parts = [message.content if isinstance(message.content, list) else [] for message in self.messages]
        return Chat(
            [message.turn for message in self.messages],
            [(turn, number) for turn, some in enumerate(parts) for number, part in enumerate(some) if part.is_segment],
        )


class RepairFields(_Strict):
    """How much of what is reused is computed anew; what is left out is as configured."""

    rule: Literal["deviation", "question", "first", "borders", "random"] | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    check_layer: Annotated[int, Field(ge=1, le=_MAX_NUMBER)] | None = None
    max_deviation: Annotated[float, Field(ge=0)] | None = None


SaidHint = Annotated[Hint, Field(strict=False)]  # JSON has words, no members of an enumeration


class ChatReuse(_Strict):
    """What only kvtier's engine knows of a chat."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(_options)] = None
    segments: Annotated[None, _must_be([], fix="mark a part of type text in messages, and only it")] = None


TokenPlace = Annotated[int, Field(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
SegmentPair = Annotated[list[TokenPlace], Field(min_length=2, max_length=2, fail_fast=True)]
SegmentPairs = Annotated[list[SegmentPair], Field(max_length=_MAX_LIST, fail_fast=True)]


class CompletionReuse(_Strict):
    """The same of a completion. Segments are pairs of start and end in tokens: of a prompt, or a list for each."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(_options)] = None
    segments: (
        Annotated[
            Annotated[SegmentPairs, Tag("=pairs")]
            | Annotated[Annotated[list[SegmentPairs], Field(max_length=_MAX_LIST, fail_fast=True)], Tag("=lists")],
            Discriminator(_shape),
        ]
        | None
    ) = None


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Off = None


class Sampling(_Strict):
    """How to answer. Defaults are OpenAI's; `top_k`, `stop_token_ids` and `ignore_eos` are vLLM's."""

    max_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_NUMBER)] | None = None  # 0, -1: all
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True), BeforeValidator(_listed)] | None = None
    stop_token_ids: Annotated[list[ApiTokenId], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_few_fields)] = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: Annotated[None, _must_be(1)] = None
    min_p: Zero = None
    logit_bias: Empty = None
    user: Ignored = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not getattr(self, "stream", None):
            raise ValueError("stream_options: allowed only if stream is true; leave it out")
        return self


class CompletionBody(CompletionPrompt, Sampling):
    """`POST /v1/completions`."""

    model_config = _Strict.model_config

    kvtier: Annotated[CompletionReuse | None, BeforeValidator(_options)] = None
    echo: Off = None
    suffix: Annotated[None, _must_be("")] = None
    logprobs: Annotated[None, _must_be()] = None
    best_of: Annotated[None, _must_be(1)] = None


class ChatBody(ChatPrompt, Sampling):
    """`POST /v1/chat/completions`."""

    model_config = _Strict.model_config

    kvtier: Annotated[ChatReuse | None, BeforeValidator(_options)] = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: Off = None
    top_logprobs: Zero = None
    response_format: Annotated[None, _must_be({"type": "text"})] = None
    tools: Empty = None
    tool_choice: Annotated[None, _must_be("none", "auto")] = None
    functions: Empty = None
    function_call: Annotated[None, _must_be("none", "auto")] = None
    modalities: Annotated[None, _must_be(["text"])] = None
    audio: Annotated[None, _must_be()] = None
    prediction: Annotated[None, _must_be()] = None
    reasoning_effort: Annotated[None, _must_be("none")] = None
    web_search_options: Annotated[None, _must_be()] = None
    parallel_tool_calls: Ignored = None
    service_tier: Ignored = None
    store: Off = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens, max_completion_tokens: give one of the two")
        return self


class PrecomputeBody(_Strict):
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
        return object_in(data)
    except ValueError as error:
        raise OpenAIError(400, str(error), code="bad_json") from None


def parse(body_type: type[B], data: bytes) -> B:
    """Parse a request's body. Raises OpenAIError (400), which names the field and what is wrong with it."""
    values = json_object(data)
    try:
        return body_type.model_validate(_few_fields(values))
    except ValidationError as error:
        raise _refused(error) from None
    except ValueError as error:
        raise OpenAIError(400, f"body: {error}", code="invalid_value") from None


def _refused(error: ValidationError) -> OpenAIError:
    field, why, kind, value = first_error(error)
    param = field[:80]
    if not param:
        clash = why.partition(":")[0].partition(",")[0] if kind == "value_error" else None
        return OpenAIError(400, why, param=clash, code="invalid_value")
    if kind == "missing":
        return OpenAIError(400, f"{param}: missing; it must be given", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        return OpenAIError(
            400, f"{param} {shown(value)}: unknown field; leave it out", param=param, code="unknown_parameter"
        )
    code = "unsupported_parameter" if why.startswith("not supported") else "invalid_value"
    return OpenAIError(400, f"{param} {shown(value)}: {why}", param=param, code=code)
