"""The `kvtier` command: parses arguments, prints, and turns errors into one line and an exit status."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtier import __version__
from kvtier.engine import server_cli
from kvtier.service import admin_cli, checks_cli, cluster_cli, route_cli, serve_cli
from kvtier.service.cli_options import ConfigOption, Exit, JsonOption, needing
from kvtier.tiers.config import Config, options
from kvtier.tiers.errors import ConfigError, KVTierError

app = typer.Typer(name="kvtier", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for verbs in (checks_cli, serve_cli, server_cli, route_cli, admin_cli):
    app.add_typer(verbs.app)
app.add_typer(cluster_cli.app)


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
    with needing("the demo"):
        from kvtier.engine.demo import DemoOptions, demo  # torch and transformers take seconds to import
    raise typer.Exit(demo(DemoOptions(model=model, as_json=as_json)))


@app.command("model")
def save_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory to be made.")],
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Leave a model that is there as it is.")] = False,
) -> None:
    """Save a model to try things with: a Llama of 50 M random weights, a tokenizer trained on the Python manual."""
    if if_missing and (directory / "config.json").exists():
        return
    with needing("this"):
        from kvtier.engine.generate import save_model as save
    save(directory)


@app.command("generate")
def run_generate(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A local checkpoint directory.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt; give this or --prompt-file.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A text file with the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 32,
    exact: Annotated[
        bool, typer.Option("--exact", help="The same bits however the prompt was had; half as fast.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt greedily with an engine in this process, and say which tier its KV came from."""
    settings = Config.load(config)
    text = _prompt(prompt, prompt_file)
    with needing("this"):
        from kvtier.engine.generate import Prompt, generate
    generate(Prompt(model, text, max_tokens, exact, as_json), settings)


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise ConfigError("--prompt, --prompt-file: give one of them")
    if file is None:
        return text or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--prompt-file "{file}": {error}; name a text file in UTF-8') from None


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


if __name__ == "__main__":
    main()
