"""A server's configuration, read again at SIGHUP: what may change in a running process does, a line names the rest."""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from kvtier.tiers import ConfigError
from kvtier.tiers.config import Config

_log = logging.getLogger(__name__)

PART: Final = "configuration"  # in lists of what is wanting
DONE, REFUSED = "done", "refused"  # outcomes of a reload
Prepare = Callable[[Config], Callable[[], None]]
"""Checks what only this server can check, and changes nothing: ConfigError. What it returns puts it in force."""

# What each server reads: sections, and options of others.
_TIERS: Final = ("host", "file", "cache", "peers", "redis", "objects", "events", "breaker", "tracing", "log")
DAEMON: Final = ("service", *_TIERS)
ENGINE: Final = ("server", "l1", "chat", "service.socket", "service.deadline", *_TIERS)
ROUTER: Final = ("router", "chat", "events.strict", "tracing", "log")


class Reloads:
    """The configuration in force, and what became of each reload. `reload` on one thread at a time; all may read."""

    def __init__(self, load: Callable[[], Config], used: Collection[str] = ()) -> None:
        """Loads: ConfigError. `used`: the sections and options that this server reads; `prepare` is set later."""
        self._load, self._used = load, frozenset(used)
        self.config = load()
        self.prepare: Prepare = lambda config: lambda: None
        self.counts: Mapping[str, int] = {DONE: 0, REFUSED: 0}
        self.why: str | None = None  # the last one was refused
        self.level = logging.INFO  # of the line about one that is done

    @property
    def wanting(self) -> dict[str, str]:
        """What is wanting: a configuration, if the last one was refused."""
        return {} if self.why is None else {PART: self.why}

    def reload(self) -> bool:
        """Load, check all of it, then put in force what may change; logged and counted. False: nothing has changed."""
        try:
            given = self._load()
            config = self.config.reloaded(given)
            changes = [each for each in self.config.changes(given) if {each[0], f"{each[0]}.{each[1]}"} & self._used]
            commit = self.prepare(config)
        except ConfigError as error:
            self.why, self.counts = str(error), self._counted(REFUSED)
            _log.warning("configuration not reloaded, the one in force stays: %s", error)
            return False
        commit()
        logging.getLogger().setLevel(config.log.level.upper())
        self.config, self.why, self.counts = config, None, self._counted(DONE)
        taken = ", ".join(f"[{section}] {name}" for section, name, is_taken in changes if is_taken)
        left = "".join(f"; [{section}] {name}: changed, takes a restart" for section, name, ok in changes if not ok)
        _log.log(self.level, "configuration reloaded: %s%s", taken or "nothing new", left)
        return True

    def state(self) -> dict[str, Any]:
        """For other processes of this server: their `apply` takes it."""
        return {"counts": self.counts, "why": self.why}

    def apply(self, state: Mapping[str, Any]) -> None:
        """Take over the outcomes that the server's first process has counted."""
        self.counts, self.why = state.get("counts", self.counts), state.get("why")

    def _counted(self, outcome: str) -> dict[str, int]:
        return {**self.counts, outcome: self.counts[outcome] + 1}
