"""Services of a cluster one by one: an operator stops or restarts one; the keeper restarts those that ended."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Final

from kvtier.service import log_to_stderr
from kvtier.service.cluster.cluster import Cluster, ClusterRecord, Print, Process, StartedService, end, launch
from kvtier.tiers import ConfigError, KVTierError, StoreLocked

_log = logging.getLogger(__name__)

_LOOK: Final = 1.0  # seconds between two checks of the services
_FIRST_WAIT: Final = 1.0  # seconds before a restart, doubled while the service goes on ending,
_LAST_WAIT: Final = 60.0  # up to this
_IS_WELL: Final = 60.0  # seconds after which a running service counts as well again


def stop_service(cluster: Cluster, name: str, report: Print) -> None:
    """Stop one service until `up` or `restart`. ConfigError if the cluster has none of that name."""
    with cluster.locked():
        record = cluster.read()
        member = _member(cluster, record, name)
        member.stopped = True
        cluster.write(record)  # first: if this is interrupted, the keeper must not restart it
        report(end(name, member) or f"{name} does not run")


def restart_service(cluster: Cluster, name: str, report: Print, stopping: Event) -> None:
    """Stop one service if it runs, start it, and wait until it is ready. ConfigError; KVTierError ends with its log."""
    with cluster.locked():
        record = cluster.read()
        member = _member(cluster, record, name)
        if (line := end(name, member)) is not None:
            report(line)
        try:
            cluster.start(record, {name: member.service}, report, stopping)
        except BaseException:
            record.members[name] = member  # it is there, and dead
            cluster.write(record)
            raise


def revive(cluster: Cluster, started: "list[subprocess.Popen[bytes]]", now: Callable[[], float] = time.time) -> bool:
    """Restart services that ended by themselves and whose wait is over. False: no cluster. StoreLocked."""
    record = cluster.read()
    if not any(_needs_a_look(member, now()) for member in record.members.values()):
        return bool(record.members)
    with cluster.locked(wait=0.0):
        record = cluster.read()
        for name, member in record.members.items():
            if not _needs_a_look(member, now()):
                continue
            if member.process is not None and member.process.runs:
                member.failures = 0
            elif member.next_start is None:
                member.next_start = now() + min(_LAST_WAIT, _FIRST_WAIT * 2 ** min(member.failures, 10))
                member.failures += 1
            else:
                _start_again(cluster, name, member, started, now)
            cluster.write(record)
        return bool(record.members)


def _needs_a_look(member: StartedService, at: float) -> bool:
    """Whether it has just ended by itself, is due for a start, or is well again. A failed job stays so."""
    if member.process is None or member.stopped or member.service.ready.exits:
        return False
    if member.process.runs:
        return member.failures > 0 and at - member.started > _IS_WELL
    return member.next_start is None or at >= member.next_start


def _start_again(
    cluster: Cluster,
    name: str,
    member: StartedService,
    started: "list[subprocess.Popen[bytes]]",
    now: Callable[[], float],
) -> None:
    member.next_start, member.started = None, now()
    try:
        process = launch(member.service.argv, member.service.env, cluster.log_of(name))
    except OSError as error:
        _log.warning("%s: %s", name, error)
        return
    member.restarts += 1
    member.process = Process.of(process.pid) or Process(process.pid, "")
    started.append(process)
    _log.warning("%s had ended, and is started again, for the %d. time", name, member.restarts)


def start_keeper(cluster: Cluster) -> None:
    """Start a process that looks after the cluster until `down`, unless one does: it restarts services that ended."""
    with cluster.locked():
        record = cluster.read()
        if record.keeper is not None and record.keeper.runs:
            return
        command = [sys.executable, "-P", "-m", "kvtier.service.cluster.keeper", str(cluster.state)]
        process = launch(command, {}, cluster.log_of("keeper"))
        record.keeper = Process.of(process.pid)
        cluster.write(record)


def keep(state: Path) -> None:
    cluster, started = Cluster(state), list[subprocess.Popen[bytes]]()
    while True:
        time.sleep(_LOOK)
        started = [process for process in started if process.poll() is None]  # else ended ones stay as zombies
        try:
            if not revive(cluster, started):
                return
        except StoreLocked:  # a verb is changing the cluster
            continue
        except KVTierError as error:
            _log.warning("%s: nothing is started again any more", error)
            return


def _member(cluster: Cluster, record: ClusterRecord, name: str) -> StartedService:
    member = record.members.get(name)
    if member is None:
        known = ", ".join(record.members) or "none: start a cluster with `kvtier cluster up`"
        raise ConfigError(f'"{name}": no service of the cluster in {cluster.state}; known are {known}')
    return member


if __name__ == "__main__":
    log_to_stderr("info", "text")
    keep(Path(sys.argv[1]))
