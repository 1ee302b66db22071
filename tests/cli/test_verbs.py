"""The verbs' table: what `kvtier --help` says without loading a verb is what each verb says of itself."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
from command_rig import kvtier
from extent import brief
from typer.core import TyperArgument
from typer.main import get_command

from kvtier.cli import main
from kvtier.cli.program import VERBS, load

HEAVY = (
    "torch", "numpy", "pydantic", "rich", "redis", "msgpack", "prometheus_client", "aiohttp", "httpx2", "starlette",
    "transformers",
)  # fmt: skip
METAVAR = re.compile(r"[A-Z]+(:[A-Z]+)?|[a-z]+(\|[a-z]+)+")
MODULES = sorted({verb.module for verb in VERBS.values()})


def eager() -> dict[str, Any]:
    """Every command, by its path, of a program that imports all modules at once and has typer's own group."""
    program = typer.Typer()
    for module in MODULES:
        program.add_typer(import_module(f"kvtier.cli.{module}").app)
    return dict(commands(get_command(program)))


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")


def shown(command: Any) -> list[Any]:
    """Its options and arguments, but for what is there to be refused."""
    return [each for each in command.params if not getattr(each, "hidden", False)]


def helped(*arguments: str) -> tuple[str, set[str]]:
    """What `kvtier ARGUMENTS` prints in a process of its own, and which heavy packages it has loaded by then."""
    program = f"""
import atexit, json, sys
sys.argv = ["kvtier", *{arguments!r}]
atexit.register(lambda: print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr))
from kvtier.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    return done.stdout, set(json.loads(done.stderr))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kvtier pu", ["purge"]), ("kvtier serve --log-f", ["--log-format"]), ("kvtier serve --log-format j", ["json"])],
)
def test_a_shell_completes_verbs_and_their_options(typed: str, offered: list[str]) -> None:
    asks = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    program = "import sys; sys.argv = ['kvtier']; from kvtier.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **asks}, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, offered, "")


def test_ctrl_c_while_it_is_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed:
        """Ctrl-C when the command line is about to be imported."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "kvtier.cli.program":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvtier.cli.program", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Pressed, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_help_has_a_short_name() -> None:
    for path in brief(((), ("cluster", "up")), ((), ("pin",), ("cluster",), ("cluster", "up"))):
        assert helped(*path, "-h")[0] == helped(*path, "--help")[0]


@pytest.mark.parametrize("name", VERBS)
def test_the_table_says_what_the_verb_says(name: str) -> None:
    verb = load(name)
    assert verb.name == name
    assert VERBS[name].help == verb.help


def test_the_help_lists_every_verb_in_order_and_loads_none() -> None:
    printed, loaded = helped("--help")
    assert loaded == set()
    listed = printed.partition("Commands:")[2]
    assert re.findall(r"^  (\w+)", listed, re.MULTILINE) == list(VERBS)
    assert " ".join(listed.split()) == " ".join(f"{name} {verb.help}" for name, verb in VERBS.items())  # none cut off


@pytest.mark.parametrize("module", brief(MODULES[:3], MODULES))
def test_a_verb_tells_its_help_in_a_process_of_its_own_and_loads_nothing_for_it(module: str) -> None:
    """One verb of each module: the others of that module start the same way."""
    name = next(name for name, verb in VERBS.items() if verb.module == module)
    printed, loaded = helped(name, "--help")
    assert f"kvtier {name}" in printed
    assert loaded == set()


def test_every_command_has_the_options_of_a_program_that_imports_all_at_once() -> None:
    expected = eager()
    assert {path for path in expected if " " not in path} == set(VERBS)
    assert {"demo rag", "cluster up", "cluster down"} <= set(expected)
    for path, command in expected.items():
        done = kvtier(*path.split(), "--help")
        printed = done.stdout
        assert done.returncode == 0
        options = {name for each in shown(command) for name in each.opts if name.startswith("--")}
        assert set(re.findall(r"^  (?:-h, )?(--[\w-]+)", printed, re.MULTILINE)) == options | {"--help"}, path
        # One style of what stands for a value: CAPITALS, or the words there are; [file] is no markup of anybody's.
        values = [each for each in command.params if each.metavar or not getattr(each, "is_flag", False)]
        if not hasattr(command, "commands"):
            assert [each.name for each in values if not METAVAR.fullmatch(each.metavar or "")] == [], path
            assert re.findall(r"^  \S+ <.*$", printed, re.MULTILINE) == [], path
            told = " ".join(each.help or "" for each in command.params).split()
            assert [word for word in told if "[" in word and word not in "".join(printed.split())] == [], path
        arguments = [str(each.metavar) for each in command.params if isinstance(each, TyperArgument)]
        usage = printed.partition("\n")[0]
        assert [name in usage for name in arguments] == [True] * len(arguments), path
        assert " ".join(printed.split()).count("...") == usage.count("..."), path  # no help is cut off


def test_what_is_no_model_is_told_before_torch_is_imported() -> None:
    program = """
import atexit, sys
sys.argv = ["kvtier", "generate", "--model", "/nope", "--prompt", "a"]
atexit.register(lambda: print("torch" in sys.modules))
from kvtier.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith('kvtier: --model "/nope": no config.json there; ')


def test_a_misspelt_verb_names_the_right_one() -> None:
    assert "status" in kvtier("statsu").stderr
