"""What is installed is more than Python files: wheel and sdist are installed, and asked for their pages and cluster."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
from threading import Event
import kvtier
from kvtier.service.cluster.defaults import BESIDE_US
from kvtier.service.cluster.file import Placeholders, Topology
from kvtier.service.observe.dashboard import LivePage
print(kvtier.__file__)
print(*(route.path for route in LivePage(dict, Event()).routes()))
deploy = BESIDE_US.parent / "deploy"
places = Placeholders(deploy, deploy, deploy)
services = Topology.read(BESIDE_US, places, ["cluster", "observability", "bench"]).services
print(*(word for each in services.values() for word in (*each.argv, *(file.source for file in each.files))
        if word.startswith(f"{deploy}/") and word.endswith((".conf", ".sh", ".py", ".yml"))), sep="\\n")
"""


def tree() -> set[str]:
    """Every file of ours, by its path under the import root, as a checkout has it."""
    folders = [path for path in (ROOT / "kvtier").iterdir() if path.is_dir() and path.name != "__pycache__"]
    files = {path for folder in folders for path in folder.resolve().rglob("*") if path.is_file()}
    homes = {folder.resolve(): f"kvtier/{folder.name}" for folder in folders}
    names = {f"{home}/{file.relative_to(folder)}" for folder, home in homes.items() for file in files
             if file.is_relative_to(folder) and "__pycache__" not in file.parts}  # fmt: skip
    return names | {f"kvtier/{path.name}" for path in (ROOT / "kvtier").iterdir() if path.is_file()}


def test_an_installed_kvtier_has_its_live_page_and_its_cluster(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert {name for name in files.namelist() if ".dist-info/" not in name} == tree()
        files.extractall(tmp_path / "installed")
    (names,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "[vllm.general_plugins]\nkvtier = kvtier.connector.vllm.plugin:register\n" in names.read_text()
    asked = [sys.executable, "-P", "-c", PROGRAM]
    all_of_it_is_there(asked, {"PYTHONPATH": str(tmp_path / "installed")}, tmp_path)


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


def test_an_sdist_is_whole_and_installs_into_a_fresh_environment(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        assert [member.name for member in files if not (member.isfile() or member.isdir())] == []  # no symlink
        names = {member.name.partition("/")[2] for member in files if member.isfile()}
    beside = {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert names == tree() | beside
    # An environment of its own, which sees the packages of this one but not what is installed editable there: a `.pth`
    # names folders, and the `.pth` files in those are not read.
    home = tmp_path / "fresh"
    venv.create(home)
    (own,) = home.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    # sdist → wheel → installed, by pip and offline.
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-index"]
    how = ["--no-deps", "--no-build-isolation", "--ignore-installed", "--no-cache-dir", str(sdist)]
    done = subprocess.run([*install, *how], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    version = subprocess.run([home / "bin" / "kvtier", "--version"], cwd=tmp_path, capture_output=True, text=True,
                             timeout=60, check=True)  # fmt: skip
    assert version.stdout.split()[-1] in sdist.name
    all_of_it_is_there([str(home / "bin" / "python"), "-c", PROGRAM], {"PYTHONPATH": ""}, tmp_path)
