"""What a chat's body has in `messages`: turns of roles, with a text or parts of type text."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from kvtier.service.openai.chat_turns import Turn
from kvtier.service.openai.fields import (
    MAX_LIST,
    ApiTokenIdLists,
    ApiTokenIds,
    Empty,
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


class PartOptions(Strict):
    """What only kvtier's engine knows of a part."""

    segment: bool | None = None  # its KV may come from another place


class TextPart(Tolerant):
    """A part of a message or a prompt. Only text is supported."""

    type: Literal["text"]
    text: Text
    kvtier: Annotated[PartOptions | None, BeforeValidator(options)] = None

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
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    refusal: Annotated[None, must_be()] = None
    audio: Annotated[None, must_be()] = None
    annotations: Ignored = None  # part of an answer that a client sends back
    tool_calls: Empty = None
    function_call: Annotated[None, must_be()] = None

    @property
    def turn(self) -> Turn:
        whole, parts = (self.content, ()) if isinstance(self.content, str) else (None, self.content)
        content = [{"type": part.type, "text": part.text} for part in parts] if whole is None else whole
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(few_fields)]],
    Field(min_length=1, max_length=MAX_LIST, fail_fast=True),
]
