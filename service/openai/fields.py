"""The types of fields that request bodies share: bounded, with errors that name the field and the fix."""

from functools import cache
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from kvtier.connector import hint_in, is_cache_mark
from kvtier.service import Json, writable
from kvtier.tiers.reuse import Hint

MAX_NUMBER: Final = 2**31 - 1
MAX_LIST: Final = 4096  # prompts, messages, parts
_MAX_TOKENS: Final = 2**20  # of a prompt
_MAX_FIELDS: Final = 128  # fields of an object; the API has fifty
_MAX_NOTED: Final = 64  # unknown names of one body


def must_be(*neutral: object, fix: str = "leave it out") -> BeforeValidator:
    """A field that is not supported. Its neutral values are accepted, since they change nothing."""

    def check(value: object) -> object:
        if value is not None and value not in neutral:
            raise ValueError(f"not supported; {fix}")
        return None

    return BeforeValidator(check)


def few_fields(value: object) -> object:
    """Refuse an object of too many fields, since pydantic would collect an error for each."""
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise ValueError(f"an object of {len(value)} fields; at most {_MAX_FIELDS} are read")
    return value


def options(value: object) -> object:
    """Refuse what is no object of options."""
    if value is not None and not isinstance(value, dict):
        raise ValueError("not an object of options; give one, or leave it out")
    return few_fields(value)


def kind_of(value: object) -> str | None:
    """The kind of a prompt or content, as a tag: =text, =texts, =tokens, =lists or =parts."""
    if isinstance(value, str):
        return "=text"
    if not isinstance(value, list):
        return None
    kinds: dict[type, str] = {str: "=texts", list: "=lists", dict: "=parts"}
    return kinds.get(type(value[0]), "=tokens") if value else "=texts"


def _ignored(value: object) -> None:
    """Accept any value: the field changes no answer."""


@cache
def _known(body_type: type[BaseModel]) -> frozenset[str]:
    """The names of its fields, as they are sent."""
    return frozenset(field.alias or name for name, field in body_type.model_fields.items())


class Strict(BaseModel):
    """An object of kvtier's own, in which an unknown field is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Tolerant(BaseModel):
    """An object of OpenAI's, in which an unknown field is ignored, as vLLM ignores it.

    Its name is noted in the context of the validation, where that is a set.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _noted(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, set) and isinstance(value, dict) and len(info.context) < _MAX_NOTED:
            info.context.update(value.keys() - _known(cls))
        return value


Text = Annotated[str, AfterValidator(writable)]
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
    Discriminator(
        kind_of,
        custom_error_type="texts",
        custom_error_message="not texts; give a text, token ids, or a list of either",
    ),
]
Ignored = Annotated[None, BeforeValidator(_ignored)]
Off = Annotated[None, must_be(False)]


# --- what only kvtier's engine knows of a request: the fields under kvtier -------------------------------------------


def _shape(value: object) -> str:
    """Whether segments are those of one prompt, or a list for each of several: one of the tags below."""
    lists = [each for each in value if isinstance(each, list)] if isinstance(value, list) else []
    is_nested = any(isinstance(each, list) for one in lists for each in one) or (lists and not any(lists))
    return "=lists" if is_nested else "=pairs"


class RepairFields(Strict):
    """How much of what is reused is computed anew; what is left out is as configured."""

    rule: Literal["deviation", "question", "first", "borders", "random"] | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    check_layer: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    max_deviation: Annotated[float, Field(ge=0)] | None = None


SaidHint = Annotated[Hint, Field(strict=False)]  # JSON has words, no members of an enumeration


def _note_unknown(info: ValidationInfo, name: str) -> None:
    """Count a field that says nothing with those that are unknown here."""
    if isinstance(info.context, set):
        info.context.add(name)


def _mark(value: object, info: ValidationInfo) -> bool:
    if not (is_mark := is_cache_mark(value)) and value is not None:
        _note_unknown(info, "cache_control")
    return is_mark


def _envelope(value: object, info: ValidationInfo) -> Hint | None:
    return None if value is None else hint_in(value, lambda _: _note_unknown(info, "kv_hints"))


CacheMark = Annotated[bool, BeforeValidator(_mark)]
"""Anthropic's `cache_control`: whether it is one. What is none is ignored."""

KVHints = Annotated[Hint | None, BeforeValidator(_envelope)]
"""vLLM's `kv_hints`: what they say. What says nothing is ignored."""


class ChatReuse(Strict):
    """Of a chat."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(options)] = None
    segments: Annotated[None, must_be([], fix="mark a part of type text in messages, and only it")] = None


TokenPlace = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
SegmentPair = Annotated[list[TokenPlace], Field(min_length=2, max_length=2, fail_fast=True)]
SegmentPairs = Annotated[list[SegmentPair], Field(max_length=MAX_LIST, fail_fast=True)]


class CompletionReuse(Strict):
    """The same of a completion. Segments are pairs of start and end in tokens: of a prompt, or a list for each."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(options)] = None
    segments: (
        Annotated[
            Annotated[SegmentPairs, Tag("=pairs")]
            | Annotated[Annotated[list[SegmentPairs], Field(max_length=MAX_LIST, fail_fast=True)], Tag("=lists")],
            Discriminator(_shape),
        ]
        | None
    ) = None


# --- tools that may be called, which must be, and calls of earlier turns ---------------------------------------------

_MAX_TOOLS: Final = 1024


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checked, and kept as it was sent: a template may read whatever stands there."""
    check(value)
    return value


class _Function(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Tolerant):
    type: Literal["function"] = "function"
    function: Annotated[_Function, BeforeValidator(few_fields)]
    cache_control: CacheMark = False


class _CalledFunction(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text | dict[str, Any] | None = None  # JSON, or what it means


class _SentCall(Tolerant):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: Annotated[_CalledFunction, BeforeValidator(few_fields)]


class _ChosenFunction(Tolerant):
    name: Text


class ChosenTool(Tolerant):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: Annotated[_ChosenFunction, BeforeValidator(few_fields)]


def _choice_kind(value: object) -> str:
    return "=word" if isinstance(value, str) else "=tool"


Tools = Annotated[
    list[Annotated[_Tool, BeforeValidator(few_fields), WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
SentCalls = Annotated[
    list[Annotated[_SentCall, BeforeValidator(few_fields), WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=word")]
    | Annotated[ChosenTool, BeforeValidator(few_fields), Tag("=tool")],
    Discriminator(_choice_kind),
]


# --- messages: turns of roles, with a text or parts of type text -----------------------------------------------------


class PartOptions(Strict):
    """What only kvtier's engine knows of a part."""

    segment: bool | None = None  # its KV may come from another place


class TextPart(Tolerant):
    """A part of a message or a prompt. Only text is supported. The longer names are those of other APIs of OpenAI's."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    kvtier: Annotated[PartOptions | None, BeforeValidator(options)] = None
    cache_control: CacheMark = False

    @property
    def is_segment(self) -> bool:
        return self.kvtier is not None and bool(self.kvtier.segment)

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.is_segment and not self.text:
            raise ValueError("an empty segment; write some text, or leave out its mark")
        return self


Parts = Annotated[
    list[Annotated[TextPart, BeforeValidator(few_fields)]],
    Field(min_length=1, max_length=MAX_LIST, fail_fast=True),
]
Prompt = Annotated[
    Annotated[Text, Tag("=text")]
    | Annotated[Texts, Tag("=texts")]
    | Annotated[ApiTokenIds, Tag("=tokens")]
    | Annotated[ApiTokenIdLists, Tag("=lists")]
    | Annotated[Parts, Tag("=parts")],
    Discriminator(
        kind_of,
        custom_error_type="prompt",
        custom_error_message="not a prompt; give a text, token ids, a list of either, or parts of type text",
    ),
]
Content = Annotated[
    Annotated[Text, Tag("=text")] | Annotated[Parts, Tag("=parts")],
    Discriminator(
        kind_of,
        custom_error_type="content",
        custom_error_message="not a message content; give a text, or parts of type text",
    ),
]


class Message(Tolerant):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: SentCalls | None = None
    tool_call_id: Text | None = None
    reasoning: Text | None = None  # of an answer that a client sends back, under the name that it had
    reasoning_content: Text | None = None
    thinking: Text | None = None
    refusal: Annotated[None, must_be()] = None
    audio: Annotated[None, must_be()] = None
    annotations: Ignored = None  # part of an answer that a client sends back
    function_call: Annotated[None, must_be(fix="send tool_calls instead")] = None
    cache_control: CacheMark = False

    @property
    def is_marked(self) -> bool:
        """Whether the client says that the prompt up to here is asked for again."""
        parts = self.content if isinstance(self.content, list) else []
        return self.cache_control or any(part.cache_control for part in parts)

    @property
    def sent(self) -> Json:
        """As `chat_of` reads it."""
        sent = {name: told for name in _READ if (told := getattr(self, name)) is not None}
        if isinstance(self.content, list):
            sent["content"] = [_sent_part(part) for part in self.content]
        return sent

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: missing; only an assistant's turn may have none")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: of role {self.role}; only an assistant's turn has them")
        return self


_READ: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")


def _sent_part(part: TextPart) -> Json:
    mark: Json = {"kvtier": {"segment": True}} if part.is_segment else {}
    return {"type": part.type, "text": part.text, **mark}


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(few_fields)]],
    Field(min_length=1, max_length=MAX_LIST, fail_fast=True),
]
