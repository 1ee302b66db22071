"""kvtier installed beside a real engine changes none of its packages."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ENGINE: Final = Path(sys.prefix) / "engine"  # made by .ci/beside-engine: the engine's own environment, without kvtier
pytestmark = pytest.mark.skipif(not ENGINE.exists(), reason="beside no engine; run `make test-vllm`")


def pip(environment: Path, *arguments: str, path: Path | None = None) -> list[str]:
    """The lines that pip prints in an environment, with `path` before its own packages. Its status is not ours."""
    command = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(path or "")}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout, run.stderr
    return sorted(run.stdout.splitlines())


def packages(environment: Path, path: Path | None = None) -> list[str]:
    """`name==version` of all but kvtier and what makes it editable; one that is there twice counts twice."""
    return pip(environment, "list", "--format=freeze", "--exclude=kvtier", "--exclude=editables", path=path)


def changed(path: Path | None = None) -> list[str]:
    """The engine's packages that are not as they were; one that is there in two versions is none that was."""
    before = {line.partition("==")[0]: line for line in packages(ENGINE)}
    now = Counter(packages(Path(sys.prefix), path))
    names = Counter(line.partition("==")[0] for line in now.elements())
    return [line for name, line in before.items() if now[line] != 1 or names[name] != 1]


def test_no_package_of_the_engine_changes() -> None:
    assert not changed()


def test_pip_check_says_what_it_said_before() -> None:
    """It says something: the engine was installed without packages that have no CPU build."""
    assert pip(Path(sys.prefix), "check") == pip(ENGINE, "check")


@pytest.mark.exhaustive
def test_the_test_can_fail_another_numpy_shows(tmp_path: Path) -> None:
    (tmp_path / "numpy-1.0.dist-info").mkdir()
    (tmp_path / "numpy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    assert "numpy==1.0" in packages(Path(sys.prefix), tmp_path)
    assert [line.partition("==")[0] for line in changed(tmp_path)] == ["numpy"]
    assert pip(Path(sys.prefix), "check", path=tmp_path) != pip(ENGINE, "check")
