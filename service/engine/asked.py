"""What request bodies ask of the engine: read, checked, and turned into its inputs. Called on any thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from kvtier.engine import Guide, SamplingParams
from kvtier.service import Json
from kvtier.service.engine.calling import calls_schema, marks_of, reader_of
from kvtier.service.engine.completion import CompletionRequest, Echo
from kvtier.service.engine.guides import JsonGuides
from kvtier.service.engine.logprobs import ChatLogprobs, TextLogprobs
from kvtier.service.engine.loop import EngineLoop, SequenceInput
from kvtier.service.engine.params import params_of, require_computable
from kvtier.service.engine.precompute import PrecomputeRequest
from kvtier.service.engine.segments import repair_of, segments_of
from kvtier.service.engine.text import AnswerText
from kvtier.service.engine.tokenizing import detokenized, tokenized
from kvtier.service.openai import (
    CallForm,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OpenAIError,
    PrecomputeBody,
    Prompts,
    TokenizeBody,
    parse,
    schema_of,
    unknown_model,
)
from kvtier.tiers.config import ServerConfig

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Served:
    """What the API needs. `events`: where KV events are published, if they are; `node`: where its daemon's are."""

    loop: EngineLoop
    prompts: Prompts
    name: str
    config: ServerConfig
    guides: JsonGuides
    events: Mapping[str, str | None] | None = None
    node: Mapping[str, str | None] | None = None
    call_form: CallForm | None = None  # how its answers call tools


def require_model(served: Served, name: str | None) -> None:
    """Raise OpenAIError if that is not the model here; None is."""
    if name is not None and name != served.name:
        raise unknown_model(name, served.name)


def completion_of(
    served: Served, body_type: type[CompletionBody] | type[ChatBody], data: bytes, deadline: float
) -> CompletionRequest:
    """What a body asks for, with `n` inputs for each prompt. Raises OpenAIError if it cannot be computed."""
    body: CompletionBody | ChatBody = _parsed(served, body_type, data)
    loop, num_choices = served.loop, body.n or 1
    require_model(served, body.model)
    num_prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
    _require_room(loop, "n" if num_choices > 1 else "prompt", num_prompts * num_choices)
    if isinstance(body, ChatBody) and body.tools and not (body.must_call or served.prompts.takes_tools):
        why = "this model's chat template has no place for them; leave them out, or require a call by tool_choice"
        raise OpenAIError(400, f"tools: {why}", param="tools", code="unsupported_parameter")
    prompts = served.prompts.tokenized(body)
    guide = _guide_of(served, body)
    params = [params_of(loop, body, prompt.token_ids, guide) for prompt in prompts]
    repair = repair_of(body, loop.engine)
    segments = segments_of(body, prompts, repair, loop.engine)
    named = [loop.engine.prompt(prompt.token_ids, body.cache_salt) for prompt in prompts]
    inputs = [
        SequenceInput(prompt, options.of_choice(choice), some, repair)
        for prompt, options, some in zip(named, params, segments, strict=True)
        for choice in range(num_choices)
    ]
    echoes = _echoes(served.prompts, body, [prompt.token_ids for prompt in prompts])
    marks = marks_of(body, served.call_form)
    return CompletionRequest(
        model=served.name,
        fingerprint=f"kvtier-{loop.fingerprint[:16]}",
        inputs=inputs,
        texts=[AnswerText(served.prompts.detokenizer(marks), body.stop or ()) for _ in inputs],
        logprobs=[_logprobs_of(served.prompts, body) for _ in inputs],
        readers=[reader_of(body, served.call_form) for _ in inputs],
        echoes=[echo for echo in echoes for _ in range(num_choices)],
        num_choices=num_choices,
        deadline=deadline,
        streams=bool(body.stream),
        wants_usage=body.wants_usage,
    )


def precomputation_of(served: Served, data: bytes, deadline: float) -> PrecomputeRequest:
    """The texts to precompute. Raises OpenAIError if one cannot be computed."""
    body, loop = parse(PrecomputeBody, data), served.loop
    require_model(served, body.model)
    _require_room(loop, "texts", len(body.each))
    texts = [served.prompts.segment("texts", one) if isinstance(one, str) else one for one in body.each]
    for text in texts:
        require_computable(loop, "texts", text, 1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    inputs = [SequenceInput(loop.engine.prompt(text, body.cache_salt), params) for text in texts]
    return PrecomputeRequest(served.name, inputs, deadline)


def tokens_of(served: Served, data: bytes) -> Json:
    """Answers `/tokenize`. Raises OpenAIError."""
    body = _parsed(served, TokenizeBody, data)
    require_model(served, body.model)
    return tokenized(served.prompts, body, served.loop.room)


def text_of_tokens(served: Served, data: bytes) -> Json:
    """Answers `/detokenize`. Raises OpenAIError."""
    body = _parsed(served, DetokenizeBody, data)
    require_model(served, body.model)
    return detokenized(served.prompts, body, served.loop.engine.model.vocab_size)


def _parsed(served: Served, body_type: type[B], data: bytes) -> B:
    """The body of a request. What nobody here knows of it is ignored, and counted."""
    unknown: set[str] = set()
    body = parse(body_type, data, unknown)
    if unknown:
        served.loop.tally.ignored.note(unknown)
    return body


def _require_room(loop: EngineLoop, param: str, num: int) -> None:
    """Raise OpenAIError if there is no room for so many sequences, now or ever; called before work is done."""
    if num > loop.capacity:
        message = f"{param}: {num} answers at once; this server has room for {loop.capacity}: ask for fewer"
        raise OpenAIError(400, message, param=param, code="invalid_value")
    loop.require_room(num)


def _logprobs_of(prompts: Prompts, body: CompletionBody | ChatBody) -> ChatLogprobs | TextLogprobs | None:
    """What tells how likely the tokens of one choice were; None: nobody asks."""
    if body.num_logprobs is None:
        return None
    return ChatLogprobs(prompts.token_texts) if isinstance(body, ChatBody) else TextLogprobs(prompts.token_texts)


def _guide_of(served: Served, body: CompletionBody | ChatBody) -> Guide | None:
    """What the answer may be; None: any text. Raises OpenAIError if that cannot be."""
    if (calls := calls_schema(body)) is not None:
        try:
            return served.guides.of(calls, "tool_choice")
        except OpenAIError:
            tools: list[Any] = (body.tools if isinstance(body, ChatBody) else None) or []
            for number, tool in enumerate(tools):
                served.guides.of(tool["function"].get("parameters") or {}, f"tools.{number}.function.parameters")
            raise  # it is not one tool's schema alone
    wanted = schema_of(body.response_format)
    return None if wanted is None else served.guides.of(*wanted)


def _echoes(prompts: Prompts, body: CompletionBody | ChatBody, token_ids: Sequence[list[int]]) -> Sequence[Echo | None]:
    """What each prompt's answers begin with."""
    if isinstance(body, ChatBody) or not body.echo:
        return [None] * len(token_ids)
    return [
        Echo(given if isinstance(given, str) else prompts.text(tokens), tokens)
        for given, tokens in zip(body.prompts, token_ids, strict=True)
    ]
