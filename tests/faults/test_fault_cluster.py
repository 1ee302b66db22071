"""kill -9 of every kind of process of a cluster while clients talk to it: no wrong text, nothing left over."""

import os
import random
import secrets
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import yaml
from cluster_rig import PORTS, Running, wait_for
from command_rig import kvtier
from crowd_rig import Turn, conversations, crowd
from extent import brief
from http_rig import pester
from redis_rig import NO_REDIS

from kvtier.service.cluster.cluster import KEY
from kvtier.service.cluster.defaults import BESIDE_US
from kvtier.service.command_line import Exit

pytestmark = [
    pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or ""),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

ENGINES: Final = ("engine-a", "engine-b")
NODES: Final = ("node-a", "node-b")
OPTIONS: Final = {
    "host__size": "8MiB",
    "file__size": "64MiB",
    "l1__size": "3MiB",  # too small for all conversations at once: they come and go
    "cache__load_or_recompute": "load",  # of so small a model computing is always faster
    "service__deadline": "20s",  # a busy machine is no fault
    "cache__prefetch_deadline": "20s",
    "file__deadline": "20s",
    "redis__deadline": "20s",
    "redis__connect_timeout": "5s",
    "router__probe_timeout": "10s",
    "router__connect_timeout": "10s",
}
NUM_CLIENTS: Final = brief(8, 32)  # one of each manner (tests/rigs/crowd_rig.py), and four
SPARE: Final = 40  # a quarter aside: connections and threads kept for a while, memory in use for the first time

# the topology, once


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory with a short name: a socket's path has some hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    from server_rig import save_checkpoint  # takes torch along

    return save_checkpoint(home)


@pytest.fixture(scope="module")
def talks(model: Path) -> list[list[Turn]]:
    return conversations(model, brief(8, 16), 3)


@pytest.fixture(scope="module")
def started(home: Path, model: Path, talks: list[list[Turn]]) -> Iterator[Running]:
    """kvtier's own topology, with engines whose answers are the same bits however a prompt was had."""
    topology = yaml.safe_load(BESIDE_US.read_text())
    for name in ENGINES:
        topology["services"][name][KEY]["argv"].append("--exact")
    (home / "exact.yml").write_text(yaml.safe_dump(topology))
    (home / "deploy").unlink(missing_ok=True)  # of a try that failed: its error is the one to see, not that of the link
    (home / "deploy").symlink_to(BESIDE_US.parent / "deploy")
    options = ("--file", str(home / "exact.yml"), "--profile", "cluster", "--model", str(model))
    running = Running(home / "state", *options, **OPTIONS)
    try:
        up = running.up()
        assert up.returncode == Exit.OK, up.stderr
        yield running
        assert running.down().returncode == Exit.OK
        # what is on the disk is whole after all of it
        for node in NODES:
            verdict = kvtier("verify", str(running.state / node.replace("node", "slabs")), "--json")
            assert verdict.returncode == Exit.OK, verdict.stdout
    finally:
        running.close()


@pytest.fixture
def cluster(started: Running) -> Iterator[Running]:
    """All of it up; after the story too, idle, with nothing left of it."""
    if started.unwell:  # a story that failed left it so: the next one is not to fail for that
        assert started.up().returncode == Exit.OK
    wait_for(lambda: is_idle(started))
    before = sizes(started)
    yield started
    wait_for(lambda: not started.unwell)
    wait_for(lambda: is_idle(started))
    wait_for(lambda: not growth(before, sizes(started)))
    for log in (started.state / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log.read_text()[-4000:]


def is_idle(cluster: Running) -> bool:
    """Whether nobody has anything to do, and nobody holds anything (I3)."""
    try:
        engines = [cluster.page(name) for name in ENGINES]
    except httpx2.TransportError:  # one that was just started does not listen yet
        return False
    return (
        all(each["state"] == "up" and each["in_flight"] == 0 for each in cluster.page("router")["replicas"])
        and all(engine["l1"]["free"] == engine["l1"]["blocks"] for engine in engines)
        and not any(engine["requests"][state] for engine in engines for state in ("live", "waiting", "running"))
        and all(map(is_at_rest, map(cluster.page, NODES)))
    )


def is_at_rest(daemon: Any) -> bool:
    """Whether a daemon has its engine and nobody else for a client, who holds nothing; its slots add up."""
    held = [(one["connected"], one["claims"], one["leases"], one["reservations"]) for one in daemon["clients"]]
    pools = [model["l2"] for model in daemon["models"]]
    for pool in pools:
        assert pool["slots"] == pool["free"] + pool["filling"] + pool["ready"] + pool["quarantined"], pool
    return held == [(True, 0, 0, 0)] and not any(
        pool[state] for pool in pools for state in ("filling", "leased", "quarantined")
    )


def sizes(cluster: Running) -> dict[str, tuple[int, int, int]]:
    """Each process's open descriptors, threads, and MiB of memory."""
    return {name: size_of(Path(f"/proc/{pid}")) for name, pid in cluster.pids().items() if name in PORTS}


def size_of(process: Path) -> tuple[int, int, int]:
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return len(os.listdir(process / "fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]) >> 10


def growth(before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> list[str]:
    """The processes that are larger now than they may have become (I5)."""
    return [
        name for name in before if any(b > a + a // 4 + SPARE for a, b in zip(before[name], after[name], strict=True))
    ]


def ask(cluster: Running, name: str, turn: Turn, salt: str) -> tuple[httpx2.Response, dict[str, int]]:
    """Ask one process; the right answer, and how much of the prompt it had in which tier."""
    url = f"{cluster.url(name)}/v1/chat/completions"
    answer = httpx2.post(url, json=turn.body(salt=salt), timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == turn.answer
    return answer, answer.json()["usage"]["prompt_tokens_details"]["kvtier"]


def fresh(salt: str) -> str:
    """A cache salt that no run of a story has had: one that runs again finds nothing of its first run."""
    return f"{salt} {secrets.token_hex(4)}"


def stored_in_redis(cluster: Running, node: str) -> int:
    return sum(each["stored"].get("redis", 0) for each in cluster.page(node)["models"])


def tell(cluster: Running, place: str, turn: Turn, salt: str) -> None:
    """Have a conversation's first turn computed by one engine of an idle cluster, and stored down to Valkey."""
    before = stored_in_redis(cluster, f"node-{place}")
    answer, cached = ask(cluster, f"engine-{place}", turn, salt)
    assert not any(cached.values())
    blocks = answer.json()["usage"]["prompt_tokens"] // 16
    wait_for(lambda: stored_in_redis(cluster, f"node-{place}") >= before + blocks)


def redis(cluster: Running, server: str, *command: str) -> str:
    """What one of the masters, `valkey-N`, says."""
    place = ["-h", "127.0.0.1", "-p", str(cluster.port + 40 + int(server[-1]))]
    told = subprocess.run(["redis-cli", *place, "-e", *command], capture_output=True, text=True, timeout=60, check=True)
    return told.stdout.strip()


def start_again(cluster: Running) -> None:
    up = cluster.up()
    assert up.returncode == Exit.OK, up.stderr


# kill -9 while clients run


def test_an_engine_is_killed(cluster: Running, talks: list[list[Turn]]) -> None:
    # a conversation that engine-a alone has
    first, second, third = talks[0]
    salt = fresh("only a has it")
    tell(cluster, "a", first, salt)
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        before = cluster.page("router")
        # it dies with streams of clients in its hands, none of which can end before: each is told so, or answered by b
        cluster.signal("engine-a", signal.SIGSTOP)
        wait_for(lambda: cluster.page("router")["replicas"][0]["in_flight"] > brief(1, 2))
        cluster.kill("engine-a")
        clients.everybody()
        after = cluster.page("router")
        assert sum(after["retries"].values()) > sum(before["retries"].values()) or clients.troubles
        assert all(name.startswith("mid_stream") or name == "no_replica" for name in clients.troubles), clients.troubles
        # what it had computed is had from Valkey by the other one, which is the only one asked
        answer, cached = ask(cluster, "router", second, salt)
        assert answer.headers["x-kvtier-replica"] == cluster.url("engine-b").removeprefix("http://")
        assert cached["redis"] > 0, cached
        # started again it comes back into service, and finds what its daemon has kept
        start_again(cluster)
        wait_for(lambda: cluster.page("router")["replicas"][0]["state"] == "up")
        clients.everybody()
        _, cached = ask(cluster, "engine-a", third, salt)
        assert cached["L2"] + cached["file"] > 0, cached


def test_the_router_is_killed(cluster: Running, talks: list[list[Turn]]) -> None:
    salt = fresh("before the router died")
    tell(cluster, "a", talks[1][0], salt)
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        cluster.kill("router")
        wait_for(lambda: sum(clients.troubles.values()) >= len(clients.num_right))
        assert all(name.endswith("Error") for name in clients.troubles), clients.troubles  # connections, all of them
        # engines have let go of what nobody waits for
        wait_for(lambda: not any(cluster.page(name)["requests"]["live"] for name in ENGINES))
        start_again(cluster)
        clients.everybody()
    # the new one learns from the publishers' replay what was stored before it was there
    wait_for(lambda: all(sum(each["blocks"].values()) for each in cluster.page("router")["replicas"]))
    _, cached = ask(cluster, "router", talks[1][1], salt)
    assert sum(cached.values()) > 0


def test_a_master_is_killed(cluster: Running, talks: list[list[Turn]]) -> None:
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        cluster.kill("valkey-2")
        # no client of the cluster notices: a third of the blocks are misses in Valkey, and other tiers have them
        clients.everybody(brief(1, 2))
        start_again(cluster)
        wait_for(lambda: redis(cluster, "valkey-2", "DBSIZE") != "0")  # it has come back empty, and is filled again
        clients.everybody()
        assert not clients.troubles
    wait_for(lambda: not any(cluster.page(node)["degraded"] for node in NODES))
    # a third of a prompt may be gone, but what is stored now is found by the other engine
    salt = fresh("after the master died")
    tell(cluster, "a", talks[2][0], salt)
    _, cached = ask(cluster, "engine-b", talks[2][1], salt)
    assert cached["redis"] > 0, cached


def test_a_daemon_is_killed(cluster: Running, talks: list[list[Turn]]) -> None:
    salt = fresh("while the daemon was dead")
    tell(cluster, "b", talks[3][0], salt)
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        cluster.kill("node-a")
        # its engine goes on with what it has itself
        before = cluster.page("engine-a")["outcomes"]["length"]
        clients.everybody(brief(1, 2))
        wait_for(lambda: cluster.page("engine-a")["outcomes"]["length"] > before)
        start_again(cluster)
        # the engine finds the new one, and through it what others have stored
        wait_for(lambda: len(cluster.page("node-a")["clients"]) == 1)
        clients.everybody()
        assert not clients.troubles
        _, cached = ask(cluster, "engine-a", talks[3][1], salt)
        assert cached["redis"] > 0, cached
        assert cluster.page("engine-a")["steps"]["failed"] == 0


# and input


def test_a_daemon_is_sent_a_thousand_malformed_requests(cluster: Running, talks: list[list[Turn]]) -> None:
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        pester(cluster.url("node-a").removeprefix("http://"), "/admin/evict")
        clients.everybody()
        assert not clients.troubles


# and all of it, for as long as one likes

SERVERS: Final = ("valkey-1", "valkey-2", "valkey-3")


def kill(cluster: Running, dice: random.Random) -> None:
    cluster.kill(dice.choice((*PORTS, *SERVERS)))
    start_again(cluster)


def freeze(cluster: Running, dice: random.Random) -> None:
    """Stopped for a moment: it is there, and says nothing."""
    name = dice.choice((*PORTS, *SERVERS))
    cluster.signal(name, signal.SIGSTOP)
    time.sleep(dice.uniform(0.1, 3))
    cluster.signal(name, signal.SIGCONT)


def hang_up(cluster: Running, dice: random.Random) -> None:
    """Every connection of a Redis master is broken."""
    redis(cluster, dice.choice(SERVERS), "CLIENT", "KILL", "TYPE", "normal")


def forget(cluster: Running, dice: random.Random) -> None:
    redis(cluster, dice.choice(SERVERS), "FLUSHALL")


def corrupt(cluster: Running, dice: random.Random) -> None:
    """Bytes in the middle of some blocks that Redis holds are others."""
    server = dice.choice(SERVERS)
    for _ in range(20):
        key = redis(cluster, server, "RANDOMKEY")
        if len(key) > 64:  # a block's: its chain hash in hexadecimal
            redis(cluster, server, "SETRANGE", key, str(dice.randrange(12_000)), "otherwise")


FAULTS: Final = (kill, freeze, hang_up, forget, corrupt)


@pytest.mark.timeout(0)  # as long as it is told; every wait in it has an end
def test_a_soak_with_a_fault_every_few_seconds(
    cluster: Running, talks: list[list[Turn]], pytestconfig: pytest.Config
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    dice = random.Random(seed)
    num_faults: Counter[str] = Counter()
    first = brief([hang_up, corrupt], dice.sample(FAULTS, len(FAULTS)))  # the other kinds have stories above
    end = time.monotonic() + pytestconfig.getoption("soak")
    with crowd(cluster.url("router"), talks, NUM_CLIENTS) as clients:
        while first or time.monotonic() < end:
            fault = first.pop() if first else dice.choice((*FAULTS, kill))
            num_faults[fault.__name__] += 1
            print(f"seed {seed}, {num_faults.total()}: {fault.__name__}, {clients.troubles}")  # seen where it fails
            fault(cluster, dice)
            clients.everybody()
    print(f"{num_faults}; {sum(clients.num_right)} right answers, troubles {clients.troubles}, from {clients.cached}")
    print(f"corrupted {[model['corrupted'] for node in NODES for model in cluster.page(node)['models']]}")
