"""A daemon in a pid namespace, with the kernel's own: clients in it and in another, each of which may die."""

import json
import os
import signal
import socket as socketlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import wait_for
from node_rig import ROOT, free_port
from service_rig import environment

from kvtier.connector.daemon.link import Peer, pidfd_of

CHILD = ROOT / "tests" / "service" / "node" / "_client_child.py"
ENTER = ("unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")


def may_not_unshare() -> str | None:
    try:
        done = subprocess.run([*ENTER, "true"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else f"no pid namespaces here: {done.stderr.strip()}"


def child_of(process: "subprocess.Popen[Any]") -> int:
    """The one child of a process, which has nothing else to do."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: children.read_text().strip())
    return int(children.read_text())


class Pod:
    """A process that does nothing, in a pid namespace of its own; others join it there."""

    def __init__(self) -> None:
        # When its child was killed, unshare says "sigprocmask unblock failed": nothing of SIGKILL can be unblocked.
        self._process = subprocess.Popen([*ENTER, "sleep", "600"], stderr=subprocess.DEVNULL)
        self._first = child_of(self._process)
        self._others: list[subprocess.Popen[str]] = []

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def run(self, *arguments: str, **options: str) -> "subprocess.Popen[str]":
        """`python ARGUMENTS` in it; ended by `kill_inner`."""
        enter = ("nsenter", "--pid", "--mount", "--target", str(self._first))
        process = subprocess.Popen(
            [*enter, sys.executable, *arguments],
            env=environment(**options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._others.append(process)
        return process

    def close(self) -> None:
        """With its first process all of it ends."""
        os.kill(self._first, signal.SIGKILL)
        self._process.wait(60)
        for process in self._others:
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


def kill_inner(process: "subprocess.Popen[str]") -> None:
    os.kill(child_of(process), signal.SIGKILL)
    process.wait(60)


@pytest.fixture
def pods() -> Iterator[Callable[[], Pod]]:
    made: list[Pod] = []

    def make() -> Pod:
        made.append(Pod())
        return made[-1]

    yield make
    for pod in made:
        pod.close()


def has_pidfds_of_peers() -> bool:
    """Whether a socket tells the pidfd of its peer, as it does from Linux 6.5 on."""
    left, right = socketlib.socketpair(socketlib.AF_UNIX)
    with left, right:
        try:
            os.close(pidfd_of(left, Peer(0, 0)))
        except OSError:
            return False
        return True


@pytest.mark.skipif(bool(why := may_not_unshare()), reason=why or "")
def test_a_daemon_watches_processes_of_any_pid_namespace(pods: Callable[[], Pod]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvn-") as home:
        socket, http = f"{home}/kv.sock", f"127.0.0.1:{free_port()}"

        def status() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://{http}/status", timeout=60) as answer:
                page: dict[str, Any] = json.load(answer)
            return page

        def start(pod: Pod) -> "subprocess.Popen[str]":
            daemon = pod.run("-m", "kvtier.cli", "serve", "--socket", socket, "--http", http, host__size="32MiB")
            assert daemon.stdout is not None
            assert "ready on" in daemon.stdout.readline()
            return daemon

        def hold(pod: Pod) -> "subprocess.Popen[str]":
            client = pod.run(str(CHILD), socket, "hold")
            assert client.stdout is not None
            first = client.stdout.readline()
            assert first == "ready\n", first + client.stdout.read()
            return client

        pod, other = pods(), pods()
        daemon = start(pod)
        # an engine in the same pod is served; killed, it holds nothing any more
        engine = hold(pod)
        assert status()["clients"][0]["leases"] == 1
        kill_inner(engine)
        wait_for(lambda: not status()["clients"])
        assert status()["events"]["leases_reclaimed"] == 1
        if has_pidfds_of_peers():  # so is one in another pod, whose pid the daemon does not see
            engine = hold(other)
            [client] = status()["clients"]
            assert (client["pids"], client["leases"]) == ([0], 1)
            kill_inner(engine)
            wait_for(lambda: not status()["clients"])
            assert status()["events"]["leases_reclaimed"] == 2
        else:  # turned away, and told why
            stranger = other.run(str(CHILD), socket, "hold")
            assert stranger.stdout is not None
            assert stranger.wait(60) != 0
            assert "No such file" not in stranger.stdout.read()
            assert status()["events"].get("turned_away", 0) >= 1, status()["events"]
        # a killed daemon takes nobody along, and is started again beside those who live
        engine = hold(pod)
        kill_inner(daemon)
        assert pod.lives
        assert engine.poll() is None
        daemon = start(pod)
        hold(pod)
        assert engine.poll() is None
        kill_inner(daemon)  # it would make its socket anew while the folder is removed
