"""What is installed is more than Python files: a wheel is built, unpacked, and asked for its pages and its cluster."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
from threading import Event
import kvtier
from kvtier.service.cluster_file import BESIDE_US, Places, Topology
from kvtier.service.dashboard import dashboard_routes
print(kvtier.__file__)
print(*(route.path for route in dashboard_routes(dict, Event())))
deploy = BESIDE_US.parent / "deploy"
services = Topology.read(BESIDE_US, Places(deploy, deploy, deploy), ["cluster", "observability", "bench"]).services
print(*(word for each in services.values() for word in (*each.argv, *(file.source for file in each.files))
        if word.startswith(f"{deploy}/") and word.endswith((".conf", ".sh", ".py", ".yml"))), sep="\\n")
"""


def test_an_installed_kvtier_has_its_live_page_and_its_cluster(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    asked = [sys.executable, "-P", "-c", PROGRAM]
    told = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True)
    where, paths, *sources = told.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert paths == "/ /dashboard.css /dashboard.js /daemon.js /router.js /draw.js /stream"
    assert len(sources) >= 8
    for file in sources:
        assert Path(file).is_relative_to(tmp_path)
        assert Path(file).exists(), file
