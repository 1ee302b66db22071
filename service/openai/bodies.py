"""Parses OpenAI request bodies: every field is typed and bounded, and every error names its field."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtier.connector import ChatPrefix, is_cache_mark
from kvtier.service import Json, first_error, object_in, shown
from kvtier.service.openai.chat_turns import Chat, chat_of
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.fields import (
    ApiCacheSalt,
    Documents,
    Ignored,
    Strict,
    Text,
    Tolerant,
    few_fields,
    must_be,
    options,
)
from kvtier.service.openai.messages import Messages, Prompt, TextPart
from kvtier.service.openai.pieces import PromptPiece, text_pieces
from kvtier.service.openai.reuse import CacheMark, ChatReuse, CompletionReuse, KVHints
from kvtier.service.openai.sampling import Sampling, TokenLimit
from kvtier.service.openai.tools import ChosenTool, ToolChoice, Tools
from kvtier.tiers.returns import Hint

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

AnyPrompt = str | list[int] | tuple[PromptPiece, ...]
"""A text, token ids, or a text in pieces."""


class RequestBody(BaseModel):
    """The fields that decide which KV a request can use: all that a router reads."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

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
    """What a chat's template is given beside its messages; all but `tools` are vLLM's fields."""

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
    """A chat, and what else its template is given."""

    messages: Messages

    def chat(self, prefix: ChatPrefix) -> Chat:
        """As `chat_with`."""
        return self.chat_with(self.messages, prefix)


class CompletionBody(CompletionPrompt, Sampling):
    """`POST /v1/completions`."""

    model_config = Tolerant.model_config

    kvtier: Annotated[CompletionReuse | None, BeforeValidator(options)] = None
    kv_hints: KVHints = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None  # of so many likeliest tokens
    suffix: Annotated[None, must_be("")] = None
    best_of: Annotated[None, must_be(1)] = None

    @property
    def hint(self) -> Hint | None:
        """Whether this conversation goes on, as the client says."""
        return (None if self.kvtier is None else self.kvtier.hint) or self.kv_hints

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(ChatPrompt, Sampling):
    """`POST /v1/chat/completions`."""

    model_config = Tolerant.model_config

    kvtier: Annotated[ChatReuse | None, BeforeValidator(options)] = None
    kv_hints: KVHints = None
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
    prediction: Ignored = None
    web_search_options: Annotated[None, must_be()] = None
    service_tier: Ignored = None
    store: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None

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
        """Whether this conversation goes on, as the client says; a mark of `cache_control` says so, too."""
        if said := (None if self.kvtier is None else self.kvtier.hint) or self.kv_hints:
            return said
        tools: list[Any] = self.tools or []
        is_marked = self.cache_control or any(message.is_marked for message in self.messages)
        return Hint.GOES_ON if is_marked or any(is_cache_mark(tool.get("cache_control")) for tool in tools) else None

    @property
    def chosen_tool(self) -> str | None:
        """The one tool that must be called."""
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
        return object_in(data)
    except ValueError as error:
        raise OpenAIError(400, str(error), code="bad_json") from None


def parse(body_type: type[B], data: bytes, unknown: set[str] | None = None) -> B:
    """Parse a request's body. Raises OpenAIError (400), which names the field and what is wrong with it.

    Names of fields that are ignored because nobody here knows them are added to `unknown`.
    """
    values = json_object(data)
    try:
        return body_type.model_validate(few_fields(values), context=unknown)
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
