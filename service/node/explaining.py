"""Why a prompt's blocks are held or not: which tier has each, what became of the first missing one, what differs."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from kvtier.service import Json
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.node.selection import BlockSelection
from kvtier.tiers import L2, ChainHash, ChildBlock, ConfigError
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.pool import MAX_CHILDREN


def explain(namespace: Namespace, others: Sequence[Namespace], blocks: BlockSelection, timeout: float) -> Json:
    """What is held of the prompt, and why not the rest; `others` are the models that hold it perhaps.

    Reads tokens of no chain but those that begin at the selection's own salt. Waits up to `timeout` seconds for tiers
    that nodes share. ConfigError as `BlockSelection.names`.
    """
    hierarchy, size = namespace.hierarchy, namespace.blocks.block_size
    hashes, root = blocks.names(namespace, timeout)
    tiers = _tiers_of(hierarchy, hashes)
    known = tiers.index(None) if None in tiers else len(hashes)
    answer: Json = {
        "model": name_of(namespace.fingerprint),
        "block_size": size,
        "blocks": len(hashes),
        "held": known,
        "runs": _runs(tiers),
        "cause": None,
        "differs": None,
        "elsewhere": [],
    }
    if known == len(hashes):
        return answer
    gone = hierarchy.why_gone(hashes[known])
    answer["cause"] = {"name": gone.cause, "tier": gone.tier, "seconds": gone.seconds, "block": known}
    if blocks.tokens:
        own = np.array(blocks.tokens[known * size : (known + 1) * size], "<u4").tobytes()
        parent = hashes[known - 1] if known else root
        answer["differs"] = _difference(own, _siblings(hierarchy, parent, hashes[known]), known * size)
        answer["elsewhere"] = _elsewhere(others, blocks, known * size, timeout)
    return answer


def _tiers_of(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[str | None]:
    """The tier nearest to the engine that holds each block; None: none does."""
    tiers: list[str | None] = [None] * len(hashes)
    held = [(L2, hierarchy.host.pool.holds(hashes)), *((each.name, each.holds(hashes)) for each in hierarchy.ports)]
    for name, are_held in reversed(held):
        tiers = [name if is_held else tier for tier, is_held in zip(tiers, are_held, strict=True)]
    return tiers


def _runs(tiers: Sequence[str | None]) -> list[Json]:
    """Consecutive blocks of one tier as one row."""
    runs: list[Json] = []
    first = 0
    for tier, group in groupby(tiers):
        count = len(list(group))
        runs.append({"first": first, "blocks": count, "tier": tier})
        first += count
    return runs


def _siblings(hierarchy: Hierarchy, parent: ChainHash, own: ChainHash) -> list[ChildBlock]:
    """Held blocks that follow the same block as the missing one: of the same chain's head, so of the same salt."""
    found = [*hierarchy.host.children(parent, MAX_CHILDREN, b"")]
    for port in hierarchy.ports:
        found += port.children(parent, MAX_CHILDREN, b"")
    return [child for child in found if child.chain_hash != own]


def _difference(own: bytes, siblings: Sequence[ChildBlock], start: int) -> Json | None:
    """Where the nearest sibling differs first, and both blocks' tokens."""
    mine = np.frombuffer(own, "<u4")
    best: Json | None = None
    for sibling in siblings:
        theirs = np.frombuffer(sibling.tokens, "<u4")[: len(mine)]
        differ = np.flatnonzero(mine[: len(theirs)] != theirs)
        same = int(differ[0]) if len(differ) else len(theirs)
        if best is None or same > best["token"] - start:
            best = {"token": start + same, "tokens": mine.tolist(), "held_tokens": theirs.tolist(), "same": same}
    return best


def _elsewhere(others: Sequence[Namespace], blocks: BlockSelection, known: int, timeout: float) -> list[Json]:
    """Other models of this daemon that hold more of the same tokens, under the same salt."""
    found: list[Json] = []
    for other in others:
        try:
            names, _ = blocks.names(other, timeout)
        except ConfigError:  # shorter than a block of that model's
            continue
        held = other.hierarchy.lookup(names).loadable
        if held * other.blocks.block_size > known:
            row = {"model": name_of(other.fingerprint), "blocks": held, "block_size": other.blocks.block_size}
            found.append(row)
    return found
