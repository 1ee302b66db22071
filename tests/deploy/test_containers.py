"""docker-compose.yml in real containers: everything is restarted, killed, filled and rolled (`make test-compose`)."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from compose_rig import services
from containers_rig import (
    ENGINES,
    HAS_CONTAINERS,
    NO_CONTAINERS,
    NODES,
    SERVERS,
    SERVICES,
    TOKENS,
    Containers,
    docker,
    lasting,
    status_of,
    wait_for,
)
from crowd_rig import Crowd, Turn, conversations, crowd
from extent import brief

from kvtier import __version__

pytestmark = [pytest.mark.skipif(not HAS_CONTAINERS, reason=NO_CONTAINERS), pytest.mark.slow, pytest.mark.timeout(600)]

USER = 10001
NEXT = "9.9.9"


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    from server_rig import save_checkpoint  # takes torch along

    with tempfile.TemporaryDirectory(prefix="kvc-") as home:
        directory = save_checkpoint(Path(home))
        for path in directory.iterdir():
            path.chmod(0o644)
        yield directory


@pytest.fixture(scope="module")
def talks(model: Path) -> list[list[Turn]]:
    """What an engine of this process says that caches nothing."""
    told = conversations(model, 4, 2)
    return [[replace(turn, model="model") for turn in turns] for turns in told]  # as the containers call it


@pytest.fixture(scope="module")
def started(model: Path) -> Iterator[Containers]:
    with tempfile.TemporaryDirectory(prefix="kvc-") as home:
        running = Containers(Path(home), model)
        try:
            running.up(profile="core")
            wait_for(lambda: {running.page(node, "/readyz")["ready"] for node in NODES} == {True})
            names = docker("ps", "--format", "{{.Names}}")
            assert "engine" not in names
            assert "router" not in names
            running.up()
            wait_for(running.is_well)
            yield running
        finally:
            running.close()


@pytest.fixture
def cluster(started: Containers, request: pytest.FixtureRequest) -> Iterator[Containers]:
    """All of it well, and after the story, too."""
    started.up()  # a story that failed left it so: the next one is not to fail for that
    wait_for(started.is_well)
    yield started
    wait_for(started.is_well)
    for name in (*NODES, *ENGINES, "router"):
        assert "Traceback" not in docker("logs", started.name(name)), request.node.name


def clients(cluster: Containers, talks: list[list[Turn]]) -> AbstractContextManager[Crowd]:
    return crowd(cluster.url("router"), talks, 2, cluster.bearer("router"))


def test_what_one_engine_has_computed_the_other_finds(cluster: Containers, talks: list[list[Turn]]) -> None:
    cluster.tell("a", talks[0][0], "across")
    cached = cluster.cached("engine-b", talks[0][1], "across")
    assert cached["redis"] >= 64, cached
    cluster.tell("b", talks[1][0], "across")
    cached = cluster.cached("engine-a", talks[1][1], "across")
    assert cached["redis"] >= 64, cached
    # the router knows who has what: its events come over volumes
    told, replica = cluster.ask("router", talks[0][1], "across")
    assert replica in ("engine-a:8000", "engine-b:8000")
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert max(score["cached"] for score in cluster.page("router")["decisions"][0]["scores"]) > 0


def test_the_bench_puts_load_on_the_router(cluster: Containers) -> None:
    load = ("bench", "http://router:8080", "--requests", "8", "--prompt-tokens", "48", "--json")
    done = cluster.compose("--profile", "bench", "run", "--rm", "-T", "bench", *load)
    (figures,) = json.loads(done.stdout)["servers"]
    assert (figures["requests"], figures["errors"]) == (8, {}), figures


def test_every_process_is_as_restrained_as_the_file_says(cluster: Containers) -> None:
    for name in SERVICES:
        # all of the container, not its first process alone: `init` has one below it
        pids = docker("top", cluster.name(name), "-eo", "pid").split()[1:]
        assert pids, name
        for pid in map(int, pids):
            told = status_of(pid)
            users = {int(each) for kind in ("Uid", "Gid") for each in told[kind]}
            assert 0 not in users, name
            assert users == {USER} or name in SERVERS, (name, users)
            assert {int(told[kind][0], 16) for kind in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}, name
            assert told["NoNewPrivs"] == ["1"], name
        for place in ("/", "/usr/bin", "/etc", "/opt"):
            done = cluster.execute(name, "touch", f"{place}/written")
            assert "Read-only file system" in done.stderr, (name, place, done.stderr)
    # of those who share a pid namespace, each has a network of its own, and a pod has none
    for place in "ab":
        names = [f"{kind}-{place}" for kind in ("pod", "node", "engine")]
        pids = [os.stat(f"/proc/{cluster.pid(name)}/ns/pid").st_ino for name in names]
        nets = [os.stat(f"/proc/{cluster.pid(name)}/ns/net").st_ino for name in names]
        assert (len(set(pids)), len(set(nets))) == (1, 3)


def test_only_the_documented_ports_are_open_and_only_to_those_they_are_for(cluster: Containers) -> None:
    for name in SERVICES:
        bound = cluster.inspect(name)["NetworkSettings"]["Ports"] or {}
        published = {port: places for port, places in bound.items() if places}
        wanted = {f"{each.rpartition(':')[2]}/tcp" for each in services()[name].get("ports", [])}
        assert set(published) == wanted, name
        assert {place["HostIp"] for places in published.values() for place in places} <= {"127.0.0.1"}, name
    # what asks for no password is reached by daemons alone
    reach = "import socket, sys; socket.create_connection((sys.argv[1], 6379), 3).close()"
    server = f"{cluster.inspect('valkey-1')['NetworkSettings']['Networks'][f'{cluster.project}_store']['IPAddress']}"
    python = "/opt/kvtier/bin/python"
    assert cluster.execute("node-a", python, "-c", reach, server).returncode == 0
    for name in ("router", *ENGINES):
        assert cluster.execute(name, python, "-c", reach, server).returncode != 0, name
    # what is published wants its token, but for what a check asks
    for name in ("router", *ENGINES):
        bare = cluster.get(name, "/v1/models").request
        assert "authorization" in bare.headers
        del bare.headers["authorization"]
        with httpx2.Client(trust_env=False) as nobody:
            assert nobody.send(bare).status_code == 401, name


def test_what_lies_in_volumes_is_our_users_alone(cluster: Containers, talks: list[list[Turn]]) -> None:
    cluster.tell("a", talks[2][0], "volumes")
    wait_for(lambda: cluster.stored("node-a", "file") > 0)
    found: dict[str, set[str]] = {}
    for name in ("slabs-a", "slabs-b", "run-a", "run-b", "events-a", "events-b"):
        root = cluster.volume(name)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700, name
        for path in (root, *root.rglob("*")):
            assert (path.lstat().st_uid, path.lstat().st_gid) == (USER, USER), path
        found[name] = {path.name for path in root.iterdir()}
    print(found)
    for name in ("events-a", "events-b"):
        assert found[name] == {"engine", "engine-replay", "node", "node-replay"}
    for name in SERVERS:  # nothing of a block is on its disk
        assert {path.name for path in cluster.volume(name).iterdir()} == {"nodes.conf"}
    secrets = [token.encode() for token in TOKENS.values()]
    for name in (*found, *SERVERS):
        for path in cluster.volume(name).rglob("*"):
            assert not path.is_file() or not any(token in path.read_bytes() for token in secrets), path


def test_without_a_checkpoint_a_model_is_made(cluster: Containers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_MODEL_DIR", "")
    cluster.compose("run", "--rm", "-T", "model")
    root = cluster.volume("model")
    assert {"config.json", "tokenizer.json"} <= {path.name for path in root.iterdir()}
    assert {path.stat().st_uid for path in (root, *root.iterdir())} == {USER}


@pytest.mark.parametrize("name", brief(("valkey-1", "pod-b", "node-b", "engine-b", "router"), SERVICES))
def test_a_restarted_service_comes_back_and_is_of_use(cluster: Containers, talks: list[list[Turn]], name: str) -> None:
    place, other = ("b", "a") if name.endswith("b") else ("a", "b")
    cluster.tell(place, talks[0][0], f"before {name}")
    cluster.compose("restart", name)
    wait_for(cluster.is_well)
    # its own node has it, on its disk or in memory, or at least the others have
    cached = cluster.cached(f"engine-{place}", talks[0][1], f"before {name}")
    assert sum(cached.values()) >= 64, cached
    cluster.tell(place, talks[1][0], f"after {name}")
    cached = cluster.cached(f"engine-{other}", talks[1][1], f"after {name}")
    assert cached["redis"] > 0, cached
    cluster.ask("router", talks[2][0], f"after {name}")


@pytest.mark.parametrize("name", brief(("valkey-2", "pod-a", "node-a", "engine-a", "router"), SERVICES))
def test_a_crashed_service_comes_back_by_itself(cluster: Containers, talks: list[list[Turn]], name: str) -> None:
    with clients(cluster, talks) as asking:
        cluster.crash(name)
        wait_for(cluster.is_well)
        asking.everybody()
    place, other = ("b", "a") if name.endswith("b") else ("a", "b")
    cluster.tell(place, talks[3][0], f"after the crash of {name}")
    cached = cluster.cached(f"engine-{other}", talks[3][1], f"after the crash of {name}")
    assert cached["redis"] > 0, cached


def fill(cluster: Containers, name: str) -> Path:
    """The file of somebody else that takes all there is."""
    filler = cluster.volume(name) / "of somebody else"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(64 << 20))
    return filler


def test_a_full_volume_costs_no_answer_and_no_stored_block(cluster: Containers, talks: list[list[Turn]]) -> None:
    cluster.tell("b", talks[0][0], "full")
    daemon, stored = cluster.pid("node-b"), cluster.stored("node-b", "file")
    assert stored
    filler = fill(cluster, "slabs-b")
    try:
        cluster.tell("b", talks[1][0], "full")
        wait_for(lambda: cluster.stored("node-b", "file") > stored)  # into what the slab has taken long ago
        assert not any(each["dropped"].get("file") for each in cluster.page("node-b")["models"])
        assert cluster.pid("node-b") == daemon
    finally:
        filler.unlink()


def test_an_engine_without_room_for_a_slab_computes_till_it_has(cluster: Containers, talks: list[list[Turn]]) -> None:
    cluster.compose("stop", "engine-b")
    cluster.compose("restart", "node-b")  # its disk is memory, and empty again
    wait_for(lambda: cluster.page("node-b", "/readyz")["ready"])
    daemon = cluster.pid("node-b")
    filler = fill(cluster, "slabs-b")
    try:
        cluster.compose("start", "engine-b")
        wait_for(lambda: cluster.page("node-b", "/readyz")["refused"])
        [refused] = cluster.page("node-b", "/readyz")["refused"]
        assert '[file] size "40MiB": the directory has 0 B free' in refused["why"]
        wait_for(lambda: cluster.get("engine-b", "/readyz").status_code == 200)
        [why] = lasting(cluster.page("engine-b", "/readyz")["wanting"])
        assert '[file] size "40MiB"' in why
        assert not any(cluster.cached("engine-b", talks[0][0], "no room").values())
    finally:
        filler.unlink()
    engine = cluster.pid("engine-b")
    wait_for(cluster.is_well)  # it attaches by itself
    assert (cluster.pid("node-b"), cluster.pid("engine-b")) == (daemon, engine)
    cluster.tell("b", talks[1][0], "with room")
    wait_for(lambda: cluster.stored("node-b", "file"))


def test_a_network_that_goes_away_costs_hits_and_no_answer(cluster: Containers, talks: list[list[Turn]]) -> None:
    cluster.tell("b", talks[0][0], "apart")
    cluster.network("disconnect", "store", "node-a")
    try:
        # Valkey is out of reach of one node: it computes, and keeps that itself
        with clients(cluster, talks) as asking:
            asking.everybody()
            cached = cluster.cached("engine-a", talks[0][0], "apart")
            assert not cached["redis"], cached
            cached = cluster.cached("engine-a", talks[0][1], "apart")
            assert sum(cached.values()) >= 64, cached
            wait_for(lambda: len(lasting(cluster.page("node-a", "/readyz")["wanting"])) == len(SERVERS))
            assert cluster.page("node-a", "/readyz")["ready"]
            assert not asking.troubles
    finally:
        cluster.network("connect", "store", "node-a")
    wait_for(cluster.is_well)
    cluster.tell("a", talks[1][0], "together")
    assert cluster.cached("engine-b", talks[1][1], "together")["redis"] > 0
    # an engine is out of reach of the router, which asks the other one
    cluster.network("disconnect", "front", "engine-a")
    try:
        wait_for(lambda: [each["state"] for each in cluster.page("router")["replicas"]] == ["down", "up"])
        with clients(cluster, talks) as asking:
            asking.everybody()
            assert not asking.troubles
            assert cluster.ask("router", talks[2][0], "apart")[1] == "engine-b:8000"
    finally:
        cluster.network("connect", "front", "engine-a", "--alias", "engine-a")


def test_images_of_the_next_version_roll_out_under_load(cluster: Containers, talks: list[list[Turn]]) -> None:
    for image in ("kvtier", "kvtier-cpu"):
        docker(
            *("build", "--quiet", "--network", "host", "--tag", f"{image}:{NEXT}", "-"),
            stdin=f"FROM {image}:{__version__}\nUSER root\n"
            f"RUN sed -i 's/^Version: .*/Version: {NEXT}/' /opt/kvtier/lib/python3*/site-packages/kvtier-*/METADATA\n"
            f"USER {USER}:{USER}\n",
        )
    cluster.tell("a", talks[0][0], "of the old version")
    wait_for(lambda: cluster.stored("node-a", "file") > 0)
    with clients(cluster, talks) as asking:
        for name in (*NODES, *ENGINES, "router"):  # the order of docs/operate.md
            cluster.up(name, version=NEXT)
            wait_for(cluster.is_well)
            asking.everybody()
            if name in NODES:  # an engine of the old version with the new daemon
                assert cluster.page(name)["version"] == NEXT
            if name != "router":
                assert all(each != "no_replica" for each in asking.troubles), asking.troubles
    for name in (*NODES, *ENGINES):
        assert f'kvtier_build_info{{version="{NEXT}"}} 1' in cluster.get(name, "/metrics").text, name
    # a daemon of the old version left it, on its disk and in Valkey
    cached = cluster.cached("engine-a", talks[0][1], "of the old version")
    assert cached["file"] + cached["L2"] >= 64, cached
