"""Rules of deployment files: their tools and schemas take them, and dashboards and alerts hang together.

That containers and pods made of them run is no affair of files; what they have in common with our processes is told by
`tests/deploy/`.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import yaml

from lint.tree import Tree

COMPOSE: Final = "docker-compose.yml"
GPU: Final = "deploy/gpu.yml"
EXAMPLE: Final = "deploy/example.env"
PROFILES: Final = ("core", "cluster", "observability", "bench")
KUBERNETES: Final = "deploy/kubernetes"
VERSIONS: Final = ("1.30", "1.34")  # of its API
TOGETHER: Final = ("model-claim gpu monitoring peers", "vllm monitoring peers")  # components of one cluster
CHART: Final = "charts/kvtier"
PROMETHEUS: Final = "deploy/prometheus"
GRAFANA: Final = "deploy/grafana"
UNIT: Final = "deploy/systemd/kvtier.service"
WORKFLOW: Final = ".github/workflows/ci.yml"

Object = dict[str, Any]


# Compose, the forge, systemd


def compose(tree: Tree) -> Iterator[str]:
    """The compose specification allows docker-compose.yml and deploy/gpu.yml."""
    yield from _against_schema(tree, "compose-spec", COMPOSE, GPU)


def _against_schema(tree: Tree, schema: str, *files: str) -> Iterator[str]:
    read = [yaml.safe_load(tree.text(file)) for file in tree.each(files)]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = tree.run(*command, *files)
    if done.returncode or not all(read):
        yield f"{', '.join(files)}: {(done.stdout + done.stderr).strip()}"


def docker_compose(tree: Tree) -> Iterator[str]:
    """docker-compose takes the files, finds every service with its command, and starts nothing without secrets."""
    given = dict(line.split("=", 1) for line in tree.text(EXAMPLE).splitlines() if re.match(r"\w", line))
    ours = {"PATH": os.environ["PATH"]}
    secrets = {name: "secret-" * 4 for name, value in given.items() if not value}
    written = dict(tree.each(yaml.safe_load(tree.text(COMPOSE))["services"].items()))
    profiles = [word for profile in PROFILES for word in ("--profile", profile)]
    for files in ([COMPOSE], [COMPOSE, GPU]):
        named = [word for file in files for word in ("-f", file)]
        command = ["docker-compose", "--env-file", EXAMPLE, *named, *profiles, "config"]
        done = tree.run(*command, environment={**ours, **secrets})
        if done.returncode:
            yield f"{', '.join(files)}: {done.stderr.strip()}"
            return
        understood = yaml.safe_load(done.stdout)["services"]
        for name in sorted({*written, *understood}):
            if name not in written or name not in understood:
                yield f"{', '.join(files)}: {name}: no service of both the file and what docker-compose understands"
            elif understood[name]["command"] != _at_defaults(written[name].get("command")):
                yield f"{', '.join(files)}: {name}: docker-compose understands {understood[name]['command']}"
    refused = tree.run("docker-compose", "--env-file", EXAMPLE, *profiles, "config", environment=ours)
    if not refused.returncode or f"see {EXAMPLE}" not in refused.stderr:
        yield f"{COMPOSE}: without secrets it starts, or does not say to see {EXAMPLE}"


def _at_defaults(words: list[str] | None) -> list[str] | None:
    """A command with every ${VARIABLE:-default} at its default."""
    return words and [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


def workflow(tree: Tree) -> Iterator[str]:
    """The forge's workflow is valid and runs `.ci/run` alone; no script sets a variable that kvtier would refuse."""
    yield from _against_schema(tree, "github-workflows", WORKFLOW)
    jobs = yaml.safe_load(tree.text(WORKFLOW))["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    if ran != [".ci/run"] or not (tree.root / ".ci" / "run").stat().st_mode & 0o100:
        yield f"{WORKFLOW}: it runs {ran}, and should run the program .ci/run, which everybody can run"
    for script in ("Makefile", *(path for path in tree.paths(".ci/*") if (tree.root / path).is_file())):
        if found := re.search(r"\bKVTIER_\w+=", tree.text(script)):
            yield f"{script}: {found[0]}: every kvtier of a test refuses a variable that is no option; rename it"


def systemd(tree: Tree) -> Iterator[str]:
    """systemd takes the unit: it misses the installed program and nothing else."""
    tree.num_checked += (tree.root / UNIT).exists()
    done = tree.run("systemd-analyze", "verify", UNIT)
    expected = "kvtier.service: Command /opt/kvtier/bin/kvtier is not executable: No such file or directory"
    if [line for line in done.stderr.splitlines() if "kvtier" in line] != [expected]:
        yield f"{UNIT}: {done.stderr.strip()}"


# Kubernetes


def kubernetes(tree: Tree) -> Iterator[str]:
    """The API of Kubernetes allows every object of the base, as the files have it."""
    base = f"{KUBERNETES}/base"
    listed = yaml.safe_load(tree.text(f"{base}/kustomization.yaml"))["resources"]
    if stray := {Path(path).name for path in tree.paths(f"{base}/*")} ^ {*listed, "kustomization.yaml"}:
        yield f"{base}: {sorted(stray)}: in the folder or in its kustomization.yaml, and not in both"
    objects = [each for name in listed for each in yaml.safe_load_all(tree.text(f"{base}/{name}"))]
    yield from _not_allowed(base, tree.each(objects))


def overlays(tree: Tree) -> Iterator[str]:
    """The same of every overlay and of components together, as kustomize makes them; each overlay is one component."""
    names = [Path(path).name for path in tree.paths(f"{KUBERNETES}/overlays/*")]
    if stray := {*names} ^ {Path(path).name for path in tree.paths(f"{KUBERNETES}/components/*")}:
        yield f"{KUBERNETES}: {sorted(stray)}: a component without its overlay, or the other way round"
    if untried := {*names} - {name for each in TOGETHER for name in each.split()}:
        yield f"{KUBERNETES}: {sorted(untried)}: tried with no other component; name it in TOGETHER"
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(tree.root / KUBERNETES, own := Path(home) / "own")
        for name in ("base", *names, *TOGETHER):
            folder = own / ("base" if name == "base" else f"overlays/{name}")
            made = {"resources": ["../../base"], "components": [f"../../components/{name}"]}
            if name in names:
                written = yaml.safe_load((folder / "kustomization.yaml").read_text())
                if {key: written.get(key) for key in made} != made:
                    yield f"{KUBERNETES}/overlays/{name}: not the base with the component of its name"
            elif name in TOGETHER:
                folder = own
                made = {"resources": ["base"], "components": [f"components/{each}" for each in name.split()]}
                (own / "kustomization.yaml").write_text(yaml.safe_dump(made))
            done = tree.run("kubectl", "kustomize", str(folder))
            if done.returncode:
                yield f"{KUBERNETES}, {name}: {done.stderr.strip()}"
                continue
            objects = [each for each in yaml.safe_load_all(done.stdout) if "coreos" not in each["apiVersion"]]
            yield from _not_allowed(f"{KUBERNETES}, {name}", tree.each(objects))


def chart(tree: Tree) -> Iterator[str]:
    """The same of the chart's objects, with everything on that Kubernetes itself knows."""
    switches = ("engine", "router"), ("monitoring", "peers")
    given = {name: {"autoscaling": {"enabled": True}} for name in switches[0]} | {
        n: {"enabled": True} for n in switches[1]
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as values:
        yaml.safe_dump(given, values)
        values.flush()
        done = tree.run(str(Path(sys.executable).with_name("helm")), "template", "kv", CHART, "--values", values.name)
    if done.returncode:
        yield f"{CHART}: {done.stderr.strip()}"
        return
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    own = [each for each in objects if not re.search(r"coreos|keda", each["apiVersion"])]
    yield from _not_allowed(CHART, tree.each(own))


def _not_allowed(where: str, objects: Iterable[Object]) -> Iterator[str]:
    """What some version of the API does not have."""
    for each in objects:
        for version in VERSIONS:
            if complaint := _complaint(json.dumps(each, sort_keys=True), version):
                yield f"{where}: {each['kind']} {each['metadata']['name']}: API {version}: {complaint}"


@cache
def _complaint(text: str, version: str) -> str:
    """Of one object, which several overlays share: each schema takes long to read."""
    kubernetes: Any = import_module("kubernetes_validate")  # its libraries take a while, for two rules

    try:
        kubernetes.validate(json.loads(text), version, strict=True)
    except (kubernetes.ValidationError, kubernetes.SchemaNotFoundError) as error:
        return str(error.message)
    return ""


# Prometheus and Grafana


def prometheus(tree: Tree) -> Iterator[str]:
    """Prometheus takes its configuration and every rule of it."""
    rules = list(tree.each(_rules(tree)))
    yield from _promtool(tree, "SUCCESS", "check", "config", "prometheus.yml")
    yield from _promtool(tree, f"{len(rules)} rules found", "check", "rules", "rules.yml")


def alerts(tree: Tree) -> Iterator[str]:
    """Each alert has a story in which it is told, and all stories come true."""
    told = yaml.safe_load(tree.text(f"{PROMETHEUS}/rules_test.yml"))["tests"]
    fired = {each["alertname"] for story in told for each in story.get("alert_rule_test", ()) if each["exp_alerts"]}
    known = {rule["alert"] for rule in _rules(tree) if "alert" in rule}
    for name in tree.each(sorted(fired | known)):
        if name not in fired & known:
            yield f"{PROMETHEUS}: {name}: an alert without a story in rules_test.yml, or a story without its alert"
    yield from _promtool(tree, "SUCCESS", "test", "rules", "rules_test.yml")


def panels(tree: Tree) -> Iterator[str]:
    """Prometheus understands what every panel of Grafana asks."""
    asked = [target["expr"] for panel in _panels(tree) for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{i}", "expr": re.sub(r"\$\w+", ".*", each.replace("$__rate_interval", "1m"))}
        for i, each in enumerate(tree.each(asked))
    ]
    with tempfile.TemporaryDirectory() as home:
        (file := Path(home) / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
        yield from _promtool(tree, f"{len(rules)} rules found", "check", "rules", str(file))


def _promtool(tree: Tree, expected: str, *arguments: str) -> Iterator[str]:
    done = tree.run("promtool", *arguments, cwd=PROMETHEUS)
    if done.returncode or expected not in done.stdout:
        yield f"{PROMETHEUS}: promtool {' '.join(arguments)}: {(done.stdout + done.stderr).strip()}"


def _rules(tree: Tree) -> list[Object]:
    groups = yaml.safe_load(tree.text(f"{PROMETHEUS}/rules.yml"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _panels(tree: Tree) -> list[Object]:
    return [panel for path in tree.paths(f"{GRAFANA}/dashboards/*") for panel in json.loads(tree.text(path))["panels"]]


def grafana(tree: Tree) -> Iterator[str]:
    """Panels lie side by side, ask the source that is chosen, have legends of their labels, and Grafana finds them."""
    for path in tree.paths(f"{GRAFANA}/dashboards/*"):
        yield from _dashboard(tree, path)
    folder = f"{GRAFANA}/provisioning"
    (source,) = yaml.safe_load(tree.text(f"{folder}/datasources/prometheus.yml"))["datasources"]
    (provider,) = yaml.safe_load(tree.text(f"{folder}/dashboards/kvtier.yml"))["providers"]
    if (source["type"], source["url"]) != ("prometheus", "http://prometheus:9090"):
        yield f"{folder}/datasources: it is not the cluster's Prometheus"
    if provider["options"]["path"] != "/etc/grafana/dashboards":
        yield f"{folder}/dashboards: the path is not where docker-compose.yml mounts the dashboards"


def _dashboard(tree: Tree, path: str) -> Iterator[str]:
    read, taken = json.loads(tree.text(path)), set[tuple[int, int]]()
    found = read["panels"]
    if not len({panel["id"] for panel in found}) == len({panel["title"] for panel in found}) == len(found):
        yield f"{path}: two panels have one id or one title"
    variables = {each["name"] for each in read.get("templating", {}).get("list", ())}
    for panel in tree.each(found):
        where, at = f"{path}: {panel['title']}", panel["gridPos"]
        area = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        if area & taken or max(x for x, _ in area) >= 24:
            yield f"{where}: it lies over another panel, or beyond the 24 columns"
        taken |= area
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            by = {
                word for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in re.findall(r"\w+", labels)
            }
            if by and not shown <= by:
                yield f"{where}: its legend names {sorted(shown - by)}, which the sum has not"
            if target["datasource"]["uid"] != "${datasource}":
                yield f"{where}: it asks another source than the one that is chosen"
            if unknown := set(re.findall(r"\$(\w+)", target["expr"])) - variables - {"__rate_interval"}:
                yield f"{where}: no variables of the dashboard: {sorted(unknown)}"
