"""KeptPlaces: where the blocks of the last long questions were: the next turn's names are not looked up again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.tiers import ChainHash
from kvtier.tiers.pool.few import BatchTable
from kvtier.tiers.pool.lease import Places
from kvtier.tiers.pool.states import READY

_RUN: Final = 64  # blocks: a question is remembered up to a whole number of these, and looked for there
_MANY: Final = 256  # blocks: fewer are found by a compiled twin sooner than their kept names are compared


class KeptPlaces:
    """Places by the last name of a question. It takes no lock.

    They are used if all names are the same and all their slots are ready and were not taken since: then each slot has
    the block it had. Otherwise, and for what follows, names are looked up. The places of half as many names as there
    are slots are kept, those used last.
    """

    def __init__(self, table: BatchTable) -> None:
        self._table = table
        self._most = table.num_slots // 2
        self._num_names = 0
        self._kept: OrderedDict[ChainHash, tuple[list[ChainHash], Places]] = OrderedDict()

    def __len__(self) -> int:
        """Names."""
        return self._num_names

    def of(self, hashes: Sequence[ChainHash]) -> Places:
        """Where the leading ready blocks are; without generations where a list of slots says that they are few."""
        is_short = len(hashes) < (_MANY if self._table.is_compiled else _RUN)
        slots = self._table.of(len(hashes)).find_run(hashes) if is_short else None
        if isinstance(slots, list):
            return Places(slots, [])
        if slots is not None:
            return Places(slots, self._table.generation[slots])
        known = self._known(hashes)
        rest = hashes if known is None else hashes[len(known) :]
        if known is not None and not (rest and len(self._table.of(1).find_run(rest[:1]))):
            return known  # the usual next turn: nothing of what is new is here yet
        found = np.asarray(self._table.of(len(rest)).find_run(rest), np.int64)
        places = Places(found, self._table.generation[found])
        if known is not None:
            columns = zip((known.slots, known.generations), (places.slots, places.generations), strict=True)
            places = Places(*(np.concatenate(each) for each in columns))
        self._keep(hashes, places)
        return places

    def _known(self, hashes: Sequence[ChainHash]) -> Places | None:
        """The places of as many leading names as are remembered, if the blocks are still there."""
        for end in range(len(hashes) // _RUN * _RUN, 0, -_RUN):
            name = hashes[end - 1]
            if name in self._kept:
                names, places = self._kept[name]
                if names != hashes[:end]:
                    return None
                slots, table = np.asarray(places.slots), self._table
                if (table.state[slots] == READY).all() and (table.generation[slots] == places.generations).all():
                    self._kept.move_to_end(name)
                    return places
                self._drop(name)
                return None
        return None

    def _keep(self, hashes: Sequence[ChainHash], places: Places) -> None:
        end = len(places) // _RUN * _RUN
        if not end or end > self._most or hashes[end - 1] in self._kept:
            return
        slots, generations = np.array(places.slots[:end]), np.array(places.generations[:end])
        self._kept[hashes[end - 1]] = list(hashes[:end]), Places(slots, generations)
        self._num_names += end
        while self._num_names > self._most:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: ChainHash) -> None:
        self._num_names -= len(self._kept.pop(name)[0])
