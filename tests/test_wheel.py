"""The quickstart's way to install: wheel and sdist are built, installed, and have pages and cluster."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from hatch_build import commit_of
from kvtier import __version__
from kvtier.tiers.extras import EXTRAS, install_command

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL: Final = f"dist/kvtier-{__version__}-py3-none-any.whl"
BUILT: Final = "dist/kvtier-*.whl"
SDIST: Final = f"dist/kvtier-{__version__}.tar.gz"
# As long as kvtier is on no index, such a command fails, or installs what somebody else has put there.
FROM_AN_INDEX: Final = re.compile(
    r"\b(?:pip\d?\s+install|pipx\s+install|uv\s+add)\s+(?:[^\n`;&#]*[ \t])?['\"]?kvtier(?![-\w/:]|\.\w)"
)
A_REQUIREMENT: Final = re.compile(r"^kvtier(?![-\w])", re.MULTILINE)  # in a file of such
PROGRAM: Final = """
from threading import Event
import kvtier
from kvtier.service.cluster.defaults import BESIDE_US
from kvtier.service.cluster.cluster import Placeholders, Topology
from kvtier.service.observe.live_page import LivePage
print(kvtier.__file__)
print(*(route.path for route in LivePage(dict, Event()).routes()))
deploy = BESIDE_US.parent / "deploy"
places = Placeholders(deploy, deploy, deploy)
services = Topology.read(BESIDE_US, places, ["cluster", "observability", "bench"]).services
print(*(word for each in services.values() for word in (*each.argv, *(file.source for file in each.files))
        if word.startswith(f"{deploy}/") and word.endswith((".conf", ".sh", ".py", ".yml"))), sep="\\n")
"""
# Stands for `pip` in an environment that sees the packages of this one: the same commands, offline.
PIP: Final = """#!/bin/sh
[ "$1" = install ] && shift
exec "$(dirname "$0")/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \\
    --no-build-isolation --ignore-installed --no-cache-dir --no-compile "$@"
"""


class Checkout(NamedTuple):
    """A checkout with wheel and sdist in `dist/`, and which files they should hold, by their paths there."""

    root: Path
    files: set[str]
    printed: list[str]  # by `make dist`


def tracked() -> list[str]:
    """What git tracks here and is not deleted."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and ((ROOT / name).is_symlink() or (ROOT / name).exists())]


def tree(root: Path) -> Iterator[str]:
    """Every file of ours, by its path under the import root."""
    for path in (root / "kvtier").iterdir():
        if path.is_dir():
            home = path.resolve()
            yield from (f"kvtier/{path.name}/{file.relative_to(home)}" for file in home.rglob("*") if file.is_file())
        else:
            yield f"kvtier/{path.name}"


def without_make() -> dict[str, str]:
    """The variables of these tests, without what a `make` around them has set. No extension module is built."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "KVTIER_"))}
    return {**own, "KVTIER_EXTENSIONS": "off"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """What is committed or about to be, built by `make dist`, with files beside it that nobody ever committed."""
    root = tmp_path_factory.mktemp("wheel") / "checkout"
    for name in tracked():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    files = set(tree(root))
    by = ["-c", "user.name=Tests", "-c", "user.email=tests@example.org"]
    for git in (["init", "--quiet"], ["add", "--all", "--force"], [*by, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *git], cwd=root, check=True, capture_output=True)
    for stray in ("tiers/stray.py", "kvtier/stray.py", "engine/.env"):
        (root / stray).write_text("secret = 1\n")
    environment = {**without_make(), "VENV": sys.prefix}
    done = subprocess.run(["make", "dist"], cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return Checkout(root, files | {"kvtier/commit.txt"}, done.stdout.splitlines())


def typed_to_install() -> list[str]:
    """The commands of the quickstart's section, in order."""
    section = (ROOT / "docs" / "quickstart.md").read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]


def all_of_it_is_there(asked: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **environment}
    told = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    where, paths, *sources = told.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    pages = "/ /charts.js /daemon.js /dashboard.css /dashboard.js /draw.js /history /memory.js /past.js /router.js "
    pages += "/saved.js /stream /tiers.js /uplot.css /uplot.js /why.js"
    assert sorted(paths.split()) == pages.split()
    assert len(sources) >= 8
    for file in sources:
        assert Path(file).is_relative_to(tmp_path)
        assert Path(file).exists(), file


def test_make_dist_prints_the_files_and_the_commands_of_the_quickstart(checkout: Checkout) -> None:
    assert checkout.printed[:2] == [WHEEL, SDIST]
    plain, extras = (line.partition(":")[2].strip() for line in checkout.printed[2:])
    assert [line for line in typed_to_install() if fnmatch(plain, line)]
    assert extras.startswith(f"pip install '{WHEEL}[engine]' ")


def test_without_git_a_checkout_is_built_without_its_commit(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BUILD_COMMIT", raising=False)
    assert len(commit_of(checkout.root).removesuffix("-dirty")) == 12
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(checkout.root) == ""
    monkeypatch.setenv("BUILD_COMMIT", "0123456789ab\n")
    assert commit_of(checkout.root) == "0123456789ab"


def test_a_wheel_is_whole_and_holds_nothing_else(checkout: Checkout, tmp_path: Path) -> None:
    with zipfile.ZipFile(checkout.root / WHEEL) as files:
        assert {name for name in files.namelist() if ".dist-info/" not in name} == checkout.files
        files.extractall(tmp_path / "installed")
    (names,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nkvtier = kvtier.connector.vllm.plugin:register\n" in names.read_text()
    asked = [sys.executable, "-P", "-c", PROGRAM]
    all_of_it_is_there(asked, {"PYTHONPATH": str(tmp_path / "installed")}, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_wheel_made_where_there_is_a_compiler_has_every_extension_module(checkout: Checkout, tmp_path: Path) -> None:
    environment = {**without_make(), "VENV": sys.prefix}
    program = "from kvtier.tiers import compiled; print(*(each.state for each in compiled.status()), sep=',')"
    for setting, platform, states in (("", sysconfig.get_platform(), {"loaded"}), ("off", "any", {"not built"})):
        environment["KVTIER_EXTENSIONS"] = setting
        made = ["make", "dist", f"DIST={tmp_path / platform}"]
        done = subprocess.run(made, cwd=checkout.root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (wheel,) = (tmp_path / platform).glob("*.whl")
        assert wheel.stem.endswith(platform.replace("-", "_"))
        with zipfile.ZipFile(wheel) as files:
            files.extractall(tmp_path / f"installed-{platform}")
        asked = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": str(tmp_path / f"installed-{platform}")})  # fmt: skip
        assert set(asked.stdout.strip().split(",")) == states, asked.stderr


def test_an_sdist_is_whole_and_holds_nothing_else(checkout: Checkout) -> None:
    with tarfile.open(checkout.root / SDIST) as files:
        assert [member.name for member in files if not (member.isfile() or member.isdir())] == []  # no symlink
        names = {member.name.partition("/")[2] for member in files if member.isfile()}
    beside = {"README.md", "CHANGELOG.md", "LICENSE", "hatch_build.py", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert names == checkout.files | beside


def test_the_printed_commands_install_into_a_fresh_environment(checkout: Checkout, tmp_path: Path) -> None:
    """Offline: there this environment's packages are seen, but not its kvtier. The wheel is made of the sdist."""
    home = tmp_path / "fresh"
    venv.create(home)
    # A `.pth` names folders. The `.pth` files in those are not read: nothing that is installed editable there is seen.
    (own,) = home.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    (home / "bin" / "pip").write_text(PIP)
    (home / "bin" / "pip").chmod(0o755)
    environment = {**without_make(), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    commands = [line for line in typed_to_install() if line.startswith("pip install ") and "torch" not in line]
    assert [line for line in commands if BUILT in line and "[" not in line]
    assert [line for line in commands if BUILT in line and "[" in line]
    assert "pip install ." in commands
    for command in commands:
        shutil.rmtree(own / "kvtier", ignore_errors=True)
        there = f"{command}; cd {tmp_path}; kvtier --version"
        done = subprocess.run(["bash", "-euc", there], cwd=checkout.root, env=environment, capture_output=True,
                              text=True, timeout=100, check=False)  # fmt: skip
        assert done.returncode == 0, command + done.stderr
        described = ["git", "describe", "--always", "--abbrev=12"]
        commit = subprocess.run(described, cwd=checkout.root, capture_output=True, text=True, check=True).stdout.strip()
        assert done.stdout.splitlines()[-1] == f"kvtier {__version__} ({commit})"
        assert (own / "kvtier" / "cli" / "__init__.py").exists()
    all_of_it_is_there([str(home / "bin" / "python"), "-c", PROGRAM], {"PYTHONPATH": ""}, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_printed_commands_run_word_for_word(checkout: Checkout, tmp_path: Path) -> None:
    """In an empty environment, with the packages of an index. It has no hatchling either: `make dist` gets its own."""
    shutil.copytree(checkout.root, tmp_path / "checkout", symlinks=True)
    shutil.rmtree(tmp_path / "checkout" / "dist")
    path = ":".join(each for each in os.environ["PATH"].split(":") if not Path(each).is_relative_to(sys.prefix))
    environment = {**without_make(), "PATH": path, "PYTHONPATH": ""}
    for name in ("VIRTUAL_ENV", "VENV", "KVTIER_EXTENSIONS"):
        environment.pop(name, None)
    torch = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    assert f"pip install {torch[1]}" in typed_to_install()
    (tmp_path / "constraints").write_text(torch[1])  # whatever the page says, no other torch comes
    environment["PIP_CONSTRAINT"] = str(tmp_path / "constraints")
    first, *others = typed_to_install()
    lines = [
        first,
        "! (cd / && python -c 'import kvtier')",
        *others,
        "cd /",
        "pip check",
        "kvtier --version",
        "kvtier doctor || [ $? = 3 ]",  # 3: warnings
        "python -c 'import kvtier; kvtier.open_engine; print(kvtier.__file__)'",
    ]
    done = subprocess.run(["bash", "-eux", "-c", "\n".join(lines)], cwd=tmp_path / "checkout", env=environment,
                          capture_output=True, text=True, timeout=1100, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(tmp_path / "checkout" / ".venv-kvtier")


def test_the_quickstart_names_every_extra() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| \S", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    ours = {"dev", "docs"}  # for working on kvtier
    same = {"compiled", "cuda", "service"}  # names that stay: cuda13, and nothing
    assert PROJECT["optional-dependencies"].keys() - ours - same <= named


def test_a_fix_names_what_the_extra_brings() -> None:
    extras = {name: set(PROJECT["optional-dependencies"][name]) for name in EXTRAS}
    assert {name: set(packages.values()) for name, packages in EXTRAS.items()} == extras
    assert extras.keys() == PROJECT["optional-dependencies"].keys() - {"compiled", "cuda", "dev", "docs", "service"}
    assert install_command("peers") == "pip install 'aeg~=0.9.0' 'cryptography>=43'"
    assert install_command("engine", "torch") == "pip install 'torch>=2.6'"


def test_nothing_says_to_install_kvtier_from_an_index() -> None:
    """Until it is on one: then this test goes, and the section begins with that command again."""
    wrong = ("pip install KV", "pip install 'KV[engine]'", "pip3 install -U KV", "pip install numpy KV==1", "uv add KV")
    right = ("pip install .", "/opt/KV/bin/pip install .", "pip install dist/KV-0.2.0.whl", "pip install .\nKV config")
    assert all(FROM_AN_INDEX.search(line.replace("KV", "kvtier")) for line in wrong)
    assert not any(FROM_AN_INDEX.search(line.replace("KV", "kvtier")) for line in right)
    found = []
    for name in tracked():
        if (ROOT / name).is_file() and name.endswith((".md", ".py", ".txt", ".yml", ".toml", "file", ".html", ".js")):
            text = (ROOT / name).read_text()
            found += [f"{name}: {each[0]}" for each in FROM_AN_INDEX.finditer(text)]
            if re.search(r"(requirements|constraints)[\w.-]*\.txt$", name):
                found += [f"{name}: {each[0]}" for each in A_REQUIREMENT.finditer(text)]
    assert found == []
