"""The bodies of `POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from typing import Annotated, Self

from pydantic import model_validator

from kvtier.connector import ChatPrefix
from kvtier.service.openai.bodies import TemplateFields
from kvtier.service.openai.chat_turns import Chat
from kvtier.service.openai.fields import ApiTokenIds, Text, Tolerant, must_be
from kvtier.service.openai.messages import Messages


class TokenizeBody(TemplateFields, Tolerant):
    """A text, or a chat as `/v1/chat/completions` takes it; one of the two."""

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
