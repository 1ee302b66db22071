"""The bodies of `POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from kvtier.service.openai.chat_turns import Chat, chat_of
from kvtier.service.openai.fields import MAX_LIST, ApiTokenIds, Text, Tolerant, must_be


class TokenizeBody(Tolerant):
    """A text, or a chat as `/v1/chat/completions` takes it; one of the two."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_LIST)] | None = None
    add_special_tokens: bool | None = None  # of a text true, of a chat false: its template writes them
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    chat_template: Annotated[None, must_be()] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt, messages: give one of the two")
        return self

    @property
    def chat(self) -> Chat:
        """Raises OpenAIError if the messages or tools are none."""
        return chat_of(self.model_dump(exclude_none=True))


class DetokenizeBody(Tolerant):
    model: Text | None = None
    tokens: ApiTokenIds
