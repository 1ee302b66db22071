"""What `kvtier explain` found, in plain English; and what it is that changes between two prompts."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvtier.tiers import TIERS

Decode = Callable[[Sequence[int]], str]

_MONTHS: Final = "(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_UUID: Final = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_DATES: Final = (
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2})?)?",
    r"\d{1,2}:\d{2}(:\d{2})?",
    r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
    rf"\d{{1,2}}\.? {_MONTHS} \d{{4}}",
    rf"{_MONTHS} \d{{1,2}}(, \d{{4}})?",
)
_KINDS: Final = (
    ("a request id", re.compile(_UUID)),
    *(("a date or time", re.compile(each)) for each in _DATES),
    ("a request id", re.compile(r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{12,}\b")),
    ("a user name", re.compile(r"(?i)(user|name|customer|account)[ _a-z]*[:=]? ?[\"']?[\w.@-]+")),
)
_BEFORE: Final = 16  # tokens before a block that may begin what changes in it
_ADVICE: Final = {
    "evicted": "Give {tier} more room if prompts return later than that; `kvtier simulate` says what pays.",
    "never_seen": "If it should have been stored, compare cache salt, model and chat template.",
    "not_admitted": "Lower [cache] admit_after to store blocks at their first sighting.",
    "quota": "Give this tenant a larger quota, by `kvtier quota`.",
    "removed": "An operator removed it; it is stored again when it is computed.",
    "reset": "Everything was forgotten; it is stored again when it is computed.",
}
_CAUSES: Final = {
    "evicted": "it was evicted from {tier} {seconds} s ago",
    "never_seen": "it was never stored here, or left too long ago",
    "not_admitted": "it was not admitted to {tier} {seconds} s ago",
    "quota": "its tenant's quota was used up {seconds} s ago",
    "removed": "an operator removed it from {tier} {seconds} s ago",
    "reset": "everything was reset {seconds} s ago",
}


def changing_part(mine: str, theirs: str) -> tuple[str, str, str] | None:
    """What it is that differs between two texts with the same beginning: (what, mine, theirs). None: no known kind."""
    same = next((i for i, (one, other) in enumerate(zip(mine, theirs, strict=False)) if one != other), -1)
    if same < 0:
        return None
    for kind, pattern in _KINDS:
        ours = next((m for m in pattern.finditer(mine) if m.start() <= same < m.end()), None)
        held = next((m for m in pattern.finditer(theirs) if m.start() <= same < m.end()), None)
        if ours is not None and held is not None and ours.start() == held.start():
            return kind, ours.group(), held.group()
    return None


def explained(answer: dict[str, Any], decode: Decode | None = None, tokens: Sequence[int] = ()) -> Iterator[str]:
    """Lines for people; the last one says what to do. `tokens` is the prompt, `decode` makes text of some."""
    size = answer["block_size"]
    for run in answer["runs"]:
        tier = run["tier"]
        where = TIERS[tier].shown if tier in TIERS else tier or "nowhere"
        last = run["first"] + run["blocks"] - 1
        yield f"blocks {run['first']}-{last} (tokens {run['first'] * size}-{(last + 1) * size - 1}): {where}"
    if (cause := answer["cause"]) is None:
        yield "Every whole block is held: nothing to do."
        return
    tier = TIERS[cause["tier"]].shown if cause["tier"] in TIERS else cause["tier"]
    why = _CAUSES.get(cause["name"], "it could not be stored in {tier} {seconds} s ago: " + cause["name"])
    yield f"block {cause['block']} is missing: {why.format(tier=tier, seconds=cause['seconds'])}"
    advice = _ADVICE.get(cause["name"], "See docs/faults.md for that reason.").format(tier=tier)
    if (differs := answer["differs"]) is not None and cause["name"] == "never_seen":
        start = cause["block"] * size
        line, advice = _difference(differs, decode, list(tokens[max(0, start - _BEFORE) : start]))
        yield line
    for other in answer["elsewhere"]:
        held = f"{other['blocks']} blocks of {other['block_size']} tokens"
        yield f"another model holds the same tokens: {other['model']}, {held}"
        what = "block size" if other["block_size"] != size else "model, dtype or layout"
        advice = (
            f"Another fingerprint ({what}) stored this prompt: run the same model with the same options everywhere."
        )
    yield advice


def _difference(differs: dict[str, Any], decode: Decode | None, before: list[int]) -> tuple[str, str]:
    """Where the nearest held block differs, and what helps. Both have the tokens `before`."""
    at, mine, theirs = differs["same"], differs["tokens"], differs["held_tokens"]
    own, held = (str(each[at : at + 4]) for each in (mine, theirs))
    advice = "Put what changes behind all that stays the same, to the end of the prompt."
    if decode is not None:
        own, held = decode(mine[at : at + 4]), decode(theirs[at : at + 4])
        if (part := changing_part(decode([*before, *mine]), decode([*before, *theirs]))) is not None:
            kind, own, held = part
            advice = f"{kind.capitalize()} changes there: move it behind all that stays the same, to the prompt's end."
    return f"differs at token {differs['token']:,}: `{own}` for `{held}`", advice
