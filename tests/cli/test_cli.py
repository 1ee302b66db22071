"""The command line: statuses, one line per mistake, `--json`, and that importing kvtier stays light."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from command_rig import kvtier

import kvtier as package
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


def test_version() -> None:
    ended = kvtier("--version")
    assert (ended.returncode, ended.stdout) == (Exit.OK, f"kvtier {package.__version__}\n")


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")],
)
def test_threads_of_torch_sleep_while_they_wait(
    given: dict[str, str], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that spin made an engine beside busy processes a hundred times slower."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, "--version") == Exit.OK
    assert os.environ["OMP_WAIT_POLICY"] == policy


def test_config_as_json(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsize = "2GiB"\n')
    shown = json.loads(kvtier("config", "--config", path, "--json", file__deadline="50ms").stdout)
    assert shown["host"]["size"] == "2GiB"
    assert shown["file"]["deadline"] == "50ms"
    assert shown["l1"]["num_blocks"] is None


def test_config_as_table() -> None:
    shown = kvtier("config", columns="200", host__size="3GiB").stdout
    line = next(line for line in shown.splitlines() if "[host] size" in line)
    assert "3GiB" in line  # in force
    assert "1GiB" in line  # the default


def test_config_refuses_what_serve_and_route_would_and_names_what_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"redis__key_file": str(tmp_path / "none")}
    ended = kvtier("config", redis__url="redis://127.0.0.1", **key)
    assert (ended.returncode, f'[redis] key_file "{tmp_path / "none"}"' in ended.stderr) == (Exit.USAGE, True)
    assert kvtier("config", file__size="64MiB", **key).returncode == Exit.OK
    assert [each.message for each in caplog.records] == [
        "[file] size: without path the tier is off; set it, or leave these out",
        "[redis] key_file: without url the tier is off; set it, or leave these out",
    ]
    for place in (tmp_path / "slabs", tmp_path / "not" / "there" / "yet"):
        assert kvtier("config", file__path=str(place)).returncode == Exit.OK
    assert list(tmp_path.iterdir()) == []  # it only looks
    (tmp_path / "slabs").write_text("in its place")
    taken = "a file is in its place"
    for path, why in ((tmp_path / "slabs", taken), ("/dev/null/x", taken), ("/proc/nope", "it cannot be made")):
        ended = kvtier("config", file__path=str(path))
        assert (ended.returncode, f'[file] path "{path}": {why}' in ended.stderr) == (Exit.USAGE, True)
    config, route = (kvtier(verb, router__replicas="http://a:1,http://b:2") for verb in ("config", "route"))
    assert (config.returncode, config.stderr) == (route.returncode, route.stderr)
    assert config.returncode == Exit.USAGE
    assert 'unknown part "http://b:2"; known are events' in config.stderr
    assert config.stderr.endswith("between replicas write a space\n")


def test_config_shows_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(
        '[redis]\nurl = "redis://:hunter2-url@a"\npassword = "hunter2-word"\nsecret = "hunter2-hunter2-hunter2"\n'
    )
    for more in ([], ["--json"]):
        ended = kvtier("config", "--config", path, *more, columns="200")
        assert ended.returncode == Exit.OK
        assert "secret" in ended.stdout
        assert "hunter2" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[redis]\nsecrt = "hunter2"', "[redis] secrt (not shown): unknown option; did you mean secret?"),
        ('[redis]\nsecret = "hunter2"', "[redis] secret (not shown): shorter than 16 characters; make one with"),
        ("[redis]\nsecret = 2222222222222222", "[redis] secret (not shown): not a text; write one, in quotes"),
        ('[service]\ntoken = "hunter2\\n"', "[service] token (not shown): empty, or with white space around it; write"),
        ('[server]\ntoken = ""', "[server] token (not shown): empty, or with white space around it; write it alone"),
        ('[redis]\npassword = " hunter2"', "[redis] password (not shown): empty, or with white space around it; write"),
        ("[redis]\npassword = 2222222222222222", "[redis] password (not shown): not a text; write one, in quotes"),
        ('[service]\ntokens = "hunter2"', "[service] tokens (not shown): unknown option; did you mean token?"),
        ('secret = "hunter2"', "secret (not shown): belongs in a section; write it as [redis] secret"),
    ],
)
def test_a_mistake_with_a_secret_does_not_show_it(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text(text + "\n")
    ended = kvtier("config", "--config", path)
    assert ended.returncode == Exit.USAGE
    assert ended.stderr.startswith(f"kvtier: {line}")
    assert "hunter2" not in ended.stderr
    assert "2222" not in ended.stderr


@pytest.mark.parametrize("name", ["KVTIER_REDIS__SECRT", "KVTIER_REDIS_PASSWORD", "KVTIER_TOKEN"])
def test_a_misspelt_variable_does_not_show_a_secret(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "hunter2")
    ended = kvtier("config")
    assert ended.returncode == Exit.USAGE
    assert ended.stderr.startswith(f"kvtier: {name} (not shown): unknown variable; did you mean KVTIER_")


def test_a_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text('[host]\nsise = "2GiB"\n')
    ended = kvtier("config", "--config", path)
    assert (ended.returncode, ended.stdout) == (Exit.USAGE, "")
    assert ended.stderr == 'kvtier: [host] sise "2GiB": unknown option; did you mean size?\n'


def test_other_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked() -> None:
        raise StoreLocked('[file] path "/kv": pid 7 has it open; stop it or choose another path')

    monkeypatch.setattr("kvtier.cli.program.app", locked)
    ended = kvtier()
    assert ended.returncode == Exit.FAILED
    assert ended.stderr == 'kvtier: [file] path "/kv": pid 7 has it open; stop it or choose another path\n'


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
def test_usage_errors_are_status_2(arguments: list[str]) -> None:
    ended = kvtier(*arguments)
    assert (ended.returncode, "bogus" in ended.stderr) == (Exit.USAGE, True)


def test_a_figure_that_is_refused_is_shown() -> None:
    ended = kvtier("simulate", "trace", "--limit", "-7")
    assert ended.returncode == Exit.USAGE
    assert "--limit" in ended.stderr
    assert "-7" in ended.stderr


def test_a_model_is_not_saved_where_no_directory_can_be() -> None:
    ended = kvtier("model", "/dev/null/model")
    assert ended.returncode == Exit.USAGE
    assert ended.stderr.startswith("kvtier: DIR '/dev/null/model': Not a directory; name a directory")


def test_every_public_name_is_there() -> None:
    for name in package.__all__:
        public = getattr(package, name)
        assert public is not None
        assert not (public.__doc__ or name).startswith(name)  # a dataclass without one gets its signature
        for member, what in vars(public).items() if isinstance(public, type) else ():
            told = hasattr(Tier, member) or inspect.getdoc(getattr(public, member))
            is_ours = isinstance(what, (FunctionType, property, classmethod))
            assert told or not is_ours or member.startswith("_"), f"{name}.{member}"
    assert {*dir(package), "__version__"} == set(package.__all__)
    with pytest.raises(AttributeError, match="attribute Nothing"):
        _ = package.Nothing  # type: ignore[attr-defined]


# What starts fast imports little: no library that does the work is there before somebody asks for work.


HEAVY = {
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "redis", "msgpack", "xxhash", "aiohttp", "httpx",
    "pydantic", "pydantic_settings", "rich", "prometheus_client", "zmq", "cryptography", "vllm", "sglang",
}  # fmt: skip
HELP = "import sys; sys.argv = ['kvtier', '--help']; from kvtier.cli import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize("program", ["import kvtier", HELP], ids=["import kvtier", "kvtier --help"])
def test_nothing_heavy_is_imported_at_the_start(program: str) -> None:
    told = f"{program}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=True)
    imported = set(done.stderr.split())
    assert "kvtier" in imported
    assert not imported & HEAVY


def test_the_face_alone_imports_no_part_of_kvtier() -> None:
    told = "import sys, kvtier; print(*[name for name in sys.modules if name.startswith('kvtier')])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["kvtier"]
