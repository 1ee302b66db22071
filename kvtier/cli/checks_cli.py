"""The verbs `kvtier verify` and `kvtier doctor`: arguments in, a table or JSON out."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from kvtier.service import ConfigOption, Exit, JsonOption
from kvtier.service.doctor import Verdict, examine, find_slabs, verify_slab, worst
from kvtier.tiers import Finding, Status, load_key
from kvtier.tiers.config import Config

app = typer.Typer()

_COLOUR: Final = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "red"}


@app.command()
def verify(
    path: Annotated[Path | None, typer.Argument(help="A slab, or a directory of slabs; else [file] path.")] = None,
    config: ConfigOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Drop entries found bad, and only those.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read everything in slabs and compare it with its checksums. Status 0 clean, 1 damage found, 3 repaired."""
    loaded = Config.load(config)
    slabs = find_slabs(path, loaded)
    key = load_key(loaded.file.key_file, "[file] key_file") if loaded.file.key_file else None
    verdicts = _verify_all(slabs, repair, key)
    for verdict in verdicts:
        if verdict.refused:
            print(f"kvtier: {verdict.refused}", file=sys.stderr)
    if as_json:
        print(json.dumps([verdict.as_json() for verdict in verdicts]))
    else:
        Console().print(_verdict_table(verdicts) if verdicts else "no slabs there")
    raise typer.Exit(worst(verdicts))


def _verify_all(slabs: Sequence[Path], repair: bool, key: bytes | None = None) -> list[Verdict]:
    """One slab after the other, with a bar on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        return [verify_slab(slab, repair=repair, key=key, progress=_advance(bar, _short(slab))) for slab in slabs]


def _advance(bar: Progress, name: str) -> Callable[[int, int], None]:
    task = bar.add_task(name, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("slab", title="kvtier verify", title_justify="left")
    for column in ("slots", "blocks", "bad payloads", "bad rows", "unreadable"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        figures = [""] * 5
        if verdict.check:
            report = verdict.check.report
            bad = (report.bad_payloads, report.bad_rows, report.unreadable)
            figures = [str(count) for count in (report.num_slots, report.num_blocks, *map(len, bad))]
        colour = {Exit.OK: "green", Exit.DEGRADED: "yellow"}.get(verdict.status, "red")
        table.add_row(_short(verdict.path), *figures, f"[{colour}]{verdict}[/]")
    return table


def _short(path: Path) -> str:
    """A slab's name without most of its 64 digits."""
    return f"{path.name[:12]}….slab" if len(path.name) > 32 else path.name


@app.command()
def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check this machine against the configuration, with the fix. Status 0 all is well, 3 warnings, 1 errors."""
    loaded = Config.load(config)
    console = Console(stderr=True)
    with console.status("measuring…") if console.is_terminal else nullcontext():
        findings = examine(loaded)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        Console().print(_finding_table(findings))
    statuses = {finding.status for finding in findings}
    if Status.ERROR in statuses:
        raise typer.Exit(Exit.FAILED)
    raise typer.Exit(Exit.DEGRADED if Status.WARNING in statuses else Exit.OK)


def _finding_table(findings: Sequence[Finding]) -> Table:
    table = Table("check", "", title="kvtier doctor", title_justify="left")
    for column in ("found", "fix"):
        table.add_column(column, overflow="fold")  # a command is worth nothing with its end cut off
    for finding in findings:
        colour = _COLOUR[finding.status]
        texts = map(escape, (finding.found, finding.fix))
        table.add_row(escape(finding.check), f"[{colour}]{finding.status}[/]", *texts)
    return table
