"""PageHistory: the numbers of a status over the last hour, so that a page that is opened late shows them."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Final

import numpy as np

from kvtier.service import Json

PERIOD: Final = 5.0  # seconds between two samples
_KEPT: Final = 720  # samples: an hour
_MOST: Final = 512  # series; with the samples that is 3 MiB, however long it runs
_DEEPEST: Final = 6  # names in a path
_IDENTITIES: Final = ("model", "name")  # the field by which an entry of a list is the same in two statuses

Path = tuple[str, ...]
"""Where a number stands in the status: keys, and for an entry of a list what names it."""


class PageHistory:
    """Samples of every number in a status, in a ring of fixed size. Thread-safe.

    A number is known by its path. Numbers past the bound on series are not kept; those that no sample has any more make
    room for others.
    """

    def __init__(self, parts: Sequence[str], *, kept: int = _KEPT, most: int = _MOST) -> None:
        """Of a status, only the fields `parts` are kept."""
        self._parts = tuple(parts)
        self._most = most
        self._lock = Lock()  # guards what follows
        self._columns: dict[Path, int] = {}
        self._at = np.zeros(kept, np.int64)  # ms of the monotonic clock, as a stream's events have it
        self._values = np.full((kept, 64), np.nan)
        self._next = 0  # samples taken so far

    def add(self, status: Mapping[str, Any], at: float | None = None) -> None:
        """Take a sample; `at` is seconds of the monotonic clock, None = now."""
        found = dict(_numbers({part: status[part] for part in self._parts if part in status}))
        with self._lock:
            row = self._next % len(self._at)
            self._at[row] = int(1000 * (time.monotonic() if at is None else at))
            self._values[row] = np.nan
            if any(path not in self._columns for path in found):
                self._make_room(found)
            for path, value in found.items():
                if (column := self._columns.get(path)) is not None:
                    self._values[row, column] = value
            self._next += 1

    def as_json(self) -> Json:
        """`now` and `at` in ms of the monotonic clock; of each series its path and its values at these times.

        A series that is the same in all samples has one value for all; null is "not known".
        """
        with self._lock:
            kept = len(self._at)
            rows = np.arange(max(0, self._next - kept), self._next) % kept
            at, values, columns = self._at[rows].tolist(), self._values[rows], dict(self._columns)
        series = [{"path": list(path), "values": _listed(values[:, column])} for path, column in columns.items()]
        return {"now": int(1000 * time.monotonic()), "period_s": PERIOD, "at": at, "series": series}

    def _make_room(self, found: Mapping[Path, float]) -> None:
        """Columns for new paths, as far as there may be more. Under the lock."""
        new = [path for path in found if path not in self._columns]
        if len(self._columns) + len(new) > self._most:
            alive = ~np.isnan(self._values).all(0)
            kept = [(path, column) for path, column in self._columns.items() if alive[column] or path in found]
            self._values = self._values[:, [column for _, column in kept]]
            self._columns = {path: number for number, (path, _) in enumerate(kept)}
        for path in new[: self._most - len(self._columns)]:
            self._columns[path] = len(self._columns)
        if (lacking := len(self._columns) - self._values.shape[1]) > 0:
            width = min(self._most, self._values.shape[1] + max(lacking, 64)) - self._values.shape[1]
            self._values = np.hstack([self._values, np.full((len(self._at), width), np.nan)])


def _numbers(value: object, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Every number in it, by its path."""
    if isinstance(value, bool) or len(path) > _DEEPEST:
        return
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, (*path, str(key)))
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping):
                name = next((entry[field] for field in _IDENTITIES if field in entry), None)
                if isinstance(name, str):
                    yield from _numbers(entry, (*path, name))


def _listed(values: "np.ndarray[Any, np.dtype[np.float64]]") -> Any:
    """For JSON: whole numbers as such, and one for all if they are the same."""
    if len(values) and (values == values[0]).all():
        return _plain(float(values[0]))
    return [_plain(value) for value in values.tolist()]


def _plain(value: float) -> int | float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(value, 6)
