"""A cluster of processes for tests, as `kvtier cluster` starts it; what is left of it at the end is an error."""

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx2
from command_rig import kvtier, kvtier_process
from doubles import wait_until
from fork_rig import ENGINE, SERVICES, Forked

from kvtier.service.cluster import cluster, keeper
from kvtier.service.cluster.cluster import Cluster, Process, ServiceStatus, is_free, launch
from kvtier.service.cluster.defaults import NUM_PORTS
from kvtier.tiers.config.config import child_environment

wait_for = partial(wait_until, timeout=100.0)
PORTS: Final = {"router": 0, "engine-a": 1, "engine-b": 2, "node-a": 11, "node-b": 12}  # of kvtier's own file


class Running:
    """`kvtier cluster` with a state directory and ports of its own; `variables` as `section__option=value`.

    Services that are kvtier's own verbs are forks, but for the first of each verb in `by_python`.
    """

    def __init__(self, state: Path, *options: str, by_python: Sequence[str] = (), **variables: str) -> None:
        self.state = state
        self.port = free_range()
        self._options, self._variables = options, {"cache__block_size": "16", **variables}
        self._by_python = {*by_python}
        self._pids: set[int] = set()
        self._started: list[subprocess.Popen[bytes] | Forked] = []
        self.restarts = False  # what ends by itself stays so, for those who look at that
        self.answer = 60.0  # seconds a health check may take: two are few on a busy machine

    def up(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """On the main thread: the verb runs in this process."""
        return self._run("up", *self._chosen(options))

    def verb(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Another one, as `restart NAME`, in this process, too."""
        return self._run(name, *arguments, "--state", str(self.state))

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with (
            patch.object(cluster, "launch", self._launch),
            patch.object(keeper, "launch", self._launch),
            patch.object(cluster, "_ANSWER", self.answer),
        ):
            done = kvtier("cluster", *arguments, **self._variables)
        self._pids |= set(self.pids().values())
        return done

    def up_by_python(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """The same in a process of its own, and so are all services."""
        done = kvtier_process("cluster", "up", *self._chosen(options), **self._variables)
        self._pids |= set(self.pids().values())
        return done

    def _chosen(self, options: Sequence[str]) -> tuple[str, ...]:
        restarts = () if self.restarts else ("--no-restart",)
        return ("--state", str(self.state), "--port", str(self.port), *restarts, *self._options, *options)

    def _launch(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes] | Forked":
        """As `launch` of the product, which `up` calls."""
        if argv[0] != "kvtier" or argv[1] in self._by_python:
            self._by_python -= {*argv}
            self._started.append(launch(argv, env, log))
        else:
            modules = ENGINE if "--model" in self._options else SERVICES
            with log.open("ab") as output:
                fork = Forked(
                    ["-m", "kvtier.cli", *argv[1:]],
                    modules,
                    env=child_environment(env),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self._started.append(fork)
        return self._started[-1]

    def status(self) -> dict[str, ServiceStatus]:
        """Of each service; the command's own status and JSON are asked for by `told`."""
        with patch.object(cluster, "_ANSWER", self.answer):
            return {row.name: row for row in Cluster(self.state).status()}

    def states(self) -> dict[str, str]:
        return {name: row.state for name, row in self.status().items()}

    @property
    def unwell(self) -> list[str]:
        return [name for name, row in self.status().items() if not row.healthy]

    def told(self) -> tuple[int, list[dict[str, Any]]]:
        """What `kvtier cluster status --json` says."""
        with patch.object(cluster, "_ANSWER", self.answer):
            done = kvtier("cluster", "status", "--state", str(self.state), "--json")
        return done.returncode, json.loads(done.stdout)

    def pids(self) -> dict[str, int]:
        record = self.state / "cluster.json"
        members = json.loads(record.read_text())["members"] if record.exists() else {}
        return {name: member["process"][0] for name, member in members.items() if member["process"]}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port + PORTS[name]}"

    def page(self, name: str, path: str = "/status") -> Any:
        return httpx2.get(self.url(name) + path, timeout=60, trust_env=False).json()

    def signal(self, name: str, number: int) -> None:
        os.kill(self.pids()[name], number)

    def kill(self, name: str) -> None:
        """kill -9, until it is seen dead."""
        self.signal(name, signal.SIGKILL)
        wait_for(lambda: self.states()[name] == "dead")

    def down(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return kvtier("cluster", "down", "--state", str(self.state), *options)

    def close(self) -> None:
        """Take it down. Nothing may be left."""
        self._pids |= set(self.pids().values())
        assert Cluster(self.state).down(print, purge=True) or not self.state.exists()
        for started in self._started:
            started.wait(60)
        assert not [pid for pid in self._pids if Process.of(pid)], "down has left processes"
        assert not self.state.exists()


def free_range() -> int:
    """The first of a hundred ports that are nobody's, of other stories' neither as long as this process lives."""
    while True:
        first = random.randrange(10_000, 17_000, NUM_PORTS)  # the README's cluster bus and free_port's are above
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first + NUM_PORTS - 1))  # which no cluster uses
        except OSError:
            claim.close()
            continue
        if all(map(is_free, range(first, first + NUM_PORTS - 1))):
            claim.detach()  # bound, not listening, until this process ends
            return first
        claim.close()
