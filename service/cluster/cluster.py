"""A cluster of plain processes from a compose file: started, watched and stopped; its state is one directory."""

import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from subprocess import Popen
from threading import Event
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtier.service import first_error, harmless
from kvtier.service.cluster.defaults import FIRST_PORT, NUM_PORTS
from kvtier.service.web import get_page
from kvtier.tiers import ConfigError, FormatError, KVTierError, StoreLocked
from kvtier.tiers.config import child_environment

KEY: Final = "x-kvtier"

_PLACE: Final = re.compile(r"\{(\w+)(?::(\d+))?\}")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=False)


class Ready(_Entry):
    """How to check that a service is ready, and stays so: one of three ways."""

    http: str | None = None  # this URL answers with a status below 400
    command: list[str] | None = None  # this command ends with status 0
    exits: bool = False  # the service itself ends with status 0

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.http is not None) + (self.command is not None) + self.exits != 1:
            raise ValueError("not one of http, command, exits; give one")
        return self


class ServiceFile(_Entry):
    source: str
    target: str
    replace: dict[str, str] = {}

    def write(self) -> None:
        text = Path(self.source).read_text(encoding="utf-8")
        for container, process in self.replace.items():
            text = text.replace(container, process)
        Path(self.target).parent.mkdir(parents=True, exist_ok=True)
        Path(self.target).write_text(text, encoding="utf-8")


class Service(_Entry):
    """One `x-kvtier`. In a `Topology` its placeholders are filled in."""

    argv: Annotated[list[str], Field(min_length=1)]
    env: dict[str, str] = {}
    ports: list[int] = []  # ports it listens on; counted from the cluster's first one until they are resolved
    ready: Ready
    after: list[str] = []  # services that must be ready or done first
    profiles: Annotated[list[str], Field(min_length=1)]
    directories: list[str] = []  # directories made for it, removed with the cluster
    kept: list[str] = []  # directories made for it, and kept
    files: list[ServiceFile] = []  # files written before it starts, in its directories
    address: str | None = None  # its address for users
    optional: bool = False  # if it fails, the others start without it


@dataclass(frozen=True, slots=True)
class Placeholders:
    state: Path
    deploy: Path
    model: Path
    first_port: int = FIRST_PORT

    def fill(self, text: str) -> str:
        """The text with `{state}`, `{deploy}`, `{model}` and `{port:N}` filled in. Raises ValueError for any other."""

        def value(found: re.Match[str]) -> str:
            name, number = found.groups()
            if name == "port" and number is not None and int(number) < NUM_PORTS:
                return str(self.first_port + int(number))
            if name in ("state", "deploy", "model") and number is None:
                return str(getattr(self, name))
            known = "{state}, {deploy}, {model} and {port:0}"
            raise ValueError(f"{found[0]} is not a placeholder; known are {known}")

        return _PLACE.sub(value, text)


@dataclass(frozen=True, slots=True)
class Topology:
    services: Mapping[str, Service]

    @classmethod
    def read(cls, file: Path, places: Placeholders, profiles: Sequence[str]) -> "Topology":
        """Read the services of these profiles. Raises ConfigError, which names service, entry, error and fix."""
        entries = {name: _service(f"{file}: {name}", data, places) for name, data in _entries(file).items()}
        known = sorted({profile for service in entries.values() for profile in service.profiles})
        for profile in profiles:
            if profile not in known:
                raise ConfigError(f'--profile "{profile}": not in {file}; known are {", ".join(known)}')
        chosen = {name: each for name, each in entries.items() if not set(profiles).isdisjoint(each.profiles)}
        for name, service in chosen.items():
            for other in service.after:
                if other not in chosen:
                    is_known = other in entries
                    fix = f"add --profile {entries[other].profiles[-1]}" if is_known else "no such service exists"
                    raise ConfigError(f'{file}: {name}: after "{other}": that service is not selected; {fix}')
        return cls({name: chosen[name] for name in _in_order(file, chosen)})

    def without(self, names: Sequence[str]) -> "Topology":
        left: dict[str, Service] = {}
        for name, service in self.services.items():
            if name not in names and left.keys() >= set(service.after):
                left[name] = service
        return Topology(left)


def _entries(file: Path) -> dict[str, Any]:
    try:
        parsed = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f'--file "{file}": {error.strerror}; name a compose file with {KEY} in it') from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'--file "{file}": not YAML, {" ".join(str(error).split())}; fix that line') from None
    services = parsed.get("services") if isinstance(parsed, dict) else None
    services = services if isinstance(services, dict) else {}
    found = {name: data[KEY] for name, data in services.items() if isinstance(data, dict) and KEY in data}
    if not found:
        raise ConfigError(f'--file "{file}": no service in it has {KEY}; name kvtier\'s docker-compose.yml')
    return found


def _service(place: str, data: object, places: Placeholders) -> Service:
    try:
        raw = Service.model_validate(data)
        values = _filled(raw.model_dump(), places.fill)
        values["ports"] = [places.first_port + port for port in raw.ports]
        return Service.model_validate(values)
    except ValidationError as error:
        entry, why, *_ = first_error(error)
        raise ConfigError(f"{place}: {entry or KEY}: {why}; fix {KEY} there") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def _filled(value: Any, fill: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, list):
        return [_filled(each, fill) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, fill) for key, each in value.items()}
    return value


def _in_order(file: Path, services: Mapping[str, Service]) -> Iterator[str]:
    try:
        yield from TopologicalSorter({name: each.after for name, each in services.items()}).static_order()
    except CycleError as error:
        circle = " after ".join(error.args[1])
        raise ConfigError(f"{file}: {circle}: they depend on each other; remove one dependency") from None


# --- processes -------------------------------------------------------------------------------------------------------

_ANSWER: Final = 2.0  # seconds in which a health check must answer
_KILLED: Final = 10.0  # seconds from SIGKILL to the end: a process of 100 GB needs time to free its memory
_BRIEF: Final = {"KVTIER_SERVER__DRAIN": "20s", "KVTIER_ROUTER__DRAIN": "20s"}  # a person waits for the end
_LOOPBACK: Final = "127.0.0.1"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Process(NamedTuple):
    """A process, by pid and start time: a new process with the same pid is not it."""

    pid: int
    start: str  # boot id, and clock ticks since the boot

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, f"{_BOOT.read_text().strip()}/{fields[19]}")

    @property
    def runs(self) -> bool:
        return Process.of(self.pid) == self

    def stop(self, grace: float) -> bool:
        """SIGTERM, and SIGKILL to all of its session after `grace` seconds. False if SIGKILL was needed to end it."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return True
        try:
            if not self.runs:  # checked after opening the descriptor: from here on it is this process or none
                return True
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            in_time = _has_ended(fd, grace)
            if not in_time:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                if not _has_ended(fd, _KILLED):
                    raise KVTierError(
                        f"process {self.pid} does not end, {_KILLED:g} s after SIGKILL; it hangs in the kernel"
                    )
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # the number cannot be in use again so soon
            return in_time
        except ProcessLookupError:
            return True
        finally:
            os.close(fd)


def launch(argv: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            program(argv),
            env=child_environment(env, under=_BRIEF),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def program(argv: Sequence[str]) -> list[str]:
    """The command of a service's argv: `kvtier` is this installation, whatever PATH says."""
    return [sys.executable, "-P", "-m", "kvtier.cli", *argv[1:]] if argv[0] == "kvtier" else list(argv)


def is_installed(name: str) -> bool:
    return name == "kvtier" or shutil.which(name) is not None


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
        return True


def is_well(ready: Ready) -> bool:
    """Whether a running service is healthy. A job that ends by itself never counts as healthy."""
    if ready.http is not None:
        parts = urlsplit(ready.http)
        try:
            status, _ = get_page(f"{parts.hostname}:{parts.port or 80}", parts.path or "/", _ANSWER)
            return status < HTTPStatus.BAD_REQUEST
        except (OSError, ValueError, HTTPException):
            return False
    if ready.command is not None:
        try:
            done = subprocess.run(
                program(ready.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ANSWER,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0
    return False


def _has_ended(process: int, timeout: float) -> bool:
    """Whether the process behind a descriptor ends in `timeout` seconds. `select` fails for descriptors past 1023."""
    ends = select.poll()
    ends.register(process, select.POLLIN)
    return bool(ends.poll(timeout * 1000))


# --- their logs ------------------------------------------------------------------------------------------------------

_TAIL_BYTES: Final = 1 << 20  # of a log, searched for its last lines
_LOOK: Final = 0.25  # seconds between two reads of new lines


def show_logs(logs: Sequence[tuple[str, Path]], num_lines: int, report: Callable[[str], None], *, follow: bool) -> None:
    """Print the last lines of each log behind its service's name, and with `follow` new ones, until Ctrl-C."""
    width = max((len(name) for name, _ in logs), default=0)
    ends = {name: _show(f"{name:<{width}} | ", path, None, num_lines, report) for name, path in logs}
    while follow:
        time.sleep(_LOOK)
        for name, path in logs:
            ends[name] = _show(f"{name:<{width}} | ", path, ends[name], None, report)


def _show(prefix: str, path: Path, start: int | None, num_lines: int | None, report: Callable[[str], None]) -> int:
    """Print whole lines from `start`, None for near the end, or the last of them; returns where they end."""
    try:
        with path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            begin = max(0, size - _TAIL_BYTES) if start is None else start if start <= size else 0
            log.seek(begin)
            data = log.read(size - begin)
    except FileNotFoundError:  # it has logged nothing yet
        return 0
    whole = data[: data.rfind(b"\n") + 1] if num_lines is None else data
    lines = whole.decode(errors="replace").splitlines()
    for line in lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]:
        report(harmless(prefix + line))
    return begin + len(whole)


# --- the cluster -----------------------------------------------------------------------------------------------------

Print = Callable[[str], None]

_DEADLINE: Final = 600.0  # seconds for one service to get ready: an engine imports torch, on a busy machine
GRACE: Final = 40.0  # seconds from SIGTERM to SIGKILL, as in the compose file: more than any service takes
_WAIT: Final = 2.0  # seconds for the keeper, which needs the state for a moment
_PAUSE: Final = 0.1  # seconds between two polls of starting services
_WARNING: Final = "warning: "
_LAST_LINES: Final = 20  # lines shown of the log of a service that failed


class _Recorded(BaseModel):
    model_config = ConfigDict(extra="forbid")  # refuse another program's file: `down` removes what it names


class StartedService(_Recorded):
    """The record of a started service. `process` is None if it has ended, as a one-time job does."""

    process: Process | None
    service: Service  # as it was started
    started: float  # Unix time
    stopped: bool = False  # by an operator
    restarts: int = 0  # since `up`: it had ended by itself
    failures: int = 0  # in a row
    next_start: float | None = None  # Unix time, of one that ended by itself


class ClusterRecord(_Recorded):
    """The contents of `cluster.json`: services in the order of their start, and the directories that `down` removes."""

    version: Literal[1]
    first_port: int = 0
    members: dict[str, StartedService] = {}
    directories: list[str] = []
    kept: list[str] = []
    keeper: Process | None = None  # restarts services that ended by themselves


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    name: str
    state: str
    healthy: bool
    pid: int | None
    address: str | None
    uptime_s: float | None
    restarts: int  # since `up`


class Cluster:
    """The cluster whose state is in one directory. Each verb locks the directory while it runs."""

    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        self._file = self.state / "cluster.json"

    def log_of(self, name: str) -> Path:
        return self.state / "logs" / f"{name}.log"

    def up(self, topology: Topology, first_port: int, report: Print, stopping: Event) -> bool:
        """Start the services that do not run yet, and wait until all are ready. False if everything ran already.

        Raises ConfigError for a port in use, or for another cluster's directory. If a service fails, or `stopping` is
        set meanwhile, everything that this call started is stopped, and KVTierError has the end of the log.
        """
        with self.locked(make=True):
            record = self.read()
            if not any(each.process is not None and each.process.runs for each in record.members.values()):
                # the rest of an earlier cluster does not apply
                self._clear(record)
            elif record.first_port != first_port:
                raise ConfigError(
                    f"--port {first_port}: the cluster in {self.state} runs at {record.first_port}; "
                    "use that, or another --state, or take it down"
                )
            missing: dict[str, Service] = {}
            for name, service in topology.services.items():
                member = record.members.get(name)
                runs = member is not None and (member.process is None or member.process.runs)
                if not runs or (service.ready.exits and not missing.keys().isdisjoint(service.after)):
                    missing[name] = service
            for name, service in missing.items():
                for port in service.ports:
                    if not is_free(port):
                        raise ConfigError(f"--port {first_port}: {name}'s port {port} is in use; choose another")
            record.first_port = first_port
            self.start(record, missing, report, stopping)
            self._until_well(record, report, stopping)
            return bool(missing)

    def start(self, record: ClusterRecord, services: Mapping[str, Service], report: Print, stopping: Event) -> None:
        """Start services in order, and wait until they are ready. If one fails, all are stopped: KVTierError."""
        _Start(self, record, services, report, stopping).run()

    def _until_well(self, record: ClusterRecord, report: Print, stopping: Event) -> None:
        """Wait for services that ran already: one that the keeper has just restarted is not ready yet."""
        end = time.monotonic() + _DEADLINE
        for name, member in record.members.items():
            while _status_of(name, member).state == "running" and not is_well(member.service.ready):
                if stopping.wait(_PAUSE):
                    raise KVTierError("interrupted: what runs goes on running")
                if time.monotonic() > end:
                    report(f"{_WARNING}{name} runs, and was not well within {_DEADLINE:g} s; see {self.log_of(name)}")
                    break

    def status(self) -> list[ServiceStatus]:
        """The status of every started service, each probed now. Raises ConfigError if there is no cluster."""
        record = self.read()
        if not record.members:
            raise self._none
        with ThreadPoolExecutor(len(record.members)) as threads:
            return list(threads.map(_status_of, record.members, record.members.values()))

    def down(self, report: Print, *, purge: bool) -> bool:
        """Stop every process, dependents first, and remove the state; slabs and models only with `purge`."""
        if not self._file.exists():
            return False
        with self.locked():
            record = self.read()
            self.stop(record, list(record.members), report)
            self._clear(record)
            for directory in record.kept if purge else ():
                shutil.rmtree(self.state / directory, ignore_errors=True)
            if any((self.state / kept).exists() for kept in record.kept):
                self.write(ClusterRecord(version=1, kept=record.kept))
            else:
                self._file.unlink()
        return True

    def stop(self, record: ClusterRecord, names: Sequence[str], report: Print) -> None:
        left = list(names)
        while left:
            wave = [name for name in left if not any(name in record.members[other].service.after for other in left)]
            with ThreadPoolExecutor(len(wave)) as threads:
                lines = threads.map(end, wave, [record.members[name] for name in wave])
                for name, line in zip(wave, lines, strict=True):
                    if line is not None:
                        report(line)
                    del record.members[name]
                    left.remove(name)
                    self.write(record)

    def write(self, record: ClusterRecord) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(record.model_dump_json(indent=1), encoding="utf-8")
        draft.replace(self._file)

    @property
    def _none(self) -> ConfigError:
        return ConfigError(f'--state "{self.state}": no cluster is up there; start one with `kvtier cluster up`')

    def _clear(self, record: ClusterRecord) -> None:
        """Remove stopped services from the record, stop the keeper, and remove their directories that are not kept."""
        if record.keeper is not None:
            record.keeper.stop(GRACE)
        for directory in (*record.directories, "logs"):
            shutil.rmtree(self.state / directory, ignore_errors=True)
        record.members.clear()
        record.keeper = None
        record.directories.clear()

    def read(self) -> ClusterRecord:
        try:
            return ClusterRecord.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ClusterRecord(version=1)
        except OSError as error:
            raise ConfigError(f'--state "{self.state}": {error.strerror}; name another directory') from None
        except ValidationError as error:
            field, why, *_ = first_error(error)
            what = f"{self._file}: not a cluster's record ({field or 'file'}: {why})"
            raise FormatError(f"{what}; end its processes, and remove the file") from None

    @contextmanager
    def locked(self, *, make: bool = False, wait: float | None = None) -> Iterator[None]:
        """Lock the state. StoreLocked if another command holds it for `wait` s; ConfigError: not a cluster's."""
        lock = self.state / "lock"
        try:
            if make:
                self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
                inside = self.state.iterdir()  # a lock of ours is empty
                if not self._file.exists() and any(path != lock or path.lstat().st_size for path in inside):
                    raise ConfigError(f'--state "{self.state}": it holds other files; name an empty directory')
            elif not self._file.exists():  # a file called `lock` there is not ours, and stays
                raise self._none
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f'--state "{self.state}": {error.strerror}; name another directory') from None
        try:
            until = time.monotonic() + (_WAIT if wait is None else wait)
            while True:
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= until:
                    why = "another `kvtier cluster` is using it; wait until it ends"
                    raise StoreLocked(f'--state "{self.state}": {why}')
                time.sleep(_PAUSE)
            try:
                yield
            finally:
                if not self._file.exists():  # nothing was started, or nothing is left
                    lock.unlink()
                    with suppress(OSError):  # not empty
                        self.state.rmdir()
        finally:
            os.close(fd)


class _Start:
    """One `up` under way: each service is started as soon as those it depends on are ready."""

    def __init__(
        self, cluster: Cluster, record: ClusterRecord, services: Mapping[str, Service], report: Print, stopping: Event
    ) -> None:
        self._cluster, self._record, self._report, self._stopping = cluster, record, report, stopping
        self._waiting = dict(services)
        self._starting: dict[str, tuple[Service, Popen[bytes], float]] = {}
        self._started: list[str] = []
        self._logged: dict[str, int] = {}  # bytes of its log from earlier starts

    def run(self) -> None:
        try:
            while self._waiting or self._starting:
                pending = {*self._waiting, *self._starting}
                for name in [name for name, each in self._waiting.items() if pending.isdisjoint(each.after)]:
                    self._launch(name, self._waiting.pop(name))
                for name in [name for name in self._starting if self._is_ready(name)]:
                    del self._starting[name]
                if self._stopping.wait(_PAUSE):
                    raise KVTierError("interrupted: the services that were started are stopped")
        except BaseException:
            self._cluster.stop(self._record, self._started, self._report)
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
        self._logged[name] = log.stat().st_size if log.exists() else 0
        for file in service.files:
            file.write()
        try:
            process = launch(service.argv, service.env, log)
        except OSError as error:
            why = f"{service.argv[0]}: {error.strerror}; install it, or leave its profile out"
            raise KVTierError(f"{name}: {why}") from None
        # A process that has ended already is not reaped before `poll` below.
        found = Process.of(process.pid) or Process(process.pid, "")
        restarts = self._record.members[name].restarts if name in self._record.members else 0
        self._record.members[name] = StartedService(
            process=found, service=service, started=time.time(), restarts=restarts
        )
        self._started.append(name)
        self._cluster.write(self._record)
        self._starting[name] = (service, process, time.monotonic())

    def _is_ready(self, name: str) -> bool:
        service, process, since = self._starting[name]
        waited = time.monotonic() - since
        status = process.poll()
        if status == 0 and service.ready.exits:
            self._record.members[name].process = None
            self._cluster.write(self._record)
            self._report(f"{name} done after {waited:.1f} s")
            for line in self._last_lines(name):
                if line.startswith(_WARNING):  # it has done its work in part, and warns of the rest
                    self._report(f"{_WARNING}{name}: {line.removeprefix(_WARNING)}")
            return True
        if status is not None:
            return self._failed(name, service, f"ended with status {status} before it was ready")
        if is_well(service.ready):
            at = "" if service.address is None else f", {service.address}"
            self._report(f"{name} ready after {waited:.1f} s{at}")
            return True
        if waited > _DEADLINE:
            return self._failed(name, service, f"was not ready within {_DEADLINE:g} s")
        return False

    def _failed(self, name: str, service: Service, why: str) -> bool:
        """True, with a warning, if the service is optional; else raises KVTierError with the end of its log."""
        log, lines = self._cluster.log_of(name), self._last_lines(name)
        if service.optional:
            last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
            self._report(f'{_WARNING}without {name}: it {why}; its last line in {log} is "{last}"')
            return True
        raise KVTierError("\n".join([f"{name} {why}; the end of {log}:", *(f"  {line}" for line in lines)]))

    def _last_lines(self, name: str) -> list[str]:
        text = self._cluster.log_of(name).read_bytes()[self._logged[name] :].decode(errors="replace")
        return text.splitlines()[-_LAST_LINES:]


def end(name: str, member: StartedService) -> str | None:
    """Stop a service's process. Returns the line to print; None: it does not run."""
    if member.process is None or not member.process.runs:
        return None
    in_time = member.process.stop(GRACE)
    return f"{name} stopped" if in_time else f"{name} killed: it did not end within {GRACE:g} s"


def _status_of(name: str, member: StartedService) -> ServiceStatus:
    state, is_well_now, uptime = "dead", False, None
    if member.process is None:
        state, is_well_now = "done", True
    elif member.process.runs:
        state, is_well_now, uptime = "running", is_well(member.service.ready), time.time() - member.started
    elif member.stopped:
        state = "stopped"
    pid = None if member.process is None else member.process.pid
    return ServiceStatus(name, state, is_well_now, pid, member.service.address, uptime, member.restarts)
