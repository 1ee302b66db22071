"""A client's end of the daemon's socket: frames out and in, the files that come with them."""

import os
import select
import socket
import time
from pathlib import Path
from typing import Any, Final

from kvtier.connector.daemon.handshake import is_trusted, peer_of
from kvtier.connector.daemon.wire import MAX_FRAME, FrameReader
from kvtier.tiers import ConfigError, forget_descriptor, hide_from_children

_RECEIVE: Final = 256 << 10  # bytes read at once
_MAX_OUTPUT: Final = 2 * MAX_FRAME  # bytes the other end may leave unread


class Connection:
    """A client's end. Not thread-safe, but for `wait`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if nobody listens, ConfigError if another user does."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        hide_from_children(self._socket.fileno())
        self._reader = FrameReader(MAX_FRAME)
        self.unsent = bytearray()  # what the socket did not take yet; `send` tries again
        self._kept: list[Any] = []  # bodies received behind the one that was asked for
        self._has_received = False  # the first bytes may bring a file along
        self.files: list[int] = []  # that came with the frames read so far; the code that takes one out closes it
        try:
            self._socket.connect(os.fspath(path))
            peer = peer_of(self._socket)
            if not is_trusted(peer.uid):
                raise ConfigError(
                    f'[service] socket "{path}": user {peer.uid} serves it, this is user {os.geteuid()}; '
                    "name the socket of a daemon of your own"
                )
        except BaseException:
            self.close()
            raise

    def send(self, frame: bytes) -> bool:
        """Send, or keep what does not fit for the next call; True if nothing is left.

        Raises OSError if the other end is gone or has not read for too long.
        """
        self.unsent += frame
        if self.unsent:
            try:
                sent = self._socket.send(self.unsent)
            except BlockingIOError:
                sent = 0
            del self.unsent[:sent]
            if len(self.unsent) > _MAX_OUTPUT:
                raise OSError("the daemon does not read")
        return not self.unsent

    def receive(self) -> list[Any]:
        """The bodies of the frames that have arrived. Raises OSError if the other end is gone, FormatError."""
        bodies, self._kept = self._kept, []
        while True:
            try:
                if self._has_received:
                    data = self._socket.recv(_RECEIVE)
                else:
                    data, files, _, _ = socket.recv_fds(self._socket, _RECEIVE, 1, socket.MSG_CMSG_CLOEXEC)
                    self.files += files
                    self._has_received = bool(data)
            except BlockingIOError:
                return bodies
            if not data:
                if bodies:
                    return bodies  # the end is there again at the next call
                raise ConnectionResetError("the daemon has hung up")
            bodies += self._reader.feed(data)
            if len(data) < _RECEIVE:
                return bodies

    def receive_first(self, timeout: float) -> Any:
        """The body of the next frame alone, within `timeout` seconds; None if there is none. Errors as `receive`."""
        end = time.monotonic() + timeout
        while not self._kept:
            self._kept = self.receive()
            if not self._kept and not self.wait(max(0.0, end - time.monotonic())):
                return None
        return self._kept.pop(0)

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for something to receive. From any thread."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self.unsent else 0))
        except ValueError:  # closed meanwhile
            return False
        return bool(poll.poll(timeout * 1000))

    def close(self) -> None:
        """Hang up; idempotent."""
        forget_descriptor(self._socket.fileno())
        self._socket.close()
        for fd in self.files:
            os.close(fd)
        self.files.clear()
