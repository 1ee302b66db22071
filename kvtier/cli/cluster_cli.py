"""`kvtier cluster up | status | logs | stop | restart | down`: the compose file's topology as plain processes here."""

import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.cli.options import JsonOption, on_signal, show
from kvtier.cli.program import VerbGroup
from kvtier.service import Exit
from kvtier.service import cluster as processes
from kvtier.service.cluster import BESIDE_US, FIRST_PORT, NUM_PORTS
from kvtier.tiers import ConfigError, KVTierError, require_extra

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.service.cluster import Topology

app = typer.Typer()
cluster = typer.Typer(cls=VerbGroup, name="cluster", no_args_is_help=True)
app.add_typer(cluster)

_PROFILES: Final = ("cluster", "observability")  # the second is left out if its programs are missing
_COMPUTE: Final = {"engine", "model"}  # kvtier's verbs that need an extra: checked before anything starts

_LONGEST: Final = 107 - len("/events-a/engine-replay")  # bytes: a socket's path has 107

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Of the service, as `status` has it.")]
StateOption = Annotated[Path, typer.Option(metavar="DIR", help="Where its logs, sockets and slabs are.")]


@cluster.command("up")
def up(
    file: Annotated[
        Path,
        typer.Option(metavar="FILE", help="A compose file with x-kvtier; kvtier's own by default.", show_default=False),
    ] = BESIDE_US,
    state: StateOption = Path("kvtier-cluster"),
    port: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=1, max=65536 - NUM_PORTS, help="The router's; the others' follow within a hundred."
        ),
    ] = FIRST_PORT,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="As of compose; may be repeated.", show_default=" and ".join(_PROFILES)),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint directory; else random weights are made.")
    ] = None,
    no_restart: Annotated[
        bool, typer.Option("--no-restart", help="Leave dead what ends by itself; else it is started again.")
    ] = False,
) -> None:
    """Start Valkey or Redis, daemons, engines and the router, wait until they are ready, and leave them running."""
    from rich.console import Console

    file, state = file.resolve(), state.absolute()
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f'--model "{model}": no config.json in it; name a checkpoint directory')
    if len(os.fsencode(state)) > _LONGEST:
        why = f"longer than {_LONGEST} bytes, too long for sockets in it"
        raise ConfigError(f'--state "{state}": {why}; choose another')
    if "," in str(state):
        raise ConfigError(f'--state "{state}": a comma ends an option of the router\'s replicas; choose another')
    places = processes.Placeholders(state, file.parent / "deploy", model.absolute() if model else state / "model", port)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    topology = _installed(processes.Topology.read(file, places, profile or _PROFILES), profile is not None, console)
    stopping = Event()
    on_signal(stopping.set)
    with console.status("starting"):
        is_new = processes.Cluster(state).up(topology, port, lambda line: console.print(line, markup=False), stopping)
        if not no_restart:
            processes.start_keeper(processes.Cluster(state))
    console.print("up" if is_new else "it is up already", "· kvtier cluster status · kvtier cluster down")


@cluster.command("status")
def status(state: StateOption = Path("kvtier-cluster"), as_json: JsonOption = False) -> None:
    """Show every service. Status 0: all are well, 3: one is not, 2: no cluster is up."""
    from rich.table import Table

    rows = processes.Cluster(state).status()
    table = Table("service", "state", "healthy", "pid", "address", "up", "restarts")
    for row in rows:
        up_for = "" if row.uptime_s is None else f"{row.uptime_s:.0f} s"
        pid = "" if row.pid is None else str(row.pid)
        healthy, restarts = "yes" if row.healthy else "no", str(row.restarts or "")
        table.add_row(row.name, row.state, healthy, pid, row.address or "", up_for, restarts)
    show([asdict(row) for row in rows], table, as_json=as_json)
    if not all(row.healthy for row in rows):
        raise typer.Exit(Exit.DEGRADED)


@cluster.command("logs")
def logs(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Of services; else all.")] = None,
    state: StateOption = Path("kvtier-cluster"),
    lines: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="The last so many of each.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is added, until Ctrl-C.")] = False,
) -> None:
    """Print the end of the services' logs, each line behind the service's name."""
    cluster = processes.Cluster(state)
    known = list(cluster.read().members) or [row.name for row in cluster.status()]
    for name in names or ():
        if name not in known:
            raise ConfigError(f'"{name}": no service of the cluster in {state}; known are {", ".join(known)}')
    with suppress(KeyboardInterrupt):
        processes.show_logs([(name, cluster.log_of(name)) for name in names or known], lines, print, follow=follow)


@cluster.command("stop")
def stop(name: NameArgument, state: StateOption = Path("kvtier-cluster")) -> None:
    """Stop one service until `up` or `restart`."""
    processes.stop_service(processes.Cluster(state), name, lambda line: print(line, file=sys.stderr))


@cluster.command("restart")
def restart(name: NameArgument, state: StateOption = Path("kvtier-cluster")) -> None:
    """Stop one service and start it again, and wait until it is ready."""
    stopping = Event()
    on_signal(stopping.set)
    processes.restart_service(processes.Cluster(state), name, lambda line: print(line, file=sys.stderr), stopping)


@cluster.command("down")
def down(
    state: StateOption = Path("kvtier-cluster"),
    purge: Annotated[bool, typer.Option("--purge", help="Remove slabs and a model that was made, too.")] = False,
) -> None:
    """Stop all services, in the order opposite to `up`, and remove the cluster's state; stored blocks are kept."""
    was_there = processes.Cluster(state).down(lambda line: print(line, file=sys.stderr), purge=purge)
    print("down" if was_there else f"no cluster in {state}: nothing to do", file=sys.stderr)


def _installed(topology: "Topology", is_required: bool, console: "Console") -> "Topology":
    """The services that can start here. A requested profile needs all its programs; optional ones are left out."""
    if any(each.argv[0] == "kvtier" and _COMPUTE.intersection(each.argv[1:2]) for each in topology.services.values()):
        require_extra("kvtier cluster up", "engine")
    missing = {name: each for name, each in topology.services.items() if not processes.is_installed(each.argv[0])}
    for name, service in missing.items():
        if is_required or _PROFILES[0] in service.profiles:
            raise KVTierError(f"{name}: {service.argv[0]} is not installed; install it, or leave its profile out")
        console.print(f"without {name}: {service.argv[0]} is not installed", markup=False)
    return topology.without(list(missing))
