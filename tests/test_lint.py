"""Every rule of `make lint` finds a fault that is planted, and nothing else; over nothing it fails.

A tree below has one kind of fault, and most have it among what is right. Tools are real; tables that programs make of
results are stand-ins.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any, Final

import _claims
import _readme
import pytest
from lint import deploy_files, fault_table, figures, licences, prose, references
from lint.__main__ import RULES, main
from lint.tree import Rule, Skip, Tree

import kvtier
from kvtier.cli.program import VERBS

ROW: Final = {"status": "hits", "message": "", "warm": 130, "restart": 130, "architecture": "a"}
REFUSED: Final = {"engine": "kvtier", "status": "refused", "message": "no; what now", "warm": 0}
MODELS: Final = [{**ROW, "engine": engine} for engine in _readme.ENGINES if engine != "kvtier"] + [ROW | REFUSED]
DISK: Final = """{"benchmark": "disk", "results": [{"ratio": 0.5}],
                   "targets": [{"name": "read", "target": ">= 0.9", "measured": 0.5}]}"""
ANSWERS: Final = "[12 tokens of prompt\n" * 6
PRINTED: Final = "<!-- printed by the script above, which benchmarks/_stories.py ran -->\n```\n{}```\n"
TABLE: Final = "<!-- figures: {}, written by a.py -->\n<!-- end of figures -->\n"
ROWS: Final = "".join(f"| {n} | fault |\n" for n in range(1, 43))
LIST: Final = "".join(
    f"{n} tests/{'gpu/' if n == 1 else ''}test_a.py::test_{'many' if n == 2 else 'one'}\n" for n in range(1, 43)
)
MARKED: Final = """
@pytest.mark.exhaustive
def test_many(): ...
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_one(n): ...
"""
UNIT: Final = "[Unit]\n[Service]\nExecStart=/opt/kvtier/bin/kvtier serve\n"
WATCHED: Final = "groups: [{name: a, rules: [{alert: Down, expr: up == 0}, {record: 'a:b', expr: sum(up)}]}]\n"
SERVICES: Final = "services:\n  a: {image: 'b:1', command: [x], environment: {A: '${A:?see deploy/example.env}'}}\n"
EXAMPLE: Final = "```\npython -m sglang.launch_server --a\n```\n"
COMPONENT: Final = "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\n"
NAMESPACES: Final = """apiVersion: v1
kind: Namespace
metadata: {name: right}
---
apiVersion: v1
kind: Namespace
metadata: {name: wrong}
spec: {imagine: []}
"""


def rows(*names: str) -> str:
    return "".join(f"| `{name}` |\n" for name in names)


def panel(number: int, expr: str = "sum by (tier) (up)", x: int = 0) -> dict[str, Any]:
    target = {"expr": expr, "legendFormat": "{{tier}}", "datasource": {"uid": "${datasource}"}}
    return {"id": number, "title": str(number), "gridPos": {"x": x, "y": 0, "w": 8, "h": 8}, "targets": [target]}


def dashboard(*panels: dict[str, Any]) -> dict[str, str]:
    return {"deploy/grafana/dashboards/kvtier.json": json.dumps({"panels": panels})}


# Rule → files of a tree, and what it says of the one fault that they have.
PLANTED: Final[dict[str, tuple[Mapping[str, str], str]]] = {
    "sentences": (
        {"README.md": f"# {'a ' * 30}\n\n- Short. {'Word ' * 25}end.\n\n```\n{'a ' * 30}\n```\nA `{'a ' * 30}`.\n"},
        "README.md:3: 26 words: Word",
    ),
    "words": ({"README.md": "`mend` is code.\n\n| a | we mended it |\n"}, "README.md:3: 'mended': write fix"),
    "tables": ({"README.md": f"| a |\n| {'b' * 160} |\n```\n| {'c' * 160} |\n```\n"}, "README.md:2: 164 characters"),
    "links": ({"README.md": "# One\n[a](#one) [b](https://x.y/z) [c](README.md#two)\n"}, "README.md:2: README.md#two"),
    "paths": ({"README.md": "`docs/{a,b}.md` `tests/*`\n", "docs/a.md": "", "tests/a": ""}, "docs/b.md: no such path"),
    "names": (
        {"README.md": "`one` is in `a/b.py`\nand `two` in `a/b.py`", "a/b.py": "def one(): ..."},
        "README.md:2: two is not in a/b.py",
    ),
    "folders": (
        {
            "CONTRIBUTING.md": "| folder | job |\n|---|---|\n| `service/` | b |\n| `tiers/` | a |\n\n",
            "tests/test_architecture.py": 'ROWS: Final = (("tiers",), ("service",), ("kvtier",))\n',
        },
        "not in the order of ROWS",
    ),
    "questions": (
        {"README.md": "[how](CONTRIBUTING.md)", "CONTRIBUTING.md": ""},
        "has no answer that names three files",
    ),
    "imports": (
        {"README.md": "`kvtier.toml`\n```\nfrom kvtier.tiers.errors import (\n    StoreLocked,\n    Nothing\n)\n```\n"},
        "README.md:2: kvtier.tiers.errors.Nothing: kvtier.tiers.errors has no Nothing",
    ),
    "commands": (
        {"README.md": "`kvtier status --json`\n```\nkvtier cluster up --nothing | tee\n```\n"},
        "kvtier cluster up --nothing: no option --nothing",
    ),
    "api": (
        {
            "docs/architecture.md": rows(*kvtier.__all__, *references.CONFIGURED[1:]),
            "docs/commands.md": rows(*(f"kvtier {verb}" for verb in VERBS)),
        },
        references.CONFIGURED[0],
    ),
    "configuration": ({"docs/configuration.md": "| option | default |\n"}, "docs/configuration.md: no row | `["),
    "examples": ({"README.md": EXAMPLE, "docs/sglang.md": EXAMPLE.replace("--a", "--b")}, "not one and the same"),
    "fault-tests": (
        {
            fault_table.PAGE: "",
            fault_table.LIST: "1 tests/test_a.py::test_one\n1 tests/test_a.py::test_two\n",
            "tests/test_a.py": MARKED,
        },
        "tests/faults/rows.txt: tests/test_a.py::test_two: no such test",
    ),
    "fault-rows": (
        {fault_table.PAGE: ROWS, fault_table.LIST: LIST, "tests/test_a.py": MARKED, "tests/gpu/test_a.py": MARKED},
        "tests/faults/rows.txt: 2: `make test` runs none",
    ),
    "fault-stories": (
        {fault_table.LIST: "1 tests/faults/test_fault_a.py::test_one\n", "tests/faults/test_fault_a.py": MARKED},
        "test_many: tests/faults/rows.txt does not list it",
    ),
    "figures": ({"a.md": "saved", "b.md": "of last week"}, "b.md: its figures are not the saved ones: run `write`"),
    "saved-tables": (
        {
            "docs/performance.md": TABLE.format("events"),
            "docs/storage.md": TABLE.format("redis") * 2,
            "docs/operate.md": "",
            "docs/reuse.md": "",
        },
        "'redis' stands there 2 times",
    ),
    "stories": (
        {"docs/storage.md": PRINTED.format(ANSWERS), "docs/operate.md": PRINTED.format("typed by hand\n" * 6)},
        "docs/operate.md: what its script printed is not as printed",
    ),
    "drawing": ({"tiers/b.py": "", "docs/architecture.svg": "<text>a.py  b.py</text>"}, "a.py: no such file"),
    "goals": (
        {"docs/performance.md": "## What was missed, and why\n", "benchmarks/results/disk.json": DISK},
        "read: 0.5: name its cause",
    ),
    "six": (
        {"README.md": "".join(f"| {label} |\n" for label, *_ in _claims.SIX[1:])},
        f"{_claims.SIX[0][0]}: no row of docs/performance.md and README.md",
    ),
    "models": (
        {"benchmarks/results/models.json": json.dumps({"benchmark": "models", "targets": [], "results": MODELS})},
        "the message does not end with what to do: no; what now",
    ),
    "compose": (
        {"docker-compose.yml": "services: {wrong: {imagine: there is none}}\n", "deploy/gpu.yml": SERVICES},
        "imagine",
    ),
    "docker-compose": (
        {"docker-compose.yml": SERVICES.replace("command", "imagine"), "deploy/example.env": "A=\nB=1\n"},
        "imagine",
    ),
    "workflow": (
        {
            ".github/workflows/ci.yml": "on: push\njobs: {a: {runs-on: b, steps: [{run: .ci/run}]}}\n",
            ".ci/run": "",
            "Makefile": "export KVTIER_FAST=1\n",
        },
        "Makefile: KVTIER_FAST=",
    ),
    "systemd": (
        {deploy_files.UNIT: UNIT.replace("ExecStart=/opt/kvtier/bin/kvtier", "ExecStart=kvtier")},
        deploy_files.UNIT,
    ),
    "kubernetes": (
        {
            "deploy/kubernetes/base/kustomization.yaml": "resources: [a.yaml]\n",
            "deploy/kubernetes/base/a.yaml": NAMESPACES,
        },
        "base: Namespace wrong: API 1.34: ",
    ),
    "overlays": (
        {
            "deploy/kubernetes/base/kustomization.yaml": "resources: [a.yaml]\n",
            "deploy/kubernetes/base/a.yaml": NAMESPACES.partition("---")[0],
            "deploy/kubernetes/overlays/gpu/kustomization.yaml": "resources: [../../base]\ncomponents: []\n",
            "deploy/kubernetes/components/gpu/kustomization.yaml": COMPONENT,
        },
        "overlays/gpu: not the base with the component of its name",
    ),
    "prometheus": (
        {"deploy/prometheus/prometheus.yml": "{}\n", "deploy/prometheus/rules.yml": WATCHED.replace("(up)", "((up)")},
        "promtool check rules rules.yml",
    ),
    "chart": (
        {
            "charts/kvtier/Chart.yaml": "{apiVersion: v2, name: kvtier, version: 0.1.0}\n",
            "charts/kvtier/templates/a.yaml": "{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {p: 1}}",
        },
        "charts/kvtier: Service a: API 1.34: ",
    ),
    "alerts": (
        {
            "deploy/prometheus/rules.yml": WATCHED,
            "deploy/prometheus/rules_test.yml": "rule_files: [rules.yml]\ntests: []\n",
        },
        "Down: an alert without a story",
    ),
    "licences": (
        {"pyproject.toml": "[project]\ndependencies = ['numpy', 'nvidia-cuda-nvrtc']\noptional-dependencies = {}\n"},
        "nvidia-cuda-nvrtc has the licence 'LicenseRef-NVIDIA-Proprietary'",
    ),
    "panels": (
        {**dashboard(panel(1, "rate(up[$__rate_interval])"), panel(2, "sum(")), "deploy/prometheus/rules.yml": ""},
        "promtool check rules",
    ),
    "grafana": (
        {
            **dashboard(panel(1), panel(2, x=8), panel(3, x=17)),
            "deploy/grafana/provisioning/datasources/prometheus.yml": "datasources: "
            "[{type: prometheus, url: 'http://prometheus:9090'}]\n",
            "deploy/grafana/provisioning/dashboards/kvtier.yml": "providers: "
            "[{options: {path: /etc/grafana/dashboards}}]\n",
        },
        "deploy/grafana/dashboards/kvtier.json: 3: it lies over another panel, or beyond the 24 columns",
    ),
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs whose tables take torch or matplotlib, and of what is too much for a small tree."""
    monkeypatch.setattr(_readme, "tables", lambda: {"events": "", "redis": ""})
    monkeypatch.setitem(sys.modules, "_architectures", Stub(ARCHITECTURES=[Stub(name="a")]))
    shown = [_claims.PageRow(label, name, pattern) for label, name, pattern in _claims.SIX]
    monkeypatch.setattr(_claims, "CLAIMS", (_claims.PageRow("read", "disk", "read"), *shown))
    monkeypatch.setattr(figures, "WRITTEN", dict.fromkeys(("a.md", "b.md"), ("write", lambda page: "saved")))
    monkeypatch.setattr(deploy_files, "VERSIONS", ["1.34"])
    monkeypatch.setattr(deploy_files, "TOGETHER", ["gpu"])


def planted(home: Path, files: Mapping[str, str]) -> Tree:
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
        if name == ".ci/run":
            (home / name).chmod(0o755)
    return Tree(home)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_finds_the_fault_and_nothing_else(rule: Rule, tmp_path: Path) -> None:
    files, expected = PLANTED[rule.name]
    try:
        findings = rule._replace(at_least=1).judge(planted(tmp_path, files))
    except Skip as skip:
        pytest.skip(str(skip))
    assert findings
    assert [finding for finding in findings if expected not in finding] == []


def test_every_rule_fails_over_nothing(tmp_path: Path) -> None:
    for rule in RULES:
        with suppress(Skip):
            assert rule.judge(Tree(tmp_path)), rule.name


def test_a_rule_that_breaks_or_sees_too_little_has_failed(tmp_path: Path) -> None:
    def breaks(tree: Tree) -> list[str]:
        """It asks for nothing."""
        raise KeyError("half way")

    assert Rule(breaks, "things", 0).judge(Tree(tmp_path)) == ["it could not go on: KeyError: 'half way'"]
    few = Rule(prose.words, "pages", 3).judge(planted(tmp_path, {"A.md": "", "B.md": ""}))
    assert few == ["only 2 pages to check, at least 3 expected"]


def test_the_program_prints_a_line_a_rule_and_a_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--list"], tmp_path) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(RULES)
    asked = ["--rule", "panels", "--rule", "examples"]
    planted(
        tmp_path,
        {
            ".ci/allowed-skips": "kubectl is not installed\n",
            **PLANTED["panels"][0],
            **dict.fromkeys(("README.md", "docs/sglang.md"), EXAMPLE),
        },
    )
    monkeypatch.setenv("PATH", "")
    # without a tool a rule is skipped; not where it has to run
    monkeypatch.delenv("CI", raising=False)
    assert main(asked, tmp_path) == 0
    told = ["ok   examples: 2 examples", "SKIP panels: promtool is not installed", "2 rules: 1 ok, 0 failed, 1 skipped"]
    assert capsys.readouterr().out.splitlines() == told
    monkeypatch.setenv("CI", "true")
    assert main(asked, tmp_path) == 1
    assert "FAIL panels: promtool is not installed" in capsys.readouterr().out
    (tmp_path / ".ci" / "allowed-skips").write_text("# as on CI\n(\\w+) is not installed  # so far\n")
    assert main(asked, tmp_path) == 0
    (tmp_path / "README.md").unlink()
    assert main(["--rule", "examples"], tmp_path) == 1


def test_licences_are_those_of_what_an_extra_of_a_package_brings_too() -> None:
    found = licences._installed(["redis[hiredis]>=6.0"])
    assert {"redis", "hiredis"} <= found.keys()
    assert "hiredis" not in licences._installed(["redis"])
