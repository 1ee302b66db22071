"""What `kvtier explain` found, in plain English: where the blocks are, why the next one is missing, what helps."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from kvtier.service.observe.differing import Decode, finding
from kvtier.tiers import TIERS
from kvtier.tiers.config import show_size

_BEFORE: Final = 64  # tokens before a block that may begin what changes in it
_UNKNOWN: Final = ("never_seen", "absent")
_ADVICE: Final = {
    "absent": "Its tiers are a daemon's: ask that one, by --http, or by --request with the same id.",
    "evicted": "Give {tier} more room if prompts return later than that; `kvtier simulate` says what pays.",
    "lost": "Give {tier} more room, or let blocks live longer there: [redis] ttl, or a bucket's lifecycle rule.",
    "never_seen": "If it should have been stored, compare cache salt, model and chat template.",
    "not_admitted": "Lower [cache] admit_after to store blocks at their first sighting.",
    "quota": "Give this tenant a larger quota, by `kvtier quota`.",
    "removed": "An operator removed it; it is stored again when it is computed.",
    "reset": "Everything was forgotten; it is stored again when it is computed.",
    "short": "Less than a block is never stored: a smaller [cache] block_size would hold more of such prompts.",
}
_LOSSY: Final = "One engine keeps KV with loss, the other does not: give both the same [cache] lossy."
_CAUSES: Final = {
    "absent": "the engine does not know why",
    "evicted": "it was evicted from {tier} {seconds} s ago",
    "lost": "it was stored in {tier} {seconds} s ago and is not there now: it expired, or was evicted",
    "never_seen": "it was never stored here, or left too long ago",
    "not_admitted": "it was not admitted to {tier} {seconds} s ago",
    "quota": "its tenant's quota was used up {seconds} s ago",
    "removed": "an operator removed it from {tier} {seconds} s ago",
    "reset": "everything was reset {seconds} s ago",
    "short": "the prompt has {tokens} tokens, and a block has {size}",
}


def explained(
    answer: dict[str, Any], decode: Decode | None = None, tokens: Sequence[int] = (), special: Collection[int] = ()
) -> Iterator[str]:
    """Lines for people; the last one says what to do.

    `tokens` is the prompt, `decode` makes text of some, `special` are those that templates write.
    """
    size = answer["block_size"]
    for run in answer["runs"]:
        last = run["first"] + run["blocks"] - 1
        where = _shown(run["tier"]) or "nowhere"
        yield f"blocks {run['first']}-{last} (tokens {run['first'] * size}-{(last + 1) * size - 1}): {where}"
    if (cut := answer.get("other_cut")) is not None:
        own, other = (each if decode is None else [decode([token]) for token in each] for each in _cuts(cut))
        yield f"another tokenizer cuts the text otherwise from token {cut['token']:,} on: {other} for {own}"
    if slow := _shown(answer.get("recompute")):
        yield f"loading what {slow} holds takes longer than computing these blocks: engines compute them"
    if (cause := answer["cause"]) is None:
        faster = f'A faster {slow} would be loaded from; [cache] load_or_recompute = "load" loads in any case.'
        yield faster if slow else "Every whole block is held: nothing to do."
        return
    words = {**cause, "tier": _shown(cause["tier"]), "size": size, "tokens": answer.get("tokens", 0)}
    why = _CAUSES.get(cause["name"], "it could not be stored in {tier} {seconds} s ago: " + cause["name"])
    yield f"block {cause['block']} is missing: {why.format(**words)}"
    advice = _ADVICE.get(cause["name"], "See docs/troubleshooting.md for that reason.").format(**words)
    away = [_shown(each) for each in answer.get("unreachable", ()) if cause["name"] != "short"]
    if away:
        yield f"{', '.join(away)}: not reachable now, and may hold it"
        advice = "See `kvtier status`: what is out of reach is a miss until it answers."
    holders = [*answer.get("tenants", ()), *answer["elsewhere"]]
    if (differs := answer["differs"]) is not None and cause["name"] in _UNKNOWN:
        start = cause["block"] * size
        line, advice = finding(differs, decode, list(tokens[max(0, start - _BEFORE) : start]), special)
        yield line
    elif answer.get("nothing_alike") and cause["name"] in _UNKNOWN and not holders:
        yield "nothing alike is known: no held prompt that was compared begins like it"
    elif cause["name"] == "never_seen" and cause["block"] and not (holders or away):
        yield f"no held prompt that is known goes on behind token {cause['block'] * size - 1:,}"
        advice = "Nothing to do where that text is new: it is held once it was computed."
    for tenant in answer.get("tenants", ()):
        whose = "a request without a cache_salt" if tenant["tenant"] == "no salt" else f"cache_salt {tenant['tenant']}"
        yield f"another tenant holds the same tokens: {whose}, {tenant['blocks']} blocks"
        advice = "Another cache_salt stored this prompt: send the same one with all that may share it, or none."
    for other in answer["elsewhere"]:
        yield from _other_model(other)
        fields = ", ".join(each["field"] for each in other.get("fields", ()))
        if fields == "lossy":
            advice = _LOSSY
            continue
        what = fields or ("block size" if other["block_size"] != size else "model, dtype or layout")
        advice = (
            f"Another fingerprint ({what}) stored this prompt: run the same model with the same options everywhere."
        )
    for slab in answer.get("closed", ()):
        yield f"a closed slab is of the same checkpoint: {slab['model']}, {show_size(slab['bytes'])}"
        yield from _fields(slab)
        advice = "Another fingerprint may have stored this prompt: run the same model with the same options everywhere."
        if [each["field"] for each in slab.get("fields", ())] == ["lossy"]:
            advice = _LOSSY
    if cut is not None:
        advice = "Another tokenizer made these prompts: use the engine's, or send text to it."
    yield advice


def _other_model(other: dict[str, Any]) -> Iterator[str]:
    held = f"{other['blocks']} blocks of {other['block_size']} tokens"
    yield f"another model holds the same tokens: {other['model']}, {held}"
    yield from _fields(other)


def _fields(model: dict[str, Any]) -> Iterator[str]:
    for field in model.get("fields", ()):
        yield f"  {field['field']}: {field['here']} here, {field['there']} there"


def _shown(tier: str | None) -> str:
    return TIERS[tier].shown if tier in TIERS else tier or ""


def _cuts(cut: dict[str, Any]) -> tuple[list[int], list[int]]:
    return cut["tokens"], cut["other_tokens"]
