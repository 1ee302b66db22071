"""The verbs' table: what `kvtier --help` says without loading a verb is what each verb says of itself."""

import json
import subprocess
import sys

import pytest

from kvtier.cli import main
from kvtier.cli.verbs import VERBS, load

HEAVY = ("torch", "numpy", "pydantic", "redis", "msgpack", "prometheus_client", "starlette", "transformers")
# What each verb may load of these, from its start to its first line of help.
LOADS = {
    "config": {"pydantic"},
    "demo": {"pydantic"},
    "verify": {"pydantic", "numpy", "redis", "msgpack", "prometheus_client"},
    "serve": {"pydantic"},
    "status": {"pydantic"},
    "cluster": {"pydantic"},
}


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


@pytest.mark.parametrize("name", VERBS)
def test_the_table_says_what_the_verb_says(name: str) -> None:
    verb = load(name)
    assert verb.name == name
    assert VERBS[name].help == verb.help


def test_the_help_lists_every_verb_in_order_and_loads_none() -> None:
    printed, loaded = helped("--help")
    assert loaded == set()
    words = [line.strip("│ ").split(" ")[0] for line in printed.partition("Commands")[2].splitlines()]
    assert [word for word in words if word in VERBS] == list(VERBS)


@pytest.mark.parametrize("name", LOADS)
def test_a_verb_starts_in_a_process_of_its_own_and_loads_what_it_needs(name: str) -> None:
    """One verb of each module: the others of that module start the same way."""
    printed, loaded = helped(name, "--help")
    assert f"kvtier {name}" in printed
    assert loaded <= LOADS[name]


def test_every_module_of_verbs_has_its_start() -> None:
    assert {VERBS[name].module for name in LOADS} == {verb.module for verb in VERBS.values()}
    assert len({VERBS[name].module for name in LOADS}) == len(LOADS)


def test_a_verb_misspelt_is_told_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtier", "statsu"])
    with pytest.raises(SystemExit):
        main()
    assert "status" in capsys.readouterr().err
