"""What the stories of the daemon's pages share: a daemon thread with pages, raw sockets, the command line."""

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx2
from service_rig import FINGERPRINT, DaemonThread, environment

from kvtier.service.http_app import Pages
from kvtier.service.http_server import HttpSocket

MODEL = FINGERPRINT.hex()[:16]


class ServedDaemon(DaemonThread):
    """A daemon of this process with its pages, as `kvtier serve` puts them together."""

    def __init__(self, socket: Path, *, lease_deadline: float = 60.0, **sections: Mapping[str, object]) -> None:
        super().__init__(socket, lease_deadline=lease_deadline, **sections)
        self.pages = Pages(self.daemon, HttpSocket("127.0.0.1:0"))
        self.http = self.pages.address
        self.pages.start()
        self.client = httpx2.Client(base_url=f"http://{self.http}", timeout=30)

    def post(self, path: str, **body: object) -> httpx2.Response:
        return self.client.post(f"/admin/{path}", json=body)

    def close(self) -> None:
        self.client.close()
        self.pages.stop()
        super().close()


def talk(http: str, data: bytes, *, more: bool = False) -> bytes:
    """Send bytes, whatever they are, and read until the other end hangs up; `more`: as if more were to come."""
    host, _, port = http.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        try:
            connection.sendall(data)
            if not more:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:  # it hangs up on what it has not read
            pass
    return answer


def kvtier(*arguments: str, stdin: str = "", **options: str) -> "subprocess.CompletedProcess[str]":
    """`kvtier ARGUMENTS` in a process of its own."""
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", *arguments]
    return subprocess.run(command, env=environment(**options), input=stdin, capture_output=True, text=True, timeout=100)
