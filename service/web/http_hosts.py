"""Checks the Host header, so that a web page cannot read a server through a DNS name that points to it."""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

_ANY: Final = "*"
_GUARDED: Final = ("/v1/", "/admin/")  # `guard.py` requires the token, or a local name if there is no token
_HEALTH: Final = ("/healthz", "/readyz")  # they report health only, nothing of what the server holds


class HostNames:
    """The names a server answers to: localhost, IP addresses, its address, this machine's name, and those configured.

    This prevents DNS rebinding: a page of evil.example may make that name point to 127.0.0.1, and then read the answers
    as its own. But its requests carry `Host: evil.example`. An IP address was never looked up, so it is safe.
    """

    def __init__(self, address: str, names: Iterable[str] = ()) -> None:
        """`address` is the configured HOST:PORT. A * in `names` allows every name."""
        known = (address.rpartition(":")[0], socket.gethostname(), *names)
        self._names = {_plain(name) for name in known if name}

    def admits(self, path: str, host: bytes | None) -> bool:
        """Whether a request for `path` under the Host header `host` is answered; `host` is None without a header."""
        if host is None or path in _HEALTH or path.startswith(_GUARDED) or _ANY in self._names:
            return True  # None is allowed since every browser sends the header
        name = _plain(name_in(host.decode("latin-1")))
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def name_in(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() and name else host


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
