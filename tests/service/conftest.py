"""What the service's stories share: daemons of this process and clients of them, a tiny checkpoint and its server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import service_rig

if TYPE_CHECKING:
    from http_rig import ServedDaemon
    from peers_rig import Fleet
    from server_rig import ServerThread

    from kvtier.connector.daemon.client import RemoteTiers


D = TypeVar("D", bound=service_rig.DaemonThread)


def started(home: Path, kind: Callable[..., D]) -> Iterator[Callable[..., D]]:
    """Daemons of this process at `home / "s"`. At the end every client is gone, and the laws hold: I3."""
    daemons: list[D] = []

    def start(**options: Any) -> D:
        daemons.append(kind(home / "s", **{"host": {"size": 1 << 20}, **options}))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.check()
        daemon.close()


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[..., service_rig.DaemonThread]]:
    yield from started(home, service_rig.DaemonThread)


@pytest.fixture
def attach(home: Path) -> "Iterator[Callable[..., RemoteTiers]]":
    """Clients of the daemon at `home / "s"`, which say goodbye at the end: name it behind the daemon's fixture."""
    clients: list[RemoteTiers] = []

    def start(**options: Any) -> "RemoteTiers":
        clients.append(service_rig.attach(home / "s", **options))
        return clients[-1]

    yield start
    for tiers in clients:
        tiers.close()


@pytest.fixture
def serve_pages(home: Path) -> "Iterator[Callable[..., ServedDaemon]]":
    """The same with their pages."""
    from http_rig import ServedDaemon

    yield from started(home, ServedDaemon)


@pytest.fixture
def served(serve_pages: "Callable[..., ServedDaemon]", request: pytest.FixtureRequest) -> "ServedDaemon":
    """A daemon of this process at `home / "s"` with its pages, and the sections of its file's `SERVED`."""
    return serve_pages(**getattr(request.module, "SERVED", {}))


@pytest.fixture
def fleet_of(home: Path, tmp_path: Path) -> "Iterator[Callable[..., Fleet]]":
    """`fleet_of(count, **options)`: daemons in processes of their own that lend to each other."""
    from peers_rig import Fleet, key_file

    with ExitStack() as stack:

        def make(count: int, **options: Any) -> "Fleet":
            return stack.enter_context(closing(Fleet(home, key_file(tmp_path), count, **options)))

        yield make


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file with the key of a fleet."""
    from peers_rig import key_file

    return key_file(tmp_path)


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """Nodes, which are closed at the end."""
    nodes: list[Any] = []
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that can chat. No story changes it."""
    from server_rig import save_checkpoint  # takes torch along

    return save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, request: pytest.FixtureRequest) -> "Iterator[ServerThread]":
    """`kvtier engine` for a file's stories that only ask, with the sections of its `SERVER`; no step has failed."""
    from server_rig import serving

    with serving(model, **getattr(request.module, "SERVER", {})) as made:
        yield made
        assert made.status()["steps"]["failed"] == 0
