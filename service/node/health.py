"""What an operator should know of a daemon: which parts of its configuration fail, and which clients it refused."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, NamedTuple

from kvtier.connector.daemon import Peer
from kvtier.service.node.loop import now
from kvtier.service.node.namespaces import name_of
from kvtier.service.observe import statuses
from kvtier.tiers import L2, Finding, Status
from kvtier.tiers.config import Config, format_size, show_size
from kvtier.tiers.hierarchy import begun, lower_modules
from kvtier.tiers.host import limits

SOCKET: Final = "socket"
_ASK: Final = 15.0  # seconds between two questions to servers
_PATIENCE: Final = 10.0  # seconds for their answers, which have deadlines of their own


class Wanting(NamedTuple):
    part: str  # SOCKET, or a tier
    why: str
    is_needed: bool  # the daemon is not ready without it: a rollout stops; an engine that needs less may attach


class Health:
    """Which parts are wanting. `look` waits, so one thread beside the loop calls it; any thread reads `wanting`."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._checked_at: float | None = None
        self._socket: tuple[Wanting, ...] = ()
        self._memory: tuple[Wanting, ...] = ()
        self._answers: dict[str, Future[list[Finding]]] = {}
        self._servers: tuple[Wanting, ...] = ()

    @property
    def wanting(self) -> list[Wanting]:
        return [*self._socket, *self._memory, *self._servers]

    def socket_is(self, why: str | None) -> bool:
        """Record why engines do not find the socket; None: they do. True if that has changed."""
        before, self._socket = self._socket, () if why is None else (Wanting(SOCKET, why, True),)
        return bool(before) != bool(self._socket)

    def look(self, given: int) -> list[Wanting]:
        """Check memory, and every `_ASK` seconds the servers; returns what is newly wanting. `given`: models' bytes."""
        before = {each.part for each in self.wanting}
        self._memory = tuple(_memory(self._config.host.size, given))
        if self._checked_at is None or self._clock() - self._checked_at >= _ASK:
            self._servers = tuple(self._ask())
            self._checked_at = self._clock()
        return [each for each in self.wanting if each.part not in before]

    def _ask(self) -> Iterator[Wanting]:
        """Check every lower tier's storage. One that hangs delays no other, and is checked again once it answers."""
        for name, module in lower_modules():
            if name not in self._answers or self._answers[name].done():
                self._answers[name] = begun(f"kvtier-{name}-health", partial(module.answers, self._config))
        wait(self._answers.values(), _PATIENCE)
        for name, answer in self._answers.items():
            if answer.done():
                for each in (one for one in answer.result() if one.status is Status.ERROR):
                    found = each.found if each.check == name else f"{each.check}: {each.found}"
                    yield Wanting(name, f"{found}; {each.fix}", False)
            else:
                yield Wanting(name, f"[{name}] hangs: no answer within {_PATIENCE:g} s; look at its storage", False)


def _memory(size: int, given: int) -> list[Wanting]:
    found, option = limits(), f'[host] size "{format_size(size)}"'
    if size > found.most:
        why = f"{option}: {found.by} has {show_size(found.most)}; lower it, and restart the daemon"
        return [Wanting(L2, why, True)]
    if size - given > found.available:
        why = f"{option}: {show_size(size - given)} of it are not given yet, and only {show_size(found.available)} free"
        return [Wanting(L2, f"{why}; lower it, or stop what uses the memory", False)]
    return []


_MOST: Final = 16  # reasons; the least recently given one is dropped first
_LONGEST: Final = 500  # characters of one


class Refusals:
    """The clients refused, by reason, the last one first. Bounded. On the loop's thread."""

    def __init__(self) -> None:
        self._by_reason: OrderedDict[tuple[str, bytes | None], tuple[int, Peer, float]] = OrderedDict()  # count, last

    def record(self, why: str, peer: Peer, model: bytes | None = None) -> bool:
        """True if the reason is new: a refused client tries again every few seconds."""
        why = why[:_LONGEST]
        before = self._by_reason.pop((why, model), None)
        self._by_reason[why, model] = (before[0] + 1 if before else 1, peer, now())
        if len(self._by_reason) > _MOST:
            self._by_reason.popitem(last=False)
        return before is None

    def welcomed(self, model: bytes) -> None:
        for key in [key for key in self._by_reason if key[1] == model]:
            del self._by_reason[key]

    def all(self) -> list[statuses.RefusedClient]:
        return [
            statuses.RefusedClient(
                why=why,
                count=count,
                seconds_ago=round(now() - at, 1),
                pid=peer.pid,  # 0: of a pid namespace that the daemon does not see
                uid=peer.uid,
                model=None if model is None else name_of(model),
            )
            for (why, model), (count, peer, at) in reversed(self._by_reason.items())
        ]
