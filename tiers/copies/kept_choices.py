"""Keeps what was measured of a device's copies in small files of the user's cache directory, one for each set-up."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvtier.tiers.config import cache_directory
from kvtier.tiers.copies.copy_ways import MAX_GRID, CopyChoice

logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 64 << 10  # of a file: what is larger is none of ours
_LOOK_AGAIN: Final = 0.05  # seconds between looks at a lock that another process has
_unwritable: set[Path] = set()  # directories that were complained of


@dataclass(frozen=True, slots=True)
class ChoiceKey:
    """What a measurement depends on: another value of any field, and it is made anew."""

    device: str  # its name
    driver: str  # the CUDA version that the driver has
    cuda: str  # torch's
    cupy: str  # "none" if it is not there
    kvtier: str
    kind: str  # "own" blocks, or an "engine"'s
    ways: str  # those there are, joined by "+"


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """A file's content: the choice for a set-up, and when it was measured (UTC, ISO 8601)."""

    key: ChoiceKey
    choice: CopyChoice
    at: str


class KeptChoices:
    """The files. Whatever is wrong with one (torn, foreign, of another set-up) counts as not measured."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory` is `kvtier/copies` in `$XDG_CACHE_HOME`, or in `~/.cache`, unless it is given."""
        self._directory = directory or cache_directory() / "copies"

    def load(self, key: ChoiceKey) -> CopyChoice | None:
        """What was measured for exactly this set-up; None: nothing, or the measurement had failed."""
        kept = _read(self._path(key))
        return kept.choice if kept is not None and kept.key == key and kept.choice.source == "measured" else None

    def keep(self, key: ChoiceKey, choice: CopyChoice) -> None:
        """Write a file, whole or not at all. A directory that takes none is logged once."""
        path = self._path(key)
        new = path.with_suffix(f".{os.getpid()}.new")
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        content = json.dumps(asdict(KeptChoice(key, choice, at)), indent=1)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_text(content)
            new.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            self._complain(error)

    def all(self) -> list[KeptChoice]:
        """Every readable file, failed measurements too, the latest first."""
        with contextlib.suppress(OSError):
            found = (_read(path) for path in self._directory.glob("*.json"))
            return sorted((kept for kept in found if kept is not None), key=lambda kept: kept.at, reverse=True)
        return []

    @contextlib.contextmanager
    def alone(self, key: ChoiceKey, give_up: Callable[[], bool]) -> Iterator[bool]:
        """Whether no other process measures this set-up now. Waits for that, but no longer than until `give_up`."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._complain(error)
            yield True  # nobody can share anything here
            return
        try:
            yield _locked(lock, give_up)
        finally:
            os.close(lock)

    def _path(self, key: ChoiceKey) -> Path:
        name = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:32]
        return self._directory / f"{name}.json"

    def _complain(self, error: OSError) -> None:
        if self._directory not in _unwritable:
            _unwritable.add(self._directory)
            logger.warning("%s: what is measured of copies is not kept, and measured at every start: %s",
                           self._directory, error.strerror or error)  # fmt: skip


def _locked(lock: int, give_up: Callable[[], bool]) -> bool:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if give_up():
            return False
        time.sleep(_LOOK_AGAIN)


def _read(path: Path) -> KeptChoice | None:
    """What a file says, if it is one of ours in every field."""
    try:
        with path.open("rb") as file:
            content: Any = json.loads(file.read(_MAX_BYTES + 1)[:_MAX_BYTES])
        kept = KeptChoice(ChoiceKey(**content["key"]), CopyChoice(**content["choice"]), content["at"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    choice = kept.choice
    texts = (*asdict(kept.key).values(), choice.source, choice.reason, kept.at)
    sizes = [size for size in (choice.batch_from, choice.torch_from) if size is not None]
    well = all(isinstance(text, str) for text in texts) and all(type(size) is int and size >= 0 for size in sizes)
    return kept if well and type(choice.grid) is int and 1 <= choice.grid <= MAX_GRID else None
