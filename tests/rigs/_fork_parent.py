"""The process behind fork_rig.py: imports the modules it is told, then forks itself for each start it is asked for.

stdin: a socket. argv: the modules, and room for a command line. Each request is one message of JSON, as is its answer:

- `{"start": ARGUMENTS, "env": …, "cwd": …, "session": …}` with descriptors for stdin, stdout and stderr is answered
  with the child's `pid`. The child goes on as `python ARGUMENTS`, in a session of its own if that is asked.
- `{"wait": PID}` is answered with its wait `status`, null while it runs.
- `{"spent": true}` is answered with the CPU `seconds` of this process and of its children that have ended.
- `{"listen": PATH}` opens a socket there for _fork_shim.py, which asks for a start and is told the child's end. A child
  whose shim is gone is killed.

This process ends when the other side closes the socket, and its children with it.
"""

import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from typing import Any, Final, NoReturn

MOST: Final = 1 << 17  # bytes of a request: an environment, mostly
_PR_SET_PDEATHSIG: Final = 1


class Parent:
    """Answers requests, forks, and tells shims how their children ended."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._listening: dict[int, socket.socket] = {}  # by descriptor
        self._shims: dict[int, socket.socket] = {}  # by descriptor
        self._children: dict[int, int] = {}  # pid of a shim's child, by the shim's descriptor
        self._ends: dict[int, tuple[int, int]] = {}  # pid and shim's descriptor, by the pidfd of that child
        self._events = select.poll()
        self._events.register(asking, select.POLLIN)

    def next_start(self) -> dict[str, Any] | None:
        """Answer requests. In a forked child: what to start, its streams in place. In the parent None, at the end."""
        while True:
            descriptor = self._events.poll()[0][0]  # one at a time: the next may be closed by then
            start = None
            if descriptor == self._asking.fileno():
                message, streams, _, _ = socket.recv_fds(self._asking, MOST, 3)
                if not message:
                    return None
                start = self._answer(json.loads(message), streams)
            elif descriptor in self._shims:
                start = self._hear(descriptor)
            elif descriptor in self._ends:
                self._tell_end(descriptor)
            else:
                shim, _ = self._listening[descriptor].accept()
                self._shims[shim.fileno()] = shim
                self._events.register(shim, select.POLLIN)
            if start is not None:
                return start

    def _answer(self, request: dict[str, Any], streams: list[int]) -> dict[str, Any] | None:
        answer: dict[str, Any]
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = {"status": status if pid else None}
        elif "spent" in request:
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            answer = {"seconds": sum(each.ru_utime + each.ru_stime for each in used)}
        elif "listen" in request:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(request["listen"])
            listening.listen()
            self._listening[listening.fileno()] = listening
            self._events.register(listening, select.POLLIN)
            answer = {}
        else:
            pid = self._fork(request, streams)
            if not pid:
                return request
            answer = {"pid": pid}
        self._asking.sendall(json.dumps(answer).encode())
        return None

    def _fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """0 in the child, whose streams are in place."""
        pid = os.fork()
        if pid:
            for each in streams:
                os.close(each)
            return pid
        for mine in (self._asking, *self._listening.values(), *self._shims.values()):
            mine.detach()  # closed below; its number may be another file's later
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with this process, however that ends
        put_in_place(streams)
        if request.get("session"):
            os.setsid()
        return 0

    def _hear(self, descriptor: int) -> dict[str, Any] | None:
        shim = self._shims[descriptor]
        message, streams, _, _ = socket.recv_fds(shim, MOST, 3)
        if not message:  # it was killed
            if descriptor in self._children:
                os.kill(self._children.pop(descriptor), signal.SIGKILL)
            self._forget(descriptor)
            return None
        request: dict[str, Any] = json.loads(message)
        pid = self._fork(request, streams)
        if not pid:
            return request
        self._children[descriptor] = pid
        end = os.pidfd_open(pid)
        self._ends[end] = pid, descriptor
        self._events.register(end, select.POLLIN)
        shim.sendall(json.dumps(pid).encode())
        return None

    def _tell_end(self, end: int) -> None:
        pid, descriptor = self._ends.pop(end)
        self._events.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        if self._children.get(descriptor) == pid:
            del self._children[descriptor]
            with suppress(OSError):  # it was killed meanwhile
                self._shims[descriptor].sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._events.unregister(descriptor)
        self._shims.pop(descriptor).close()


def put_in_place(descriptors: list[int]) -> None:
    """The child's own streams, and no other descriptor."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 20)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def show_as(words: list[str]) -> None:
    """What `ps` and `pkill -f` see of this process, as far as the command line's memory has room."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # arg_start and arg_end of proc(5)
    text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def run(start: dict[str, Any]) -> None:
    """What `python ARGUMENTS` does after its own start."""
    os.chdir(start["cwd"])
    os.environ.clear()
    os.environ.update(start["env"])
    sys.executable = start.get("python", sys.executable)
    what, *arguments = start["start"]
    show_as([sys.executable, *start["start"]])
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


def end(status: int) -> NoReturn:
    """What Python does at its end, but for taking apart the parent's modules, which would take seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def main() -> None:
    """Import, serve, and in each child run."""
    asking = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    for name in sys.argv[1:-1]:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a fork would lose some"
    gc.freeze()  # no collection of a child's looks at what was imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, whose end is ours
    start = Parent(asking).next_start()
    if start is None:
        return
    status = 0
    try:
        run(start)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = (ended.code or 0) & 0xFF
    end(status)


if __name__ == "__main__":
    main()
