"""Which calls of `generate` blocks can hold: rows of plain tokens, decoded one after the other behind the prompt."""

from typing import Any, Final

import torch

_ONE: Final = ("num_beams", "num_return_sequences", "num_beam_groups")
_OWN_WAYS: Final = (  # of decoding, beside one token after the other behind the prompt as it was given
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "custom_generate",
    "token_healing",
)
_WHOLE_PROMPT: Final = ("output_attentions", "output_hidden_states")
_DYNAMIC: Final = (None, "dynamic", "hybrid")  # the cache that is made here; Gemma's checkpoints name the last


def no_rows(model: Any, input_ids: torch.Tensor) -> str | None:
    """What keeps blocks from holding these tokens' KV, and the fix; None for plain rows."""
    if model.training:
        return "the model is in training mode; call model.eval()"
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        return f"input_ids has the shape {tuple(input_ids.shape)}; pass [rows, tokens]"
    return None


def not_plain(model: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> str | None:
    """What keeps blocks from holding the KV of `generate(input_ids, **options)`, and the fix; None where they can."""
    given = {name: asked_for(model, options, name) for name in (*_ONE, *_OWN_WAYS, *_WHOLE_PROMPT)}
    if options.get("past_key_values") is not None:
        return "past_key_values is a cache of the caller's; leave it out, or use load() and store()"
    if asked_for(model, options, "use_cache") is False:
        return "use_cache=False; leave it out"
    if (kind := asked_for(model, options, "cache_implementation")) not in _DYNAMIC:
        return f"cache_implementation={kind!r}; leave it out, or set it to None in model.generation_config"
    if several := [name for name in _ONE if given[name] not in (None, 1)]:
        return f"{several[0]}={given[several[0]]}; leave it at 1, and pass a prompt several times for several answers"
    if ways := [name for name in _OWN_WAYS if given[name]]:
        return f"{ways[0]} decodes in a way of its own; leave it out"
    if whole := [name for name in _WHOLE_PROMPT if given[name]]:
        return f"{whole[0]} would lack the tokens that are loaded; leave it out"
    if _is_padded(model, input_ids, options):
        return "padding or a mask; generate rows of one length together, without either"
    tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
    if more := sorted(tensors - {"attention_mask", "pad_token_id", "eos_token_id", "bos_token_id"}):
        return f"{', '.join(more)}: KV that depends on more than the tokens; leave it out if it changes nothing"
    return None


def asked_for(model: Any, options: dict[str, Any], name: str) -> Any:
    """The value `generate` goes by: the argument, else the generation_config argument's, else the model's."""
    if name in options:
        return options[name]
    settings = (options.get("generation_config"), model.generation_config)
    return next((value for one in settings if (value := getattr(one, name, None)) is not None), None)


def _is_padded(model: Any, input_ids: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether any token is masked. Without a mask `generate` makes one that hides the padding token."""
    mask = options.get("attention_mask")
    if mask is not None:
        return mask.shape != input_ids.shape or not bool(mask.all())
    pad, ends = (asked_for(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or (ends is not None and bool(torch.isin(torch.as_tensor(ends), torch.as_tensor(pad)).any())):
        return False
    return bool((input_ids == pad).any())
