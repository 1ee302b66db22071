"""Real redis-servers on loopback ports: one alone, a cluster, a master with Sentinels; to be killed and restarted."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from doubles import wait_until as wait_for
from node_rig import free_port
from redis_command import RedisError, ask
from toxic_proxy import ToxicProxy

_MISSING: Final = [name for name in ("redis-server", "redis-cli", "openssl") if not shutil.which(name)]
NO_REDIS: Final = f"{_MISSING[0]} is not installed (Debian: apt-get install redis-server openssl)" if _MISSING else None

_PATIENCE: Final = 60.0  # seconds for anything to start or to agree
_NUM_SLOTS: Final = 16384


class ServerProcess:
    """One process on one port, which it keeps when it is killed and started again. Nothing is persistent."""

    process: subprocess.Popen[bytes] | None

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped: the kernel still accepts connections, nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@dataclass
class RedisServer(ServerProcess):
    """A redis-server.

    `options` go to redis-server as they stand; `directory` is its own.
    """

    directory: Path
    options: Sequence[str] = ()
    password: str | None = None
    tls: "Certificate | None" = None
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it and wait until it answers; the first time on a port nobody has."""
        for port in [self.port] if self.port else (free_port() for _ in range(20)):
            with (self.directory / "log").open("wb") as log:
                self.process = subprocess.Popen(
                    [*DIE_WITH_US, "redis-server", *self._arguments(port)], stdout=log, stderr=log, cwd=self.directory
                )
            if self._answers(port):
                self.port = port
                return
            self.kill()
        raise RuntimeError(f"redis-server did not start: {(self.directory / 'log').read_text()[-2000:]}")

    def renew(self) -> None:
        """As it was started: killed or not, without data, limits and clients."""
        if self.process is None:
            self.start()
        self.cli("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")
        self.cli("FLUSHALL")
        self.cli("CLIENT", "KILL", "TYPE", "normal")

    @property
    def url(self) -> str:
        """Without a password."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def cli(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """What `redis-cli` would print; `stdin` is the last argument (-x). RedisError if Redis says an error."""
        return self._ask(self.port, *arguments, *([] if stdin is None else [stdin]))

    def value_of(self, key: str) -> bytes:
        """What a key holds, byte by byte."""
        return self.cli("GET", key)

    def all_keys(self) -> list[str]:
        """Every key it holds."""
        return sorted(self.cli("KEYS", "*").decode().split())

    def _ask(self, port: int, *arguments: str | bytes) -> bytes:
        authority = self.tls.authority if self.tls else None
        return ask(port, *arguments, password=self.password, authority=authority, timeout=_PATIENCE)

    def _answers(self, port: int) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            with suppress(RedisError):  # nobody listens yet
                if self._is_ours(port):
                    return True
            time.sleep(0.01)
        return False

    def _is_ours(self, port: int) -> bool:
        assert self.process is not None
        return f"process_id:{self.process.pid}\r".encode() in self._ask(port, "INFO", "server")

    def _arguments(self, port: int) -> list[str]:
        listen = ["--port", str(port)]
        if self.tls:
            files = ("--tls-cert-file", self.tls.certificate, "--tls-key-file", self.tls.key,
                     "--tls-ca-cert-file", self.tls.authority, "--tls-auth-clients", "no")  # fmt: skip
            listen = ["--port", "0", "--tls-port", str(port), *map(str, files)]
        secret = ["--requirepass", self.password] if self.password else []
        never = ["--save", "", "--appendonly", "no", "--daemonize", "no", "--bind", "127.0.0.1"]
        return [*self.options, *listen, *secret, *never, "--dir", str(self.directory)]


@dataclass(frozen=True)
class Certificate:
    """A server's certificate for 127.0.0.1 and the authority that signed it, as PEM files."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path) -> "Certificate":
        """A self-signed one: its own authority."""
        certificate, key = directory / "certificate.pem", directory / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=kvtier test", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
             "-keyout", str(key), "-out", str(certificate)],
            check=True, capture_output=True, timeout=_PATIENCE,
        )  # fmt: skip
        return cls(certificate, certificate, key)


@dataclass
class Cluster:
    """Masters, each with its share of the hash slots, and their replicas.

    With proxies, clients are told those: what `proxies[i]` does happens to `masters[i]`.
    """

    masters: list[RedisServer]
    replicas: list[RedisServer]
    proxies: list[ToxicProxy]

    @property
    def url(self) -> str:
        """All masters."""
        return ",".join(f"redis://127.0.0.1:{port}" for port in self.ports)

    @property
    def ports(self) -> list[int]:
        """Where clients find the masters."""
        return [proxy.port for proxy in self.proxies] or [master.port for master in self.masters]


@dataclass
class WatchedModel:
    """A master, its replica, and the Sentinels that watch them."""

    name: str
    master: RedisServer
    replica: RedisServer
    sentinels: list[RedisServer]

    @property
    def url(self) -> str:
        """The Sentinels."""
        return ",".join(sentinel.url for sentinel in self.sentinels)


@contextmanager
def standalone(
    *options: str, password: str | None = None, tls: bool = False, maxmemory: str = "0", policy: str = "noeviction"
) -> Iterator[RedisServer]:
    """One server."""
    with _directory() as directory:
        limits = ("--maxmemory", maxmemory, "--maxmemory-policy", policy)
        certificate = Certificate.make(directory) if tls else None
        with _running(RedisServer(directory, (*limits, *options), password, certificate)) as server:
            yield server


@contextmanager
def cluster(*options: str, replicas: int = 0, proxied: bool = False, password: str | None = None) -> Iterator[Cluster]:
    """Three masters and, if asked for, replicas of each; it serves what it can when one is down."""
    with ExitStack() as stack:
        directory = stack.enter_context(_directory())
        servers, proxies = [], []
        for i in range(3 * (1 + replicas)):
            home = directory / str(i)
            home.mkdir()
            bus = free_port()
            settings = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no",
                        "--cluster-node-timeout", "1000", "--cluster-port", str(bus)]  # fmt: skip
            settings += ["--masterauth", password] if password else []
            if proxied and i < 3:
                proxies.append(stack.enter_context(ToxicProxy(0)))
                settings += ["--cluster-announce-port", str(proxies[-1].port)]
            server = stack.enter_context(_running(RedisServer(home, (*settings, *options), password)))
            if proxied and i < 3:
                proxies[-1].target = server.port
            servers.append((server, bus))
        _join(servers)
        yield Cluster([server for server, _ in servers[:3]], [server for server, _ in servers[3:]], proxies)


@contextmanager
def watched(num_sentinels: int = 1, name: str = "mymaster", password: str | None = None) -> Iterator[WatchedModel]:
    """A master and a replica under Sentinels that fail over within some seconds."""
    with ExitStack() as stack:
        directory = stack.enter_context(_directory())
        homes = [directory / str(i) for i in range(2 + num_sentinels)]
        for home in homes:
            home.mkdir()
        auth = ["--masterauth", password] if password else []
        master = stack.enter_context(_running(RedisServer(homes[0], auth, password)))
        follow = ["--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0"]
        replica = stack.enter_context(_running(RedisServer(homes[1], [*follow, *auth], password)))
        wait_for(lambda: b"master_link_status:up" in replica.cli("INFO", "replication"))
        sentinels = []
        for home in homes[2:]:
            file = home / "sentinel.conf"
            lines = [
                f"sentinel monitor {name} 127.0.0.1 {master.port} {num_sentinels // 2 + 1}",
                f"sentinel down-after-milliseconds {name} 500",
                f"sentinel failover-timeout {name} 3000",
                *([f"sentinel auth-pass {name} {password}"] if password else []),
            ]
            file.write_text("\n".join(lines) + "\n")
            sentinels.append(stack.enter_context(_running(RedisServer(home, [str(file), "--sentinel"]))))
        others = f"num-other-sentinels\n{num_sentinels - 1}\n".encode()
        for sentinel in sentinels:
            wait_for(lambda s=sentinel: b"num-slaves\n1\n" in s.cli("SENTINEL", "MASTER", name))
            wait_for(lambda s=sentinel: others in s.cli("SENTINEL", "MASTER", name))
        yield WatchedModel(name, master, replica, sentinels)


def replicated(master: RedisServer, replica: RedisServer) -> None:
    """Wait until the replica has all that the master holds by now. WAIT would look at its own connection's writes."""

    def offset(server: RedisServer, name: str) -> int:
        lines = server.cli("INFO", "replication").decode().splitlines()
        return next(int(line.partition(":")[2]) for line in lines if line.startswith(f"{name}:"))

    wanted = offset(master, "master_repl_offset")
    wait_for(lambda: offset(replica, "slave_repl_offset") >= wanted)


def _join(nodes: Sequence[tuple[RedisServer, int]]) -> None:
    """What `redis-cli --cluster create` does, without its pauses. The first three are masters."""
    (first, first_bus), *others = nodes
    for (master, _), (low, high) in zip(nodes[:3], _shares(3), strict=True):
        master.cli("CLUSTER", "ADDSLOTSRANGE", str(low), str(high))
    for number, (server, _) in enumerate(nodes):
        server.cli("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
    for server, _ in others:
        server.cli("CLUSTER", "MEET", "127.0.0.1", str(first.port), str(first_bus))
    known = f"cluster_known_nodes:{len(nodes)}".encode()
    for server, _ in nodes:
        wait_for(lambda s=server: known in s.cli("CLUSTER", "INFO"))
    for number, (replica, _) in enumerate(nodes[3:]):
        master_id = nodes[number % 3][0].cli("CLUSTER", "MYID").decode()
        wait_for(lambda s=replica, m=master_id: m.encode() in s.cli("CLUSTER", "NODES"))
        replica.cli("CLUSTER", "REPLICATE", master_id)
    for server, _ in nodes:
        wait_for(lambda s=server: _agreed(s, len(nodes)))


def _agreed(server: RedisServer, num_nodes: int) -> bool:
    info = server.cli("CLUSTER", "INFO")
    if b"cluster_state:ok" not in info or f"cluster_slots_assigned:{_NUM_SLOTS}".encode() not in info:
        return False
    lines = server.cli("CLUSTER", "NODES").splitlines()
    followers = sum(b"slave" in line for line in lines)
    linked = b"role:master" in (role := server.cli("INFO", "replication")) or b"master_link_status:up" in role
    return len(lines) == num_nodes and followers == num_nodes - 3 and linked and b"handshake" not in b"".join(lines)


def _shares(num_masters: int) -> list[tuple[int, int]]:
    edges = [_NUM_SLOTS * i // num_masters for i in range(num_masters + 1)]
    return [(low, high - 1) for low, high in pairwise(edges)]


@contextmanager
def _running(server: RedisServer) -> Iterator[RedisServer]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-redis-") as directory:
        yield Path(directory)


# A killed test run leaves no servers behind.
DIE_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
