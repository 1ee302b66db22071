"""Remembers whom the daemon refused and why, so that an operator sees engines which go without it."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvtier.connector.daemon import Peer
from kvtier.service.node.loop import now

_MOST: Final = 16  # reasons; the one that was last given longest ago goes first
_LONGEST: Final = 500  # characters of one


@dataclass(slots=True)
class RefusalReason:
    """A reason, and whom it was last given."""

    why: str
    count: int
    pid: int  # 0: of a pid namespace that the daemon does not see
    uid: int
    model: bytes | None  # its fingerprint, if the client said which
    at: float  # seconds, as `now`

    @property
    def seconds_ago(self) -> float:
        return now() - self.at


class Refusals:
    """Bounded, the last one first. Lives on the loop's thread."""

    def __init__(self) -> None:
        self._by_reason: OrderedDict[tuple[str, bytes | None], RefusalReason] = OrderedDict()

    def note(self, why: str, peer: Peer, model: bytes | None = None) -> bool:
        """True if it is not known yet: whoever is refused tries again every few seconds."""
        why = why[:_LONGEST]
        before = self._by_reason.pop((why, model), None)
        self._by_reason[why, model] = RefusalReason(why, before.count + 1 if before else 1, *peer, model, now())
        if len(self._by_reason) > _MOST:
            self._by_reason.popitem(last=False)
        return before is None

    def welcomed(self, model: bytes) -> None:
        """An engine of that model is in: what kept it out is over."""
        for key in [key for key in self._by_reason if key[1] == model]:
            del self._by_reason[key]

    def all(self) -> list[RefusalReason]:
        return list(reversed(self._by_reason.values()))
