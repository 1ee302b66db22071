"""What a request asks of segment reuse: where its segments lie, how they are repaired, and whether that can be done."""

from collections.abc import Sequence
from typing import Any, Final

from kvtier.connector.segments import Repair, Segment
from kvtier.engine import Engine, wanted_reuse
from kvtier.service.openai import ChatBody, CompletionBody, OpenAIError, TokenizedPrompt
from kvtier.tiers import RequestError

_SEGMENTS: Final = "kvtier.segments"
_PAIRS: Final = "a list of pairs, [[start, end], …], for one prompt of token ids, or such a list for each of several"


def segments_of(
    body: CompletionBody | ChatBody, prompts: Sequence[TokenizedPrompt], repair: Repair | None, engine: Engine
) -> list[list[Segment]]:
    """The segments of each prompt: the parts that are marked, or what `kvtier.segments` names.

    Raises OpenAIError if the latter do not fit the prompts, or the engine would refuse one of them.
    """
    named = _named(body, len(prompts))
    field = _SEGMENTS if named else "messages" if isinstance(body, ChatBody) else "prompt"
    wanted = named or [_segments(prompt.segments) for prompt in prompts]
    for segments, prompt in zip(wanted, prompts, strict=True):
        try:
            wanted_reuse(segments, repair, len(prompt.token_ids), engine.segments)
        except RequestError as error:
            raise _refused(engine, field, str(error)) from None
    return wanted


def repair_of(body: CompletionBody | ChatBody, engine: Engine) -> Repair | None:
    """How the request wants its segments repaired; None: as configured."""
    wanted = None if body.kvtier is None else body.kvtier.repair
    if wanted is None:
        return None
    given = {name: value for name, value in wanted.model_dump().items() if value is not None}
    return Repair(**{"rule": engine.config.repair_rule, "share": engine.config.repair_share, **given})


def _named(body: CompletionBody | ChatBody, num_prompts: int) -> list[list[Segment]]:
    """The segments that `kvtier.segments` names, a list for each prompt; none: it names none."""
    if isinstance(body, ChatBody) or body.kvtier is None or not body.kvtier.segments:
        return []
    first = body.prompt[0] if isinstance(body.prompt, list) else None
    if not isinstance(first, int | list):
        raise _wrong("they count tokens, but the prompt is text; give token ids, or mark parts of type text")
    named: list[Any] = body.kvtier.segments
    is_several = not any(named) or any(isinstance(each, list) for one in named for each in one)
    if isinstance(first, list) != is_several:
        raise _wrong(f"not of the prompt's shape; give {_PAIRS}")
    if is_several and len(named) != num_prompts:
        raise _wrong(f"{len(named)} lists for {num_prompts} prompts; give {_PAIRS}")
    return [_segments(pairs) for pairs in named] if is_several else [_segments(named)]


def _segments(pairs: Sequence[Any]) -> list[Segment]:
    return [Segment(start, end) for start, end in pairs]


def _refused(engine: Engine, field: str, why: str) -> OpenAIError:
    """What the engine says of segments, with the field at fault."""
    if engine.segments is None or engine.config.exact:
        message = f"{field}: {why}" if field != _SEGMENTS else f"kvtier.{why}"
        return OpenAIError(400, message, param=field, code="unsupported_parameter")
    if why.startswith("check_layer"):
        return OpenAIError(400, f"kvtier.repair.{why}", param="kvtier.repair.check_layer", code="invalid_value")
    return OpenAIError(400, f"{field}: {why}", param=field, code="invalid_value")


def _wrong(why: str) -> OpenAIError:
    return OpenAIError(400, f"{_SEGMENTS}: {why}", param=_SEGMENTS, code="invalid_value")
