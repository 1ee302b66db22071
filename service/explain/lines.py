"""What `kvtier explain` prints, in plain English: where the blocks are, why the next is missing, what helps."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvtier.connector import named_line
from kvtier.service import Json
from kvtier.tiers import TIERS
from kvtier.tiers.config import show_size
from kvtier.tiers.file import options_that_share

# --- how much two blocks have in common ------------------------------------------------------------------------------

_RUN: Final = 3  # consecutive tokens that count as equal at another place
_PART: Final = 4  # a quarter of a block must be equal, or it is another prompt's


def num_alike(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens that are equal: of the beginnings, or of runs at any place. 0 if they are less than a quarter."""
    same = num_same(mine, theirs)
    runs = len(_token_runs(mine) & _token_runs(theirs))
    alike = max(same, runs and runs + _RUN - 1)
    return alike if _PART * alike >= len(mine) else 0


def num_same(mine: Sequence[object], theirs: Sequence[object]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(mine), len(theirs)))


def _token_runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + _RUN]) for at in range(len(tokens) - _RUN + 1)}


# --- what differs between two prompts with the same beginning --------------------------------------------------------

Decode = Callable[[Sequence[int]], str]

_MONTHS: Final = "(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_UUID: Final = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_CUT_UUID: Final = r"\b[0-9a-fA-F]{8}-[0-9a-fA-F-]{0,27}$"  # cut off at the end of the block
_DATES: Final = (
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?",
    r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?",
    r"\d{4}[./]\d{1,2}[./]\d{1,2}",
    r"\d{1,2}[./]\d{1,2}[./]\d{2,4}",
    rf"\d{{1,2}}\.? {_MONTHS} \d{{4}}",
    rf"{_MONTHS} \d{{1,2}}(, \d{{4}})?",
    r"\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)(day|da?$|$)",  # perhaps cut off at the end of the block
    r"\d{4}年\d{1,2}月\d{1,2}日",
    r"\b20\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(T?\d{4,6}Z?)?\b",
    r"\b1[5-9]\d{8}(\d{3}|\.\d+)?\b",  # seconds since 1970, or milliseconds
)
_IDS: Final = (
    r"\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{12,}\b",
    r"\b[0-9A-HJKMNP-TV-Z]{26}\b",
    r"\b(req|chatcmpl|cmpl|resp|msg|call|run|sess|thread|trace)[-_](?=\w*\d)[\w-]+",
    r"(?i:\b(request|session|trace|run|conversation|correlation)[ _-]?(id|number)?[\"']?\s*[:=#])\s*[\"']?[\w.-]+",
)
_NAME: Final = "a user name"
_WHO: Final = r"(?i:\b(user|customer|account|client|member|name)([ _-]?(name|id|number))?)[\"']?"
_NAMES: Final = (
    rf"{_WHO} *[:=] *[\"']?[\w.@-]+( [A-Z][\w.-]*){{0,2}}",
    rf"{_WHO} +((is|named|called) +)?([A-Z][\w.@-]*( [A-Z][\w.-]*)?|[\w.@-]*\d[\w.@-]*)",
    r"\b[\w.+-]+@[\w-]+\.[\w.-]+",
)
_KINDS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, patterns in (
        ("a request id", (_UUID, _CUT_UUID)),
        ("a date or time", _DATES),
        ("a request id", _IDS),
        (_NAME, _NAMES),
    )
    for pattern in patterns
)
_SHOWN: Final = 4  # tokens of each that are shown if their kind is unknown
_SAME: Final = 8  # characters that must be equal behind differing tokens: the same text, tokenized in two ways
_GOES_ON: Final = 3  # equal characters behind what changes
_MANY: Final = 3  # tokens that must be equal, some places further on
_FURTHER: Final = 16  # places


class Difference(NamedTuple):
    line: str
    advice: str


def finding(differs: Json, decode: Decode | None, before: Sequence[int], special: Collection[int]) -> Difference:
    at, mine, theirs = differs["same"], differs["tokens"], differs["held_tokens"]
    is_another = differs["token"] == at and not num_alike(
        mine, theirs
    )  # of a first block; behind it the head is shared
    place = f"differs at token {differs['token']:,}"
    if at == len(theirs) < len(mine):
        return Difference(f"the held prompt ends at token {differs['token'] - 1:,}, and this one goes on", _GOES_ON_NEW)
    if decode is not None and (known := _known_cause(decode([*before, *mine]), decode([*before, *theirs]))) is not None:
        return Difference(f"{place}: {known.line}", known.advice)
    if (shifted := _shifted(mine[at:], theirs[at:])) is not None:
        who, more = shifted
        number = "one token" if len(more) == 1 else f"{len(more)} tokens"
        shown = ", ".join(map(str, more)) if decode is None else f"`{decode(more)}`"
        template = "another choice of add_special_tokens" if len(more) == 1 else "text before all that stays the same"
        return Difference(
            f"{place}: {who} prompt has {number} more there, {shown}",
            f"Another chat template, or {template}: use the same in every client.",
        )
    if decode is None:
        own, held = (str(each[at : at + _SHOWN]) for each in (mine, theirs))
        return Difference(f"{place}: `{own}` for `{held}`", _ANOTHER if is_another else _MOVE)
    if (cuts := _cut_anew(mine[at:], theirs[at:], decode)) is not None:
        own, held = cuts
        return Difference(
            f"the same text is other tokens at token {differs['token']:,}: `{own}` for `{held}`",
            "An answer that is sent back as text is tokenised anew: send its token ids, or let one tokenizer cut all.",
        )
    whole, held_whole = decode([*before, *mine]), decode([*before, *theirs])
    part = changing_part(whole, held_whole)
    if part is not None:
        kind, own, held = part
        advice = f"{kind.capitalize()} changes there: move it behind all that stays the same, to the prompt's end."
        if named_line(_line_at(whole, num_same(whole, held_whole))) == "date":
            advice += ' [chat] move_lines = ["date"] moves such lines to the end of their message.'
        return Difference(f"{place}: `{own}` for `{held}`", advice)
    own, held = decode(mine[at : at + _SHOWN]), decode(theirs[at : at + _SHOWN])
    text = f"{place}: `{own}` for `{held}`"
    behind = [*before, *mine[:at]][-1:]
    if not {*mine[at : at + 1], *theirs[at : at + 1], *behind}.isdisjoint(special):
        else_another = ", or another prompt" if is_another else ""
        advice = "A special token is there: another chat template, other roles, or a system prompt that one side lacks"
        return Difference(text, f"{advice}{else_another}.")
    return Difference(text, _ANOTHER if is_another else _MOVE)


_REASONING: Final = re.compile(r"<think>|<thinking>|<reasoning>|\[THINK\]|<\|channel\|>analysis")
_KEY: Final = re.compile(r'"[\w.$-]*(?:"\s*:|"?$)')  # of a JSON object; perhaps cut off at the end of the block


def _known_cause(mine: str, theirs: str) -> Difference | None:
    if (same := num_same(mine, theirs)) == min(len(mine), len(theirs)):
        return None
    if named_line(line := _line_at(mine, same)) == "billing" and _line_at(theirs, same).startswith(line[:20]):
        advice = 'A billing header changes there: [chat] drop_lines = ["billing"] leaves that line out.'
        return Difference(f"`{line}` for `{_line_at(theirs, same)}`", advice)
    of_mine, of_theirs = _match_at(_REASONING, mine, same), _match_at(_REASONING, theirs, same)
    if (of_mine and of_mine[0]) != (of_theirs and of_theirs[0]):
        advice = (
            "Chat templates leave out the reasoning of earlier turns, so its KV is never found: "
            '[cache] store_generated = "answers" does not store it.'
        )
        whose = "this" if of_theirs is None else "the held"
        return Difference(f"reasoning begins there in {whose} prompt", advice)
    own, held = _match_at(_KEY, mine, same), _match_at(_KEY, theirs, same)
    if own and held:
        advice = "Keys of JSON have another order there: for tools' schemas, [chat] sort_tools = true gives them one."
        return Difference(f"`{own[0]}` for `{held[0]}`", advice)
    return None


def _match_at(pattern: re.Pattern[str], text: str, place: int) -> re.Match[str] | None:
    return next((m for m in pattern.finditer(text) if m.start() <= place < m.end()), None)


def _line_at(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, max(0, place)) + 1 :].partition("\n")[0]


_ANOTHER: Final = (
    "Little before and behind is the same: another prompt, or another chat template or system prompt at its head."
)
_GOES_ON_NEW: Final = "Nothing to do: what goes on there is new, and is held once it was computed."
_MOVE: Final = "Put what changes behind all that stays the same, to the end of the prompt."


def changing_part(mine: str, theirs: str) -> tuple[str, str, str] | None:
    """What differs between two texts with the same beginning: (kind, mine, theirs). None: no known kind."""
    if (same := num_same(mine, theirs)) == min(len(mine), len(theirs)):
        return None
    for kind, pattern in _KINDS:
        ours, held = _match_at(pattern, mine, same), _match_at(pattern, theirs, same)
        if ours is None or held is None or ours.start() != held.start():
            continue
        rests = zip(mine[ours.end() :][:_GOES_ON], theirs[held.end() :][:_GOES_ON], strict=False)
        if kind != _NAME or all(one == other for one, other in rests):  # else another sentence, as after `User: `
            return kind, ours.group(), held.group()
    return None


def _shifted(mine: Sequence[int], theirs: Sequence[int]) -> tuple[str, list[int]] | None:
    size = min(len(mine), len(theirs))
    for more in range(1, min(_FURTHER, size // 2, size - _MANY) + 1):
        if list(mine[more:size]) == list(theirs[: size - more]):
            return "this", list(mine[:more])
        if list(theirs[more:size]) == list(mine[: size - more]):
            return "the held", list(theirs[:more])
    return None


def _cut_anew(mine: Sequence[int], theirs: Sequence[int], decode: Decode) -> tuple[str, str] | None:
    """The same text in two tokenizations, up to where both meet: `he|llo` and `hello`. None: the text differs."""
    if not mine or not theirs:
        return None
    own, held = decode(mine), decode(theirs)
    same = num_same(own, held)
    first = max(len(decode(mine[:1])), len(decode(theirs[:1])))
    if same < min(len(own), len(held)) and same < first + _SAME:
        return None
    one = other = 1
    while (left := len(decode(mine[:one]))) != (right := len(decode(theirs[:other]))):
        if left < right:
            one += 1
        else:
            other += 1
        if one > len(mine) or other > len(theirs):
            break
    return "|".join(decode([each]) for each in mine[:one]), "|".join(decode([each]) for each in theirs[:other])


# --- the lines -------------------------------------------------------------------------------------------------------

_BEFORE: Final = 64  # tokens before a block where the change may begin
_UNKNOWN: Final = ("never_seen", "absent")
_ADVICE: Final = {
    "absent": "Its tiers are a daemon's: ask that one, by --http, or by --request with the same id.",
    "evicted": "Give {tier} more room if prompts return later than that; `kvtier simulate` says what pays.",
    "lost": "Give {tier} more room, or let blocks live longer there: [redis] ttl, or a bucket's lifecycle rule.",
    "never_seen": "If it should have been stored, compare cache salt, model and chat template.",
    "not_admitted": "Lower [cache] admit_after to store blocks at their first sighting.",
    "outranked": "Give {tier} more room: by [cache] policy, what it holds is needed sooner.",
    "quota": "Give this tenant a larger quota, by `kvtier quota`.",
    "removed": "An operator removed it; it is stored again when it is computed.",
    "reset": "Everything was forgotten; it is stored again when it is computed.",
    "short": "Less than a block is never stored: a smaller [cache] block_size would hold more of such prompts.",
}
_LOSSY: Final = "One engine keeps KV with loss, the other does not: give both the same [cache] lossy."
_SIZES: Final = "Ranks of another number stored such blocks: with [cache] {} this engine finds those."
_CAUSES: Final = {
    "absent": "the engine does not know why",
    "evicted": "it was evicted from {tier} {seconds} s ago",
    "lost": "it was stored in {tier} {seconds} s ago and is not there now: it expired, or was evicted",
    "never_seen": "it was never stored here, or left too long ago",
    "not_admitted": "it was not admitted to {tier} {seconds} s ago",
    "outranked": "{tier} kept blocks that are likelier to return, {seconds} s ago",
    "quota": "its tenant's quota was used up {seconds} s ago",
    "removed": "an operator removed it from {tier} {seconds} s ago",
    "reset": "everything was reset {seconds} s ago",
    "short": "the prompt has {tokens} tokens, and a block has {size}",
}


def explained(
    answer: dict[str, Any], decode: Decode | None = None, tokens: Sequence[int] = (), special: Collection[int] = ()
) -> Iterator[str]:
    """Lines for people, advice last. `tokens`: the prompt; `special`: tokens that templates write."""
    size = answer["block_size"]
    for run in answer["runs"]:
        last = run["first"] + run["blocks"] - 1
        where = _shown(run["tier"]) or "nowhere"
        yield f"blocks {run['first']}-{last} (tokens {run['first'] * size}-{(last + 1) * size - 1}): {where}"
    if (cut := answer.get("other_cut")) is not None:
        cuts = cut["tokens"], cut["other_tokens"]
        own, other = (each if decode is None else [decode([token]) for token in each] for each in cuts)
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
        held = f"{other['blocks']} blocks of {other['block_size']} tokens"
        yield f"another model holds the same tokens: {other['model']}, {held}"
        yield from _fields(other)
        fields = ", ".join(each["field"] for each in other.get("fields", ()))
        if fields == "lossy" or _options(other):
            advice = _SIZES.format(_options(other)) if _options(other) else _LOSSY
            continue
        what = fields or ("block size" if other["block_size"] != size else "model, dtype or layout")
        advice = (
            f"Another fingerprint ({what}) stored this prompt: run the same model with the same options everywhere."
        )
    for slab in answer.get("closed", ()):
        yield f"a closed slab is of the same checkpoint: {slab['model']}, {show_size(slab['bytes'])}"
        yield from _fields(slab)
        advice = "Another fingerprint may have stored this prompt: run the same model with the same options everywhere."
        if _options(slab):
            advice = _SIZES.format(_options(slab))
        elif [each["field"] for each in slab.get("fields", ())] == ["lossy"]:
            advice = _LOSSY
    if cut is not None:
        advice = "Another tokenizer made these prompts: use the engine's, or send text to it."
    yield advice


def _options(model: dict[str, Any]) -> str:
    here, there = ({each["field"]: each[side] for each in model.get("fields", ())} for side in ("here", "there"))
    return ", ".join(f"{option} = {value}" for option, value in options_that_share(here, there).items())


def _fields(model: dict[str, Any]) -> Iterator[str]:
    for field in model.get("fields", ()):
        yield f"  {field['field']}: {field['here']} here, {field['there']} there"


def _shown(tier: str | None) -> str:
    return TIERS[tier].shown if tier in TIERS else tier or ""
