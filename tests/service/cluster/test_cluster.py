"""`kvtier cluster`: real processes brought up in order, looked at, killed, started again, taken down to the last."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
import yaml
from cluster_rig import Running, free_range, wait_for
from command_rig import kvtier
from node_rig import ROOT
from redis_rig import NO_REDIS
from router_rig import RawReplica
from service_rig import environment
from small_engines import GREEDY
from tiny_models import config_of, prompt

from kvtier.connector.local import LocalConnector
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.service.cluster import cluster
from kvtier.service.cluster.cluster import Placeholders, Process, Ready, Topology, is_free
from kvtier.service.command_line import Exit
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError, FormatError

pytestmark = pytest.mark.timeout(300)

SLEEPER = ["sh", "-c", "echo I am here; exec sleep 600"]


@pytest.fixture
def file_of(home: Path) -> Callable[[dict[str, Any]], str]:
    def write(services: dict[str, Any]) -> str:
        for each in services.values():
            each["x-kvtier"].setdefault("profiles", ["cluster"])
        path = home / "compose.yml"
        path.write_text(yaml.safe_dump({"services": services}))
        return str(path)

    return write


def page(*, after: tuple[str, ...] = (), port: int = 0, **more: Any) -> dict[str, Any]:
    """A service that answers on a port."""
    argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", f"{{port:{port}}}"]
    ready = {"http": f"http://127.0.0.1:{{port:{port}}}/"}
    return {"x-kvtier": {"argv": argv, "ports": [port], "ready": ready, "after": list(after), **more}}


# the real file


@pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or "")
def test_valkey_and_two_daemons(home: Path) -> None:
    running = Running(home / "state", "--profile", "core")
    up = running.up_by_python()
    assert up.returncode == Exit.OK, up.stderr
    lines = up.stderr.splitlines()
    assert [line.split()[0] for line in lines[3:4]] == ["valkey-join"]  # after the three, before the daemons
    wait_for(lambda: not running.unwell)
    status, rows = running.told()
    assert status == Exit.OK
    assert {row["name"]: row["state"] for row in rows} == {
        **dict.fromkeys(("valkey-1", "valkey-2", "valkey-3"), "running"),
        "valkey-join": "done",
        **dict.fromkeys(("node-a", "node-b"), "running"),
    }
    assert all(row["healthy"] for row in rows)
    assert rows[-1]["address"] in {f"http://127.0.0.1:{running.port + offset}" for offset in (11, 12)}
    assert rows[-1]["pid"] in running.pids().values()
    # a second time it is up already, and the same processes go on
    before = running.pids()
    again = running.up()
    assert again.returncode == Exit.OK
    assert "it is up already" in again.stderr
    assert running.pids() == before
    # a killed daemon and a killed master are seen, and nothing else is touched when they are started again
    for name in ("node-a", "valkey-2"):
        os.kill(before[name], signal.SIGKILL)
    wait_for(lambda: running.states()["node-a"] == "dead")
    assert running.states() == {**{name: "running" for name in before}, "valkey-join": "done"} | {
        "node-a": "dead",
        "valkey-2": "dead",
    }
    assert running.up().returncode == Exit.OK
    after = running.pids()
    assert {name for name in before if before[name] != after[name]} == {"node-a", "valkey-2"}
    wait_for(lambda: not running.unwell)
    # one that hangs is not dead, and not healthy
    os.kill(after["node-b"], signal.SIGSTOP)
    patience, running.answer = running.answer, 1.0
    assert running.told()[0] == Exit.DEGRADED
    wait_for(lambda: running.unwell == ["node-b"])
    running.answer = patience
    os.kill(after["node-b"], signal.SIGCONT)
    # one whose processes are all gone, as after a boot, begins anew and at another port, if that is wanted
    for pid in after.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: set(running.states().values()) == {"dead", "done"})
    running.port = free_range()
    up = running.up()
    assert up.returncode == Exit.OK, up.stderr
    after = running.pids()
    # another cluster in its place: one line
    other = Running(home / "other", "--profile", "core")
    other.port = running.port
    refused = other.up()
    assert refused.returncode == Exit.USAGE
    assert refused.stderr == (
        f"kvtier: --port {running.port}: valkey-1's port {running.port + 41} is in use; choose another\n"
    )
    assert not other.state.exists()
    # down takes all of it away but what was stored
    down = running.down()
    assert down.returncode == Exit.OK
    assert down.stderr.splitlines()[-1] == "down"
    assert not [pid for pid in after.values() if Process.of(pid)]
    assert {path.name for path in running.state.iterdir()} == {"cluster.json", "lock", "slabs-a", "slabs-b"}
    assert kvtier("cluster", "status", "--state", str(running.state)).returncode == Exit.USAGE
    running.close()


def num_shared(state: Path, seed: int) -> int:
    """Blocks of a prompt nobody has seen that node-a's engine computes, and node-b's finds in Redis."""
    found = 0
    for side in "ab":
        cache = {"load_or_recompute": "load", "prefetch_deadline": "60s"}
        config = Config.load(service={"socket": state / f"run-{side}" / "kv.sock"}, cache=cache)
        options = EngineConfig(block_size=16, num_blocks=64)
        engine = Engine.from_config(config_of("llama"), options, LocalConnector.connect(config))
        try:
            engine.generate([prompt(seed, 200)], GREEDY)
            assert isinstance(engine.connector, LocalConnector)
            assert engine.drain(60)
            assert engine.connector.tiers.drain(60)
            found = int(engine.connector.tiers.stats()['kvtier_lookup_blocks_total{tier="redis"}'])
        finally:
            engine.close()
    return found


@pytest.mark.slow
@pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or "")
def test_a_lost_nodes_conf_costs_shared_blocks_and_keeps_nothing_from_starting(home: Path) -> None:
    running = Running(home / "state", "--profile", "core")
    assert running.up().returncode == Exit.OK
    masters = [f"127.0.0.1:{running.port + number}" for number in (41, 42, 43)]
    # a master and a daemon are gone, and the master's disk has forgotten who it was
    for name in ("valkey-2", "node-a"):
        running.kill(name)
    (running.state / "valkey-2" / "nodes.conf").unlink()
    up = running.up()
    assert up.returncode == Exit.OK, up.stderr
    warnings = [line for line in up.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, up.stderr
    assert warnings[0].startswith(f"warning: valkey-join: {masters[1]} has lost its nodes.conf: make a new cluster")
    wait_for(lambda: running.states()["node-a"] == "running" and not running.unwell)
    # what it says to do makes one cluster again, while the daemons go on
    before = running.pids()
    told = re.search(r"by: (sh \S+/join\.sh --anew [\d.: ]+);", warnings[0])
    assert told is not None
    fixed = subprocess.run(told[1].split(), capture_output=True, text=True, timeout=200)
    assert (fixed.returncode, "warning" in fixed.stderr) == (0, False), fixed.stderr
    with redis.RedisCluster(host="127.0.0.1", port=running.port + 42) as cluster:
        assert {f"{node.host}:{node.port}" for node in cluster.get_nodes()} == set(masters)
    # and they attach by themselves: what one has stored the other finds
    seeds = iter(range(100))
    wait_for(lambda: num_shared(running.state, next(seeds)) > 0)
    assert running.pids() == before
    running.close()


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (Debian has it)")
def test_prometheus_asks_where_the_processes_are(home: Path) -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    file = home / "compose.yml"
    file.write_text(yaml.safe_dump({"services": {"prometheus": composed["services"]["prometheus"]}}))
    (home / "deploy").symlink_to(ROOT / "deploy")
    running = Running(home / "state", "--file", str(file), "--profile", "observability")
    up = running.up()
    assert up.returncode == Exit.OK, up.stderr
    jobs = {11: "node", 12: "node", 1: "engine", 2: "engine", 0: "router"}
    expected = {(job, f"127.0.0.1:{running.port + offset}") for offset, job in jobs.items()}

    def targets() -> set[tuple[str, str]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{running.port + 90}/api/v1/targets", timeout=60) as answer:
            found = json.load(answer)["data"]["activeTargets"]
        return {(each["labels"]["job"], each["labels"]["instance"]) for each in found}

    wait_for(lambda: targets() == expected)
    running.close()


# services of other kinds


def test_what_only_watches_may_be_missing(home: Path, file_of: Callable[[dict[str, Any]], str]) -> None:
    watcher = {"argv": ["no-such-program"], "ready": {"exits": True}, "profiles": ["observability"]}
    file = file_of(
        {
            "it": page(),
            "watcher": {"x-kvtier": watcher},
            "screen": page(port=1, after=("watcher",), profiles=["observability"]),
        }
    )
    running = Running(home / "state", "--file", file)
    up = running.up()
    assert up.returncode == Exit.OK, up.stderr
    assert up.stderr.splitlines()[0] == "without watcher: no-such-program is not installed"
    assert running.states() == {"it": "running"}
    running.close()
    asked = Running(home / "state", "--file", file, "--profile", "cluster", "--profile", "observability").up()
    assert asked.returncode == Exit.FAILED
    assert asked.stderr.startswith("kvtier: watcher: no-such-program is not installed; install it, or")


def test_what_may_be_missing_fails_in_one_line(home: Path, file_of: Callable[[dict[str, Any]], str]) -> None:
    never_well = {"argv": ["sh", "-c", "echo first; echo it is broken; exit 7"], "ready": {"command": ["true"]}}
    file = file_of(
        {
            "store": {"x-kvtier": {**never_well, "ready": {"command": ["false"]}, "optional": True}},
            "job": {"x-kvtier": {"argv": ["sh", "-c", "date +%N >> {state}/made/times"], "ready": {"exits": True}}},
            "it": page(after=("store", "job")),
        }
    )
    document = yaml.safe_load(Path(file).read_text())
    document["services"]["job"]["x-kvtier"].update(after=["store"], directories=["{state}/made"])
    Path(file).write_text(yaml.safe_dump(document))
    running = Running(home / "state", "--file", file, "--profile", "cluster")
    up = running.up()
    assert up.returncode == Exit.OK, up.stderr
    log = running.state / "logs" / "store.log"
    warning = (
        f'warning: without store: it ended with status 7 before it was ready; its last line in {log} is "it is broken"'
    )
    assert [line for line in up.stderr.splitlines() if line.startswith("warning")] == [warning]
    assert running.states() == {"store": "dead", "job": "done", "it": "running"}
    assert running.told()[0] == Exit.DEGRADED
    # the next `up` tries it again, and the job that stands behind it, as compose does
    assert warning in running.up().stderr
    assert len((running.state / "made" / "times").read_text().split()) == 2
    running.close()


def test_the_order_is_that_of_need(home: Path, file_of: Callable[[dict[str, Any]], str]) -> None:
    job = {"argv": ["sh", "-c", "date +%s.%N > {state}/made/time"], "ready": {"exits": True}, "after": ["first"]}
    file = file_of(
        {
            "last": page(port=1, after=("job",)),
            "job": {"x-kvtier": {**job, "directories": ["{state}/made"]}},
            "first": page(port=0, env={"GREETING": "{port:0}"}),
            "elsewhere": page(port=2, profiles=["bench"]),
            "container-only": {"x-kvtier": {**page(port=3)["x-kvtier"], "profiles": ["bench"]}},
        }
    )
    running = Running(home / "state", "--file", file, "--profile", "cluster")
    up = running.up()
    assert [line.split()[0] for line in up.stderr.splitlines()] == ["first", "job", "last", "up"], up.stderr
    environ = Path(f"/proc/{running.pids()['first']}/environ").read_bytes().split(b"\0")
    assert f"GREETING={running.port}".encode() in environ
    # two clusters, two directories, two ranges
    other = Running(home / "other", "--file", file, "--profile", "cluster")
    assert other.up().returncode == Exit.OK
    assert not set(other.pids().values()) & set(running.pids().values())
    assert running.down().stderr.splitlines() == ["last stopped", "first stopped", "down"]
    assert set(other.states().values()) == {"running", "done"}
    # one that runs keeps its ports
    other.port, was = running.port, other.port
    moved = other.up()
    assert moved.returncode == Exit.USAGE
    assert f"runs at {was}" in moved.stderr
    other.close()
    running.close()
    assert "nothing to do" in running.down().stderr


def test_a_failure_takes_back_what_it_started(home: Path, file_of: Callable[[dict[str, Any]], str]) -> None:
    good = page(port=0)
    bad: dict[str, Any] = {"argv": ["kvtier", "serve", "--http", "127.0.0.1:{port:1}"], "ready": {"exits": True}}
    bad |= {"after": ["good"], "env": {"KVTIER_SERVICE__SOCKET": "{state}/none/kv.sock"}}
    running = Running(
        home / "state", "--file", file_of({"good": good, "bad": {"x-kvtier": bad}}), "--profile", "cluster"
    )
    up = running.up()
    assert up.returncode == Exit.FAILED
    first, *rest = up.stderr.splitlines()
    assert first.startswith("good ready after")
    assert rest[0] == "good stopped"
    assert rest[1].startswith("kvtier: bad ended with status 2 before it was ready; the end of ")
    assert "make that directory" in rest[2]  # the daemon's own line
    assert running.pids() == {}
    # what went before stays: only the missing part was tried again
    file_of({"good": good})
    assert running.up().returncode == Exit.OK
    file_of({"good": good, "bad": {"x-kvtier": bad}})
    assert running.up().returncode == Exit.FAILED
    assert running.states() == {"good": "running"}
    running.close()


def test_an_interrupted_up_leaves_nothing(home: Path, file_of: Callable[[dict[str, Any]], str]) -> None:
    never = {"argv": SLEEPER, "ready": {"command": ["false"]}}
    file = file_of({"good": page(port=0), "never": {"x-kvtier": never}})
    running = Running(home / "state", "--file", file)
    command = [sys.executable, "-m", "kvtier.cli", "cluster", "up", "--state", str(running.state)]
    command += ["--port", str(running.port), "--profile", "cluster", "--file", file]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(running.pids()) == 2 and "I am here" in (running.state / "logs/never.log").read_text())
        pids = running.pids()
        # meanwhile nobody else may
        busy = running.down()
        assert busy.returncode == Exit.FAILED
        assert "another `kvtier cluster` is using it" in busy.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == Exit.FAILED
        assert process.stderr is not None
        assert process.stderr.read().endswith("kvtier: interrupted: the services that were started are stopped\n")
    assert not [pid for pid in pids.values() if Process.of(pid)]
    running.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"argv": ["sh", "{port:100}"]}, r"\{port:100\} is not a placeholder"),
        ({"prots": [1]}, "prots: Extra inputs are not permitted"),
        ({"ready": {}}, "ready: not one of http, command, exits; give one"),
        ({"after": ["nobody"]}, 'after "nobody": that service is not selected; no such service exists'),
        ({"after": ["bench"]}, 'after "bench": that service is not selected; add --profile bench'),
        ({"after": ["it"]}, "they depend on each other"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    home: Path, file_of: Callable[[dict[str, Any]], str], change: dict[str, Any], message: str
) -> None:
    it = {"x-kvtier": {"argv": ["true"], "ready": {"exits": True}, **change}}
    file = file_of({"it": it, "bench": page(port=1, profiles=["bench"])})
    with pytest.raises(ConfigError, match=message) as refused:
        Topology.read(Path(file), Placeholders(home, home, home), ["cluster"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("up", "--file", "nowhere.yml"), Exit.USAGE, "No such file or directory"),
        (("up", "--file", "torn.yml"), Exit.USAGE, "not YAML"),
        (("up", "--profile", "clutter"), Exit.USAGE, '--profile "clutter": not in'),
        (("up", "--model", "."), Exit.USAGE, "no config.json in it"),
        (
            ("up", "--state", "deep/" * 20),
            Exit.USAGE,
            "longer than 84 bytes, too long for sockets in it; choose another",
        ),
        (("up", "--state", "a,b"), Exit.USAGE, "a comma ends an option of the router's replicas; choose another"),
        (("up", "--file", "missing.yml", "--profile", "cluster"), Exit.FAILED, "no-such-program is not installed"),
        (("status",), Exit.USAGE, "no cluster is up there"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int, message: str
) -> None:
    (home / "setup.cfg").write_text("name: value\n")
    (home / "torn.yml").write_text("services: [")
    entry = {"argv": ["no-such-program"], "ready": {"exits": True}, "profiles": ["cluster"]}
    (home / "missing.yml").write_text(yaml.safe_dump({"services": {"it": {"x-kvtier": entry}}}))
    monkeypatch.chdir(home)
    done = kvtier("cluster", *arguments)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (home / "kvtier-cluster").exists()


def test_a_directory_with_other_things_is_left_alone(home: Path) -> None:
    (home / "letter").write_text("to keep")
    with pytest.raises(ConfigError, match="it holds other files; name an empty directory"):
        cluster.Cluster(home).up(Topology({}), 7400, print, Event())
    assert not cluster.Cluster(home).down(print, purge=True)
    assert [path.name for path in home.iterdir()] == ["letter"]


def test_a_lock_of_another_program_is_left_alone(home: Path) -> None:
    (home / "lock").write_text("to keep")
    for verb in ("stop", "restart"):
        refused = kvtier("cluster", verb, "router", "--state", home)
        assert (refused.returncode, refused.stderr) == (
            Exit.USAGE,
            f'kvtier: --state "{home}": no cluster is up there; start one with `kvtier cluster up`\n',
        )
    with pytest.raises(ConfigError, match="it holds other files; name an empty directory"):
        cluster.Cluster(home).up(Topology({}), 7400, print, Event())
    assert (home / "lock").read_text() == "to keep"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "version: Field required"),
        ('{"nodes": ["a", "b"]}', "version: Field required"),
        ('{"version": 2, "members": {}}', "version: Input should be 1"),
        ('{"version": 1, "directories": ["logs"], "nodes": 3}', "nodes: Extra inputs are not permitted"),
        ("[]", "file: Input should be an object"),
        ("{", "file: Invalid JSON"),
    ],
)
def test_another_programs_file_of_that_name_is_left_alone(home: Path, text: str, why: str) -> None:
    (home / "cluster.json").write_text(text)
    (home / "logs").mkdir()
    here = cluster.Cluster(home)
    with pytest.raises(FormatError, match=f"not a cluster's record .{why}.*; end its processes, and remove the file"):
        here.down(print, purge=True)
    with pytest.raises(FormatError):
        here.up(Topology({}), 7400, print, Event())
    with pytest.raises(FormatError):
        here.status()
    assert (home / "cluster.json").read_text() == text
    assert (home / "logs").is_dir()


# one process


def test_another_process_of_the_same_pid_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        found = Process.of(other.pid)
        assert found is not None
        assert found.runs
        once = Process(other.pid, found.start + "0")  # had this pid before
        assert not once.runs
        assert once.stop(0.1)
        assert found.runs
        assert found.stop(30)
        assert Process.of(other.pid) is None  # a zombie is none
        assert other.wait() == -signal.SIGTERM
    assert found.stop(0.1)


def test_who_has_many_files_open_stops_it_all_the_same() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with ExitStack() as stack, subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        last = 0
        while last < 1024:  # `select` knows none from here on
            last = stack.enter_context(open(os.devnull)).fileno()
        found = Process.of(other.pid)
        assert found is not None
        assert found.stop(30)
        assert other.wait() == -signal.SIGTERM


def test_one_that_does_not_heed_is_killed() -> None:
    script = "trap '' TERM; sleep 600 & echo $!; while :; do wait; done"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as deaf:
        assert deaf.stdout is not None
        child = int(deaf.stdout.readline())
        found = Process.of(deaf.pid)
        assert found is not None
        assert Process.of(child) is not None
        assert not found.stop(0.1)
        assert deaf.wait() == -signal.SIGKILL
        wait_for(lambda: Process.of(child) is None)  # and what it had started


def test_a_health_check_that_answers_byte_by_byte_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def drips(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        for _ in range(100):  # a second, each byte in time
            time.sleep(0.01)
            yield b"a"
        yield b": b\r\n\r\n"

    other = RawReplica(drips)
    try:
        monkeypatch.setattr(cluster, "_ANSWER", 60.0)
        assert cluster.is_well(Ready(http=f"http://{other.name}/v1/healthz"))
        monkeypatch.setattr(cluster, "_ANSWER", 0.2)
        assert not cluster.is_well(Ready(http=f"http://{other.name}/v1/healthz"))
    finally:
        other.close()


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_free(taken.getsockname()[1])
