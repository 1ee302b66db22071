"""kvtier installed without extras: what needs no model runs, and the rest names what it lacks."""

import json
import signal
import subprocess
from pathlib import Path
from typing import IO, Final

import pytest
from fork_rig import SERVICES, Forked
from service_rig import environment, patient_options

EXTRAS: Final = ("cupy", "llguidance", "matplotlib", "safetensors", "torch", "transformers")
_PATIENCE: Final = 250.0  # seconds for an end: no import is shared with other tests, and the machine may be busy
pytestmark = pytest.mark.timeout(300)
# Runs `kvtier` as often as it is told, and says at its end which packages of extras were imported.
PROGRAM: Final = f"""
import atexit, json, sys
atexit.register(lambda: print("loaded:", *filter(sys.modules.get, {EXTRAS!r}), file=sys.stderr))
from kvtier.cli import main
def run(*arguments):
    sys.argv = ["kvtier", *arguments]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
statuses = [run(*arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps(statuses), file=sys.stderr)
"""
# The same where no package of an extra is installed.
BARE: Final = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r}))\n{PROGRAM}"


def start(*commands: list[str], program: str = PROGRAM, **options: str) -> Forked:
    told, pipe = ["-c", program, json.dumps(commands)], subprocess.PIPE
    return Forked(told, SERVICES, env=environment(**options), stdout=pipe, stderr=pipe)


def told_by(process: Forked) -> tuple[str, str]:
    """What it printed, little enough for a pipe, once it has ended well."""
    assert process.stdout is not None
    assert process.stderr is not None
    status = process.wait(_PATIENCE)
    out, err = process.stdout.read(), process.stderr.read()
    assert status == 0, err
    return out, err


def address(errors: IO[str] | None) -> str:
    """Where a server answers, once it says so."""
    assert errors is not None
    lines = iter(errors.readline, "")
    return next(line for line in lines if "ready on" in line).rpartition(" ")[2].strip()


def test_daemon_router_and_operators_load_no_torch(home: Path) -> None:
    slabs = {**patient_options(), "file__path": str(home / "slabs"), "file__size": "1MiB", "host__size": "1MiB"}
    serve = ["serve", "--socket", str(home / "s"), "--http", "127.0.0.1:0"]
    route = ["route", "--replica", "http://127.0.0.1:9", "--http", "127.0.0.1:0"]
    with start(serve, **slabs) as daemon, start(route) as router:
        try:
            at = ["--http", address(daemon.stderr)]
            address(router.stderr)
            (home / "tokens").write_text("[1, 2, 3]")
            asked = (
                ["status", *at],
                ["top", *at, "--count", "1"],
                ["explain", *at, "--blocks", str(home / "tokens")],
                ["verify", str(home)],
            )
            with start(*asked) as operator:
                out, told = told_by(operator)
        finally:
            for server in (daemon, router):
                server.send_signal(signal.SIGTERM)
        assert told.splitlines()[-2:] == ["[0, 0, 1, 0]", "loaded:"], out + told
        for server in (daemon, router):
            assert told_by(server)[1].splitlines()[-1] == "loaded:"


def test_what_is_missing_is_named_in_one_line_with_the_command_that_installs_it(home: Path) -> None:
    folder = str(home)
    (home / "config.json").write_text('{"model_type": "llama"}')
    api = """
import kvtier
for name in kvtier.__all__:
    try:
        getattr(kvtier, name)
    except ImportError as error:
        print(error)
try:
    from kvtier.connector.transformers import KVTier
except kvtier.KVTierError as error:
    print(error)
"""
    asked = (
        ["engine", "--model", folder],
        ["demo"],
        ["demo", "rag"],
        ["cluster", "up", "--state", f"{folder}/state"],
        ["model", f"{folder}/new"],
        ["generate", "--model", folder, "--prompt", "a"],
        ["worth", folder],
        ["size", folder],
        ["simulate", f"{folder}/trace", "--png", f"{folder}/picture"],
    )
    with start(*asked, program=BARE + api) as bare:
        out, told = told_by(bare)
    packages, no_gpu = (
        "'safetensors>=0.5' 'torch>=2.6' 'transformers>=5.0'",
        ("; without a GPU, first pip install 'torch>=2.6' --index-url https://download.pytorch.org/whl/cpu"),
    )
    engine = f"needs llguidance, safetensors, torch, transformers: pip install 'llguidance>=1.7' {packages}{no_gpu}"
    transformers = f"needs safetensors, torch, transformers: pip install {packages}{no_gpu}"
    verbs = ("engine", "demo", "demo rag", "cluster up", "model", "generate", "worth")
    assert told.splitlines() == [
        *(f"kvtier: kvtier {verb} {engine}" for verb in verbs),
        f"kvtier: kvtier size {transformers}",
        "kvtier: --png needs matplotlib: pip install 'matplotlib>=3.10'",
        json.dumps([2] * len(asked)),
        "loaded:",
    ], told
    assert out.splitlines() == [f"kvtier.Engine {engine}", f"kvtier.open_engine {engine}", f"KVTier {transformers}"]
