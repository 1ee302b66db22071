"""The `kvtier` command: its verbs and their modules, and errors as one line and an exit status."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_group

from kvtier import __version__
from kvtier.service import Exit, harmless
from kvtier.tiers import ConfigError, KVTierError, MissingPackages
from kvtier.tiers.config import preset

# --- the verbs -------------------------------------------------------------------------------------------------------


class Verb(NamedTuple):
    """A verb of `kvtier`: the module whose `app` holds it, and the help that `kvtier --help` shows."""

    module: str
    help: str


# Module → verb → help, in the order of `kvtier --help`: kept here, so that help imports no module.
_MODULES: Final = (
    ("checks_cli", {
        "config": "Show the configuration in force: defaults, then the file, then KVTIER_SECTION__OPTION variables.",
    }),
    ("demo_cli", {
        "demo": "Prefill a long text once, then find it again in every tier, also after the process was killed.",
        "model": "Save a model to try: a Llama of 50 M random weights, a tokenizer trained on the Python manual.",
        "generate": "Answer one prompt greedily with an engine in this process, and say which tier its KV came from.",
    }),
    ("checks_cli", {
        "verify": "Check every block of slabs against its checksum. Status 0: clean, 1: damaged, 3: repaired.",
        "doctor": "Check this machine against the configuration, with the fix. Status 0: well, 3: warnings, 1: errors.",
    }),
    ("servers_cli", {
        "serve": "Serve host memory and the tiers below it to the engines of this node, until SIGTERM or Ctrl-C.",
        "engine": "Answer OpenAI requests with an engine of its own, its KV in every tier, until SIGTERM or Ctrl-C.",
        "route": "Send OpenAI's requests to the replica that holds most of their prompt, until SIGTERM or Ctrl-C.",
    }),
    ("admin_cli", {
        "status": "Show how the daemon is doing, or an engine or router. Status 0: well, 3: degraded, 1: no answer.",
        "top": "Show what a daemon, engine or router does, look after look: a table on a terminal, a line otherwise.",
        "explain": "Say which tier holds a prompt's blocks, why none holds the first that is missing, and what helps.",
        "pin": "Keep the blocks of a prompt in host memory for a time; without blocks, list what is pinned.",
        "unpin": "Remove a pin: its blocks may be evicted again.",
        "quota": "Bound what a tenant has of each model's memory and slab; without a tenant, list the quotas.",
        "purge": "Remove blocks from every tier: a prompt's, a model's, or all.",
        "export": "Write a model's blocks, or a prompt's, to a file for `kvtier import`; the daemon goes on serving.",
        "import": "Store the blocks of a file that `kvtier export` wrote; each is verified first.",
        "trace": "Record a model's lookups as JSON lines in Mooncake's form.",
    }),
    ("measure_cli", {
        "size": "Show what a model's KV takes, and how many tokens and conversations memory and disk hold.",
        "worth": "Measure prompts computed and loaded here: from how many tokens on loading wins, in time and money.",
        "bench": "Put load on an OpenAI server, or on two by turns: first tokens, tokens a second, cached tokens.",
        "simulate": "Show what memory and disk of other sizes would have found of a trace, beside the optimum.",
    }),
    ("cluster_cli", {
        "cluster": "A whole cluster on this machine, without containers.",
    }),
)  # fmt: skip
VERBS: Final = {name: Verb(module, text) for module, verbs in _MODULES for name, text in verbs.items()}


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a verb's module and return the verb. KeyError for an unknown one."""
    module: Any = import_module(f"kvtier.cli.{VERBS[name].module}")
    module.app.rich_markup_mode = None  # plain help, as that of `kvtier`
    verb: TyperCommand | TyperGroup = get_group(module.app).commands[name]  # type: ignore[assignment]
    verb.help = VERBS[name].help
    for each in verb.commands.values() if isinstance(verb, TyperGroup) else ():
        each.short_help = each.help  # else only its first words
    for each in verb.commands.values() if isinstance(verb, TyperGroup) else (verb,):
        for param in each.params:
            if isinstance(param, TyperArgument):  # its name is its metavar: no "<path>" behind that
                vars(param)["display_type_rich"] = lambda ctx: None
    return verb


class VerbGroup(TyperGroup):
    """A group whose verbs print help without pydantic, which typer would import to convert an absent `--help`."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # typer takes a bool as it is
        return option


class Verbs(VerbGroup):
    """The group of all verbs. `--help` reads the table above; a verb's module is imported when the verb is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name=name, short_help=verb.help) for name, verb in VERBS.items()}

    def get_params(self, ctx: Any) -> Any:
        """The options of `kvtier` itself, all flags: absent ones are false, as above."""
        params = super().get_params(ctx)
        for each in params:
            each.default = each.default or False
        return params

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Errors of options include the value, which typer leaves out of some."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            refused: Any = error.__cause__
            if callable(getattr(refused, "errors", None)):  # pydantic's, which converts typer's values
                error.message = f"{refused.errors()[0]['input']!r:.60}: {error.message}"
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that the arguments begin with, loaded, and the arguments after it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


# --- the program -----------------------------------------------------------------------------------------------------

# Help and mistakes are plain text: rich alone would take twice the CPU time of all else.
app = typer.Typer(
    cls=Verbs,
    name="kvtier",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every verb, too
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        packed = Path(__file__).parents[1] / "commit.txt"  # of a wheel; a checkout has git
        print(f"kvtier {__version__}" + (f" ({packed.read_text()})" if packed.exists() else ""))
        raise typer.Exit(Exit.OK)


@app.callback()
def kvtier(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A hierarchical KV-cache offload service for LLM inference."""


def main() -> None:
    """Run the command line. An error that the user can fix is one line on stderr and status 2; others are status 1.

    Output that cannot be written is status 1, without a line if its reader has left, as in `| head`. OpenMP's threads,
    which are torch's, sleep while they wait: those that spin take the cores from what they wait for, if other processes
    want them, too.
    """
    preset("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {harmless(str(error))}", file=sys.stderr)
        can_fix = isinstance(error, ConfigError | MissingPackages)
        sys.exit(Exit.USAGE if can_fix else Exit.FAILED)
    except OSError:
        if not _output_fails("\n"):
            raise
        sys.exit(Exit.FAILED)
    finally:
        if _output_fails():
            sys.exit(Exit.FAILED)


def _output_fails(more: str = "") -> bool:
    """Whether printed output cannot be written. It is then dropped, or Python would report it again at its end.

    A failed write of a large text leaves nothing to try again: then `more` is tried.
    """
    if sys.stdout is None:  # closed from the beginning
        return False
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"kvtier: standard output: {error.strerror}; write it to another place", file=sys.stderr)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False
