"""`kvtier config`: the configuration in force, as a table or JSON."""

import json

import typer
from rich.console import Console
from rich.table import Table

from kvtier.service import ConfigOption, JsonOption
from kvtier.tiers.config import Config, options

app = typer.Typer()


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show the configuration in force: defaults, then the file, then KVTIER_SECTION__OPTION variables."""
    values = Config.load(config).model_dump(mode="json")
    if as_json:
        print(json.dumps(values))
        return
    defaults = Config().model_dump(mode="json")
    table = Table("option", "value", "default", "meaning", title="kvtier configuration", title_justify="left")
    for section, name, field in options():
        value, default = values[section][name], defaults[section][name]
        shown = _toml(value) if value == default else f"[bold]{_toml(value)}[/]"
        table.add_row(rf"\[{section}] {name}", shown, "" if value == default else _toml(default), field.description)
    Console().print(table)


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False).replace("[", r"\[")
