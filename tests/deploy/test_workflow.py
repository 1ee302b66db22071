"""The forge's workflow: valid by its schema, and it runs `.ci/run` and nothing else of its own."""

import re
import subprocess
import sys

import yaml
from node_rig import ROOT


def test_the_workflow_runs_what_everybody_can_run() -> None:
    file = ROOT / ".github" / "workflows" / "ci.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    [job] = yaml.safe_load(file.read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_what_ci_sets_is_no_option_of_kvtier() -> None:
    """Every `kvtier` that a test starts refuses a variable KVTIER_… that it does not know."""
    scripts = [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]
    assert [script.name for script in scripts if re.search(r"\bKVTIER_\w+=", script.read_text())] == []
