"""Which of a request's answers are read for tool calls, and in which form."""

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
    # references lead to the beginning of a schema: what they name is moved there
    named = {name: each for schema in schemas.values() for name, each in schema.get("$defs", {}).items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {k: v for k, v in schema.items() if k != "$defs"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    listed = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
    return {**listed, "$defs": named} if named else listed


def _reads(body: CompletionBody | ChatBody) -> bool:
    return isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none"
