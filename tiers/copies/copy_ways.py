"""Which way copies between a device and L2 go, by the size of their pieces; and measurements of it, in files."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtier.tiers import Metrics
from kvtier.tiers.config import cache_directory

if TYPE_CHECKING:
    from kvtier.tiers.config import HostConfig

logger = logging.getLogger(__name__)

CopyWay = Literal["batch", "kernel", "staging", "torch"]
"""By one call of the driver; by a kernel that reads and writes pinned slots; through staging on the device; by torch.

Our own blocks take the kernel, an engine's the staging.
"""

MAX_GRID: Final = 32  # blocks of threads. Published: 64 slow a neighbour's compute 100 times, 32 six times


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """From which mean size of pieces on which way is taken, in bytes, and why.

    The defaults are published figures. The driver's batches: 51 GB/s at 64 KiB, 40 to 44 at 28 KiB, 4 to 7 at 24 KiB
    and less. A torch copy costs some 6 us of Python, in which PCIe 5 moves 300 KB. A kernel of 16 x 512 threads, each
    with 16 bytes under way, has twice as much in flight as PCIe 5 moves within its latency (55 GB/s x 1.5 us).
    """

    batch_from: int | None = 28 << 10  # None: never
    torch_from: int | None = 512 << 10  # smaller ones go by kernel, unless in a batch. None: all of them
    grid: int = 16  # blocks of threads of the kernel
    source: Literal["default", "measured", "configured"] = "default"
    reason: str = "not measured"

    def way(self, mean_bytes: float, *, has_batch: bool, has_kernel: bool) -> CopyWay:
        """The way for pinned pieces of that mean size; a way that is missing is never chosen."""
        if has_batch and self.is_batched(mean_bytes):
            return "batch"
        if has_kernel and (self.torch_from is None or mean_bytes < self.torch_from):
            return "kernel"
        # without a kernel many small pieces by one call still beat a call for each
        return "batch" if has_batch and not has_kernel and self.batch_from is not None else "torch"

    def is_batched(self, mean_bytes: float) -> bool:
        """Whether the driver's batches are at least as fast as gathering, for pieces of that mean size."""
        return self.batch_from is not None and mean_bytes >= self.batch_from

    def with_options(self, host: "HostConfig") -> "CopyChoice":
        """The same, with the operator's options instead."""
        chosen = self
        if host.batch_copies_from is not None:
            reason = f"[host] batch_copies_from; the rest: {self.reason}"
            chosen = replace(chosen, batch_from=host.batch_copies_from, source="configured", reason=reason)
        return chosen if host.copy_grid is None else replace(chosen, grid=host.copy_grid)


DEFAULT: Final = CopyChoice()


class CopyWays:
    """The ways of one copy stream: the choice, which a measurement may replace at any time, and their counts."""

    def __init__(self, choice: CopyChoice | None = None, metrics: Metrics | None = None) -> None:
        """With a fixed choice; `metrics` count every batch of copies."""
        self.choice = choice or DEFAULT
        self.metrics = metrics
        self.host: HostConfig | None = None

    @classmethod
    def to_measure(cls, host: "HostConfig", metrics: Metrics | None = None) -> "CopyWays":
        """The defaults until the device was measured; options of `host` stay as they are."""
        ways = cls(DEFAULT.with_options(host), metrics)
        ways.host = host
        return ways

    @property
    def wants_measuring(self) -> bool:
        """Whether a measurement could change anything."""
        return self.host is not None and (self.host.batch_copies_from is None or self.host.copy_grid is None)

    def choose(self, choice: CopyChoice) -> None:
        """Use this one from now on, with the operator's options instead."""
        self.choice = choice if self.host is None else choice.with_options(self.host)

    def show(self, device: str) -> None:
        """Report the choice for a device to the metrics."""
        if self.metrics is not None:
            self.metrics.copies.chosen(device, self.choice.batch_from, self.choice.grid)

    def count(self, way: CopyWay, num_bytes: int) -> None:
        """One batch of copies was given to the device."""
        if self.metrics is not None:
            self.metrics.copies.made(way, num_bytes)


_MAX_BYTES: Final = 64 << 10  # of a file: a larger one is not ours
_LOOK_AGAIN: Final = 0.05  # seconds between tries of a lock that another process has
_unwritable: set[Path] = set()  # directories that were warned about


@dataclass(frozen=True, slots=True)
class ChoiceKey:
    """The conditions of a measurement: if any field changes, it is repeated."""

    device: str  # its name
    driver: str  # the CUDA version that the driver has
    cuda: str  # torch's
    cupy: str  # "none" if it is not there
    kvtier: str
    kind: str  # "own" blocks, or an "engine"'s
    ways: str  # those that exist, joined by "+"


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """A file's content: the choice for a set-up, and when it was measured (UTC, ISO 8601)."""

    key: ChoiceKey
    choice: CopyChoice
    at: str


class KeptChoices:
    """The files. A wrong one (torn, foreign, of another set-up) counts as not measured."""

    def __init__(self, directory: Path | None = None) -> None:
        """`directory` is `kvtier/copies` in `$XDG_CACHE_HOME`, or in `~/.cache`, unless it is given."""
        self._directory = directory or cache_directory() / "copies"

    def load(self, key: ChoiceKey) -> CopyChoice | None:
        """The choice measured for exactly this set-up; None: there is none, or the measurement had failed."""
        kept = _read(self._path(key))
        return kept.choice if kept is not None and kept.key == key and kept.choice.source == "measured" else None

    def keep(self, key: ChoiceKey, choice: CopyChoice) -> None:
        """Write a file, whole or not at all. A directory that is not writable is logged once."""
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
            yield True  # nothing can be shared here
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
    """A file's content, if every field is valid."""
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
