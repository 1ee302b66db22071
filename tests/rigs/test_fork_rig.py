"""Forks end, are told apart and are killed as processes of their own; so are those that other programs start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doubles import wait_until as until
from fork_rig import Forked, cpu_seconds, warm_programs
from service_rig import environment

MODULES = ("json",)
TELL = "import os, sys; print(os.getpid(), os.getsid(0), sys.argv, os.environ['WHO'], os.getcwd(), flush=True)"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_programs(tmp_path_factory.mktemp("f") / "bin", MODULES)


def runs(pid: int) -> bool:
    """Whether it runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_fork_has_its_own_arguments_environment_session_and_end() -> None:
    environment = {**os.environ, "WHO": "me"}
    before = cpu_seconds()
    with Forked(["-c", TELL, "a", "b"], MODULES, env=environment, stdout=subprocess.PIPE, start_new_session=True) as it:
        assert it.stdout is not None
        assert it.stdout.read() == f"{it.pid} {it.pid} ['-c', 'a', 'b'] me {os.getcwd()}\n"
    assert it.returncode == 0
    with Forked(["-c", "import sys; sys.exit(7)"], MODULES, env=environment) as other:
        pass
    assert other.returncode == 7
    with Forked(["-c", "import time; time.sleep(600)"], MODULES, env=environment) as third:
        until(lambda: b"time.sleep(600)" in Path(f"/proc/{third.pid}/cmdline").read_bytes())
        third.kill()
    assert third.returncode == -signal.SIGKILL
    assert cpu_seconds() > before


def test_forks_end_with_who_started_them_however_that_ends() -> None:
    program = """
import os, time
from fork_rig import Forked
print(Forked(["-c", "import time; time.sleep(600)"], ("json",), env=os.environ).pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        fork = int(worker.stdout.readline())
        assert runs(fork)
        worker.kill()
    until(lambda: not runs(fork))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_what_was_started_ends_the_fork(programs: Path, number: signal.Signals) -> None:
    command = [str(programs / "python"), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shim:
        assert shim.stdout is not None
        fork = int(shim.stdout.readline())
        assert fork != shim.pid
        shim.send_signal(number)
        assert shim.wait(60) == -number
        until(lambda: not runs(fork))
