"""The Dockerfile without a builder: what it copies is there, what it stands on is pinned, nobody's account runs it."""

import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from typing import Final, NamedTuple

import pytest
import yaml
from cluster_rig import wait_for
from node_rig import ROOT, free_port

from kvtier import __version__
from kvtier.service.cluster.cluster import is_free

FILE: Final = ROOT / "Dockerfile"
TARGETS: Final = ("plain", "cpu", "cuda")


class Instruction(NamedTuple):
    """One instruction and the stage that it is in."""

    stage: str
    verb: str
    words: list[str]

    @property
    def flags(self) -> dict[str, str]:
        """Its options."""
        return dict(word.removeprefix("--").split("=", 1) for word in self.words if word.startswith("--"))

    @property
    def arguments(self) -> list[str]:
        """The other words."""
        return [word for word in self.words if not word.startswith("--")]


@cache
def instructions() -> list[Instruction]:
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE))
    found, stage = [], ""
    for line in filter(None, text.splitlines()):
        verb, _, rest = line.partition(" ")
        words = shlex.split(rest)
        if verb == "FROM":
            assert words[1] == "AS", f"{line}: a stage without a name"
            stage = words[2]
        found.append(Instruction(stage, verb, words))
    return found


def parents() -> dict[str, str]:
    return {each.stage: each.words[0] for each in instructions() if each.verb == "FROM"}


def line_of(target: str) -> list[Instruction]:
    """What makes a target, its parents' first."""
    stages = [target]
    while stages[0] in parents():
        stages.insert(0, parents()[stages[0]])
    return [each for stage in stages for each in instructions() if each.stage == stage]


def test_what_it_copies_is_there_and_sent_along() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for each in instructions():
        assert each.verb != "ADD"
        if each.verb != "COPY":
            continue
        *sources, _ = each.arguments
        if "from" in each.flags:
            assert each.flags["from"] in parents()
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in sent), source
            copied.add(source)
    assert sent == {source for source in copied if not any(source.startswith(f"{other}/") for other in copied)}
    # the import root's symlinks lead to what is copied, too
    links = [path.readlink().name for path in (ROOT / "kvtier").iterdir() if path.is_symlink()]
    assert set(links) <= copied


def test_what_it_stands_on_is_pinned() -> None:
    for stage, parent in parents().items():
        assert parent in parents() or re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", parent), f"{stage}: {parent}"
    torch = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    chosen = {each.stage: each.words[0] for each in instructions() if each.verb == "ARG" and "TORCH" in each.words[0]}
    assert torch is not None
    assert chosen == {"build-cpu": f"TORCH={torch[1]}", "build-cuda": "TORCH=torch"}


def test_torch_is_where_an_engine_runs() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    images = {name: each["image"] for name, each in composed["services"].items() if each["image"].startswith("kvtier")}
    with_torch = {name for name, image in images.items() if image == f"kvtier-cpu:{__version__}"}
    assert with_torch == {"model", "engine-a", "engine-b"}
    assert {images[name] for name in images.keys() - with_torch} == {f"kvtier:{__version__}"}
    asked = {word for each in line_of("build-plain") if each.verb == "RUN" for word in each.words}
    assert not any("torch" in word for word in asked)
    assert extras_of("build-plain").isdisjoint({"engine", "cuda", "transformers"})


def extras_of(stage: str) -> set[str]:
    """The extras with which kvtier is installed there."""
    words = " ".join(word for each in line_of(stage) if each.verb == "RUN" for word in each.words)
    (names,) = re.findall(r"\.\[([\w,]+)\]", words)
    return set(names.split(","))


@pytest.mark.parametrize("target", TARGETS)
def test_what_options_need_is_in_every_image(target: str) -> None:
    """Nothing can be installed in a container that runs: it is read-only."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    options = {"compression", "encryption", "objects", "peers"}  # of [redis], [file], [objects], [peers]
    assert options < extras.keys()
    assert options <= extras_of(f"build-{target}")


@pytest.mark.parametrize("target", TARGETS)
def test_nobodys_account_runs_it(target: str) -> None:
    line = line_of(target)
    users = [each.words[0] for each in line if each.verb == "USER"]
    assert users[-1] == "10001:10001"
    assert [each.words for each in line if each.verb == "ENTRYPOINT"] == [["[kvtier]"]]
    assert not [each for each in line if each.verb in ("HEALTHCHECK", "EXPOSE", "VOLUME")]  # compose has these


def test_compose_builds_what_is_there() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    gpu = yaml.safe_load((ROOT / "deploy" / "gpu.yml").read_text())
    services = [*composed["services"].values(), *gpu["services"].values()]
    built = {each["build"]["target"]: each["image"] for each in services if "build" in each}
    names = {target: "kvtier" if target == "plain" else f"kvtier-{target}" for target in TARGETS}
    assert built == {target: f"{name}:{__version__}" for target, name in names.items()}
    for name in names.values():  # as the first lines of the Dockerfile build them
        assert f"--tag {name}:{__version__} " in (ROOT / "Dockerfile").read_text()
    owned = {word for each in instructions() if each.verb == "RUN" for word in each.words if word.startswith("/data/")}
    users = {each.words[0] for each in instructions() if each.verb == "USER"}
    for each in composed["services"].values():
        if each["image"].startswith("kvtier"):
            assert each["user"] in users
            # a volume at another place would be root's
            places = set(re.findall(r":(/data/[\w-]+)", " ".join(each.get("volumes", []))))
            assert places <= owned


def test_the_health_check_tells_well_from_unwell() -> None:
    check = [sys.executable, str(ROOT / "deploy" / "is-well")]
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)], stderr=subprocess.DEVNULL
    ) as server:
        wait_for(lambda: not is_free(port))
        assert subprocess.run([*check, f"http://127.0.0.1:{port}/"], timeout=60).returncode == 0
        missing = subprocess.run([*check, f"http://127.0.0.1:{port}/nothing"], stderr=subprocess.PIPE, timeout=60)
        assert missing.returncode == 1
        assert b"404" in missing.stderr
        server.kill()
    nobody = subprocess.run([*check, f"http://127.0.0.1:{port}/"], stderr=subprocess.PIPE, timeout=60)
    assert nobody.returncode == 1
    assert b"refused" in nobody.stderr
