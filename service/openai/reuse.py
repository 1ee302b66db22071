"""What only kvtier's engine knows of a request: the fields under `kvtier`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo

from kvtier.connector import hint_in, is_cache_mark
from kvtier.service.openai.fields import MAX_LIST, MAX_NUMBER, Strict, must_be, options
from kvtier.tiers.returns import Hint


def _shape(value: object) -> str:
    """Whether segments are those of one prompt, or a list for each of several: one of the tags below."""
    lists = [each for each in value if isinstance(each, list)] if isinstance(value, list) else []
    is_nested = any(isinstance(each, list) for one in lists for each in one) or (lists and not any(lists))
    return "=lists" if is_nested else "=pairs"


class RepairFields(Strict):
    """How much of what is reused is computed anew; what is left out is as configured."""

    rule: Literal["deviation", "question", "first", "borders", "random"] | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    check_layer: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    max_deviation: Annotated[float, Field(ge=0)] | None = None


SaidHint = Annotated[Hint, Field(strict=False)]  # JSON has words, no members of an enumeration


def _noted(info: ValidationInfo, name: str) -> None:
    """Count a field that says nothing with those that are unknown here."""
    if isinstance(info.context, set):
        info.context.add(name)


def _mark(value: object, info: ValidationInfo) -> bool:
    if not (is_mark := is_cache_mark(value)) and value is not None:
        _noted(info, "cache_control")
    return is_mark


def _envelope(value: object, info: ValidationInfo) -> Hint | None:
    return None if value is None else hint_in(value, lambda _: _noted(info, "kv_hints"))


CacheMark = Annotated[bool, BeforeValidator(_mark)]
"""Anthropic's `cache_control`: whether it is one. What is none is ignored."""

KVHints = Annotated[Hint | None, BeforeValidator(_envelope)]
"""vLLM's `kv_hints`: what they say. What says nothing is ignored."""


class ChatReuse(Strict):
    """Of a chat."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(options)] = None
    segments: Annotated[None, must_be([], fix="mark a part of type text in messages, and only it")] = None


TokenPlace = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
SegmentPair = Annotated[list[TokenPlace], Field(min_length=2, max_length=2, fail_fast=True)]
SegmentPairs = Annotated[list[SegmentPair], Field(max_length=MAX_LIST, fail_fast=True)]


class CompletionReuse(Strict):
    """The same of a completion. Segments are pairs of start and end in tokens: of a prompt, or a list for each."""

    hint: SaidHint | None = None
    repair: Annotated[RepairFields | None, BeforeValidator(options)] = None
    segments: (
        Annotated[
            Annotated[SegmentPairs, Tag("=pairs")]
            | Annotated[Annotated[list[SegmentPairs], Field(max_length=MAX_LIST, fail_fast=True)], Tag("=lists")],
            Discriminator(_shape),
        ]
        | None
    ) = None
