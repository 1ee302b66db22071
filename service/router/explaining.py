"""Answers `kvtier explain` for a router: which replica holds how many blocks of a prompt. It knows no reasons."""

from collections.abc import Iterator

from kvtier.service import Json
from kvtier.service.openai import OpenAIError
from kvtier.service.router.holdings import Held
from kvtier.service.router.prompts import KnownPrompt
from kvtier.tiers import TIERS

_UNKNOWN = {
    "unreadable": "the router cannot read it; give a prompt or messages as the API takes them",
    "no_tokenizer": "the router has no tokenizer; start it with --model DIR, or give token ids by --blocks",
    "late": "no replica has tokenised it in time; give token ids by --blocks",
}


def explained_holdings(known: KnownPrompt, held: Held, block_size: int | None) -> Json:
    """Who holds the prompt, with lines for people. Raises OpenAIError if its tokens are not known."""
    if known.unknown is not None:
        why = _UNKNOWN.get(known.unknown, f"its tokens are not known ({known.unknown}); give token ids by --blocks")
        raise OpenAIError(400, f"prompt: {why}", param="prompt", code="unknown_prompt")
    replicas = [
        {"replica": name, "blocks": sum(found.values()), "media": dict(found), "sure": name in held.sure}
        for name, found in held.prefixes.items()
    ]
    answer: Json = {
        "block_size": block_size,
        "tokens": len(known.tokens),
        "blocks": held.num_blocks,
        "replicas": sorted(replicas, key=lambda each: -each["blocks"]),
    }
    return {**answer, "lines": list(_lines(answer))}


def _lines(answer: Json) -> Iterator[str]:
    """For people."""
    if answer["block_size"] is None or not answer["replicas"]:
        yield "No replica publishes KV events: the router knows nothing of what they hold."
        return
    shown = {kind.medium: kind.shown for kind in TIERS.values()}
    yield f"{answer['tokens']:,} tokens, {answer['blocks']:,} whole blocks of {answer['block_size']}"
    for each in answer["replicas"]:
        where = ", ".join(f"{count:,} in {shown.get(medium, medium)}" for medium, count in each["media"].items())
        unsure = "" if each["sure"] else "; its events are not up to date"
        yield f"{each['replica']}: {each['blocks']:,} blocks{' (' + where + ')' if where else ''}{unsure}"
    yield "A router knows no reasons: ask the engine by --url, or its node's daemon by --http, why it lacks the others."
