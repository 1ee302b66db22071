"""Why blocks of a chain are held or not: each one's tier, why the first missing one left, and what differs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.service import Json
from kvtier.service.explain.lines import num_alike, num_same
from kvtier.service.explain.request_log import UNSALTED, client_of
from kvtier.tiers import L1, L2, BlockRecord, ChainHash, ChildBlock
from kvtier.tiers.hierarchy import Hierarchy, Span
from kvtier.tiers.naming import chain_hashes, is_named_by
from kvtier.tiers.pool import MAX_CHILDREN, NEVER_SEEN, EvictionReason

if TYPE_CHECKING:
    from kvtier.tiers.copies import BlockPool

SHORT: Final = "short"  # the prompt is shorter than a block, and is never stored
ELSEWHERE: Final = "absent"  # not known in this process: the daemon knows

LooksUp = Callable[[Sequence[ChainHash]], int]  # names of a chain → the number of leading ones held


@dataclass(frozen=True, slots=True)
class PromptChain:
    names: Sequence[ChainHash]
    root: ChainHash  # the name before the first
    block_size: int  # tokens
    tokens: Sequence[int] = ()  # the whole prompt; empty: only the blocks' names are known


def explain_chain(name: str, chain: PromptChain, hierarchy: Hierarchy | None, first: "BlockPool | None" = None) -> Json:
    """Which blocks of the chain are held, and why not the rest. `hierarchy`: None if another process has the tiers.

    Compares held blocks only behind blocks of this chain, so that no other tenant's tokens are revealed.
    """
    names, size = chain.names, chain.block_size
    tiers = _tiers_of(names, hierarchy, first)
    known = tiers.index(None) if None in tiers else len(names)
    answer: Json = {
        "model": name,
        "block_size": size,
        "tokens": len(chain.tokens) or len(names) * size,
        "blocks": len(names),
        "held": known,
        "runs": _runs(tiers),
        "cause": None,
        "differs": None,
        "nothing_alike": False,
        "elsewhere": [],
        "tenants": [],
        "recompute": None if hierarchy is None else _quicker_computed(tiers[:known], hierarchy, size),
        "unreachable": [],
    }
    if not names:
        answer["cause"] = {"name": SHORT, "tier": "", "seconds": 0, "block": 0}
    elif known < len(names):
        evicted = EvictionReason(ELSEWHERE) if hierarchy is None else hierarchy.eviction_reason(names[known])
        answer["cause"] = {"name": evicted.cause, "tier": evicted.tier, "seconds": evicted.seconds, "block": known}
        answer["unreachable"] = [] if hierarchy is None else [*hierarchy.wanting]
        if chain.tokens:
            parent = names[known - 1] if known else chain.root
            held = [each for each in _children(hierarchy, first, parent) if each.chain_hash != names[known]]
            if not known:
                # Under vLLM's names all tenants' first blocks have one root. Only a name that tokens alone determine is
                # certainly of this salt.
                held = [each for each in held if is_named_by(BlockRecord(each.chain_hash, parent, each.tokens, 0))]
            answer["differs"] = _difference(chain.tokens[known * size :], held, known * size, size)
            answer["nothing_alike"] = not known and answer["differs"] is None
    return answer


def held_by_tenants(
    chain: PromptChain, roots: Iterable[tuple[ChainHash, str]], lookup: LooksUp, least: int, scheme: str
) -> list[Json]:
    """Other tenants that hold more than `least` blocks of the same tokens. `roots`: their chains' roots and names."""
    found: list[Json] = []
    first = chain.tokens[: chain.block_size]
    for root, name in roots:
        if root != chain.root and lookup(chain_hashes(root, first, chain.block_size, scheme)):
            held = lookup(chain_hashes(root, chain.tokens, chain.block_size, scheme))
            if held > least:
                found.append({"tenant": name, "blocks": held})
    return sorted(found, key=lambda each: -each["blocks"])


def tenant_name(root: ChainHash, unsalted: ChainHash) -> str:
    return UNSALTED if root == unsalted else f"{client_of(root):08x}"


def is_unknown(cause: Json | None) -> bool:
    return cause is not None and cause["name"] in (NEVER_SEEN, ELSEWHERE)


def _tiers_of(names: Sequence[ChainHash], hierarchy: Hierarchy | None, first: "BlockPool | None") -> list[str | None]:
    tiers: list[str | None] = [None] * len(names)
    held: list[tuple[str, Sequence[bool]]] = []
    if hierarchy is not None:
        held = [(L2, hierarchy.host.pool.holds(names)), *((each.name, each.holds(names)) for each in hierarchy.ports)]
    if first is not None:
        num_first = first.lookup(names)
        held.insert(0, (L1, [at < num_first for at in range(len(names))]))
    for name, are_held in reversed(held):
        tiers = [name if is_held else tier for tier, is_held in zip(tiers, are_held, strict=True)]
    return tiers


def _quicker_computed(tiers: Sequence[str | None], hierarchy: Hierarchy, size: int) -> str | None:
    """The tier whose blocks are faster to compute than to load; None: loading pays for all."""
    slow = Counter(each for each in tiers if each not in (L1, L2))
    num_bytes = {str(each): count * hierarchy.host.region.slot_bytes for each, count in slow.items()}
    start = next((at for at, each in enumerate(tiers) if each not in (L1, L2)), len(tiers))
    span = Span(start * size, (len(tiers) - start) * size, num_bytes)
    return next(iter(num_bytes)) if slow and hierarchy.rates.is_quicker_computed(span) else None


def _runs(tiers: Sequence[str | None]) -> list[Json]:
    runs: list[Json] = []
    first = 0
    for tier, group in groupby(tiers):
        count = len(list(group))
        runs.append({"first": first, "blocks": count, "tier": tier})
        first += count
    return runs


def _children(hierarchy: Hierarchy | None, first: "BlockPool | None", parent: ChainHash) -> list[ChildBlock]:
    """Held blocks with the same parent as the missing one. Behind a block they have its salt."""
    found = [] if first is None else [*first.children(parent)]
    if hierarchy is not None:
        found += hierarchy.host.children(parent, MAX_CHILDREN, b"")
        for port in hierarchy.ports:
            if (tier := port.readable()) is not None:
                found += tier.children(parent, MAX_CHILDREN)
    return found


def _difference(rest: Sequence[int], held: Sequence[ChildBlock], start: int, size: int) -> Json | None:
    """Where the nearest of the held blocks differs first, and both blocks' tokens.

    Behind block 0 all share the preceding blocks. A first block must share tokens itself; None if none does.
    """
    mine = rest[:size]
    best: Json | None = None
    nearest = (0, 0)
    for block in held:
        theirs = np.frombuffer(block.tokens, "<u4")[: len(mine)].tolist()
        same = num_same(mine, theirs)
        alike = num_alike(mine, theirs)
        near = (same, alike) if start else (alike, same)
        if (best is None and start) or near > nearest:
            nearest = near
            best = {"token": start + same, "tokens": list(mine), "held_tokens": theirs, "same": same}
    return best
