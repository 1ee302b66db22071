"""`kvtier config`: the configuration in force, as a table or JSON."""

import json

import typer

from kvtier.cli.options import ConfigOption, JsonOption, show
from kvtier.tiers import config as configuration

app = typer.Typer()


@app.command("config")
def show_config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    from rich.table import Table

    loaded, defaults = configuration.Config.load(config), configuration.Config().model_dump(mode="json")
    values = loaded.model_dump(mode="json")
    table = Table("option", "value", "default", "meaning", title="kvtier configuration", title_justify="left")
    for section, name, field in configuration.options():
        value, default = values[section][name], defaults[section][name]
        shown = _toml(value) if value == default else f"[bold]{_toml(value)}[/]"
        table.add_row(rf"\[{section}] {name}", shown, "" if value == default else _toml(default), field.description)
    show(values, table, as_json=as_json)


def _toml(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False).replace("[", r"\[")
