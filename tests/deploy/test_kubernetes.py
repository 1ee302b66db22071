"""deploy/kubernetes without a cluster: careful, and the same services as docker-compose.yml. `make lint` validates it.

Its processes run in test_kubernetes_rolling.py. That pods made of it run, nothing shows; docs/kubernetes.md says so.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from compose_rig import command_of, services, variables
from kubernetes_rig import (
    COMPONENT,
    FOLDER,
    TOGETHER,
    base,
    built,
    containers,
    environment,
    found,
    kustomized,
    needs_kubectl,
    pods,
)
from node_rig import ROOT

from kvtier import __version__
from kvtier.cli.program import load
from kvtier.service.cluster.cluster import GRACE
from kvtier.service.router.replica_list import ReplicaSpec
from kvtier.tiers.config.config import Config
from kvtier.tiers.peers.link import EventsAt

PAGE: Final = ROOT / "docs" / "kubernetes.md"
OURS: Final = {"node": "node-a", "engine": "engine-a", "router": "router"}  # → its service of compose
# A socket in a directory cannot be shared by nodes: events go over TCP, with keys; and addresses are pods', not names.
ONLY_HERE: Final = {"EVENTS__ALLOW_REMOTE", "EVENTS__CURVE_KEY_FILE", "EVENTS__CURVE_READER_FILE", "EVENTS__NODE",
                    "EVENTS__NODE_REPLAY", "ROUTER__CURVE_KEY_FILE", "ROUTER__CURVE_PUBLISHER_FILE"}  # fmt: skip
ONLY_THERE: Final = {"SERVICE__ALLOWED_HOSTS", "SERVER__ALLOWED_HOSTS"}  # Prometheus goes by addresses here


def test_every_image_has_a_name_of_its_own_and_this_version() -> None:
    """Else `images` of kustomize could set no version, or one for all."""
    manifests = "\n".join(path.read_text() for path in sorted(FOLDER.rglob("*.yaml")))
    named = re.findall(r"(?:image: |value: \")([\w./-]+):([\w.@-]+)", manifests)
    ours = {(name, tag) for name, tag in named if name.startswith("kvtier")}
    assert {tag for _, tag in ours} == {__version__}
    assert {name for name, _ in ours} == {"kvtier", "kvtier-cpu", "kvtier-cuda", "kvtier-vllm"}
    assert not [name for name, tag in named if tag == "latest"]


# as kustomize makes it


@needs_kubectl
def test_the_overlay_of_the_page_is_one(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "deploy" / "kubernetes")
    written, _ = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)  # the other one is Helm's
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "kustomization.yaml").write_text(written)
    objects = kustomized(tmp_path / "own")
    (node,) = dict(pods(objects))["node"]["containers"]
    (engine,) = dict(pods(objects))["engine"]["containers"]
    assert {each["name"]: each.get("value") for each in node["env"]}["KVTIER_HOST__SIZE"] == "64GiB"
    assert (node["image"], engine["image"]) == (
        f"registry.example/kvtier:{__version__}",
        f"registry.example/kvtier-cuda:{__version__}",
    )
    assert [each["name"] for each in dict(pods(objects))["engine"]["initContainers"]] == ["keys"]
    assert found("PodMonitor", "kvtier-node", objects)


@needs_kubectl
def test_an_update_waits_for_no_gpu_that_nobody_has() -> None:
    for overlay in ("gpu", "vllm", *TOGETHER):
        engine = found("Deployment", "engine", built(overlay))["spec"]
        assert engine["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert engine["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_router_that_ends_takes_requests_until_all_know_it() -> None:
    (router,) = dict(pods(base()))["router"]["containers"]
    assert router["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


@needs_kubectl
def test_vllm_is_heard_by_routers_that_expect_no_keys() -> None:
    for name, pod in pods(built("vllm")):
        if name == "engine":
            (vllm,) = pod["containers"]
            mounted = {each["name"] for each in vllm["volumeMounts"]}
            assert mounted <= {each["name"] for each in pod["volumes"]}
            assert '"socket":"/data/run/kv.sock"' in " ".join(vllm["args"])
            assert '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"' in " ".join(vllm["args"])
        if name == "router":
            assert not any("CURVE" in option for option in environment(pod))
            (spec,) = (each for each in pod["containers"][0]["args"] if each.startswith("--replica="))
            there = ReplicaSpec.parse(spec.removeprefix("--replica=")).at("10.1.0.4").publishers
            assert (there.events, there.replay) == ("tcp://10.1.0.4:5557", "tcp://10.1.0.4:5558")


@needs_kubectl
def test_daemons_lend_to_each_other_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    objects = built("peers")
    pod = dict(pods(objects))["node"]
    told = {name: value for name, value in environment(pod).items() if "PEERS" in name}
    key = tmp_path / "peers.key"
    key.write_text("ab" * 32)
    key.chmod(0o400)
    for name, value in {**told, "KVTIER_PEERS__KEY_FILE": str(key)}.items():
        monkeypatch.setenv(name, value)
    peers = Config.load().peers
    (port,) = (each["containerPort"] for each in pod["containers"][0]["ports"] if each["name"] == "peers")
    service = found("Service", "nodes", objects)["spec"]
    assert (peers.listen, peers.nodes) == (f"0.0.0.0:{port}", (f"nodes:{port}",))
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", port)
    assert (
        service["selector"].items()
        <= found("DaemonSet", "node", objects)["spec"]["template"]["metadata"]["labels"].items()
    )
    policy = found("NetworkPolicy", "peers", objects)["spec"]["ingress"]
    assert policy == [{"from": [{"podSelector": {"matchLabels": {COMPONENT: "node"}}}], "ports": [{"port": "peers"}]}]
    # Each can follow the others' events: over TCP, with the keys that all publishers have. Everybody may connect there.
    (events_policy,) = found("NetworkPolicy", "node", objects)["spec"]["ingress"]
    assert events_policy == {"ports": [{"port": "events"}, {"port": "replay"}]}
    events = {name: value for name, value in environment(pod).items() if "EVENTS" in name}
    at = EventsAt.bound(*(events[f"KVTIER_EVENTS__{name}"] for name in ("PUBLISH", "REPLAY")))
    assert at.reached_at("10.1.0.4").publish == "tcp://10.1.0.4:5567"
    assert peers.events
    assert "KVTIER_EVENTS__CURVE_KEY_FILE" in events
    (init,) = (each for each in pod["initContainers"] if each["name"] == "peer-key")
    assert told["KVTIER_PEERS__KEY_FILE"] == f"{init['command'][-1]}{Path(init['command'][-2]).name}"
    assert "secret generic kvtier-peer-key --from-file=peers.key" in PAGE.read_text()


# careful


def test_every_pod_is_restrained() -> None:
    for name, pod in pods(base()):
        own = pod["securityContext"]
        assert own["runAsNonRoot"], name
        assert own["runAsUser"] == (10001 if name in OURS else 999), name
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not pod["automountServiceAccountToken"], name
        assert not any(pod.get(field) for field in ("hostPID", "hostIPC", "hostNetwork")), name
        for each in containers(pod):
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"], each["name"]
            assert not context["allowPrivilegeEscalation"], each["name"]
            assert context["capabilities"]["drop"] == ["ALL"], each["name"]
            assert each["resources"]["limits"]["memory"], each["name"]
            # only who makes the node's directories is root, and may do that alone
            is_root = context.get("runAsUser") == 0
            assert is_root == (each["name"] == "directories")
            assert context["capabilities"].get("add", []) == (["CHOWN", "FOWNER", "DAC_OVERRIDE"] if is_root else [])


def test_only_directories_of_the_node_are_shared() -> None:
    mounted = {
        (name, volume["hostPath"]["path"])
        for name, pod in pods(base())
        for volume in pod.get("volumes", [])
        if "hostPath" in volume
    }
    assert mounted == {("node", "/run/kvtier"), ("node", "/var/lib/kvtier/slabs"), ("engine", "/run/kvtier")}


def test_everything_mounted_is_there_and_everything_there_is_mounted() -> None:
    for name, pod in pods(base()):
        there = {each["name"] for each in pod.get("volumes", [])}
        there |= {"data"} if name == "valkey" else set()  # of its claim
        used = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
        assert used == there, name


def test_whoever_is_stopped_has_the_time_it_takes() -> None:
    needed = {"engine": Config().server.patience + 10, "router": Config().router.patience}
    for name, pod in pods(base()):
        if name in OURS:
            hook = containers(pod)[0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            assert hook + needed.get(name, 0) + 5 <= pod["terminationGracePeriodSeconds"], name
            assert pod["terminationGracePeriodSeconds"] >= GRACE, name


def test_who_may_reach_whom() -> None:
    """As policies add up: what none of them names is closed."""
    known = {name: pod for name, pod in pods(base())}
    ports = {
        (name, port["name"]): port["containerPort"]
        for name, pod in known.items()
        for port in pod["containers"][0].get("ports", [])
    }
    policies = [each["spec"] for each in base() if each["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in policies
    may: set[tuple[str, str, str]] = set()
    for policy in policies:
        for rule in policy.get("ingress", []):
            (target,) = _chosen(policy["podSelector"], known)
            senders = {"anybody"}
            if "from" in rule:
                ((kind, selector),) = rule["from"][0].items()
                senders = {"any pod"} if kind == "namespaceSelector" else _chosen(selector, known)
            for port in rule["ports"]:
                assert (target, port["port"]) in ports
                may |= {(sender, target, port["port"]) for sender in senders}
    stores = {(name, "valkey", port) for name in ("node", "valkey", "valkey-join") for port in ("valkey", "bus")}
    engines = {("router", "engine", port) for port in ("http", "events", "replay")}
    assert may == stores | engines | {
        ("any pod", "router", "http"),
        *(("anybody", "node", p) for p in ("events", "replay")),
    }


def _chosen(selector: Mapping[str, Any], known: Mapping[str, object]) -> set[str]:
    names = {selector["matchLabels"][COMPONENT]} if "matchLabels" in selector else set()
    for expression in selector.get("matchExpressions", []):
        assert (expression["key"], expression["operator"]) == (COMPONENT, "In")
        names |= set(expression["values"])
    assert names <= known.keys()
    return names


def test_every_secret_is_one_that_the_page_makes() -> None:
    page = PAGE.read_text()
    for _, pod in pods(base()):
        for each in containers(pod):
            for variable in each.get("env", []):
                if (wanted := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    assert re.search(rf"secret generic {wanted['name']} .*--from-literal={wanted['key']}=", page)
            if each["name"] == "keys":
                for path in each["command"][3:-1]:
                    assert f"--from-file={path.removeprefix('/secret/')}" in page
    assert "secret generic kvtier-event-keys" in page


# the same services


@pytest.mark.parametrize(("name", "other"), OURS.items())
def test_pods_and_containers_have_the_same_options(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = environment(dict(pods(base()))[name])
    here = {option.removeprefix("KVTIER_"): value for option, value in told.items() if option.startswith("KVTIER_")}
    there = {option.removeprefix("KVTIER_"): value for option, value in variables(services()[other]).items()}
    assert here.keys() - ONLY_HERE == there.keys() - ONLY_THERE
    addresses = re.compile(r".*(TOKEN|URL|PUBLISH|REPLAY|ALLOWED_HOSTS)")
    for option in here.keys() & there.keys():
        assert here[option] == there[option] or addresses.fullmatch(option), option
    for option, value in told.items():
        monkeypatch.setenv(option, value)
    Config.load()  # every one known, every value possible


@pytest.mark.parametrize(("name", "other"), OURS.items())
def test_pods_and_containers_run_the_same_verbs(name: str, other: str) -> None:
    (own,) = dict(pods(base()))[name]["containers"]
    there = services()[other]
    verb, *arguments = own["args"]
    parsed = load(verb).make_context(verb, list(arguments)).params
    theirs_verb, *theirs = command_of(there)[1:]
    parsed_there = load(theirs_verb).make_context(theirs_verb, theirs).params
    different = {option for option in parsed if parsed[option] != parsed_there[option]}
    assert verb == theirs_verb
    assert different <= {
        "replica",
        "replicas",
        "model",
    }  # found by the name; the router asks them for a prompt's tokens
    assert own["image"] == there["image"]
    assert own["ports"][0]["containerPort"] == int(parsed["http"].rpartition(":")[2])


def test_valkey_is_the_one_of_compose() -> None:
    (master,) = dict(pods(base()))["valkey"]["containers"]
    there = services()["valkey-1"]
    assert master["image"] == there["image"] == dict(pods(base()))["valkey-join"]["containers"][0]["image"]
    assert [*master["command"], *master["args"]][: len(there["command"])] == there["command"]
    files = found("ConfigMap", "valkey")["data"]
    assert {name: (ROOT / "deploy" / "valkey" / name).read_text() for name in files} == files
    assert files.keys() == {path.name for path in (ROOT / "deploy" / "valkey").iterdir()}
    redis = environment(dict(pods(base()))["node"])["KVTIER_REDIS__URL"]
    joined = dict(pods(base()))["valkey-join"]["containers"][0]["args"]
    assert redis == ",".join(f"redis://{name}:6379" for name in joined)
    assert len(joined) == found("StatefulSet", "valkey")["spec"]["replicas"]


def test_the_job_is_gone_when_an_upgrade_changes_it() -> None:
    assert found("Job", "valkey-join")["spec"]["ttlSecondsAfterFinished"] > 0  # its template is immutable


def test_masters_are_joined_by_their_addresses_once_they_are_known(tmp_path: Path) -> None:
    (join,) = dict(pods(base()))["valkey-join"]["containers"]
    script = join["command"][2].replace("/etc/kvtier/valkey/join.sh", "join.sh").replace("sleep 1", "sleep 0.01")
    (tmp_path / "join.sh").write_text("echo joined $@\n")
    # a name server that knows a name from the second question on
    asked = (
        f'echo "$2" >>{tmp_path}/asked; [ $(grep -c "$2" {tmp_path}/asked) -gt 1 ] && echo "10.0.0.${{2#valkey-}} $2"'
    )
    (tmp_path / "getent").write_text(f"#!/bin/sh\n{asked.replace('${2#valkey-}', '$(echo $2 | tr -dc 0-9)')}\n")
    (tmp_path / "getent").chmod(0o755)
    command = [*join["command"][:2], script, join["command"][3], *join["args"]]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "joined 10.0.0.0:6379 10.0.0.1:6379 10.0.0.2:6379\n", done.stderr


def test_routers_hear_of_an_engine_and_of_its_nodes_daemon() -> None:
    known = dict(pods(base()))
    node, engine = environment(known["node"]), environment(known["engine"])
    ports = {each["name"]: each for each in known["node"]["containers"][0]["ports"]}
    for port, published, told in (("events", "PUBLISH", "NODE"), ("replay", "REPLAY", "NODE_REPLAY")):
        assert node[f"KVTIER_EVENTS__{published}"] == f"tcp://*:{ports[port]['containerPort']}"
        assert engine[f"KVTIER_EVENTS__{told}"] == f"tcp://10.0.0.7:{ports[port]['hostPort']}"
    spec = ReplicaSpec.parse(known["router"]["containers"][0]["args"][-1].removeprefix("--replica="))
    service = found("Service", spec.host)["spec"]
    assert spec.has_addresses
    assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", spec.port)


def test_every_service_finds_its_pods() -> None:
    known = dict(pods(base()))
    for each in base():
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            spec = each["spec"]
            chosen = spec["selector"].get("matchLabels", spec["selector"])[COMPONENT]
            names = {port["name"] for port in known[chosen]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec.get("ports", [])} <= names


@needs_kubectl
def test_what_is_watched_is_there_and_the_rules_are_those_of_compose() -> None:
    objects = built("monitoring")
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    assert found("PrometheusRule", "kvtier", objects)["spec"] == rules
    watched = set()
    for each in objects:
        if each["kind"] in ("ServiceMonitor", "PodMonitor"):
            selector, spec = each["spec"]["selector"], each["spec"]
            chosen = {selector["matchLabels"].get(COMPONENT)} - {None}
            for expression in selector.get("matchExpressions", []):
                chosen |= set(expression["values"])
            watched |= chosen
            assert spec["jobLabel"] == COMPONENT
            (endpoint,) = spec.get("endpoints") or spec["podMetricsEndpoints"]
            assert endpoint["port"] == "http"
            if each["kind"] == "ServiceMonitor":
                assert all(found("Service", name)["metadata"]["labels"][COMPONENT] == name for name in chosen)
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert watched == {job["job_name"] for job in scraped} == OURS.keys()
