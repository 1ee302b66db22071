"""A cluster of plain processes in a directory: brought up in order, looked at, taken down; the missing start again."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from threading import Event
from typing import Any, Final

from kvtier.service.cluster_file import Ready, Service, Topology
from kvtier.service.cluster_process import Process, is_free, is_well, launch
from kvtier.tiers.errors import ConfigError, FormatError, KVTierError, StoreLocked

Tell = Callable[[str], None]

_DEADLINE: Final = 180.0  # seconds for one service to be ready: an engine imports torch, on a busy machine
GRACE: Final = 40.0  # seconds from SIGTERM to SIGKILL: as compose gives them, more than any of ours takes
_PAUSE: Final = 0.1  # seconds between two looks at what starts
_LAST_LINES: Final = 20  # of the log of a service that failed
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Member:
    """What is remembered of a service that was started; `process` is None for one that is done."""

    process: Process | None
    ready: Ready
    after: list[str]
    address: str | None
    started: float  # Unix time


@dataclass(slots=True)
class Record:
    """The state directory's `cluster.json`: members in the order they were started in, and what `down` takes away."""

    first_port: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def is_up(self) -> bool:
        """Whether any process of it runs."""
        return any(member.process is not None and member.process.runs for member in self.members.values())

    def runs(self, name: str) -> bool:
        """Whether a service need not be started: it runs, or is done."""
        member = self.members.get(name)
        return member is not None and (member.process is None or member.process.runs)


@dataclass(frozen=True, slots=True)
class Row:
    """How one service is: `state` is running, done or dead."""

    name: str
    state: str
    healthy: bool
    pid: int | None
    address: str | None
    uptime_s: float | None


class Cluster:
    """The cluster whose state is in one directory. Each verb has the directory to itself while it lasts."""

    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        self._file = self.state / "cluster.json"

    def log_of(self, name: str) -> Path:
        """Where a service's output is."""
        return self.state / "logs" / f"{name}.log"

    def up(self, topology: Topology, first_port: int, tell: Tell, stopping: Event) -> bool:
        """Start what does not run yet, and return once all of it is ready; False where all of it ran already.

        ConfigError for a port in use or another cluster's directory. Where a service fails, KVTierError with the end
        of its log, after everything that this call started was stopped; so too where `stopping` is set meanwhile.
        """
        with self._locked(make=True):
            record = self._read()
            if not record.is_up:  # what an earlier one has left would not fit
                self._clear(record)
            elif record.first_port != first_port:
                raise ConfigError(
                    f"--port {first_port}: the cluster in {self.state} runs at {record.first_port}; "
                    "use that, or another --state, or take it down"
                )
            missing = {name: each for name, each in topology.services.items() if not record.runs(name)}
            for name, service in missing.items():
                for port in service.ports:
                    if not is_free(port):
                        raise ConfigError(f"--port {first_port}: {name}'s port {port} is in use; choose another")
            record.first_port = first_port
            _Start(self, record, missing, tell, stopping).run()
            return bool(missing)

    def status(self) -> list[Row]:
        """How every service is that was started; each is asked now. ConfigError where there is no cluster."""
        record = self._read()
        if not record.members:
            raise ConfigError(f'--state "{self.state}": no cluster is up there; start one with `kvtier cluster up`')
        with ThreadPoolExecutor(len(record.members)) as threads:
            return list(threads.map(_row, record.members, record.members.values()))

    def down(self, tell: Tell, *, purge: bool) -> bool:
        """End every process, each after those that waited for it, and remove the state.

        Slabs and models are kept, but with `purge`. False where nothing was there.
        """
        if not self._file.exists():
            return False
        with self._locked():
            record = self._read()
            self.stop(record, list(record.members), tell)
            self._clear(record)
            for directory in record.kept if purge else ():
                shutil.rmtree(self.state / directory, ignore_errors=True)
            if any((self.state / kept).exists() for kept in record.kept):
                self.write(Record(kept=record.kept))
            else:
                self._file.unlink()
        return True

    def stop(self, record: Record, names: Sequence[str], tell: Tell) -> None:
        """End these members, each after those that waited for it, and forget them."""
        left = list(names)
        while left:
            wave = [name for name in left if not any(name in record.members[other].after for other in left)]
            with ThreadPoolExecutor(len(wave)) as threads:
                lines = threads.map(_stop, wave, [record.members[name] for name in wave])
                for name, line in zip(wave, lines, strict=True):
                    if line is not None:
                        tell(line)
                    del record.members[name]
                    left.remove(name)
                    self.write(record)

    def write(self, record: Record) -> None:
        """Replace the record at once: a reader sees the old one or the new one."""
        data = {"version": _VERSION, **asdict(record)}
        for name, member in record.members.items():
            data["members"][name]["ready"] = member.ready.model_dump()
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(data, indent=1), encoding="utf-8")
        draft.replace(self._file)

    def _clear(self, record: Record) -> None:
        """Forget members, none of which runs, and what is not kept of them."""
        for directory in (*record.directories, "logs"):
            shutil.rmtree(self.state / directory, ignore_errors=True)
        record.members.clear()
        record.directories.clear()

    def _read(self) -> Record:
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
            if data.pop("version") != _VERSION:
                raise ValueError("of another version")
            data["members"] = {name: _member(each) for name, each in data["members"].items()}
            return Record(**data)
        except FileNotFoundError:
            return Record()
        except OSError as error:
            raise ConfigError(f'--state "{self.state}": {error.strerror}; name another directory') from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(
                f"{self._file}: not a cluster's record ({error}); end its processes, and remove it"
            ) from None

    @contextmanager
    def _locked(self, *, make: bool = False) -> Iterator[None]:
        lock = self.state / "lock"
        try:
            if make:
                self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not self._file.exists() and any(path != lock for path in self.state.iterdir()):
                    raise ConfigError(f'--state "{self.state}": other things are in it; name a directory of its own')
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f'--state "{self.state}": {error.strerror}; name another directory') from None
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreLocked(f'--state "{self.state}": another `kvtier cluster` is at work there') from None
            try:
                yield
            finally:
                if not self._file.exists():  # nothing came of it, or nothing is left
                    lock.unlink()
                    with suppress(OSError):  # not empty
                        self.state.rmdir()
        finally:
            os.close(fd)


class _Start:
    """One `up` under way: services started as soon as those they wait for are ready."""

    def __init__(
        self, cluster: Cluster, record: Record, services: Mapping[str, Service], tell: Tell, stopping: Event
    ) -> None:
        self._cluster, self._record, self._tell, self._stopping = cluster, record, tell, stopping
        self._waiting = dict(services)
        self._starting: dict[str, tuple[Service, Popen[bytes], float]] = {}
        self._started: list[str] = []

    def run(self) -> None:
        """Until all are ready; else none of them is there any more."""
        try:
            while self._waiting or self._starting:
                pending = {*self._waiting, *self._starting}
                for name in [name for name, each in self._waiting.items() if pending.isdisjoint(each.after)]:
                    self._launch(name, self._waiting.pop(name))
                for name in [name for name in self._starting if self._is_ready(name)]:
                    del self._starting[name]
                if self._stopping.wait(_PAUSE):
                    raise KVTierError("interrupted: what was started is stopped")
        except BaseException:
            self._cluster.stop(self._record, self._started, self._tell)
            raise

    def _launch(self, name: str, service: Service) -> None:
        state = self._cluster.state
        for directories, noted in ((service.directories, self._record.directories), (service.kept, self._record.kept)):
            for directory in map(Path, directories):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                if directory.is_relative_to(state) and (inside := str(directory.relative_to(state))) not in noted:
                    noted.append(inside)
        log = self._cluster.log_of(name)
        log.parent.mkdir(exist_ok=True)
        for file in service.files:
            file.write()
        try:
            process = launch(service.argv, service.env, log)
        except OSError as error:
            raise KVTierError(
                f"{name}: {service.argv[0]}: {error.strerror}; install it, or leave its profile out"
            ) from None
        found = Process.of(process.pid) or Process(process.pid, "")  # ended already: reaped by nobody but us, below
        self._record.members[name] = Member(found, service.ready, service.after, service.address, time.time())
        self._started.append(name)
        self._cluster.write(self._record)
        self._starting[name] = (service, process, time.monotonic())

    def _is_ready(self, name: str) -> bool:
        service, process, since = self._starting[name]
        waited = time.monotonic() - since
        status = process.poll()
        if status == 0 and service.ready.exits:
            self._record.members[name] = replace(self._record.members[name], process=None)
            self._cluster.write(self._record)
            self._tell(f"{name} done after {waited:.1f} s")
            return True
        if status is not None:
            raise self._failed(name, f"ended with status {status} before it was ready")
        if is_well(service.ready):
            at = "" if service.address is None else f", {service.address}"
            self._tell(f"{name} ready after {waited:.1f} s{at}")
            return True
        if waited > _DEADLINE:
            raise self._failed(name, f"was not ready within {_DEADLINE:g} s")
        return False

    def _failed(self, name: str, why: str) -> KVTierError:
        log = self._cluster.log_of(name)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return KVTierError("\n".join([f"{name} {why}; the end of {log}:", *(f"  {line}" for line in lines)]))


def _stop(name: str, member: Member) -> str | None:
    """End its process, where it runs: what is to be said of that."""
    if member.process is None or not member.process.runs:
        return None
    in_time = member.process.stop(GRACE)
    return f"{name} stopped" if in_time else f"{name} killed: it did not end within {GRACE:g} s"


def _member(data: Mapping[str, Any]) -> Member:
    process = None if data["process"] is None else Process(*data["process"])
    return Member(**{**data, "process": process, "ready": Ready.model_validate(data["ready"])})


def _row(name: str, member: Member) -> Row:
    if member.process is None:
        return Row(name, "done", True, None, member.address, None)
    if not member.process.runs:
        return Row(name, "dead", False, member.process.pid, member.address, None)
    uptime = time.time() - member.started
    return Row(name, "running", is_well(member.ready), member.process.pid, member.address, uptime)
