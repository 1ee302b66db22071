"""`kvtier compile`: builds the compiled twins of innermost loops for this user."""

import sys
from dataclasses import asdict

import typer

from kvtier.cli.options import JsonOption, show
from kvtier.tiers import KVTierError, compiled

app = typer.Typer()


@app.command("compile")
def build_twins(as_json: JsonOption = False) -> None:
    from rich.markup import escape
    from rich.table import Table

    compiled.build(lambda line: print(line, file=sys.stderr))
    found = compiled.status()
    table = Table("twin", "state", "why", title="kvtier compile", title_justify="left")
    for each in found:
        table.add_row(each.name, each.state, escape(each.reason))
    show([asdict(each) for each in found], table, as_json=as_json)
    if num_broken := sum(each.state == "broken" for each in found):
        fix = "where nothing may be run from that folder, name another one by KVTIER_COMPILED"
        raise KVTierError(f"compile: {num_broken} of {len(found)} twins were built and do not load; {fix}")
