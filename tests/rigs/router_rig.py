"""What the router's stories share: replicas that do as they are told, as processes, and a router of this process."""

import json
import os
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from doubles import wait_until as until
from fork_rig import SERVICES, Forked
from node_rig import free_port
from service_rig import end_child, environment

from kvtier.connector import ChatPrefix
from kvtier.service.router.router import serve
from kvtier.tiers.config.config import Config

CHILD = Path(__file__).parents[1] / "service" / "router" / "_replica_child.py"
PATIENCE = 60.0  # seconds for anything to come about on a busy machine
MODEL = {"id": "m", "object": "model", "kvtier": {"block_size": 4, "fingerprint": "ab" * 32}}


Says = Callable[[str, dict[str, str]], bytes | Iterator[bytes] | None]


class ToldReplica:
    """A replica as a process. It keeps its address when it is killed and started again."""

    def __init__(self, nature: Mapping[str, object] = MODEL) -> None:
        self.name = f"{nature.get('host', '127.0.0.1')}:{nature.get('port') or free_port()}"
        authority = nature.get("authority")  # who has signed its certificate, where it has one
        self.url = f"http{'' if authority is None else 's'}://{self.name}"
        self.nature = nature
        verified = True if authority is None else ssl.create_default_context(cafile=str(authority))
        self.client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False, verify=verified)
        self._process: Forked | None = None

    def start(self) -> None:
        if self._process is not None:
            self._process.wait(60)
        command = [str(CHILD), self.name.rpartition(":")[2], json.dumps(self.nature)]
        self._process = Forked(command, SERVICES, env=environment())
        until(self._is_there)

    def _is_there(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None
        try:
            return self.client.get("/seen").status_code == 200
        except httpx2.TransportError:
            return False

    @property
    def is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def behave(self, **behaviour: object) -> None:
        self.client.post("/behave", json=behaviour)

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The requests it was given since it started."""
        seen: list[dict[str, Any]] = self.client.get("/seen").json()
        return seen

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        self.client.close()
        if self._process is not None:
            end_child(self._process)


def page(value: object, *lines: str) -> bytes:
    body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    head = [*lines, "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(["HTTP/1.1 200 OK", *head, "", ""]).encode() + body


class RawReplica:
    """Answers each request by what `says` makes of its path and headers; hangs up where that is None or has no end.

    What comes in several parts is sent part by part.
    """

    def __init__(self, says: Says) -> None:
        self.pages: dict[str, object] = {
            "/v1/models": {"object": "list", "data": [MODEL]},
            "/readyz": {},
            "/metrics": "",
        }
        self.asked: Counter[str] = Counter()
        self.hangs: dict[str, threading.Event] = {}  # by path: what to wait for before it is answered
        self._says = says
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.name = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def hang_up(self) -> None:
        while self._open:
            with suppress(OSError):  # it has ended
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes who waits for the next
        self._accepting.join(60)
        self._listening.close()
        self.hang_up()

    def _accept(self) -> None:
        try:
            while True:
                self._open.append(self._listening.accept()[0])
                threading.Thread(target=self._serve, args=(self._open[-1],), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while first := lines.readline():
                    path = first.split()[1].decode()
                    self.asked[path] += 1
                    headers: dict[str, str] = {}
                    while (line := lines.readline().decode().strip()) != "":
                        name, _, value = line.partition(":")
                        headers[name.lower()] = value.strip()
                    lines.read(int(headers.get("content-length", 0)))
                    if path in self.hangs:
                        self.hangs[path].wait(PATIENCE)
                    known = path in self.pages or not path.startswith("/v1/")
                    answer = page(self.pages.get(path, {})) if known else self._says(path, headers)
                    parts = [answer] if isinstance(answer, bytes) else answer
                    for part in parts or ():
                        connection.sendall(part)
                    if not isinstance(answer, bytes) or b"length" not in answer:
                        return
            except OSError:
                return


@contextmanager
def replicas(number: int, *natures: Mapping[str, object]) -> Iterator[list[ToldReplica]]:
    """Running replicas, of these natures or all alike."""
    made = [ToldReplica(natures[i] if i < len(natures) else MODEL) for i in range(number)]
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            replica.close()


class RouteProcess:
    """`kvtier route` over a file, in so many processes."""

    def __init__(self, file: Path, *arguments: str) -> None:
        command = ["-m", "kvtier.cli", "route", "--config", str(file), *arguments]
        patient = {"router__probe_timeout": "20s", "router__connect_timeout": "20s"}
        variables = environment(router__http="127.0.0.1:0", **patient)
        self.log = file.with_suffix(".log")
        with self.log.open("w") as log:
            self.process: Any = Forked(command, SERVICES, env=variables, stderr=log)
        until(lambda: self.said(" ready on ") or self.process.poll() is not None)
        ready = next(line for line in self.log.read_text().splitlines() if " ready on " in line)
        self.url = f"http://{ready.rpartition(' ')[2]}"

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def hang_up(self) -> None:
        os.kill(self.process.pid, signal.SIGHUP)

    def complete(self, token: str) -> httpx2.Response:
        body, headers = {"model": "m", "prompt": "a prompt"}, {"authorization": f"Bearer {token}"}
        url = f"{self.url}/v1/completions"
        return httpx2.post(url, json=body, headers=headers, timeout=PATIENCE, trust_env=False)

    def close(self) -> None:
        end_child(self.process, [signal.SIGTERM])


class RoutedReplicas:
    """A router of this process, before replicas; times are those of a busy machine unless said."""

    def __init__(self, *specs: str, chat: object = None, **options: object) -> None:
        patient = {"http": "127.0.0.1:0", "probe_interval": "50ms", "probe_timeout": "20s", "connect_timeout": "20s"}
        config = Config.load(
            router={**patient, "replicas": specs, **options}, chat=chat if isinstance(chat, Mapping) else {}
        )
        self.config = config.router
        self.server = serve(self.config, prefix=ChatPrefix.of(config.chat))
        self.server.start()
        token = self.config.token
        headers = {} if token is None else {"authorization": f"Bearer {token.get_secret_value()}"}
        base = f"http://{self.server.address}"
        self.client = httpx2.Client(base_url=base, headers=headers, timeout=PATIENCE, trust_env=False)
        self.client.get("/healthz")  # answered after the first look at the replicas

    def complete(self, prompt: object = "a prompt", **fields: object) -> httpx2.Response:
        return self.client.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    def status(self) -> Any:
        return self.client.get("/status").json()

    def state(self, replica: ToldReplica) -> str:
        return next(str(each["state"]) for each in self.status()["replicas"] if each["name"] == replica.name)

    def metrics(self) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@contextmanager
def routed(*specs: str, chat: object = None, **options: object) -> Iterator[RoutedReplicas]:
    """A running router."""
    router = RoutedReplicas(*specs, chat=chat, **options)
    try:
        yield router
    finally:
        router.close()
