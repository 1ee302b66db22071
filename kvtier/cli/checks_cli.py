"""The verbs `kvtier config`, `verify` and `doctor`: arguments in, a table or JSON out."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier.cli.options import ConfigOption, JsonOption, begin, progress_bar, show
from kvtier.service import Exit, router
from kvtier.service import doctor as checks
from kvtier.tiers import Finding, Status, load_key
from kvtier.tiers import config as configuration

if TYPE_CHECKING:
    from rich.table import Table

    from kvtier.service.doctor import Verdict


# --- kvtier config ---------------------------------------------------------------------------------------------------

app = typer.Typer()


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvtier.tiers.hierarchy import check_tiers

    loaded, defaults = configuration.Config.load(config), configuration.Config().model_dump(mode="json")
    path = loaded.file.path
    made = () if path is None else [each for each in (path, *path.parents) if not each.exists()]
    try:
        check_tiers(loaded)
    finally:
        for each in made:  # created on the way, as other verbs do: this verb removes it
            with suppress(OSError):
                each.rmdir()
    if loaded.router.replicas:
        router.parse_replicas(loaded.router.replicas)
    values = loaded.model_dump(mode="json")
    table = Table("option", "value", "default", "meaning", title="kvtier configuration", title_justify="left")
    for section, name, field in configuration.options():
        value, default = values[section][name], defaults[section][name]
        shown = escape(_toml(value))
        mark = " ↻" if configuration.is_reloadable(field) else ""
        cells = (f"[{section}] {name}{mark}", "" if value == default else _toml(default), field.description or "")
        option, usual, meaning = map(escape, cells)
        table.add_row(option, shown if value == default else f"[bold]{shown}[/]", usual, meaning)
    show(values, table, as_json=as_json)


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


# --- kvtier verify and doctor ----------------------------------------------------------------------------------------

_COLOUR: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "red"}


@app.command()
def verify(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A slab, or a directory of slabs; else [file] path.")
    ] = None,
    config: ConfigOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop entries found bad, and only those.")] = False,
    as_json: JsonOption = False,
) -> None:
    loaded = configuration.Config.load(config)
    slabs = checks.find_slabs(path, loaded)
    key = load_key(loaded.file.key_file, "[file] key_file") if loaded.file.key_file else None
    verdicts = _verify_all(slabs, repair, key)
    for verdict in verdicts:
        if verdict.refused:
            print(f"kvtier: {verdict.refused}", file=sys.stderr)
    table = _verdict_table(verdicts) if verdicts else "no slabs there"
    show([verdict.as_json() for verdict in verdicts], table, as_json=as_json)
    raise typer.Exit(checks.worst(verdicts))


def _verify_all(slabs: Sequence[Path], repair: bool, key: bytes | None = None) -> "list[Verdict]":
    with progress_bar(in_bytes=True) as bar:
        return [checks.verify_slab(slab, repair=repair, key=key, progress=begin(bar, _short(slab))) for slab in slabs]


def _verdict_table(verdicts: "Sequence[Verdict]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table("slab", title="kvtier verify", title_justify="left")
    for column in ("slots", "blocks", "bad payloads", "bad rows", "unreadable"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        figures = [""] * 5
        if check := verdict.check:
            bad = (check.bad_payloads, check.bad_rows, check.unreadable)
            figures = [str(count) for count in (check.superblock.num_slots, check.num_blocks, *map(len, bad))]
        colour = {Exit.OK: "green", Exit.DEGRADED: "yellow"}.get(verdict.status, "red")
        table.add_row(escape(_short(verdict.path)), *figures, f"[{colour}]{escape(str(verdict))}[/]")
    return table


def _short(path: Path) -> str:
    """A slab's name without most of its 64 digits."""
    return f"{path.name[:12]}….slab" if len(path.name) > 32 else path.name


@app.command()
def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    from rich.console import Console

    loaded = configuration.Config.load(config)
    console = Console(stderr=True)
    with console.status("measuring…") if console.is_terminal else nullcontext():
        findings = checks.examine(loaded)
    show([asdict(finding) for finding in findings], _finding_table(findings), as_json=as_json)
    statuses = {finding.status for finding in findings}
    if Status.ERROR in statuses:
        raise typer.Exit(Exit.FAILED)
    raise typer.Exit(Exit.DEGRADED if Status.WARNING in statuses else Exit.OK)


def _finding_table(findings: Sequence[Finding]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "", title="kvtier doctor", title_justify="left")
    for column in ("found", "fix"):
        table.add_column(column, overflow="fold")  # a command must be whole
    for finding in findings:
        colour = _COLOUR[finding.status]
        texts = map(escape, (finding.found, finding.fix))
        table.add_row(escape(finding.check), f"[{colour}]{finding.status}[/]", *texts)
    return table
