"""What a body's `response_format` asks for: a text, or JSON, maybe of a schema."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from kvtier.service import Json
from kvtier.service.openai.fields import Text, Tolerant, few_fields


class _TextFormat(Tolerant):
    type: Literal["text"]


class _ObjectFormat(Tolerant):
    type: Literal["json_object"]


class _NamedSchema(Tolerant):
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # a schema is always followed


class _SchemaFormat(Tolerant):
    type: Literal["json_schema"]
    json_schema: Annotated[_NamedSchema, BeforeValidator(few_fields)]


def _kind(value: object) -> str | None:
    kinds = {"text": "=text", "json_object": "=object", "json_schema": "=schema"}
    return kinds.get(str(value.get("type"))) if isinstance(value, dict) else None


ResponseFormat = Annotated[
    Annotated[_TextFormat, Tag("=text")]
    | Annotated[_ObjectFormat, Tag("=object")]
    | Annotated[_SchemaFormat, Tag("=schema")],
    Discriminator(
        _kind,
        custom_error_type="response_format",
        custom_error_message="not a format; give an object of type text, json_object or json_schema",
    ),
]


def schema_of(wanted: "ResponseFormat | None") -> tuple[Json, str] | None:
    """The schema of the answer, and the field that has it; None: it may be any text."""
    if isinstance(wanted, _SchemaFormat):
        schema = wanted.json_schema.schema_
        return ({"type": "object"} if schema is None else schema), "response_format.json_schema.schema"
    return ({"type": "object"}, "response_format") if isinstance(wanted, _ObjectFormat) else None
