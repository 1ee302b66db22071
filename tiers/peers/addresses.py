"""From the nodes that [peers] names to the addresses behind the names: a headless service has one for each node."""

import logging
import socket
from collections.abc import Sequence
from typing import Final

_log = logging.getLogger(__name__)

MAX_PEERS: Final = 64
_unknown: Final[set[str]] = set()  # names that could not be looked up, and that was logged
_too_many: Final[set[tuple[str, ...]]] = set()  # nodes with more addresses than are used, likewise


def address_text(address: Sequence[object]) -> str:
    """HOST:PORT of a socket's address, as [peers] nodes takes it."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def looked_up(nodes: Sequence[str]) -> list[tuple[str, int]]:
    """Up to MAX_PEERS addresses of the HOST:PORTs, in order, each once. Waits for a resolver, as long as that takes."""
    found: dict[tuple[str, int], None] = {}
    for node in nodes:
        host, _, port = node.rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            if node not in _unknown:
                _unknown.add(node)
                _log.warning("[peers] nodes %s: cannot be looked up (%s); it is tried again and again", node, error)
            continue
        _unknown.discard(node)
        found.update(((str(info[4][0]), int(info[4][1])), None) for info in infos)
    if len(found) > MAX_PEERS and tuple(nodes) not in _too_many:
        _too_many.add(tuple(nodes))
        _log.warning("[peers] nodes: %d addresses, the first %d are used", len(found), MAX_PEERS)
    return list(found)[:MAX_PEERS]
