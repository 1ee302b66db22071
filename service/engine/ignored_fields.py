"""Counts the request fields that are ignored because this server does not know them; the log names each once."""

import logging
import re
from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import Final

_log = logging.getLogger(__name__)

OTHER: Final = "other"  # what the rest counts as
_MOST: Final = 32  # names that are counted by themselves: clients choose them, and a metric keeps them for ever
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)


class IgnoredFields:
    """Requests by the unknown field they had. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def note(self, names: Iterable[str]) -> None:
        """One request had these."""
        with self._lock:
            for name in sorted({name if _NAME.fullmatch(name) else OTHER for name in names}):
                if name not in self._counts and len(self._counts) >= _MOST:
                    name = OTHER
                if name not in self._counts:
                    _log.warning("request field %s: unknown here, so it is ignored; this is said once", name)
                self._counts[name] += 1

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
