"""Answers `kvtier explain` for an engine: a prompt as text, messages or token ids, or a request that ended lately."""

from collections.abc import Sequence
from typing import Final

from kvtier.connector import LocalConnector
from kvtier.engine import Engine, NamedPrompt
from kvtier.service import Json
from kvtier.service.engine.loop import EngineLoop
from kvtier.service.explain import (
    AskedChain,
    client_of,
    explain_chain,
    explained,
    held_by_tenants,
    is_unknown,
    tenant_name,
)
from kvtier.service.openai import ExplainBody, OpenAIError, Prompts, parse
from kvtier.tiers import L1, ChainHash, RequestError
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.naming import root_hash

_LOCATE: Final = 5.0  # seconds for tiers of a daemon or of other nodes


def explain_prompt(loop: EngineLoop, prompts: Prompts, data: bytes) -> Json:
    """What is held of the prompt in a body, and why not the rest, with lines for people.

    The body has `prompt` or `messages` as the API takes them, or `request`, an answer's id; and the `cache_salt` whose
    it is. `tokens`, beside a text, are what another tokenizer made of it. Raises OpenAIError for anything else.
    """
    body, engine = parse(ExplainBody, data), loop.engine
    salt = body.cache_salt
    if not engine.config.enable_prefix_caching:
        raise OpenAIError(400, "[l1] enable_prefix_caching: off, so that nothing is ever held; turn it on")
    if body.request is not None:
        asked, cut = _of_request(loop, body.request, salt), None
    else:
        assert body.asked is not None
        given = prompts.tokenized(body.asked)
        if len(given) != 1:
            why = f"prompt: {len(given)} prompts; one at a time is explained"
            raise OpenAIError(400, why, param="prompt", code="invalid_value")
        tokens = given[0].token_ids
        try:
            asked = engine.prompt(tokens, salt)
        except RequestError as error:
            raise OpenAIError(400, f"prompt: {error}", param="prompt", code="invalid_value") from None
        cut = _other_cut(tokens, body.tokens)
    answer = _explained(engine, asked)
    answer["other_cut"] = cut
    answer["lines"] = list(explained(answer, prompts.text, asked.token_ids, prompts.special))
    return answer


def _explained(engine: Engine, asked: NamedPrompt) -> Json:
    chain, fingerprint = asked.chain, engine.identity.fingerprint()
    assert chain is not None
    connector = engine.connector
    tiers = connector.tiers if isinstance(connector, LocalConnector) else None
    hierarchy = tiers if isinstance(tiers, Hierarchy) else None
    names = list(chain.hashes)
    where = None if tiers is None else tiers.locate(names, _LOCATE)  # asks tiers that nodes share
    asked_chain = AskedChain(names, chain.root, chain.block_size, asked.token_ids)
    answer = explain_chain(fingerprint.hex()[:16], asked_chain, hierarchy, engine.pool)
    if where is not None and hierarchy is None:
        _add_below(answer, dict(where.by_tier))
        answer["unreachable"] = [] if tiers is None else [*tiers.wanting]
    if is_unknown(answer["cause"]) and (unsalted := root_hash(fingerprint)) != chain.root:
        # what has no salt is everybody's; of other tenants nobody is told anything

        def held(some: Sequence[ChainHash]) -> int:
            return max(engine.pool.lookup(some), 0 if hierarchy is None else hierarchy.lookup(some).loadable)

        roots = [(unsalted, tenant_name(unsalted, unsalted))]
        answer["tenants"] = held_by_tenants(asked_chain, roots, held, answer["held"], engine.config.hash_scheme)
    return answer


def _add_below(answer: Json, found: dict[str, int]) -> None:
    """What a daemon says it holds, behind what L1 holds: it tells how many leading blocks, by tier."""
    first, below = answer["held"], sum(found.values())
    if below <= first:
        return
    runs = [] if not first else [{"first": 0, "blocks": first, "tier": L1}]
    at = 0
    for tier, count in found.items():
        end = at + count
        if end > first:
            runs.append({"first": max(at, first), "blocks": end - max(at, first), "tier": tier})
        at = end
    if below < answer["blocks"]:
        runs.append({"first": below, "blocks": answer["blocks"] - below, "tier": None})
        answer["cause"] = {**answer["cause"], "block": below}
    else:
        answer["cause"] = None
    answer["held"], answer["runs"], answer["differs"], answer["nothing_alike"] = below, runs, None, False


def _of_request(loop: EngineLoop, request: str, salt: str | None) -> NamedPrompt:
    """The prompt of a request that ended lately. OpenAIError unless it is this tenant's."""
    own = loop.engine.config.cache_salt if salt is None else salt
    root = root_hash(loop.engine.identity.fingerprint(), cache_salt=own)
    known = loop.ended.recent.find(client_of(root), request)
    asked = None if known is None else loop.engine.prompt(known.tokens.tolist(), salt)
    if known is None or asked is None or asked.chain is None or asked.chain.root != known.root:
        why = f"request {request[:80]!r}: no request of this id and cache_salt ended here lately"
        raise OpenAIError(404, f"{why}; give its prompt instead", param="request", code="not_found")
    return asked


def _other_cut(tokens: list[int], other: Sequence[int] | None) -> Json | None:
    """Where another tokenizer cuts the same text differently; None: nowhere."""
    if other is None or list(other) == tokens:
        return None
    at = next((i for i, (one, two) in enumerate(zip(tokens, other, strict=False)) if one != two), None)
    at = min(len(tokens), len(other)) if at is None else at
    return {"token": at, "tokens": tokens[at : at + 4], "other_tokens": list(other[at : at + 4])}
