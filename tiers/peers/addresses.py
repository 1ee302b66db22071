"""From the nodes that [peers] names to the addresses behind the names: a headless service has one for each node."""

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

_log = logging.getLogger(__name__)

MAX_PEERS: Final = 64
_KEPT: Final = 3600.0  # seconds; those that are dead by then cost a connection now and then

_Address = tuple[str, int]


def address_text(address: Sequence[object]) -> str:
    """HOST:PORT of a socket's address, as [peers] nodes takes it."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PeerAddresses:
    """The addresses of the HOST:PORTs that [peers] names. Not thread-safe; a look-up waits for the resolver.

    No answer is not an empty answer: what a name stood for counts for `_KEPT` seconds more. Of more than MAX_PEERS
    addresses the same ones are used whatever their order: those that rank first under this machine's name, so that
    machines do not all choose the same.
    """

    def __init__(self, nodes: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes, self._clock = nodes, clock
        self._known: dict[str, tuple[float, list[_Address]]] = {}  # by node: when it was looked up, and what it is
        self._unknown: set[str] = set()  # nodes whose last look-up failed
        self._told_too_many = False

    def look_up(self) -> list[_Address]:
        """Up to MAX_PEERS addresses, each once."""
        for node in self._nodes:
            try:
                self._known[node] = self._clock(), looked_up(node)
                self._unknown.discard(node)
            except (OSError, ValueError) as error:
                if node not in self._unknown:
                    self._unknown.add(node)
                    kept = "; its last addresses stay for now" if node in self._known else ""
                    _log.warning(
                        "[peers] nodes %s: cannot be looked up (%s); it is tried again and again%s", node, error, kept
                    )
                if node in self._known and self._clock() - self._known[node][0] > _KEPT:
                    del self._known[node]
        found = list(dict.fromkeys(each for _, addresses in self._known.values() for each in addresses))
        if len(found) <= MAX_PEERS:
            return found
        if not self._told_too_many:
            self._told_too_many = True
            _log.warning("[peers] nodes: %d addresses, %d of them are used", len(found), MAX_PEERS)
        return sorted(found, key=_rank)[:MAX_PEERS]


def looked_up(node: str) -> list[_Address]:
    """The addresses of HOST:PORT. OSError or ValueError if nobody knows them; waits for a resolver."""
    host, _, port = node.rpartition(":")
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(info[4][0]), int(info[4][1])) for info in infos))


def _rank(address: _Address) -> bytes:
    return hashlib.blake2b(address_text(address).encode(), key=socket.gethostname().encode()[:64]).digest()
