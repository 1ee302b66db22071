"""The objects of deploy/kubernetes: as the files have them, and as kustomize makes them."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import yaml
from node_rig import ROOT

FOLDER: Final = ROOT / "deploy" / "kubernetes"
OVERLAYS: Final = ("gpu", "model-claim", "monitoring", "peers", "vllm")
TOGETHER: Final = ("model-claim gpu monitoring peers", "vllm monitoring peers")  # components of one cluster
COMPONENT: Final = "app.kubernetes.io/component"

needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed; it brings kustomize")


@cache
def base() -> list[dict[str, Any]]:
    """Every object of the base, as it stands in the files."""
    listed = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    return [each for name in listed for each in yaml.safe_load_all((FOLDER / "base" / name).read_text())]


@cache
def built(overlay: str) -> list[dict[str, Any]]:
    """Every object as kustomize makes it, of an overlay or of several components."""
    if overlay == "base" or overlay in OVERLAYS:
        return kustomized(FOLDER / "base" if overlay == "base" else FOLDER / "overlays" / overlay)
    with TemporaryDirectory() as home:
        shutil.copytree(FOLDER, own := Path(home) / "own")
        components = [f"components/{name}" for name in overlay.split()]
        (own / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["base"], "components": components}))
        return kustomized(own)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def found(kind: str, name: str, objects: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    (only,) = (each for each in objects or base() if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return dict(only)


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod's specification, under its component's name."""
    for each in objects:
        template = each.get("spec", {}).get("template")
        if template is not None:
            yield template["metadata"]["labels"][COMPONENT], template["spec"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def environment(pod: Mapping[str, Any]) -> dict[str, str]:
    """A pod's own options; what comes from a secret is its name, and a node has an address."""
    (own,) = pod["containers"]
    told = {each["name"]: each.get("value") or f"{'s' * 24}" for each in own.get("env", [])}
    return {name: value.replace("$(NODE_IP)", "10.0.0.7") for name, value in told.items()}
