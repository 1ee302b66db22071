"""Asks the node's daemon which engines it refused lately, and why: they run without it."""

import http.client
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Final

from kvtier.connector.daemon import peer_of
from kvtier.service.observe import DaemonStatus
from kvtier.service.web import hang_up
from kvtier.tiers import Finding, KVTierError, ok, warning
from kvtier.tiers.config import ServiceConfig

_ANSWER: Final = 2.0  # seconds
_MOST_BYTES: Final = 8 << 20  # of a status
_LATELY: Final = 3600.0  # seconds
_NAME: Final = "refused engines"


def check_refused(config: ServiceConfig) -> list[Finding]:
    """A line for each reason of the last hour. Nothing where no daemon is configured, or its pages do not answer."""
    pid = _served_by(config.socket) if config.socket is not None else None
    status = _status(config.http) if pid is not None else None
    if status is None or status.pid != pid:  # the pages of another daemon
        return []
    lately = [each for each in status.refused if each.seconds_ago < _LATELY]
    if not lately:
        return [ok(_NAME, "none in the last hour")]
    fix = "change what the reason names; the engine tries again by itself"
    return [
        warning(_NAME, f"{each.count}, the last {each.seconds_ago:.0f} s ago, pid {each.pid}: {each.why}", fix)
        for each in lately
    ]


def _served_by(path: Path) -> int | None:
    """The pid of the daemon behind a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_ANSWER)
            client.connect(str(path))
            return peer_of(client).pid
    except OSError:
        return None


def _status(address: str) -> DaemonStatus | None:
    host, _, port = address.rpartition(":")
    try:
        with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_ANSWER)) as connection:
            connection.connect()
            connected = connection.sock
            with hang_up(lambda: connected, _ANSWER):
                connection.request("GET", "/status")
                answer = connection.getresponse()
                return DaemonStatus.parse(json.loads(answer.read(_MOST_BYTES))) if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException, KVTierError):
        return None
