"""charts: the objects of deploy/kubernetes, and what values change. A real helm renders it; no cluster runs it."""

import base64
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubernetes_rig import COMPONENT, OVERLAYS, TOGETHER, built, containers, environment, found, needs_kubectl, pods
from node_rig import ROOT

from kvtier import __version__
from kvtier.cli.program import load
from kvtier.tiers.config.config import Config

CHART: Final = ROOT / "charts" / "kvtier"
HELM: Final = Path(sys.executable).with_name("helm")
VALUES: Final[dict[str, dict[str, Any]]] = {  # → the same as a component of kustomize
    "gpu": {"engine": {"gpu": True}},
    "model-claim": {"engine": {"modelClaim": "model"}},
    "monitoring": {"monitoring": {"enabled": True}},
    "peers": {"peers": {"enabled": True}},
    "vllm": {"engine": {"kind": "vllm", "modelClaim": "model"}},
}
OWN_LABELS: Final = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}

pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm is not installed")


def helm(*words: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *words, str(CHART), "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=120)


def rendered(*values: Mapping[str, Any], namespace: str = "kvtier", name: str = "kv") -> list[dict[str, Any]]:
    merged: dict[str, Any] = {}
    for part, given in itertools.chain.from_iterable(each.items() for each in values):
        merged[part] = {**merged.get(part, {}), **given} if isinstance(given, dict) else given
    done = helm("template", name, "--namespace", namespace, values=merged)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def test_spans_of_all_go_to_one_collector() -> None:
    tracing = {"tracing": {"endpoint": "http://otel-collector.monitoring:4318"}}
    for more in ({}, VALUES["vllm"]):
        objects = rendered(tracing, more)
        named = dict(pods(objects))
        for name in ("node", "engine", "router"):
            (variable,) = [each for each in named[name]["containers"][0]["env"] if "TRACING" in each["name"]]
            assert variable == {"name": "KVTIER_TRACING__ENDPOINT", "value": tracing["tracing"]["endpoint"]}
    assert "TRACING" not in json.dumps(rendered())
    assert "tracing" in refusal({"tracing": {"endpoint": "collector:4318"}})


def refusal(values: Mapping[str, Any]) -> str:
    done = helm("template", "kv", values=values)
    assert done.returncode != 0
    return done.stderr


def comparable(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Each object without what only Helm adds; a container's environment by name, as its order is of no effect."""
    objects = json.loads(json.dumps(objects))
    for each in objects:
        each["metadata"].pop("namespace", None)
        for metadata in (each["metadata"], each.get("spec", {}).get("template", {}).get("metadata", {})):
            labels = {name: value for name, value in metadata.pop("labels", {}).items() if name not in OWN_LABELS}
            metadata |= {"labels": labels} if labels else {}
    for _, pod in pods(objects):
        for container in containers(pod):
            container["env"] = {variable["name"]: variable for variable in container.get("env", [])}
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in objects
        if each["kind"] not in ("Namespace", "Secret") and each["metadata"]["name"] != "kvtier-dashboards"
    }


@needs_kubectl
@pytest.mark.parametrize("components", ["base", *OVERLAYS, *TOGETHER])
def test_the_chart_makes_what_kustomize_makes(components: str) -> None:
    values = [VALUES[name] for name in components.split() if name != "base"]
    assert comparable(rendered(*values)) == comparable(built(components))


def test_it_has_the_version_of_kvtier_and_helm_finds_no_fault() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert (done := helm("lint", "--strict")).returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({"engine": {"replica": 3}}, "Additional property replica is not allowed"),
        ({"engine": {"kind": "sglang"}}, "engine.kind must be one of"),
        ({"engine": {"kind": "vllm"}}, "name a claim with the model"),
        ({"node": {"config": {"host": "64GiB"}}}, "node.config.host: Invalid type"),
        ({"images": {"registry": "registry.example"}}, "images.registry: Does not match pattern"),
        ({"images": {"tag": "sha256:0123"}}, "images.tag: Does not match pattern"),
        ({"engine": {"replicas": None}}, "engine: replicas is required"),
        ({"engine": {"autoscaling": None}}, "engine: autoscaling is required"),
        ({"node": {"runDirectory": None}}, "node: runDirectory is required"),
        ({"router": {"hosts": None}}, "router: hosts is required"),
        ({"secrets": {"eventKeys": None}}, "secrets: eventKeys is required"),
        ({"monitoring": None}, "monitoring is required"),
        ({"engine": {"env": [{"name": "A", "value": 1}]}}, "engine.env.0.value: Invalid type"),
        (
            {"engine": {"kind": "vllm", "modelClaim": "m", "config": {"l1": {"size": "1GiB"}}}},
            "engine.config: only for",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], about: str) -> None:
    assert about in refusal(values)


def test_configuration_reaches_each_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections and options as in kvtier.toml: numbers, lists and switches arrive as kvtier reads them."""
    objects = rendered(
        {"node": {"config": {"host": {"size": "64GiB", "huge_pages": False}, "redis": {"url": "redis://own:6379"}}}},
        {"engine": {"config": {"cache": {"block_size": 64}}}},
        {"router": {"config": {"router": {"max_blocks": 40_000_000}}, "hosts": ["kv.example"]}},
        namespace="serving",
    )
    known = dict(pods(objects))
    loaded = {}
    for name in ("node", "engine", "router"):
        with monkeypatch.context() as patched:
            for option, value in environment(known[name]).items():
                patched.setenv(option, value)
            loaded[name] = Config.load()
    host, redis = loaded["node"].host, loaded["node"].redis
    assert (host.size, host.huge_pages) == (64 << 30, False)
    assert redis.url is not None
    assert redis.url.get_secret_value() == "redis://own:6379"
    assert loaded["engine"].cache.block_size == 64
    assert loaded["router"].router.max_blocks == 40_000_000
    hosts = environment(known["router"])["KVTIER_ROUTER__ALLOWED_HOSTS"].split()
    assert hosts == ["router", "router.serving", "router.serving.svc", "router.serving.svc.cluster.local", "kv.example"]


def test_values_without_content_are_as_if_left_out() -> None:
    empty = dict.fromkeys(("config", "env", "pod", "container", "annotations"))
    images = dict.fromkeys(("registry", "tag", "pullPolicy", "pullSecrets"))
    values = {"node": empty, "engine": {**empty, "args": None}, "router": empty, "images": images}
    assert comparable(rendered(values)) == comparable(rendered())


def test_a_variable_comes_once_and_is_that_of_env() -> None:
    value = {"name": "KVTIER_CACHE__BLOCK_SIZE", "value": "32"}
    objects = rendered({"engine": {"config": {"cache": {"block_size": 64}}, "env": [value]}})
    [engine] = dict(pods(objects))["engine"]["containers"]
    assert [each for each in engine["env"] if each["name"] == value["name"]] == [value]


def test_names_that_yaml_takes_for_numbers_are_texts() -> None:
    scaled = {"autoscaling": {"enabled": True}}
    more = {"engine": scaled, "router": scaled, "monitoring": {"enabled": True}}
    for each in rendered(VALUES["peers"], more, namespace="123", name="null"):
        assert each["metadata"]["namespace"] == "123"
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "null"


def test_the_values_of_the_page_do_what_they_say() -> None:
    _, written = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    objects = rendered(yaml.safe_load(written))
    engine = dict(pods(objects))["engine"]
    assert engine["containers"][0]["image"] == f"registry.example/kvtier-vllm:{__version__}"
    assert engine["nodeSelector"] == {"pool": "gpu"}
    assert {"ScaledObject", "HorizontalPodAutoscaler", "PodMonitor"} <= {each["kind"] for each in objects}
    assert found("PrometheusRule", "kvtier", objects)["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    (dashboards,) = (each["data"] for each in objects if each["metadata"]["name"] == "kvtier-dashboards")
    folder = ROOT / "deploy" / "grafana" / "dashboards"
    assert dashboards == {path.name: path.read_text() for path in folder.iterdir()}


def test_pods_go_where_values_say() -> None:
    pod = {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "serving",
    }
    container = {"resources": {"limits": {"memory": "70Gi"}}}
    more = {"env": [{"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "own", "key": "proxy"}}}]}
    values = {name: {"pod": pod, "container": container, **more} for name in ("node", "engine", "router")}
    images = {"registry": "registry.example/", "tag": "1", "pullPolicy": "Always", "pullSecrets": ["pull"]}
    known = dict(pods(rendered({**values, "images": images})))
    for name in values:
        assert known[name].items() >= pod.items()
        own = known[name]["containers"][0]
        assert own["resources"]["limits"] == container["resources"]["limits"]
        assert own["resources"]["requests"]  # what is not named stays
        assert own["env"][-1] == more["env"][0]
        assert known[name]["imagePullSecrets"] == [{"name": "pull"}]
        for each in containers(known[name]):
            assert re.fullmatch(r"registry\.example/kvtier(-cpu)?:1", each["image"])
            assert each["imagePullPolicy"] == "Always"
    assert known["valkey"]["containers"][0]["image"].startswith("valkey/valkey:")


def test_secrets_are_made_with_strong_keys_or_are_yours() -> None:
    made = {each["metadata"]["name"]: each["data"] for each in rendered(VALUES["peers"]) if each["kind"] == "Secret"}
    assert {name: sorted(data) for name, data in made.items()} == {
        "kvtier-tokens": ["router", "server", "service"],
        "kvtier-peer-key": ["peers.key"],
    }
    values = [base64.b64decode(value).decode() for data in made.values() for value in data.values()]
    assert len(set(values)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in values)
    yours = rendered(VALUES["peers"], {"secrets": {"tokens": "t", "eventKeys": "e", "peerKey": "p"}})
    assert not [each for each in yours if each["kind"] == "Secret"]
    named = set(
        re.findall(r'"secretName": "(\w[^"]*)"|"secretKeyRef": \{"key": "\w+", "name": "(\w[^"]*)"', json.dumps(yours))
    )
    assert {one or other for one, other in named} == {"t", "e", "p"}


@pytest.mark.parametrize("kind", ["kvtier", "vllm"])
def test_replicas_are_left_to_what_scales_them(kind: str, tmp_path: Path) -> None:
    values = {"enabled": True, "maxReplicas": 5}
    objects = rendered(
        {"engine": {"kind": kind, "modelClaim": "model", "autoscaling": values}, "router": {"autoscaling": values}}
    )
    for name, scaler in (("engine", "ScaledObject"), ("router", "HorizontalPodAutoscaler")):
        assert "replicas" not in found("Deployment", name, objects)["spec"]
        spec = found(scaler, name, objects)["spec"]
        assert spec["scaleTargetRef"]["name"] == name
        assert 5 in (spec.get("maxReplicas"), spec.get("maxReplicaCount"))
    [trigger] = found("ScaledObject", "engine", objects)["spec"]["triggers"]
    metric = "kvtier_engine_requests" if kind == "kvtier" else "vllm:num_requests_waiting"
    assert re.match(rf"sum\({metric}\{{", trigger["metadata"]["query"])
    rules = {"groups": [{"name": "scaling", "rules": [{"record": "waiting", "expr": trigger["metadata"]["query"]}]}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    done = subprocess.run(["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_your_own_engines_have_daemons_and_routers() -> None:
    spec = "http://vllm.serving:8000,events=tcp://*:5557,replay=tcp://*:5558,block_size=16,addresses=all"
    objects = rendered({"engine": {"enabled": False}, "router": {"engines": [spec], "encryptedEvents": False}})
    known = dict(pods(objects))
    assert known.keys() == {"node", "router", "valkey", "valkey-join"}
    verb, *arguments = known["router"]["containers"][0]["args"]
    assert [str(each) for each in load(verb).make_context(verb, arguments).params["replica"]] == [spec]
    assert not any("CURVE" in name for name in environment(known["router"]))
    assert rendered({"engine": {"enabled": False}, "valkey": {"enabled": False}}, {"networkPolicies": False}) != []


def test_every_combination_of_switches_renders_and_what_is_named_is_there() -> None:
    switches = itertools.product(("kvtier", "vllm", "none"), *[(False, True)] * 4)
    for kind, valkey, peers, monitoring, policies in switches:
        engine = {"enabled": False} if kind == "none" else {"kind": kind, "modelClaim": "model", "gpu": monitoring}
        objects = rendered({
            "engine": engine, "valkey": {"enabled": valkey}, "peers": {"enabled": peers},
            "monitoring": {"enabled": monitoring}, "networkPolicies": policies,
        })  # fmt: skip
        known = dict(pods(objects))
        assert {"node", *(("engine", "router") if kind != "none" else ()), *(("valkey",) if valkey else ())} <= {*known}
        assert ("NetworkPolicy" in {each["kind"] for each in objects}) == policies
        for name, pod in known.items():
            there = {each["name"] for each in pod.get("volumes", [])} | ({"data"} if name == "valkey" else set())
            used = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
            assert used <= there, name
        for each in objects:
            if each["kind"] in ("Service", "PodDisruptionBudget"):
                selector = each["spec"]["selector"]
                assert selector.get("matchLabels", selector)[COMPONENT] in known
        redis = any("REDIS" in name for name in environment(known["node"]))
        assert redis == valkey
