"""What fills each tier of a model: blocks by tenant, and the prefixes that most blocks begin with."""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, Lineage
from kvtier.tiers.hierarchy import Hierarchy, Wanted, lineages
from kvtier.tiers.naming import root_hash
from kvtier.tiers.pool import Slots, Words

UNSALTED: Final = "no salt"
OTHERS: Final = "others"
UNKNOWN: Final = "not known"

_MOST_TENANTS: Final = 10  # told by themselves
_MOST_PREFIXES: Final = 10
_MOST_ROOTS: Final = 4096  # tenants known
_MOST_HEADS: Final = 1 << 16  # first blocks whose tenant was told with them
_LONGEST: Final = 4096  # blocks of a prefix that are counted
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class Tenants:
    """Which tenants a model has, as far as they have stored since the start. Bounded. On the loop's thread, but `of`.

    A tenant is known by the root of chains with its salt. Under vLLM's names all chains begin at one root: there a
    first block is remembered with the tenant that stored it.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.unsalted = root_hash(fingerprint)
        self._roots: OrderedDict[ChainHash, None] = OrderedDict()
        self._heads: OrderedDict[ChainHash, ChainHash] = OrderedDict()

    def note(self, wanted: Iterable[Wanted]) -> None:
        """Blocks are about to be stored: whose they are."""
        for each in wanted:
            if each.tenant != self.unsalted:
                self._roots[each.tenant] = None
                if len(self._roots) > _MOST_ROOTS:
                    self._roots.popitem(last=False)
                if each.parent == self.unsalted and each.hashes:
                    self._heads[each.hashes[0]] = each.tenant
                    if len(self._heads) > _MOST_HEADS:
                        self._heads.popitem(last=False)

    def known(self) -> list[ChainHash]:
        """The roots of all tenants, those without a salt first. On any thread."""
        return [self.unsalted, *self._roots.copy()]

    def of(self, head: ChainHash, parent: ChainHash) -> ChainHash | None:
        """Whose a chain is that begins with `head` behind `parent`; None if nobody has said."""
        if parent == self.unsalted:
            return self._heads.get(head, parent)
        return parent if parent in self._roots else None


class TenantUse(NamedTuple):
    root: ChainHash | None  # None: not known; b"": of others, together
    num_blocks: int


class PrefixUse(NamedTuple):
    """Blocks that begin with the same blocks."""

    head: ChainHash  # the first of these
    root: ChainHash | None  # whose they are
    num_shared: int  # leading blocks that all of them have in common
    num_branches: int  # ways they go on after these
    num_blocks: int  # with them


class TierUse(NamedTuple):
    """What fills one tier."""

    num_blocks: int
    num_tenants: int
    tenants: Sequence[TenantUse]  # the largest first; then others and not known, if there are
    prefixes: Sequence[PrefixUse]  # the largest first


def use_of(lineage: Lineage, tenants: Tenants) -> TierUse:
    """What fills a tier that holds these blocks. Time and memory for each block, mostly outside the GIL."""
    names = lineage.names
    if not len(names):
        return TierUse(0, 0, (), ())
    parents = _parents(names @ _MIX, lineage.parents @ _MIX)
    heads = _heads(parents)
    sizes = np.bincount(heads, minlength=len(names))
    begun = np.flatnonzero(sizes)
    begun = begun[np.argsort(sizes[begun], kind="stable")[::-1]]
    owners = [tenants.of(names[i].tobytes(), lineage.parents[i].tobytes()) for i in begun[:_MOST_HEADS].tolist()]
    by_root: dict[ChainHash | None, int] = {}
    for root, size in zip(owners, sizes[begun].tolist(), strict=False):
        by_root[root] = by_root.get(root, 0) + size
    unknown = by_root.pop(None, 0) + int(sizes[begun[_MOST_HEADS:]].sum())
    ordered = sorted(by_root.items(), key=lambda each: each[1], reverse=True)
    told = [TenantUse(root, size) for root, size in ordered[:_MOST_TENANTS]]
    if rest := sum(size for _, size in ordered[_MOST_TENANTS:]):
        told.append(TenantUse(b"", rest))
    if unknown:
        told.append(TenantUse(None, unknown))
    top = begun[:_MOST_PREFIXES].tolist()
    shared = _shared(parents, top)
    prefixes = [
        PrefixUse(names[head].tobytes(), owner, *common, int(sizes[head]))
        for head, owner, common in zip(top, owners, shared, strict=False)
    ]
    return TierUse(len(names), len(by_root), told, prefixes)


def _parents(names: Words, parents: Words) -> Slots:
    """The place of each block's parent; its own if the parent is not there."""
    order = np.argsort(names)
    at = np.searchsorted(names[order], parents).clip(max=len(names) - 1)
    place = order[at]
    return np.where(names[place] == parents, place, np.arange(len(names)))


def _heads(parents: Slots) -> Slots:
    """The first block of each block's chain."""
    heads = parents
    for _ in range(64):  # twice as far with each turn; names that are no hashes might make a circle
        further = heads[heads]
        if (further == heads).all():
            break
        heads = further
    return heads


def _shared(parents: Slots, heads: Sequence[int]) -> list[tuple[int, int]]:
    """For each head: how many blocks it and its only children make, and how many children the last of them has."""
    everyone = np.arange(len(parents))
    is_child = parents != everyone
    num_children = np.bincount(parents[is_child], minlength=len(parents))
    child: NDArray[np.int64] = np.zeros(len(parents), np.int64)
    child[parents[is_child]] = everyone[is_child]
    found = []
    for head in heads:
        at, length = head, 1
        while num_children[at] == 1 and length < _LONGEST:
            at, length = int(child[at]), length + 1
        found.append((length, int(num_children[at])))
    return found


class MemoryUse:
    """What fills the tiers of each model: looked at when somebody asks, and not again for a while. Thread-safe.

    A look takes some time for each block, so that the next comes after fifty times as long, and ten seconds at least.
    """

    def __init__(self, pause: float = 10.0) -> None:
        self._pause = pause
        self._key = secrets.token_bytes(16)
        self._lock = Lock()  # held by whoever looks
        self._found: dict[bytes, tuple[float, dict[str, TierUse]]] = {}  # fingerprint → good until, by tier

    def of(self, models: Mapping[bytes, tuple[Hierarchy, Tenants]]) -> dict[bytes, dict[str, TierUse]]:
        """By fingerprint and tier. Who asks while another looks gets what was found before."""
        if self._lock.acquire(blocking=not self._found):
            try:
                for fingerprint, (hierarchy, tenants) in models.items():
                    if time.monotonic() >= self._found.get(fingerprint, (0.0, {}))[0]:
                        began = time.monotonic()
                        use = {tier: use_of(each, tenants) for tier, each in lineages(hierarchy).items()}
                        now = time.monotonic()
                        self._found[fingerprint] = (now + max(self._pause, 50 * (now - began)), use)
                for gone in self._found.keys() - models.keys():
                    del self._found[gone]
            finally:
                self._lock.release()
        return {fingerprint: use for fingerprint, (_, use) in list(self._found.items())}

    def label(self, name: ChainHash) -> str:
        """For people who may not know names: the same for one name while this process lives, and no way back."""
        return hashlib.blake2b(name, key=self._key, digest_size=4).hexdigest()
