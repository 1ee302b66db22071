"""One thread that waits for files, calls and time; and the daemon's Unix socket, open to this user's processes only."""

import contextlib
import fcntl
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from kvtier.connector.daemon import is_trusted
from kvtier.tiers import ConfigError, TierUnavailable

T = TypeVar("T")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
_MAX_CALLS: Final = 4096  # from other threads, waiting for their turn
_BUFFER: Final = 256 << 10  # bytes read at once

ReadyHandler = Callable[[int], object]  # called with what is ready: READABLE, WRITABLE, or more of epoll's bits


class Loop:
    """Readiness, calls and time on one thread. `call`, `submit`, `wake` and `stop` are for any thread."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_BUFFER))  # what a handler reads into: good until it returns
        self._epoll = select.epoll()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, tuple[ReadyHandler, int]] = {}  # fd → handler, and the round it came in
        self._round = 0
        self.watch(self._event, lambda events: os.eventfd_read(self._event))
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = 0
        self._stopped = False

    def watch(self, fd: int, handler: ReadyHandler, events: int = READABLE) -> None:
        self._handlers[fd] = handler, self._round
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching the file. Call it before the file is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run(self, turn: Callable[[], float]) -> None:
        """Serve until `stop`. Every round ends with `turn`, which returns how many seconds the next may wait."""
        self._thread = threading.get_ident()
        wait = 0.0
        while not self._stopped:
            ready = self._epoll.poll(wait)
            self._round += 1
            for fd, events in ready:
                handler, since = self._handlers.get(fd, (None, 0))  # an earlier handler may have closed it,
                if handler is not None and since < self._round:  # and another may have opened a file of that number
                    handler(events)
            while self._calls:
                self._calls.popleft()()
            wait = turn()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop's thread, soon. It must not wait."""
        self._calls.append(function)
        self.wake()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """As `call`; the future holds the result, or TierUnavailable. Wait for it with a deadline."""
        future: Future[T] = Future()
        if self._stopped or len(self._calls) >= _MAX_CALLS:
            future.set_exception(TierUnavailable("the daemon is stopping, or has too much to do"))
        else:
            self.call(lambda: _settle(future, function))
        return future

    def wake(self) -> None:
        if threading.get_ident() != self._thread and not self._stopped:
            with contextlib.suppress(OSError):  # the counter is full: it wakes up anyway
                os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """End `run` after this round. Safe in a signal handler."""
        self._stopped = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the loop's own files. Waiting calls run first, so that no thread waits for them."""
        while self._calls:
            self._calls.popleft()()
        self._handlers.clear()
        self._epoll.close()
        os.close(self._event)


def _settle(future: "Future[T]", function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


now: Final = time.monotonic  # the clock of the daemon, in seconds


# --- the daemon's socket ---------------------------------------------------------------------------------------------

BACKLOG: Final = 512
_MAX_PATH: Final = 107  # bytes of sockaddr_un.sun_path, less its terminating zero


class Listener:
    """A listening socket at a path. Its lock file `{path}.lock` stays; who holds the lock may replace the socket."""

    def __init__(self, path: Path) -> None:
        """ConfigError if the path cannot be used; it names the pid of another daemon that serves it."""
        self.path = path
        self._renewing = threading.Lock()
        if (length := len(os.fsencode(path))) > _MAX_PATH:
            raise _bad(path, f"{length} bytes, at most {_MAX_PATH}; choose a shorter path")
        with _directory(path) as home:
            self._lock = _lock(path, home)
            try:
                self.socket, self._file = _listen(path, home)
            except BaseException:
                os.close(self._lock)
                raise

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this socket: a cleaner of temporary files may have removed it. May wait."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self.path.lstat(), self._file) and self._holds_lock()
        return False

    def _holds_lock(self) -> bool:
        """Whether our lock is the file that another daemon would lock."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(f"{self.path}.lock"), os.fstat(self._lock))
        return False

    def renewed(self) -> socket.socket:
        """A new socket at the path, while we hold the lock; `replace` takes it. May wait. ConfigError as at first."""
        with self._renewing:
            if self._lock < 0:
                raise ConfigError("the daemon is stopping")
            with _directory(self.path) as home:
                if not self._holds_lock():
                    lock = _lock(self.path, home)  # ConfigError: another daemon serves there now
                    os.close(self._lock)
                    self._lock = lock
                made, self._file = _listen(self.path, home)
        return made

    def replace(self, made: socket.socket) -> None:
        self.socket.close()
        self.socket = made

    def close(self) -> None:
        """Remove the socket, unless the path leads to another daemon's now. Idempotent."""
        with self._renewing:
            if self._lock >= 0:
                self.socket.close()
                with contextlib.suppress(OSError):
                    if os.path.samestat(self.path.lstat(), self._file):
                        self.path.unlink()
                os.close(self._lock)
                self._lock = -1


def _bad(path: Path, why: str) -> ConfigError:
    return ConfigError(f'[service] socket "{path}": {why}')


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """The socket's directory, opened: if it is moved away meanwhile, nothing is done in its replacement."""
    home = path.absolute().parent
    try:
        opened = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _bad(path, f"{home}: {error.strerror}; make that directory") from None
    try:
        found = os.fstat(opened)
        if not is_trusted(found.st_uid):
            why = f"{home} is user {found.st_uid}'s, this is user {os.geteuid()}; choose a directory of your own"
            raise _bad(path, why)
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            raise _bad(path, f"others may replace files in {home}; `chmod go-w` it, or choose another")
        yield opened
    finally:
        os.close(opened)


def _check_owner(path: Path, home: int) -> None:
    try:
        found = os.lstat(path.name, dir_fd=home)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _bad(path, "a file that is no socket is there; move it, or choose another")
    if not is_trusted(found.st_uid):
        raise _bad(path, f"user {found.st_uid}'s, this is user {os.geteuid()}; choose another path")


def _lock(path: Path, home: int) -> int:
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"{path.name}.lock", flags, 0o600, dir_fd=home)
    except OSError as error:
        raise _bad(path, f"{path}.lock: {error.strerror}; choose another path") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise _bad(path, f"the daemon with pid {owner} serves it; stop that one, or choose another path") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _listen(path: Path, home: int) -> tuple[socket.socket, os.stat_result]:
    _check_owner(path, home)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=home)  # stale, since its owner would hold the lock
        listener.bind(os.fspath(path))
        os.chmod(path.name, 0o600, dir_fd=home)  # before `listen` no client can connect
        found = os.lstat(path.name, dir_fd=home)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bad(path, f"{error.strerror}; choose another path") from None
    return listener, found
