"""The processes that copy for one client, each watched by a pidfd until it has ended."""

import os
import socket
from collections.abc import Callable
from typing import Final

from kvtier.connector.daemon import Peer, handshake
from kvtier.service.node.loop import Loop

MAX_PROCESSES: Final = 256  # that copy for one client


class ClientProcesses:
    """Lives on the loop's thread. True while one of them lives."""

    def __init__(self, loop: Loop, all_ended: Callable[[], None]) -> None:
        """`all_ended` is called when the last of them ends by itself."""
        self._loop = loop
        self._all_ended = all_ended
        self._pids: dict[int, int] = {}  # by pidfd, of those that live

    def __bool__(self) -> bool:
        return bool(self._pids)

    @property
    def pids(self) -> list[int]:
        """Of those that live; 0 for those of a pid namespace that this process does not see."""
        return sorted(set(self._pids.values()))

    def watch(self, connection: socket.socket, peer: Peer) -> int:
        """Watch the process that connected. OSError if it can't be watched, or there are too many.

        Returns what tells it from others: since Linux 6.9 a pidfd's inode is its process's own.
        """
        fd = handshake.pidfd_of(connection, peer)
        process = os.fstat(fd).st_ino
        if peer.pid and peer.pid in self._pids.values():
            os.close(fd)
        elif len(self._pids) >= MAX_PROCESSES:
            os.close(fd)
            raise OSError(f"more than {MAX_PROCESSES} processes")
        else:
            self._pids[fd] = peer.pid
            self._loop.watch(fd, lambda events: self._ended(fd))
        return process

    def forget(self) -> None:
        """Watch none of them any more. Idempotent."""
        for fd in self._pids:
            self._loop.forget(fd)
            os.close(fd)
        self._pids.clear()

    def _ended(self, fd: int) -> None:
        self._loop.forget(fd)
        os.close(fd)
        del self._pids[fd]
        if not self._pids:
            self._all_ended()
