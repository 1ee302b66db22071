"""The `kvtier` command: parses arguments, prints, and turns errors into one line and an exit status."""

import json
import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier import __version__
from kvtier.service import admin_cli, serve_cli
from kvtier.tiers.config import Config, options
from kvtier.tiers.errors import ConfigError, KVTierError


class Exit(IntEnum):
    """The exit statuses of every verb."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3


app = typer.Typer(name="kvtier", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.add_typer(serve_cli.app)
app.add_typer(admin_cli.app)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {__version__}")
        raise typer.Exit(Exit.OK)


@app.callback()
def kvtier(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A hierarchical KV-cache offload service for LLM inference."""


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


@app.command("demo")
def run_demo(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A local checkpoint directory instead of random weights.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prefill a long text once, then find it again in every tier, also after the process was killed."""
    try:
        from kvtier.engine.demo import DemoOptions, demo  # torch and transformers take seconds to import
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers", "safetensors"):
            raise
        raise KVTierError(f"the demo needs {error.name}: install kvtier[engine]") from None
    raise typer.Exit(demo(DemoOptions(model=model, as_json=as_json)))


def main() -> None:
    """Run the command line. A user's mistake ends as one line on stderr and status 2, another failure as status 1."""
    try:
        app()
    except ConfigError as error:
        sys.exit(_complain(str(error), Exit.USAGE))
    except KVTierError as error:
        sys.exit(_complain(str(error), Exit.FAILED))


def _complain(message: str, status: Exit) -> Exit:
    print(f"kvtier: {message}", file=sys.stderr)
    return status
