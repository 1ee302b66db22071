"""What /status says: the keys that people's tools read, of a daemon, an engine and a router, and other builds' too."""

import math
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

import httpx2
import pytest
from command_rig import kvtier
from doubles import chain_of, wait_until
from node_rig import free_port
from router_rig import RawReplica, replicas, routed
from server_rig import ServerThread, save_checkpoint
from service_rig import Attach, DaemonProcess, load, store

from kvtier.service.observe import DaemonStatus, EngineStatus, RouterStatus, top
from kvtier.service.observe.live_page import PageHistory
from kvtier.service.observe.statuses import StatusPart
from kvtier.tiers.errors import FormatError


def listed(text: str) -> list[str]:
    return text.split()


FIGURES: Final = "lookups missed stored dropped evicted corrupted moved absent ages"
# Read from /status of kvtier 0.1, before it had types, and what came since. What a key counts has as many keys as have
# occurred.
DAEMON: Final = listed(f"""
    version pid uptime_s status degraded wanting socket token_file budget budget.bytes budget.given events
    tier_captions tier_captions.name tier_captions.label tier_captions.shown tier_captions.medium tier_captions.lower
    kv_events kv_events.publish kv_events.replay kv_events.seq kv_events.batches kv_events.events
    lent gpu_hour models models.model models.name models.fingerprint models.block_size models.block_bytes models.clients
    models.l2 models.l2.slots models.l2.bytes models.l2.ready_bytes models.l2.pinned models.l2.quotas models.l2.free
    models.l2.filling models.l2.ready models.l2.leased models.l2.quarantined models.l2.dirty
    models.l2.tails
    models.tiers models.tiers.file models.tiers.file.slots models.tiers.file.breakers models.tiers.file.room
    models.saved models.optimum models.return_gaps
    {" ".join(f"models.{key}" for key in FIGURES.split())}
    clients clients.pids clients.uid clients.connected clients.seconds clients.protocol clients.claims
    clients.leases clients.reservations clients.preallocated clients.model refused
""")
ENGINE: Final = listed(f"""
    version pid status wanting model fingerprint block_size max_model_len
    requests requests.live requests.capacity requests.waiting requests.loading requests.running outcomes refused
    l1 l1.blocks l1.free tokens tokens.prompt_tokens tokens.computed_tokens tokens.generated_tokens cached_tokens
    steps steps.done steps.failed preempted tiers
    {" ".join(f"tiers.{key}" for key in FIGURES.split())}
""")
ROUTER: Final = listed("""
    uptime_s block_size fingerprint models wanting
    tier_captions tier_captions.name tier_captions.label tier_captions.shown tier_captions.medium tier_captions.lower
    replicas replicas.name replicas.url replicas.state replicas.why replicas.load replicas.in_flight replicas.requests
    replicas.errors replicas.fingerprint replicas.events replicas.events.state replicas.events.seq replicas.events.gaps
    replicas.events.lost replicas.events.age_s replicas.node_events replicas.blocks replicas.latency
    list list.errors list.why
    decisions decisions.time decisions.prompt_blocks decisions.chosen decisions.reason decisions.scores
    decisions.scores.name decisions.scores.cached decisions.scores.load decisions.scores.work
    requests retries errors unknown_prompts
    tokens tokens.prompt tokens.promised tokens.told_prompt tokens.told_cached tokens.told_tiers
    indexed_blocks forgotten_blocks cpu_s prompt_price
""")


def keys_of(value: Any, known: list[str], path: str = "") -> Iterator[str]:
    """Every path of keys in a JSON value, in its order; not below those that have no keys in `known`: they count."""
    if isinstance(value, list):
        yield from keys_of(value[0], known, path) if value else ()
    elif isinstance(value, dict) and (not path or any(each.startswith(path) for each in known)):
        for key, inner in value.items():
            yield f"{path}{key}"
            yield from keys_of(inner, known, f"{path}{key}.")


def test_a_daemons(home: Path, disk_dir: Path, attach: Attach) -> None:
    daemon = DaemonProcess(
        home / "s",
        host__size="1MiB",
        file__path=str(disk_dir),
        file__size="4MiB",
        events__publish=f"tcp://127.0.0.1:{free_port()}",
    )
    tiers, chain = attach(), chain_of(6)
    store(tiers, chain)
    assert load(tiers, chain) == 6

    def told() -> Any:
        return httpx2.get(f"http://{daemon.http}/status", timeout=60).json()

    wait_until(lambda: "events" in told()["kv_events"])
    page = told()
    tiers.close()
    assert daemon.end(SIGTERM) == 0
    assert list(keys_of(page, DAEMON)) == DAEMON
    # It is read as it was written, and shown.
    assert DaemonStatus.parse(page).as_json() == page
    assert "1 connected" in "\n".join(top.daemon_lines(DaemonStatus.parse(page)))


def test_an_engines(tmp_path: Path) -> None:
    server = ServerThread(save_checkpoint(tmp_path))
    page = server.status()
    server.close()
    assert list(keys_of(page, ENGINE)) == ENGINE
    assert EngineStatus.parse(page).as_json() == page


def test_a_routers() -> None:
    with replicas(1) as (one,):
        spec = f"{one.url},block_size=4,events=tcp://127.0.0.1:{free_port()}"
        with routed(spec) as router:
            assert router.complete().status_code == 200
            page = router.status()
    assert list(keys_of(page, ROUTER)) == ROUTER
    assert RouterStatus.parse(page).as_json() == page
    assert "1 of 1 replicas up" in "\n".join(top.router_lines(RouterStatus.parse(page)))


@pytest.mark.parametrize(
    ("kind", "page", "why"),
    [
        (DaemonStatus, {"version": "0.0.9", "clients": []}, 'answer of kvtier "0.0.9": pid: missing; run one'),
        (RouterStatus, {"replicas": [{"state": 3}]}, "answer of another kvtier: uptime_s: missing; run one"),
        (DaemonStatus, {"version": {"a": "b\n" * 99}, "clients": None}, "answer of kvtier "),
    ],
)
def test_another_builds_is_one_line(kind: type[StatusPart], page: Any, why: str) -> None:
    with pytest.raises(FormatError) as told:
        kind.parse(page)
    assert str(told.value).startswith(why)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300


def test_a_command_that_meets_another_build() -> None:
    other = RawReplica(lambda path, headers: None)
    other.pages["/status"] = {"version": "0.0.9", "clients": [], "more": "than this one knows"}
    try:
        ended = kvtier("status", "--http", other.name)
    finally:
        other.close()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == 'kvtier: answer of kvtier "0.0.9": pid: missing; run one kvtier on both sides\n'


# The past hour that a server keeps for the live page: every number of a status, in fixed memory.


def series(history: PageHistory) -> dict[tuple[str, ...], Any]:
    return {tuple(each["path"]): each["values"] for each in history.as_json()["series"]}


def test_numbers_are_known_by_where_they_stand() -> None:
    history = PageHistory(["uptime_s", "models"])
    model = {"model": "ab", "lookups": {"l2": 3, "miss": 1}, "open": True, "why": "text", "list": [1, 2]}
    history.add({"uptime_s": 5.5, "models": [model, {"model": "cd", "lookups": {"l2": 7}}], "pid": 17}, at=1.0)
    model["lookups"] = {"l2": 4, "miss": 1}
    history.add({"uptime_s": 6.5, "models": [model]}, at=2.0)
    assert history.as_json()["at"] == [1000, 2000]
    # What stays the same is told once; what is not there any more is not known; texts, lists and other parts are none.
    assert series(history) == {
        ("uptime_s",): [5.5, 6.5],
        ("models", "ab", "lookups", "l2"): [3, 4],
        ("models", "ab", "lookups", "miss"): 1,
        ("models", "cd", "lookups", "l2"): [7, None],
    }


def test_the_oldest_sample_goes_for_the_newest() -> None:
    history = PageHistory(["n"], kept=3)
    for number in range(5):
        history.add({"n": number}, at=number)
    assert history.as_json()["at"] == [2000, 3000, 4000]
    assert series(history) == {("n",): [2, 3, 4]}


def test_series_are_bounded_and_those_that_are_gone_make_room() -> None:
    history = PageHistory(["n"], kept=2, most=3)
    history.add({"n": {"a": 1, "b": 1, "c": 1, "d": 1}}, at=0)
    assert list(series(history)) == [("n", "a"), ("n", "b"), ("n", "c")]  # d is one too many
    history.add({"n": {"c": 2, "d": 2}}, at=1)  # a and b are still in the sample before
    assert ("n", "d") not in series(history)
    history.add({"n": {"c": 3, "d": 3}}, at=2)
    history.add({"n": {"c": 4, "d": 4}}, at=3)
    assert series(history) == {("n", "c"): [3, 4], ("n", "d"): [3, 4]}


def test_what_json_cannot_say_is_not_known() -> None:
    history = PageHistory(["n"])
    for value in (math.inf, math.nan, 1e300, 0.1234567):
        history.add({"n": value}, at=1)
    assert series(history) == {("n",): [None, None, 1e300, 0.123457]}
