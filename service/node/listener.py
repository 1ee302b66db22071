"""The daemon's Unix socket: made so that it is never half there, and only this user's processes get in."""

import contextlib
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.connector.daemon import is_trusted
from kvtier.tiers import ConfigError

BACKLOG: Final = 512
_MAX_PATH: Final = 107  # bytes of sockaddr_un.sun_path, less its terminating zero


class Listener:
    """A listening socket at a path, with the lock that makes it the only one there.

    The lock is a file beside it, `{path}.lock`, which stays: its holder may replace the socket.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the path cannot be used, or naming the pid of another daemon that serves it."""
        self.path = path
        self._renewing = threading.Lock()
        if (length := len(os.fsencode(path))) > _MAX_PATH:
            raise ConfigError(f'[service] socket "{path}": {length} bytes, at most {_MAX_PATH}; choose a shorter path')
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
        try:
            return os.path.samestat(self.path.lstat(), self._file) and self._holds_lock()
        except FileNotFoundError:
            return False

    def _holds_lock(self) -> bool:
        """Whether the lock that another daemon would look at is ours. FileNotFoundError where there is none."""
        return os.path.samestat(os.lstat(f"{self.path}.lock"), os.fstat(self._lock))

    def renewed(self) -> socket.socket:
        """A new socket at the path, which nobody else serves while we hold the lock; `replace` takes it. May wait.

        ConfigError as at the start: the lock may have been removed, too.
        """
        with self._renewing:
            if self._lock < 0:
                raise ConfigError("the daemon is stopping")
            with _directory(self.path) as home:
                self._lock_again(home)
                made, self._file = _listen(self.path, home)
        return made

    def _lock_again(self, home: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._holds_lock():
                return
        lock = _lock(self.path, home)  # ConfigError: another daemon serves there by now
        os.close(self._lock)
        self._lock = lock

    def replace(self, made: socket.socket) -> None:
        """Listen there from now on."""
        self.socket.close()
        self.socket = made

    def close(self) -> None:
        """Take the socket away, if the path does not lead to another daemon's by now; idempotent."""
        with self._renewing:
            if self._lock >= 0:
                self.socket.close()
                with contextlib.suppress(OSError):
                    if os.path.samestat(self.path.lstat(), self._file):
                        self.path.unlink()
                os.close(self._lock)
                self._lock = -1


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    """The socket's directory, opened: if it is moved away meanwhile, nothing is done in whatever takes its place."""
    home = path.absolute().parent
    try:
        opened = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f'[service] socket "{path}": {home}: {error.strerror}; make that directory') from None
    try:
        _check_directory(path, home, os.fstat(opened))
        yield opened
    finally:
        os.close(opened)


def _check_directory(path: Path, home: Path, found: os.stat_result) -> None:
    if not is_trusted(found.st_uid):
        raise ConfigError(
            f'[service] socket "{path}": {home} is user {found.st_uid}\'s, this is user {os.geteuid()}; '
            "choose a directory of your own"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f'[service] socket "{path}": others may replace files in {home}; `chmod go-w` it, or choose another'
        )


def _check_owner(path: Path, home: int) -> None:
    try:
        found = os.lstat(path.name, dir_fd=home)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f'[service] socket "{path}": a file that is no socket is there; move it, or choose another')
    if not is_trusted(found.st_uid):
        raise ConfigError(
            f'[service] socket "{path}": user {found.st_uid}\'s, this is user {os.geteuid()}; choose another path'
        )


def _lock(path: Path, home: int) -> int:
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"{path.name}.lock", flags, 0o600, dir_fd=home)
    except OSError as error:
        raise ConfigError(f'[service] socket "{path}": {path}.lock: {error.strerror}; choose another path') from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f'[service] socket "{path}": the daemon with pid {owner} serves it; stop that one, or choose another path'
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _listen(path: Path, home: int) -> tuple[socket.socket, os.stat_result]:
    """A socket at the path, and the file it is there."""
    _check_owner(path, home)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=home)  # stale, since its owner would hold the lock
        listener.bind(os.fspath(path))
        os.chmod(path.name, 0o600, dir_fd=home)  # before `listen` nobody gets in
        found = os.lstat(path.name, dir_fd=home)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f'[service] socket "{path}": {error.strerror}; choose another path') from None
    return listener, found
