"""`kvtier demo`, `model` and `generate`: verbs that run an engine in this process."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import ConfigOption, ExactOption, JsonOption, writable_file
from kvtier.cli.program import VerbGroup
from kvtier.tiers import ConfigError, require_extra
from kvtier.tiers import config as configuration

app = typer.Typer()
demos = typer.Typer(cls=VerbGroup, name="demo", invoke_without_command=True)
app.add_typer(demos)

CheckpointOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A local checkpoint directory instead of random weights.")
]


@demos.callback()
def run_demo(context: typer.Context, model: CheckpointOption = None, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is not None:
        if model is not None or as_json:
            raise ConfigError(f"write options after `{context.invoked_subcommand}`, which they are for")
        return
    require_extra("kvtier demo", "engine")
    from kvtier.engine.demo import DemoOptions, demo  # torch and transformers take seconds to import

    raise typer.Exit(demo(DemoOptions(model=model, as_json=as_json)))


@demos.command("rag")
def run_rag_demo(
    model: CheckpointOption = None,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="Questions to the recall model.")] = 200,
    rule: Annotated[str, typer.Option(metavar="NAME", help="Which reused tokens are computed anew.")] = "deviation",
    share: Annotated[float, typer.Option(metavar="NUMBER", min=0, max=1, help="How many of them.")] = 0.15,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Draw it, too; needs matplotlib.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask about documents in different orders: full prefill, prefixes alone, segments without and with repair."""
    require_extra("kvtier demo rag", "engine")
    from kvtier.engine.demo import RagOptions, rag_demo

    raise typer.Exit(rag_demo(RagOptions(model, questions, rule, share, picture, as_json)))


@app.command("model")
def save_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory to be made.")],
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Leave a model that is there as it is.")] = False,
) -> None:
    if if_missing and (directory / "config.json").exists():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"DIR {str(directory)!r}: {error.strerror}; name a directory that can be made") from None
    require_extra("kvtier model", "engine")
    from kvtier.engine.demo import save_model as save

    save(directory)


@app.command("generate")
def run_generate(
    model: Annotated[Path, typer.Option(metavar="DIR", help="A local checkpoint directory.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt; give this or --prompt-file.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A text file with the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Tokens of the answer.")] = 32,
    exact: ExactOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    settings = configuration.Config.load(config)
    text = _prompt(prompt, prompt_file)
    require_extra("kvtier generate", "engine")
    from kvtier.connector.models import require_checkpoint

    require_checkpoint(model)
    from kvtier.engine.demo import GenerateOptions, generate

    generate(GenerateOptions(model, text, max_tokens, exact, as_json), settings)


def _prompt(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise ConfigError("--prompt, --prompt-file: give one of them")
    if file is None:
        return text or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--prompt-file "{file}": {error}; name a text file in UTF-8') from None
