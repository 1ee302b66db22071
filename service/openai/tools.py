"""What a chat's body says of tools: those that may be called, which must be, and calls of earlier turns."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator

from kvtier.service.openai.fields import Text, Tolerant, few_fields
from kvtier.service.openai.reuse import CacheMark

_MAX_TOOLS: Final = 1024


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checked, and kept as it was sent: a template may read whatever stands there."""
    check(value)
    return value


class _Function(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Tolerant):
    type: Literal["function"] = "function"
    function: Annotated[_Function, BeforeValidator(few_fields)]
    cache_control: CacheMark = False


class _CalledFunction(Tolerant):
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: Text | dict[str, Any] | None = None  # JSON, or what it means


class _SentCall(Tolerant):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: Annotated[_CalledFunction, BeforeValidator(few_fields)]


class _ChosenFunction(Tolerant):
    name: Text


class ChosenTool(Tolerant):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: Annotated[_ChosenFunction, BeforeValidator(few_fields)]


def _choice_kind(value: object) -> str:
    return "=word" if isinstance(value, str) else "=tool"


Tools = Annotated[
    list[Annotated[_Tool, BeforeValidator(few_fields), WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
SentCalls = Annotated[
    list[Annotated[_SentCall, BeforeValidator(few_fields), WrapValidator(_as_sent)]],
    Field(max_length=_MAX_TOOLS, fail_fast=True),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("=word")]
    | Annotated[ChosenTool, BeforeValidator(few_fields), Tag("=tool")],
    Discriminator(_choice_kind),
]
