"""The types of fields that request bodies share: bounded, with errors that name the field and the fix."""

from functools import cache
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from kvtier.service import writable

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
