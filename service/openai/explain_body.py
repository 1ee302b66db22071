"""The body of `POST /explain`: whose prompt, and which."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtier.service.openai.bodies import ChatPrompt, CompletionPrompt
from kvtier.service.openai.fields import ApiCacheSalt, ApiTokenIds, Text
from kvtier.service.openai.messages import Messages, Prompt
from kvtier.service.openai.tools import Tools


class ExplainBody(BaseModel):
    """`POST /explain`: a prompt as the API takes it, or a request's id; one of the three."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: Text | None = None
    cache_salt: ApiCacheSalt | None = None
    prompt: Prompt | None = None
    messages: Messages | None = None
    tools: Tools | None = None  # beside messages
    request: Annotated[Text, Field(min_length=1, max_length=512)] | None = None
    tokens: ApiTokenIds | None = None  # what another tokenizer made of the text

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(each is not None for each in (self.prompt, self.messages, self.request)) != 1:
            raise ValueError("prompt, messages, request: give one of the three")
        return self

    @property
    def asked(self) -> "CompletionPrompt | ChatPrompt | None":
        """The prompt; None: it is a request's."""
        if self.messages is not None:
            return ChatPrompt.model_construct(model="", messages=self.messages, tools=self.tools)
        return None if self.prompt is None else CompletionPrompt.model_construct(model="", prompt=self.prompt)
