"""`kvtier config`: the configuration in force, as a table or JSON."""

import json

import typer
from rich.table import Table

from kvtier.cli.options import ConfigOption, JsonOption, show
from kvtier.tiers.config import Config, options

app = typer.Typer()


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    values, defaults = Config.load(config).model_dump(mode="json"), Config().model_dump(mode="json")
    table = Table("option", "value", "default", "meaning", title="kvtier configuration", title_justify="left")
    for section, name, field in options():
        value, default = values[section][name], defaults[section][name]
        shown = _toml(value) if value == default else f"[bold]{_toml(value)}[/]"
        table.add_row(rf"\[{section}] {name}", shown, "" if value == default else _toml(default), field.description)
    show(values, table, as_json=as_json)


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False).replace("[", r"\[")
