"""Runs another program that the kernel kills when this process's parent ends: `PID COMMAND…`, the parent's pid."""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def main(words: list[str]) -> None:
    """Does not return. The kernel keeps the order over execve(2), unless the program is set-uid."""
    parent, command = int(words[0]), words[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it ended before the order was given
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
