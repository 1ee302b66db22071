"""This node as an owner of the ring: which nodes reported blocks of which keys, in bounded memory."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.service import events
from kvtier.tiers.peers import LAPSE, MAX_HOLDERS, MAX_NODES, PeerAddress, Report

_PIECE: Final = 1024  # keys released while the lock is held
_MAX_REPORTERS: Final = 4 * MAX_NODES  # nodes, once for each model
_EVERY: Final = 1.0  # seconds between two looks for silent nodes
_ALL: Final = 0xFF  # tiers, as bits


@dataclass(slots=True)
class _Reporter:
    number: int  # in `Holders`
    epoch: int
    next: int
    heard: float


class HolderIndex:
    """Implements `Owner`, for all models together. Thread-safe.

    Beyond `max_keys` the node with the most loses its oldest. A node that is silent for `LAPSE` is forgotten. What a
    node reports costs only its own keys, and a wrong one costs a query for a block that is not there.
    """

    def __init__(self, max_keys: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_keys, self._clock = max_keys, clock
        self.counts: Counter[str] = Counter()  # reports_{taken, missed, refused}, keys_forgotten, nodes_lapsed
        self._looked = clock()
        self._lock = threading.Lock()  # guards what follows
        self._holders = events.new_holders(1)
        self._reporters: dict[tuple[bytes, PeerAddress], _Reporter] = {}
        self._nodes: dict[int, tuple[bytes, PeerAddress]] = {}  # by number in `Holders`

    @property
    def num_keys(self) -> int:
        """Each counted for every node that holds it."""
        return self._holders.num_names

    def report(self, fingerprint: bytes, report: Report) -> bool:
        who = fingerprint, report.node
        self._forget_silent()
        if report.seq == 0:
            self._forget(who)
        with self._lock:
            known = self._reporters.get(who)
            if report.seq == 0 and known is None:
                if len(self._reporters) >= _MAX_REPORTERS:
                    self.counts["reports_refused"] += 1
                    return False
                known = self._reporters[who] = _Reporter(self._holders.open(), report.epoch, 0, 0.0)
                self._nodes[known.number] = who
            if known is None or (known.epoch, known.next) != (report.epoch, report.seq):
                self.counts["reports_missed"] += 1
                return False
            self._holders.store(known.number, report.added, list(report.added), 0, 0)
            self._holders.remove(known.number, report.removed, 0)
            known.next, known.heard = report.seq % 0xFFFF + 1, self._clock()
            self.counts["reports_taken"] += 1
            self._make_room()
        return True

    def holders(self, fingerprint: bytes, keys: Sequence[int]) -> list[list[PeerAddress]]:
        found = list[list[PeerAddress]]()
        with self._lock:
            for key in keys:
                numbers = [number for number, _ in self._holders.leading([key])]
                nodes = [self._nodes[each] for each in random.sample(numbers, min(len(numbers), MAX_HOLDERS))]
                found.append([node for model, node in nodes if model == fingerprint])
        return found

    def check(self) -> None:
        with self._lock:
            self._holders.check()
            assert self._holders.num_names <= self._max_keys, f"{self._holders.num_names} keys"
            assert {each.number: who for who, each in self._reporters.items()} == self._nodes, "numbers of nodes"

    def _forget_silent(self) -> None:
        now = self._clock()
        if now - self._looked < _EVERY:
            return
        self._looked = now
        with self._lock:
            silent = [who for who, each in self._reporters.items() if now - each.heard > LAPSE]
        for who in silent:
            self._forget(who)
            self.counts["nodes_lapsed"] += 1

    def _forget(self, who: tuple[bytes, PeerAddress]) -> None:
        """In pieces, so that others get the lock in between; queries show the node no more at once."""
        with self._lock:
            if (known := self._reporters.pop(who, None)) is None:
                return
            del self._nodes[known.number]
            self._holders.shut(known.number)
        after = -1
        while after:
            with self._lock:
                after = self._holders.release(known.number, _ALL, _PIECE, after)

    def _make_room(self) -> None:
        while (num_over := self._holders.num_names - self._max_keys) > 0:
            largest = max(self._nodes, key=self._holders.size)
            if not (done := self._holders.forget(largest, num_over + min(_PIECE, self._max_keys // 16))):
                return  # the rest is of nodes that are being forgotten
            self.counts["keys_forgotten"] += done
