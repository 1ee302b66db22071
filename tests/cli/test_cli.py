"""The command line: statuses, one line per mistake, `--json`, and that importing kvtier stays light."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import kvtier
from kvtier import cli
from kvtier.service.command_line import Exit
from kvtier.tiers.errors import StoreLocked
from kvtier.tiers.tier import Tier


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The status `kvtier ARGUMENTS` ends with."""
    monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == Exit.OK
    assert capsys.readouterr().out == f"kvtier {kvtier.__version__}\n"


def test_config_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsize = "2GiB"\n')
    monkeypatch.setenv("KVTIER_FILE__DEADLINE", "50ms")
    assert run(monkeypatch, "config", "--config", str(path), "--json") == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["host"]["size"] == "2GiB"
    assert shown["file"]["deadline"] == "50ms"
    assert shown["l1"]["num_blocks"] is None


def test_config_as_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVTIER_HOST__SIZE", "3GiB")
    assert run(monkeypatch, "config") == Exit.OK
    line = next(line for line in capsys.readouterr().out.splitlines() if "[host] size" in line)
    assert "3GiB" in line  # in force
    assert "1GiB" in line  # the default


def test_config_refuses_what_serve_and_route_would_and_names_what_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KVTIER_REDIS__URL", "redis://127.0.0.1")
    monkeypatch.setenv("KVTIER_REDIS__KEY_FILE", str(tmp_path / "none"))
    assert run(monkeypatch, "config") == Exit.USAGE
    assert f'[redis] key_file "{tmp_path / "none"}"' in capsys.readouterr().err
    monkeypatch.delenv("KVTIER_REDIS__URL")
    monkeypatch.setenv("KVTIER_FILE__SIZE", "64MiB")
    assert run(monkeypatch, "config") == Exit.OK
    idle = "[file] size: without path the tier is off; set it, or leave these out"
    assert [each.message for each in caplog.records] == [
        idle,
        "[redis] key_file: without url the tier is off; set it, or leave these out",
    ]
    monkeypatch.setenv("KVTIER_FILE__PATH", str(tmp_path / "slabs"))
    assert run(monkeypatch, "config") == Exit.OK
    assert not (tmp_path / "slabs").exists()  # it only looks
    (tmp_path / "slabs").write_text("in its place")
    assert run(monkeypatch, "config") == Exit.USAGE
    assert "a file is in its place" in capsys.readouterr().err
    for path, why in (("/dev/null/x", "a file is in its place"), ("/proc/nope", "it cannot be made")):
        monkeypatch.setenv("KVTIER_FILE__PATH", path)
        assert run(monkeypatch, "config") == Exit.USAGE
        assert f'[file] path "{path}": {why}' in capsys.readouterr().err
    monkeypatch.setenv("KVTIER_FILE__PATH", str(tmp_path / "not" / "there" / "yet"))
    assert run(monkeypatch, "config") == Exit.OK
    assert not (tmp_path / "not").exists()
    monkeypatch.delenv("KVTIER_FILE__PATH")
    monkeypatch.setenv("KVTIER_ROUTER__REPLICAS", "http://a:1,http://b:2")
    errors = [(run(monkeypatch, verb), capsys.readouterr().err) for verb in ("config", "route")]
    assert errors[0] == errors[1]
    assert errors[0][0] == Exit.USAGE
    assert 'unknown part "http://b:2"; known are events' in errors[0][1]
    assert errors[0][1].endswith("between replicas write a space\n")


def test_config_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(
        '[redis]\nurl = "redis://:hunter2-url@a"\npassword = "hunter2-word"\nsecret = "hunter2-hunter2-hunter2"\n'
    )
    for more in ([], ["--json"]):
        assert run(monkeypatch, "config", "--config", str(path), *more) == Exit.OK
        output = capsys.readouterr()
        assert "secret" in output.out
        assert "hunter2" not in output.out + output.err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[redis]\nsecrt = "hunter2"', "[redis] secrt (not shown): unknown option; did you mean secret?"),
        ('[redis]\nsecret = "hunter2"', "[redis] secret (not shown): shorter than 16 characters; make one with"),
        ("[redis]\nsecret = 2222222222222222", "[redis] secret (not shown): not a text; write one, in quotes"),
        (
            '[service]\ntoken = "hunter2\\n"',
            "[service] token (not shown): empty, or with white space around it; write it",
        ),
        ('[server]\ntoken = ""', "[server] token (not shown): empty, or with white space around it; write it alone"),
        ('[redis]\npassword = " hunter2"', "[redis] password (not shown): empty, or with white space around it; write"),
        ("[redis]\npassword = 2222222222222222", "[redis] password (not shown): not a text; write one, in quotes"),
        ('[service]\ntokens = "hunter2"', "[service] tokens (not shown): unknown option; did you mean token?"),
        ('secret = "hunter2"', "secret (not shown): belongs in a section; write it as [redis] secret"),
    ],
)
def test_a_mistake_with_a_secret_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, line: str
) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(text + "\n")
    assert run(monkeypatch, "config", "--config", str(path)) == Exit.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"kvtier: {line}")
    assert "hunter2" not in error
    assert "2222" not in error


@pytest.mark.parametrize("name", ["KVTIER_REDIS__SECRT", "KVTIER_REDIS_PASSWORD", "KVTIER_TOKEN"])
def test_a_misspelt_variable_does_not_show_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, "hunter2")
    assert run(monkeypatch, "config") == Exit.USAGE
    assert capsys.readouterr().err.startswith(f"kvtier: {name} (not shown): unknown variable; did you mean KVTIER_")


def test_a_mistake_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsise = "2GiB"\n')
    assert run(monkeypatch, "config", "--config", str(path)) == Exit.USAGE
    output = capsys.readouterr()
    assert output.err == 'kvtier: [host] sise "2GiB": unknown option; did you mean size?\n'
    assert output.out == ""


def test_other_failures_are_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def locked() -> None:
        raise StoreLocked('[file] path "/kv": pid 7 has it open; stop it or choose another path')

    monkeypatch.setattr("kvtier.cli.program.app", locked)
    assert run(monkeypatch) == Exit.FAILED
    assert capsys.readouterr().err == 'kvtier: [file] path "/kv": pid 7 has it open; stop it or choose another path\n'


@pytest.mark.parametrize("verb", [("--version",), ("config", "--json"), ()])
def test_output_that_cannot_be_written_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    # A full disk is said; a reader that has gone, as behind `| head`, is no mistake of anybody's.
    if not verb:  # more than is kept to be written later
        monkeypatch.setattr("kvtier.cli.program.app", lambda: print("x" * 20_000))
    read, write = os.pipe()
    os.close(read)
    for place, said in (
        ("/dev/full", "kvtier: standard output: No space left on device; write it to another place\n"),
        (write, ""),
    ):
        with open(place, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert run(monkeypatch, *verb) == Exit.FAILED
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("arguments", [["bogus"], ["config", "--bogus"], ["demo", "--bogus"]])
def test_usage_errors_are_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(monkeypatch, *arguments) == Exit.USAGE
    assert "bogus" in capsys.readouterr().err


def test_a_figure_that_is_refused_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "simulate", "trace", "--limit", "-7") == Exit.USAGE
    told = capsys.readouterr().err
    assert "--limit" in told
    assert "-7" in told


def test_a_model_is_not_saved_where_no_directory_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "model", "/dev/null/model") == Exit.USAGE
    assert capsys.readouterr().err.startswith("kvtier: DIR '/dev/null/model': Not a directory; name a directory")


def test_every_public_name_is_there() -> None:
    for name in kvtier.__all__:
        public = getattr(kvtier, name)
        assert public is not None
        assert not (public.__doc__ or name).startswith(name)  # a dataclass without one gets its signature
        for member, what in vars(public).items() if isinstance(public, type) else ():
            told = hasattr(Tier, member) or inspect.getdoc(getattr(public, member))
            is_ours = isinstance(what, (FunctionType, property, classmethod))
            assert told or not is_ours or member.startswith("_"), f"{name}.{member}"
    assert {*dir(kvtier), "__version__"} == set(kvtier.__all__)
    with pytest.raises(AttributeError, match="attribute Nothing"):
        _ = kvtier.Nothing  # type: ignore[attr-defined]


def test_import_is_light() -> None:
    program = "import sys, kvtier; print(sorted({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
