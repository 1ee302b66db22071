"""SGLang's engines as forks of a process that has SGLang imported: a start takes a third of its time.

Imported before anything else of SGLang's, in a process that starts no threads.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from sglang_rig import ENVIRONMENT

os.environ.update(ENVIRONMENT)

# isort: split
import _sglang_child as child  # SGLang reads the environment as it is imported


class Fork:
    """What of `subprocess.Popen` the rig uses, for a fork that runs the child's `main`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stderr: IO[str], **_: object) -> None:
        """The last argument of `command` is what `main` reads."""
        asked, told = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(command[-1], env, asked[0], told[1], stderr.fileno())
        os.close(asked[0])
        os.close(told[1])
        self.stdin, self.stdout = os.fdopen(asked[1], "wb"), os.fdopen(told[0], "rb")

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
            time.sleep(0.01)
        return status


def _run(options: str, env: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for own, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(own, number)
        os.closerange(3, 256)
        os.environ.clear()
        os.environ.update(env)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv[1:] = [options]
        child.main()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)
