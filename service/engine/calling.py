"""Which of a request's answers are read for tool calls, and in which form."""

import json
from typing import Any, Final

from kvtier.service import Json
from kvtier.service.openai import (
    MARKS,
    CallForm,
    CallReader,
    ChatBody,
    CompletionBody,
    GuidedReader,
    HermesReader,
    LlamaReader,
    Prompts,
)

_NO_MARKS: Final[tuple[str, ...]] = ()
_VALUES: Final = ("const", "enum", "default", "examples")  # of a schema: what they hold is none
_NO_ARGUMENTS: Final[Json] = {"type": "object", "properties": {}}


def form_of(configured: str, prompts: Prompts) -> CallForm | None:
    """The form of `[server] tool_parser`; None: answers are not read."""
    if configured == "auto":
        return prompts.call_form
    return "hermes" if configured == "hermes" else "llama" if configured == "llama" else None


def marks_of(body: CompletionBody | ChatBody, form: CallForm | None) -> tuple[str, ...]:
    """Special tokens that are text of this request's answers."""
    return MARKS[form] if form is not None and _reads(body) else _NO_MARKS


def reader_of(body: CompletionBody | ChatBody, form: CallForm | None) -> CallReader | None:
    """What reads one answer to this request; None: all of it is text."""
    if isinstance(body, ChatBody) and body.must_call:
        return GuidedReader(body.chosen_tool)
    if form is None or isinstance(body, CompletionBody) or not _reads(body):
        return None
    most = 1 if body.parallel_tool_calls is False else None
    return HermesReader(most) if form == "hermes" else LlamaReader(body.tool_names, most)


def calls_schema(body: CompletionBody | ChatBody) -> Json | None:
    """What an answer must be that has to call a tool: the arguments of the chosen one, or a list of calls."""
    if isinstance(body, CompletionBody) or not body.must_call:
        return None
    tools: list[Any] = body.tools or []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or _NO_ARGUMENTS for tool in tools}
    if body.chosen_tool is not None:
        schema: Json = schemas[body.chosen_tool]
        return schema
    # each schema stands whole in a place of its own, and its references lead there
    places = {f"tool{number}": schema for number, schema in enumerate(schemas.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in zip(schemas, places, strict=True)
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    defined = {place: _moved(schema, f"#/$defs/{place}") for place, schema in places.items()}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": defined}


def _moved(schema: Json, place: str) -> Json:
    """A copy whose references to its own beginning lead to `place`. Values that only look like schemas stay."""
    copy: Json = json.loads(json.dumps(schema))
    left: list[Any] = [copy]
    while left:
        inside = left.pop()
        if isinstance(inside, dict):
            reference = inside.get("$ref")
            if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
                inside["$ref"] = place + reference[1:]
            left += [value for name, value in inside.items() if name not in _VALUES]
        elif isinstance(inside, list):
            left += inside
    return copy


def _reads(body: CompletionBody | ChatBody) -> bool:
    return isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"
