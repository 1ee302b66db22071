"""What a chat's body has in `messages`: turns of roles, with a text or parts of type text."""

from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kvtier.service import Json
from kvtier.service.openai.fields import (
    MAX_LIST,
    ApiTokenIdLists,
    ApiTokenIds,
    Ignored,
    Strict,
    Text,
    Texts,
    Tolerant,
    few_fields,
    kind_of,
    must_be,
    options,
)
from kvtier.service.openai.reuse import CacheMark
from kvtier.service.openai.tools import SentCalls


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
