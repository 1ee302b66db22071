"""The engine's sampling parameters, from the fields of a body."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from kvtier.engine import Guide, SamplingParams
from kvtier.service.engine.loop import EngineLoop
from kvtier.service.openai import ChatBody, CompletionBody, OpenAIError, too_long

_SHORT_ANSWER: Final = 16  # OpenAI's default for max_tokens of a text completion
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class ChoiceParams:
    """The parameters of a prompt's choices. Each choice has its own random stream."""

    params: SamplingParams
    seed: int | None

    def of_choice(self, choice: int) -> SamplingParams:
        return self.params if self.seed is None else replace(self.params, seed=(self.seed + choice) % _SEEDS)


def params_of(
    loop: EngineLoop, body: CompletionBody | ChatBody, prompt: list[int], guide: Guide | None = None
) -> ChoiceParams:
    """Raises OpenAIError if the engine cannot answer so."""
    is_chat = isinstance(body, ChatBody)
    left = loop.room - len(prompt)
    wanted = body.max_completion_tokens or body.max_tokens if isinstance(body, ChatBody) else body.max_tokens
    max_tokens = wanted or max(1, left if is_chat else min(_SHORT_ANSWER, left))
    require_computable(loop, "messages" if is_chat else "prompt", prompt, max_tokens)
    _require_tokens(loop, "logit_bias", body.logit_bias or ())
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=_of_prompt(loop, body),
        guide=guide,
        is_call=isinstance(body, ChatBody) and body.must_call,
        hint=body.hint,
    )
    return ChoiceParams(params, body.seed)


def require_computable(loop: EngineLoop, param: str, prompt: list[int], num_asked: int) -> None:
    """Raise OpenAIError if the model cannot compute a prompt, and an answer of so many tokens."""
    if not prompt:
        raise OpenAIError(400, f"{param}: it has no tokens; write some text", param=param, code="invalid_value")
    _require_tokens(loop, param, prompt)
    if num_asked > loop.room - len(prompt):
        raise too_long(param, len(prompt), num_asked, loop.room)


def _require_tokens(loop: EngineLoop, param: str, token_ids: Collection[int]) -> None:
    vocab_size = loop.engine.model.vocab_size
    if token_ids and (largest := max(token_ids)) >= vocab_size:
        message = f"{param}: token id {largest}; this model's are 0 to {vocab_size - 1}"
        raise OpenAIError(400, message, param=param, code="invalid_value")


def _of_prompt(loop: EngineLoop, body: CompletionBody | ChatBody) -> int | None:
    """Of how many likeliest tokens the prompt's logprobs are told; None: they are not. Raises OpenAIError."""
    if isinstance(body, ChatBody) or not body.echo or body.logprobs is None:
        return None
    if loop.engine.config.exact or loop.engine.model.has_own_cache:
        why = "this engine is exact" if loop.engine.config.exact else "this kind of model keeps a cache of its own"
        message = f"echo true: with logprobs it wants those of the prompt, and {why}; leave out one of the two"
        raise OpenAIError(400, message, param="echo", code="unsupported_parameter")
    return body.logprobs
