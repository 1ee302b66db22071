"""Several router processes behind one port: what each publishes for the others; the parent replaces those that end."""

import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.service import Json, Reloads
from kvtier.service.observe import brief_time, counts
from kvtier.service.router.client import trusted
from kvtier.service.router.replica_list import ReplicaList
from kvtier.service.web import HttpSocket
from kvtier.tiers import KVTierError
from kvtier.tiers.config import Config

_log = logging.getLogger(__name__)

TELL: Final = 0.25  # seconds from one time that a process writes its slot to the next
_FRESH: Final = 2.0  # seconds that requests in a slot count as under way
_LOOK: Final = 0.1  # seconds between two looks at the processes
_STARTS: Final = 120.0  # seconds until the first process must be ready
_HUNG: Final = 30.0  # seconds after which a silent process is killed
_WELL: Final = 60.0  # seconds after which a new process counts as well
_FIRST_WAIT, _LAST_WAIT = 0.1, 10.0  # seconds until an ended process is replaced; doubled while processes go on ending
_GRACE: Final = 15.0  # seconds that a stop may take beyond `drain`


class Board:
    """A slot for each process, in memory that they share. Only its own process writes a slot."""

    def __init__(self, num_slots: int) -> None:
        self._files = [os.memfd_create("kvtier-router", os.MFD_CLOEXEC) for _ in range(num_slots)]
        self._last: list[Json] = [{} for _ in range(num_slots)]

    def write(self, slot: int, value: Json) -> None:
        body = json.dumps({**value, "at": time.monotonic()}).encode()
        os.pwrite(self._files[slot], b"%016x%016x" % (len(body), xxhash.xxh3_64_intdigest(body)) + body, 0)

    def read(self, slot: int) -> Json:
        """The last whole value, `{}` before the first. A value that is being written is not whole."""
        data = os.pread(self._files[slot], os.fstat(self._files[slot]).st_size, 0)
        body = data[32 : 32 + int(data[:16] or b"0", 16)]
        if body and len(data) >= 32 and int(data[16:32], 16) == xxhash.xxh3_64_intdigest(body):
            self._last[slot] = json.loads(body)
        return self._last[slot]

    def age(self, slot: int) -> float:
        """Seconds since its value was written; infinite if none was."""
        return time.monotonic() - float(self.read(slot).get("at", "-inf"))


class Seat:
    """A process's place on the board: its own slot, those of the others, and the parent's, which is the last."""

    def __init__(self, board: Board, place: int, number: int) -> None:
        self._board, self._place, self._number = board, place, number
        self._parent = os.getppid()
        self.before: Json = board.read(place)  # of the process that had this place before

    def publish(self, value: Json) -> None:
        """Write its slot. If the parent is dead, this process stops, too."""
        self._board.write(self._place, value)
        if os.getppid() != self._parent:
            os.kill(os.getpid(), signal.SIGTERM)  # wakes the main thread, unlike raise_signal here

    def others(self) -> Iterator[tuple[Json, bool]]:
        """What the other processes published, and whether that is from now; an old value only counts what has been."""
        for slot in range(self._number):
            if slot != self._place and (value := self._board.read(slot)):
                yield value, self._board.age(slot) < _FRESH

    @property
    def replaced(self) -> dict[str, int]:
        """Processes that ended and were replaced, by reason."""
        return dict(self._board.read(self._number).get("replaced", {}))

    @property
    def reloads(self) -> Json:
        """The parent's counts of the configuration's reloads; empty before the first."""
        return dict(self._board.read(self._number).get("reloads", {}))


def stopped_line(seconds: float, counted: Iterable[Json], ends: str) -> str:
    """The last line of a router that was up for so long, from what its processes have counted."""
    requests, errors = Counter[str](), Counter[str]()
    for each in counted:
        for (_, reason), number in each.get("requests", ()):
            requests[reason] += number
        errors.update(dict(each.get("errors", ())))
    answered = f"{sum(requests.values())} requests given to replicas ({counts(requests)}), {ends}"
    return f"stopped after {brief_time(seconds)}: {answered}; errors {counts(errors)}"


def _checked(config: Config) -> Callable[[], None]:
    """As `Reloads.prepare`: the processes put it in force."""
    trusted.cache_clear()  # the file may have other certificates now
    trusted(config.router.replica_ca)
    ReplicaList(config.router.replicas, config.router.replicas_file, config.router.resolve_interval)
    return lambda: None


@dataclass(slots=True)
class _Child:
    pid: int = 0  # 0: none runs
    started: float = 0.0
    due: float = 0.0  # monotonic time of the next start
    num_quick: int = 0  # in a row that ended soon
    is_hung: bool = False


class RouterProcesses:
    def __init__(self, reloads: Reloads, num_signals: Callable[[], int]) -> None:
        """Reserve the port. ConfigError if it is taken. `num_signals`: how many signals to stop have come.

        From here on SIGHUP is for `run`; new processes begin with the configuration that is in force then.
        """
        config = reloads.config.router
        reloads.prepare = _checked
        self._reloads, self._hangups, self._num_reloads = reloads, list[int](), 0
        signal.signal(signal.SIGHUP, lambda number, _: self._hangups.append(number))
        alone = HttpSocket(config.http, "router")  # it shares no port: one that is taken is an error
        self.http = f"{config.http.rpartition(':')[0]}:{alone.socket.getsockname()[1]}"
        alone.close()
        # the port is ours even while no process listens
        self._reserved = HttpSocket(self.http, "router", is_shared=True, listens=False)
        self._number, self._num_signals = config.processes, num_signals
        self._board = Board(self._number + 1)
        self._children = [_Child() for _ in range(self._number)]
        self._replaced = Counter[str]()
        self._began = time.monotonic()

    def run(self, ready: Callable[[], None]) -> Seat | None:
        """Start the processes: returns a seat in each. In this one it returns None once all have ended after a signal.

        The first one starts alone, and `ready` is called when all are. If the first does not start, SystemExit with
        its status, or KVTierError.
        """
        deadline, is_ready = time.monotonic() + _STARTS, False
        while not self._num_signals():
            self._end_hung()
            self._reap()
            self._reload()
            ages = [self._board.age(place) for place in range(self._number)]
            if min(ages) == float("inf") and time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
                raise KVTierError(f"[router] processes: the first is not ready after {_STARTS:g} s; see its log")
            for place, child in enumerate(self._children):
                if child.pid == 0 and time.monotonic() >= child.due and (place == 0 or min(ages) < float("inf")):
                    child.pid, child.started, child.is_hung = os.fork(), time.monotonic(), False
                    if child.pid == 0:  # SIGHUP waits until it can reload
                        return Seat(self._board, place, self._number)
            if not is_ready and max(ages) < float("inf"):
                is_ready = True
                ready()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # not around a fork
            time.sleep(_LOOK)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        self._stop()
        return None

    def _reload(self) -> None:
        """After a SIGHUP: check the configuration, and have every process take it."""
        if len(self._hangups) > self._num_reloads:
            self._num_reloads = len(self._hangups)
            if self._reloads.reload():
                self._signal(signal.SIGHUP)
            self._tell()

    def _tell(self) -> None:
        self._board.write(self._number, {"replaced": self._replaced, "reloads": self._reloads.state()})

    def _end_hung(self) -> None:
        for place, child in enumerate(self._children):
            if child.pid and min(self._board.age(place), time.monotonic() - child.started) > _HUNG:
                child.is_hung = True
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        for place, child in enumerate(self._children):
            if child.pid and (reason := self._ended(child)) is not None:
                reason = "hung" if child.is_hung else reason
                self._replaced[reason] += 1
                self._tell()
                lived = time.monotonic() - child.started
                child.num_quick = 0 if lived > _WELL else child.num_quick + 1
                child.due = time.monotonic() + min(_LAST_WAIT, _FIRST_WAIT * 2 ** min(child.num_quick, 10))
                _log.warning("process %d of the router ended (%s) after %.0f s, and is replaced", place, reason, lived)

    def _ended(self, child: _Child) -> str | None:
        """Why a process has ended; None if it runs. SystemExit if no process was ever ready."""
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return None
        child.pid = 0
        code = os.waitstatus_to_exitcode(status)
        if all(not self._board.read(place) for place in range(self._number)):
            sys.exit(code if code > 0 else 1)  # it has said why
        return signal.Signals(-code).name if code < 0 else f"exit_{code}"

    def _stop(self) -> None:
        """Have all end: they go on for as long as `drain`; a second signal kills them."""
        began, num_killed = time.monotonic(), 0
        end = began + self._reloads.config.router.patience + _GRACE
        while any(child.pid for child in self._children):
            is_late = self._num_signals() > 1 or time.monotonic() > end
            num_killed += is_late
            number = signal.SIGKILL if is_late else signal.SIGTERM
            self._signal(number)  # again and again: a new one hears no signal yet
            self._end_hung()
            time.sleep(_LOOK)
            for child in self._children:
                if child.pid and os.waitpid(child.pid, os.WNOHANG)[0]:
                    child.pid = 0
        counted = [self._board.read(place).get("counts", {}) for place in range(self._number)]
        ends = f"the last in {time.monotonic() - began:.1f} s" + (", processes killed" if num_killed else "")
        _log.info("%s", stopped_line(began - self._began, counted, ends))

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.pid:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)
