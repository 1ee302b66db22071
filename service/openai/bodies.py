"""Parses OpenAI request bodies: every field is typed and bounded, and every error names its field."""

from collections.abc import Sequence
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from kvtier.service import Json, first_error, object_in, shown
from kvtier.service.openai.chat_turns import Chat
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.fields import (
    ApiCacheSalt,
    Documents,
    Empty,
    Ignored,
    Off,
    Strict,
    Text,
    Tolerant,
    Zero,
    few_fields,
    must_be,
    options,
)
from kvtier.service.openai.messages import Messages, Prompt, TextPart
from kvtier.service.openai.pieces import PromptPiece, text_pieces
from kvtier.service.openai.reuse import ChatReuse, CompletionReuse
from kvtier.service.openai.sampling import Sampling, TokenLimit

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


class ChatPrompt(RequestBody):
    messages: Messages

    @property
    def chat(self) -> Chat:
        parts = [message.content if isinstance(message.content, list) else [] for message in self.messages]
        return Chat(
            [message.turn for message in self.messages],
            [(turn, number) for turn, some in enumerate(parts) for number, part in enumerate(some) if part.is_segment],
        )


class CompletionBody(CompletionPrompt, Sampling):
    """`POST /v1/completions`."""

    model_config = Tolerant.model_config

    kvtier: Annotated[CompletionReuse | None, BeforeValidator(options)] = None
    echo: Off = None
    suffix: Annotated[None, must_be("")] = None
    logprobs: Annotated[None, must_be()] = None
    best_of: Annotated[None, must_be(1)] = None


class ChatBody(ChatPrompt, Sampling):
    """`POST /v1/chat/completions`."""

    model_config = Tolerant.model_config

    kvtier: Annotated[ChatReuse | None, BeforeValidator(options)] = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: Off = None
    top_logprobs: Zero = None
    response_format: Annotated[None, must_be({"type": "text"})] = None
    tools: Empty = None
    tool_choice: Annotated[None, must_be("none", "auto")] = None
    functions: Empty = None
    function_call: Annotated[None, must_be("none", "auto")] = None
    modalities: Annotated[None, must_be(["text"])] = None
    audio: Annotated[None, must_be()] = None
    prediction: Annotated[None, must_be()] = None
    reasoning_effort: Annotated[None, must_be("none")] = None
    web_search_options: Annotated[None, must_be()] = None
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
