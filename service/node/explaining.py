"""Why a prompt's blocks are held by a daemon's tiers or not, and which other model or tenant holds them."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from time import monotonic

from kvtier.service import Json
from kvtier.service.explain import PromptChain, client_of, explain_chain, held_by_tenants, is_unknown, tenant_name
from kvtier.service.node.closed_models import closed_models
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import NotThere, name_of
from kvtier.service.node.selection import BlockSelection
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.naming import root_hash


def explain(
    namespace: Namespace,
    others: Sequence[Namespace],
    blocks: BlockSelection,
    timeout: float,
    slabs: Path | None = None,
) -> Json:
    """What is held of the prompt, and why not the rest; `others` are the models that hold it perhaps.

    If nobody holds a block of it, closed slabs of the same checkpoint in the directory `slabs` are named.
    For operators: it says which other tenant holds the same tokens, but tells no token of another's. Takes up
    to `timeout` seconds in all, half of them for tiers that nodes share; tenants whose turn would come later are left
    out. ConfigError as `BlockSelection.names`.
    """
    until = monotonic() + timeout
    shared_until = until - timeout / 2
    hierarchy, size, model = namespace.hierarchy, namespace.blocks.block_size, name_of(namespace.fingerprint)
    own_root = root_hash(namespace.fingerprint, cache_salt=blocks.cache_salt)
    if blocks.tokens and len(blocks.tokens) < size:
        answer = explain_chain(model, PromptChain((), own_root, size, blocks.tokens), hierarchy)
        answer["elsewhere"] = _elsewhere(namespace, others, blocks, 0, shared_until)
        return answer
    hashes, root = blocks.names(namespace, timeout / 2)
    chain = PromptChain(hashes, root, size, blocks.tokens)
    answer = explain_chain(model, chain, hierarchy)
    if blocks.tokens and answer["cause"] is not None:
        known = answer["held"]
        answer["elsewhere"] = _elsewhere(namespace, others, blocks, known * size, shared_until)
        if is_unknown(answer["cause"]):
            if not known and not answer["elsewhere"]:
                answer["closed"] = _closed(namespace, others, slabs)
            unsalted = namespace.tiers.tenants.unsalted
            roots = [(each, tenant_name(each, unsalted)) for each in namespace.tiers.tenants.known()]
            scheme = blocks.scheme_of(hashes, root, size)

            def held(names: Sequence[ChainHash]) -> int:
                return hierarchy.lookup(names).loadable

            in_time = takewhile(lambda _: monotonic() < until, roots)
            answer["tenants"] = held_by_tenants(chain, in_time, held, known, scheme)
    return answer


def explain_request(namespace: Namespace, request_id: str, cache_salt: str | None, timeout: float) -> Json:
    """The same of a request that ended lately. NotThere if none of that id and tenant did."""
    root = root_hash(namespace.fingerprint, cache_salt=cache_salt)
    seen = namespace.tiers.seen.recent.find(client_of(root), request_id)
    if seen is None:
        why = "no request of this id and cache salt ended here lately; `kvtier explain --blocks` takes its tokens"
        raise NotThere(f'request "{request_id}": {why}')
    if not seen.names:
        return explain_chain(name_of(namespace.fingerprint), PromptChain((), root, namespace.blocks.block_size), None)
    return explain(namespace, [], BlockSelection(seen.names), timeout)


def _elsewhere(
    own: Namespace, others: Sequence[Namespace], blocks: BlockSelection, known: int, until: float
) -> list[Json]:
    """Other models of this daemon that hold more of the same tokens, under the same salt."""
    found: list[Json] = []
    for other in others:
        try:
            names, _ = blocks.names(other, max(0.0, until - monotonic()))
        except ConfigError:  # shorter than a block of that model's
            continue
        held = other.hierarchy.lookup(names).loadable
        if held * other.blocks.block_size > known:
            row = {"model": name_of(other.fingerprint), "blocks": held, "block_size": other.blocks.block_size}
            found.append({**row, "fields": _differing(own.about, other.about)})
    return found


def _closed(own: Namespace, others: Sequence[Namespace], slabs: Path | None) -> list[Json]:
    """Closed slabs of the same weights, or of a model with the same name. Nobody reads whether they hold the prompt.

    None while the own slab is off: its disk may hang.
    """
    if "file" in own.hierarchy.wanting:
        return []
    closed = closed_models(slabs, {own.fingerprint, *(other.fingerprint for other in others)})
    return [
        {"model": name_of(each.fingerprint), "bytes": each.num_bytes, "fields": _differing(own.about, each.about)}
        for each in closed
        if any(field in own.about and each.about.get(field) == own.about[field] for field in ("model", "revision"))
    ]


def _differing(here: Mapping[str, str], there: Mapping[str, str]) -> list[Json]:
    """The fields by which two models are not one, if both engines have said what theirs are."""
    if not here or not there:
        return []
    fields = dict.fromkeys([*here, *there])
    fields.pop("model", None)  # a name for people
    return [
        {"field": field, "here": here.get(field, "none"), "there": there.get(field, "none")}
        for field in fields
        if here.get(field) != there.get(field)
    ]
