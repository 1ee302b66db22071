"""The process behind fork_rig.py: imports the modules it is told, then forks itself for each start it is asked for.

argv: the descriptor of a socket, and the modules. Each request is one message of JSON, as is its answer:
`{"start": ARGUMENTS, "env": …, "cwd": …}` with descriptors for stdin, stdout and stderr is answered with the child's
`pid`. The child goes on as `python ARGUMENTS`. `{"wait": PID}` is answered with its wait `status`, null while it runs,
and the CPU `seconds` it took. This process ends when the other side closes the socket.
"""

import builtins
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import types
from typing import Any, Final

MOST: Final = 1 << 17  # bytes of a request: an environment, mostly


def next_start(asking: socket.socket) -> dict[str, Any] | None:
    """Answer requests. In a forked child: what to start, its streams in place. In the parent None, at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asking, MOST, 3)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            pid, status, used = os.wait4(request["wait"], os.WNOHANG)
            seconds = used.ru_utime + used.ru_stime
            answer = {"status": status if pid else None, "seconds": seconds}
        else:
            child = os.fork()
            if not child:
                put_in_place(descriptors)
                return dict(request)
            answer = {"pid": child}
            for descriptor in descriptors:
                os.close(descriptor)
        asking.sendall(json.dumps(answer).encode())


def put_in_place(descriptors: list[int]) -> None:
    """The child's own streams, and no other descriptor."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 20)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(start: dict[str, Any]) -> None:
    """What `python ARGUMENTS` does after its own start; it ends as a process of its own ends."""
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["env"])
    what, *arguments = start["start"]
    if what == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if what == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), module.__dict__)
        return
    sys.argv, sys.path[0] = start["start"], os.path.dirname(what)
    module.__file__ = what
    with open(what, "rb") as source:
        code = compile(source.read(), what, "exec")
    exec(code, module.__dict__)


def main() -> None:
    """Import, serve, and in each child run."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose some"
    gc.freeze()  # or each child's end would look through all that was imported: a fifth of a second of CPU time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, whose end is ours
    start = next_start(asking)
    if start is not None:
        asking.detach()  # closed already; its number may be another file's by now
        run(start)


if __name__ == "__main__":
    main()
