"""How much of a prefix is a hit when several pools have to have their parts of it: SGLang's rules for HiCache."""

from collections.abc import Mapping, Sequence

from kvtier.connector.sglang.page_store import PageStore
from kvtier.tiers import ChainHash

_ALL, _TRAILING = "all_pages", "trailing_pages"  # PoolHitPolicy


def hit_ends(
    names: Sequence[ChainHash],
    needed: Sequence[tuple[str, str, int]],
    stores: Mapping[str, PageStore],
    *,
    every: bool,
) -> tuple[list[int], dict[str, int]]:
    """How long a prefix of `names` may be, ascending, and how far each pool by itself reaches.

    The first pool holds all of `names`. `needed` has each further pool's name, hit policy and window in pages. Any
    other policy asks nothing and gets no answer. A pool that is not in `stores` holds nothing. `every`: ranks have to
    agree on a length, so all of them are told, else the longest alone may be.
    """
    ends = range(1, len(names) + 1)
    allowed = set(ends)
    reached: dict[str, int] = {}
    trailing = sum(policy == _TRAILING for _, policy, _ in needed)
    for pool, policy, window in sorted(needed, key=lambda each: each[1] == _TRAILING):  # what cuts short comes first
        if policy not in (_ALL, _TRAILING) or not allowed:
            continue
        store = stores.get(pool)
        if store is None:
            allowed = set()
        elif policy == _ALL:
            reached[pool] = store.held(names)
            allowed &= set(range(1, reached[pool] + 1))
        else:
            mine = store.held_ends(names[: max(allowed)], max(1, window))
            found = set(mine) if every or trailing > 1 else {next(mine, 0)}
            reached[pool] = max(found, default=0)
            allowed &= found
    return sorted(allowed), {pool: end for pool, end in reached.items() if end}
