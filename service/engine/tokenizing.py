"""Answers `/tokenize` and `/detokenize` in vLLM's shapes: what a text or a chat is in tokens, and back."""

from kvtier.service import Json
from kvtier.service.openai import DetokenizeBody, OpenAIError, Prompts, TokenizeBody


def tokenized(prompts: Prompts, body: TokenizeBody, room: int) -> Json:
    """The tokens of a text or chat. `room`: tokens of the longest request. Raises OpenAIError if there are none."""
    if body.prompt is None:
        found = prompts.chat(body.chat(prompts.prefix))
    else:
        found = prompts.prompt(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    ids = found.token_ids
    strings = prompts.token_strings(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": strings}


def detokenized(prompts: Prompts, body: DetokenizeBody, vocab_size: int) -> Json:
    """The text of tokens, special ones too. Raises OpenAIError if the model has no such token."""
    if (largest := max(body.tokens)) >= vocab_size:
        message = f"tokens: token id {largest}; this model's are 0 to {vocab_size - 1}"
        raise OpenAIError(400, message, param="tokens", code="invalid_value")
    return {"prompt": prompts.text(body.tokens)}
