"""`kvtier config`: the configuration in force, as a table or JSON. It refuses what `serve` and `route` would refuse."""

import json
from contextlib import suppress

import typer

from kvtier.cli.options import ConfigOption, JsonOption, show
from kvtier.service import router
from kvtier.tiers import config as configuration

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
        for each in made:  # on the way, as the others make it: this verb leaves nothing
            with suppress(OSError):
                each.rmdir()
    if loaded.router.replicas:
        router.parse_replicas(loaded.router.replicas)
    values = loaded.model_dump(mode="json")
    table = Table("option", "value", "default", "meaning", title="kvtier configuration", title_justify="left")
    for section, name, field in configuration.options():
        value, default = values[section][name], defaults[section][name]
        shown = escape(_toml(value))
        cells = (f"[{section}] {name}", "" if value == default else _toml(default), field.description or "")
        option, usual, meaning = map(escape, cells)
        table.add_row(option, shown if value == default else f"[bold]{shown}[/]", usual, meaning)
    show(values, table, as_json=as_json)


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
