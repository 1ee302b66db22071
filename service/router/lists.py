"""Keeps the list of replicas up to date: from the configuration, a file that may change, and names in the DNS."""

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvtier.service.router.spec import ReplicaSpec, parse_replicas
from kvtier.tiers import ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY: Final = 1.0  # seconds between two reads of the file; a content read twice alike is complete
_MAX_FILE: Final = 1 << 20  # bytes
_PATIENCE: Final = 10.0  # seconds a read of the file may take before it counts as an error
_MAX_ADDRESSES: Final = 1024  # of a name
_FIRST: Final = 2.0  # seconds the first lookup of names may take


class ReplicaList:
    """The replicas as last known. A failed read or lookup changes nothing: it is logged once, and counted.

    `errors` counts by `file` and `name`; `why` says what is wrong with the file now.
    """

    def __init__(self, texts: Sequence[str], file: Path | None, interval: float) -> None:
        """`interval` is seconds between two lookups of names. Raises ConfigError if a spec or the file is wrong."""
        self.errors: Counter[str] = Counter()
        self.why: str | None = None
        self._texts, self._file, self._interval = texts, file, interval
        self._lines = self._seen = None if file is None else _read(file)
        self._given = parse_replicas([*texts, *(self._lines or ())])
        self._addresses: dict[tuple[str, int], tuple[str, ...]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Task[None]] = {}  # by name; ended, or under way

    @property
    def specs(self) -> list[ReplicaSpec]:
        """One spec for each replica. A name whose addresses are not known yet yields none."""
        found: dict[str, ReplicaSpec] = {}
        for spec in self._given:
            at = self._addresses.get((spec.host, spec.port), ()) if spec.has_addresses else (None,)
            for each in (spec if address is None else spec.at(address) for address in at):
                found.setdefault(each.name, each)
        return list(found.values())

    async def looked_up(self) -> list[ReplicaSpec]:
        """The specs after a first lookup of names; a lookup that takes too long is used later."""
        self._look_up_all()
        if self._lookups:
            await asyncio.wait(self._lookups.values(), timeout=_FIRST)
        return self.specs

    async def follow(self, changed: Callable[[list[ReplicaSpec]], None]) -> None:
        """Run until cancelled: call `changed` with the specs whenever they change.

        A disk or a resolver that does not answer delays nothing else.
        """
        loop, told = asyncio.get_running_loop(), self.specs
        looking: asyncio.Task[None] | None = None
        looking_since = 0.0
        due = loop.time() + self._interval
        while True:
            await asyncio.sleep(min(_EVERY, self._interval))
            if self._file is not None and (looking is None or looking.done()):
                looking, looking_since = asyncio.create_task(self._look_at_file(self._file)), loop.time()
            elif looking is not None and loop.time() - looking_since >= _PATIENCE:
                self._wrong(f'[router] replicas_file "{self._file}": not read within {_PATIENCE:g} s; check its disk')
            if loop.time() >= due:
                due = loop.time() + self._interval
                self._look_up_all()
            if (specs := self.specs) != told:
                told = specs
                changed(specs)

    async def _look_at_file(self, file: Path) -> None:
        """Take in the file's specs, if two reads in a row gave the same."""
        try:
            lines = await _on_thread("list", partial(_read, file))
            if lines == self._seen and lines != self._lines:
                self._given, self._lines = parse_replicas([*self._texts, *lines]), lines
                _log.info("%s: %d replicas", file, len(self._given))
            if lines == self._lines:
                self.why = None
            self._seen = lines
        except ConfigError as error:
            self._wrong(str(error))

    def _wrong(self, why: str) -> None:
        """Record what is wrong with the file; count and log it once."""
        if why != self.why:
            self.errors["file"] += 1
            _log.warning("%s; the list of replicas stays as it was", why)
        self.why = why

    def _look_up_all(self) -> None:
        """Begin to look up every name whose last lookup has ended."""
        for name in {(spec.host, spec.port) for spec in self._given if spec.has_addresses}:
            if name not in self._lookups or self._lookups[name].done():
                self._lookups[name] = asyncio.create_task(self._look_up(*name))

    async def _look_up(self, host: str, port: int) -> None:
        try:
            infos = await _on_thread(host, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
            found = sorted({str(info[4][0]) for info in infos})
        except (OSError, ValueError) as error:  # ValueError: not a valid host name
            self.errors["name"] += 1
            if self.errors["name"] == 1:
                _log.warning("replica %s: its addresses cannot be looked up (%s)", host, error)
            return
        self._addresses[host, port] = tuple(found[:_MAX_ADDRESSES])


async def _on_thread(name: str, function: Callable[[], T]) -> T:
    """Run `function` on a daemon thread, since a disk or a resolver may never answer. Raises what it raises."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[], None]) -> None:
        if not answer.done():
            settle()

    def work() -> None:
        try:
            settle = partial(answer.set_result, function())
        except (OSError, ValueError, ConfigError) as error:
            settle = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, settle)

    threading.Thread(target=work, name=f"kvtier-resolve-{name}", daemon=True).start()
    return await answer


def _read(file: Path) -> list[str]:
    """The file's specs, without comments. Raises ConfigError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise ValueError(f"more than {_MAX_FILE} bytes")
        lines = [line.partition("#")[0].strip() for line in data.decode().splitlines()]
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f'[router] replicas_file "{file}": {why}; give a file with one replica per line') from None
    return [line for line in lines if line]
