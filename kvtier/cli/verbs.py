"""The verbs of the command line: where each is defined, and its line of help."""

from importlib import import_module
from typing import Any, Final, NamedTuple

from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


class Verb(NamedTuple):
    """A verb of `kvtier`: the module whose `app` holds it, and the help that `kvtier --help` shows."""

    module: str
    help: str


# In the order of `kvtier --help`. A test compares each help with the verb's own.
VERBS: Final = {
    "config": Verb(
        "config_cli", "Show the configuration in force: defaults, then the file, then KVTIER_SECTION__OPTION variables."
    ),
    "demo": Verb(
        "demo_cli", "Prefill a long text once, then find it again in every tier, also after the process was killed."
    ),
    "model": Verb(
        "demo_cli",
        "Save a model to try things with: a Llama of 50 M random weights, a tokenizer trained on the Python manual.",
    ),
    "generate": Verb(
        "demo_cli", "Answer one prompt greedily with an engine in this process, and say which tier its KV came from."
    ),
    "verify": Verb(
        "checks_cli",
        "Read everything in slabs and compare it with its checksums. Status 0 clean, 1 damage found, 3 repaired.",
    ),
    "doctor": Verb(
        "checks_cli",
        "Check this machine against the configuration, with the fix. Status 0 all is well, 3 warnings, 1 errors.",
    ),
    "serve": Verb(
        "serve_cli",
        "Serve host memory and the tiers below it to the engines of this node, until SIGTERM or Ctrl-C.",
    ),
    "engine": Verb(
        "engine_cli",
        "Answer OpenAI requests with an engine of this process, its KV in every tier, until SIGTERM or Ctrl-C.",
    ),
    "route": Verb(
        "route_cli", "Send OpenAI's requests to the replica that holds most of their prompt, until SIGTERM or Ctrl-C."
    ),
    "status": Verb(
        "admin_cli",
        "Show how the daemon is doing, or a router at --http. Status 0: well, 3: degraded, 1: it does not answer.",
    ),
    "top": Verb(
        "admin_cli",
        "Show what the daemon does, look after look: a table that moves on a terminal, a line each otherwise.",
    ),
    "pin": Verb(
        "admin_cli", "Keep the blocks of a prompt in host memory for a time; without blocks, list what is pinned."
    ),
    "unpin": Verb("admin_cli", "Let go of what a pin keeps."),
    "quota": Verb(
        "admin_cli", "Bound what a tenant has of each model's host memory; without a tenant, list the quotas."
    ),
    "purge": Verb("admin_cli", "Forget blocks in every tier: a prompt's, a model's, or all."),
    "export": Verb(
        "admin_cli",
        "Write a model's blocks, or a prompt's, to a file that `kvtier import` reads; the daemon goes on serving.",
    ),
    "import": Verb("admin_cli", "Store the blocks of a file that `kvtier export` wrote; each is verified first."),
    "trace": Verb("admin_cli", "Record a model's lookups as JSON lines in Mooncake's form."),
    "cluster": Verb("cluster_cli", "A whole cluster on this machine, without containers."),
}


def load(name: str) -> TyperCommand | TyperGroup:
    """A verb as its module defines it: imports the module, and all that it needs. KeyError for none of ours."""
    module: Any = import_module(f"kvtier.cli.{VERBS[name].module}")
    verb: TyperCommand | TyperGroup = get_group(module.app).commands[name]  # type: ignore[assignment]
    return verb


class Verbs(TyperGroup):
    """The group of all verbs. `--help` reads the table above; a verb's module is imported when the verb is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name=name, help=verb.help) for name, verb in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that the arguments start with, loaded, and the arguments after it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest
