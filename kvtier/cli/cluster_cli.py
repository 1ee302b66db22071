"""`kvtier cluster up | status | down`: the compose file's topology as plain processes of this machine."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.cli import serving
from kvtier.cli.options import JsonOption, show
from kvtier.cli.verbs import VerbGroup
from kvtier.service import Exit
from kvtier.service import cluster as processes
from kvtier.service.cluster import BESIDE_US, FIRST_PORT, NUM_PORTS
from kvtier.tiers import ConfigError, KVTierError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.service.cluster import Topology

app = typer.Typer()
cluster = typer.Typer(cls=VerbGroup, name="cluster", no_args_is_help=True)
app.add_typer(cluster)

_PROFILES: Final = ("cluster", "observability")  # of which the second is left out where its programs are missing

_LONGEST: Final = 107 - len("/events-a/engine-replay")  # bytes: a socket's path has 107

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
    serving.on_signal(stopping.set)
    with console.status("starting"):
        is_new = processes.Cluster(state).up(topology, port, lambda line: console.print(line, markup=False), stopping)
    console.print("up" if is_new else "it is up already", "· kvtier cluster status · kvtier cluster down")


@cluster.command("status")
def status(state: StateOption = Path("kvtier-cluster"), as_json: JsonOption = False) -> None:
    """Show every service. Status 0: all are well, 3: one is not, 2: no cluster is up."""
    from rich.table import Table

    rows = processes.Cluster(state).status()
    table = Table("service", "state", "healthy", "pid", "address", "up")
    for row in rows:
        up_for = "" if row.uptime_s is None else f"{row.uptime_s:.0f} s"
        pid = "" if row.pid is None else str(row.pid)
        table.add_row(row.name, row.state, "yes" if row.healthy else "no", pid, row.address or "", up_for)
    show([asdict(row) for row in rows], table, as_json=as_json)
    if not all(row.healthy for row in rows):
        raise typer.Exit(Exit.DEGRADED)


@cluster.command("down")
def down(
    state: StateOption = Path("kvtier-cluster"),
    purge: Annotated[bool, typer.Option("--purge", help="Remove slabs and a model that was made, too.")] = False,
) -> None:
    """End all of it, in the order opposite to `up`, and remove its state; what was stored is kept."""
    was_there = processes.Cluster(state).down(lambda line: print(line, file=sys.stderr), purge=purge)
    print("down" if was_there else f"no cluster in {state}: nothing to do", file=sys.stderr)


def _installed(topology: "Topology", is_asked_for: bool, console: "Console") -> "Topology":
    """What can be started here. Whoever asks for a profile needs all its programs; what only adds to it goes, aloud."""
    missing = {name: each for name, each in topology.services.items() if not processes.is_installed(each.argv[0])}
    for name, service in missing.items():
        if is_asked_for or _PROFILES[0] in service.profiles:
            raise KVTierError(f"{name}: {service.argv[0]} is not installed; install it, or leave its profile out")
        console.print(f"without {name}: {service.argv[0]} is not installed", markup=False)
    return topology.without(list(missing))
