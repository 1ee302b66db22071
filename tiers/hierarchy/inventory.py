"""What a hierarchy's tiers hold now, chain by chain, parents first: for a copy of a whole namespace."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.tiers import L2, ChainHash, Enumerates, Lineage, TellsLineage
from kvtier.tiers.hierarchy.hierarchy import Hierarchy


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Consecutive blocks of one chain; `parent` names what comes before the first, held or not."""

    parent: ChainHash
    hashes: list[ChainHash]


def held_runs(hierarchy: Hierarchy) -> list[HeldRun]:
    """Every block of L2 and of the tiers that can tell, once, as long runs; a run comes after the one it branches off.

    No I/O, but time for every block: not for a serving thread. Blocks may come and go meanwhile.
    """
    parents: dict[ChainHash, ChainHash] = {}
    for port in hierarchy.ports:
        tier: object = port.tier  # a probe may detach it meanwhile
        if isinstance(tier, Enumerates):
            parents.update(tier.held())
    parents.update(hierarchy.host.held())
    return in_runs(parents)


def lineages(hierarchy: Hierarchy) -> dict[str, Lineage]:
    """The blocks of L2 and of each tier that can tell, by the tier's name, as arrays. No I/O."""
    found = {L2: hierarchy.host.lineage()}
    for port in hierarchy.ports:
        tier: object = port.tier  # a probe may detach it meanwhile
        if isinstance(tier, TellsLineage):
            found[port.name] = tier.lineage()
    return found


def in_runs(parents: Mapping[ChainHash, ChainHash]) -> list[HeldRun]:
    """Blocks, given as name → parent, as runs, parents first."""
    children: dict[ChainHash, list[ChainHash]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    runs: list[HeldRun] = []
    starts = [name for name, parent in parents.items() if parent not in parents][::-1]
    while starts:
        run = [starts.pop()]
        while branches := children.get(run[-1]):
            starts += branches[:0:-1]
            run.append(branches[0])
        runs.append(HeldRun(parents[run[0]], run))
    return runs
