"""Services of a cluster one by one: logs, stop, restart, and what ended by itself is started again, and counted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest
import yaml
from cluster_rig import Running, wait_for

from kvtier.service.cluster import cluster as cluster_module
from kvtier.service.cluster import keeper
from kvtier.service.cluster.cluster import Cluster, show_logs
from kvtier.service.cluster.keeper import revive
from kvtier.service.command_line import Exit

pytestmark = pytest.mark.timeout(300)

SAYS = """
import http.server, sys
print("I am", sys.argv[1], flush=True)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[2]), bind="127.0.0.1")
"""


@pytest.fixture
def file(home: Path) -> str:
    """A compose file of two services that answer, one behind the other."""

    def page(name: str, port: int, after: list[str]) -> dict[str, object]:
        argv = [sys.executable, "-c", SAYS, name, f"{{port:{port}}}"]
        ready = {"http": f"http://127.0.0.1:{{port:{port}}}/"}
        return {"x-kvtier": {"argv": argv, "ports": [port], "ready": ready, "after": after, "profiles": ["cluster"]}}

    path = home / "compose.yml"
    path.write_text(yaml.safe_dump({"services": {"one": page("one", 0, []), "two": page("two", 1, ["one"])}}))
    return str(path)


def test_one_service_at_a_time_and_what_is_killed_comes_back(home: Path, file: str) -> None:
    running = Running(home / "state", "--file", file, "--profile", "cluster")
    running.restarts = True
    assert running.up().returncode == Exit.OK
    first = running.pids()
    # What one is killed comes back by itself, with another pid, and it is counted.
    os.kill(first["one"], signal.SIGKILL)
    wait_for(lambda: running.status()["one"].restarts == 1 and running.states()["one"] == "running")
    wait_for(lambda: not running.unwell)
    second = running.pids()
    assert (second["one"] != first["one"], second["two"]) == (True, first["two"])
    status, rows = running.told()
    assert (status, [row["restarts"] for row in rows]) == (Exit.OK, [1, 0])
    # Its log has both starts; a line says whose it is.
    told = running.verb("logs", "one", "--lines", "50")
    assert (told.returncode, told.stdout.count("one | I am one\n")) == (Exit.OK, 2)
    both = running.verb("logs")
    assert {line.split(" | ")[0] for line in both.stdout.splitlines()} == {"one", "two"}
    # What an operator stops stays so, and is not well; `restart` waits until it is ready.
    assert running.verb("stop", "two").stderr == "two stopped\n"
    assert (running.states()["two"], running.told()[0]) == ("stopped", Exit.DEGRADED)
    assert running.verb("stop", "two").stderr == "two does not run\n"
    done = running.verb("restart", "two")
    assert (done.returncode, done.stderr.splitlines()[-1].split(" after")[0]) == (Exit.OK, "two ready")
    assert not running.unwell
    assert running.verb("restart", "one").stderr.splitlines()[0] == "one stopped"
    third = running.pids()
    assert (third["one"] != second["one"], third["two"] != second["two"]) == (True, True)
    for wrong in ("restart", "stop", "logs"):
        refused = running.verb(wrong, "tree")
        assert refused.returncode == Exit.USAGE
        assert refused.stderr.startswith('kvtier: "tree": no service of the cluster in ')
        assert refused.stderr.endswith("; known are one, two\n")
    keeper = Cluster(running.state).read().keeper
    assert keeper is not None
    assert keeper.runs
    running.close()
    assert not keeper.runs


def test_one_that_goes_on_ending_waits_longer_each_time(home: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(home / "state", "--file", file, "--profile", "cluster")
    assert running.up().returncode == Exit.OK
    made, state, started = Cluster(running.state), running.state / "cluster.json", list[subprocess.Popen[bytes]]()
    record = json.loads(state.read_text())
    record["members"]["two"]["service"]["argv"] = ["false"]
    state.write_text(json.dumps(record))
    os.kill(running.pids()["two"], signal.SIGKILL)
    wait_for(lambda: running.states()["two"] == "dead")
    clock, waits = [0.0], []
    for _ in range(9):
        assert revive(made, started, lambda: clock[0])
        due = made.read().members["two"].next_start
        assert due is not None
        waits.append(due - clock[0])
        assert revive(made, started, lambda: clock[0])  # not yet
        assert made.read().members["two"].next_start == due
        clock[0] = due
        assert revive(made, started, lambda: clock[0])
        started[-1].wait()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (running.status()["two"].restarts, len(started)) == (9, 9)
    # A verb at work is waited for, and does not meet the keeper's look.
    monkeypatch.setattr(cluster_module, "_WAIT", 0.1)
    with made.locked():
        assert running.verb("stop", "two").returncode == Exit.FAILED
    # A restart that fails says why, and leaves it where it was.
    failed = running.verb("restart", "two")
    assert (failed.returncode, "two ended with status 1 before it was ready" in failed.stderr) == (Exit.FAILED, True)
    assert running.states() == {"one": "running", "two": "dead"}

    # Who interrupts `stop` has said that it is to stay ended: the keeper does not start it again.
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(keeper, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keeper.stop_service(made, "one", print)
    assert made.read().members["one"].stopped
    running.close()


def test_a_log_is_followed(tmp_path: Path) -> None:
    path, told, stop = tmp_path / "log", list[str](), Event()
    path.write_text("".join(f"line {number}\n" for number in range(100)))

    def tell(line: str) -> None:
        told.append(line)
        if line.endswith("line 98"):
            with path.open("a") as log:
                log.write("and\nmo")
        if line.endswith("and"):
            with path.open("a") as log:
                log.write("re\n")
        if line.endswith("more"):
            stop.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_logs([("a", path), ("none", tmp_path / "none")], 2, tell, follow=True)
    assert told == ["a    | line 98", "a    | line 99", "a    | and", "a    | more"]
