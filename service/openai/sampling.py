"""How to answer: the fields that chats and completions share."""

from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from kvtier.service.openai.fields import (
    MAX_NUMBER,
    ApiTokenId,
    Ignored,
    Off,
    Text,
    Tolerant,
    few_fields,
    must_be,
)
from kvtier.service.openai.response_format import ResponseFormat

_MAX_CHOICES: Final = 128
_MAX_STOPS: Final = 16
_MAX_STOP: Final = 256  # characters
_MAX_BIASES: Final = 1024
_AS_FORMAT: Final = "send response_format instead"
_DIGITS: Final = 11  # more than a token id has


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _by_token(value: object) -> object:
    """JSON has names of fields only as texts."""
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
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Off = None


class Sampling(Tolerant):
    """Defaults are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids` and `ignore_eos` are vLLM's."""

    max_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_NUMBER)] | None = None  # 0, -1: all
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True), BeforeValidator(_listed)] | None = None
    stop_token_ids: Annotated[list[ApiTokenId], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream_options: Annotated[StreamOptions | None, BeforeValidator(few_fields)] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # of others no logits are left
    logit_bias: Annotated[dict[ApiTokenId, Bias], BeforeValidator(_by_token)] | None = None
    response_format: ResponseFormat | None = None
    user: Ignored = None
    metadata: Ignored = None
    # of vLLM, and what they would change is another answer
    min_tokens: Annotated[None, must_be(0)] = None
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
