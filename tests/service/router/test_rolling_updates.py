"""Another version of the model comes, replica by replica: requests are answered, and a conversation stays with one."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from router_rig import MODEL, RoutedReplicas, ToldReplica, replicas, routed, until

from kvtier.service.router.fleet import LivingVersions, ProbeSettings, Replica, ReplicaProfile, ReplicaState
from kvtier.service.router.replica_list import Publishers, ReplicaSpec

OLD = MODEL
NEW = {**MODEL, "kvtier": {"block_size": 8, "fingerprint": "cd" * 32}}


def chat(router: RoutedReplicas, conversation: object) -> str:
    """Who answers a turn of it."""
    turns = [{"role": "user", "content": f"conversation {conversation}"}]
    answer = router.client.post("/v1/chat/completions", json={"model": "m", "messages": turns})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-kvtier-replica"])


def fingerprints(router: RoutedReplicas) -> dict[str, str]:
    """Of the replicas that are up."""
    return {each["name"]: each["fingerprint"] for each in router.status()["replicas"] if each["state"] == "up"}


def renew(router: RoutedReplicas, replica: ToldReplica, nature: Mapping[str, object] = NEW) -> None:
    """Replace it where it is, and wait until the router has it."""
    replica.kill()
    replica.nature = nature
    replica.start()
    until(lambda: fingerprints(router).get(replica.name) == "cd" * 32)


def names(some: Sequence[ToldReplica]) -> set[str]:
    return {each.name for each in some}


def test_one_replica_after_the_other_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    # As `docker compose up` and Kubernetes' StatefulSets do it.
    caplog.set_level(logging.WARNING)
    with replicas(3) as fleet, routed(*(each.url for each in fleet)) as router:
        until(lambda: len(fingerprints(router)) == 3)
        before = {number: chat(router, number) for number in range(12)}
        assert len(set(before.values())) > 1
        for step in (1, 2):
            renew(router, fleet[step - 1])
            # who talks with the old version goes on with it
            assert {chat(router, number) for number in before} <= names(fleet[step:])
            # new conversations begin with either, and stay with that, too
            first = {number: chat(router, (step, number)) for number in range(40)}
            assert set(first.values()) & names(fleet[:step])
            assert set(first.values()) & names(fleet[step:])
            for number, home in first.items():
                assert (chat(router, (step, number)) in names(fleet[:step])) == (home in names(fleet[:step]))
        told = [line for line in caplog.messages if "conversations stay with one of them" in line]
        assert len(told) == 1
        assert f"{fleet[0].name} has fingerprint {'cd' * 32}, block_size 8" in told[0]
        renew(router, fleet[2])
        assert {chat(router, number) for number in before} <= names(fleet)
        status = router.status()
        assert (status["fingerprint"], status["block_size"]) == ("cd" * 32, 8)


def test_new_ones_come_before_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Kubernetes' Deployments do it: other addresses, and for a while more replicas than there are to be.
    monkeypatch.setattr("kvtier.service.router.replica_list._EVERY", 0.05)
    listed = tmp_path / "replicas"
    with replicas(4, OLD, OLD, NEW, NEW) as fleet:
        listed.write_text("\n".join(each.url for each in fleet[:2]))
        with routed(replicas_file=str(listed)) as router:
            until(lambda: len(fingerprints(router)) == 2)
            for first, last in ((0, 3), (1, 3), (1, 4), (2, 4)):
                chat(router, "the one")
                listed.write_text("\n".join(each.url for each in fleet[first:last]))
                until(lambda which=fleet[first:last]: set(fingerprints(router)) == names(which))
                assert chat(router, "the one") in names(fleet[:2] if first < 2 else fleet[2:])
                assert {chat(router, (first, last, i)) for i in range(8)} <= names(fleet[first:last])
            assert router.status()["fingerprint"] == "cd" * 32


def test_all_at_once() -> None:
    # As Kubernetes' strategy Recreate does it: nobody is there for a while, and then there are others.
    with replicas(2) as fleet, routed(*(each.url for each in fleet)) as router:
        until(lambda: len(fingerprints(router)) == 2)
        home = chat(router, "the one")
        for each in fleet:
            each.kill()
        until(lambda: not fingerprints(router))
        assert router.complete().status_code in (502, 503)
        renew(router, fleet[0])
        assert chat(router, "the one") == fleet[0].name
        renew(router, fleet[1])
        assert {chat(router, number) for number in range(12)} == names(fleet)
        assert home in names(fleet)


def test_each_model_is_served_by_those_who_have_it() -> None:
    adapter = {"id": "ad", "object": "model", "parent": "m"}
    other = {"id": "n", "object": "model", "kvtier": {"block_size": 16, "fingerprint": "ef" * 32}}
    with (
        replicas(3, MODEL, {**MODEL, "adapters": [adapter]}, other) as fleet,
        routed(*(each.url for each in fleet)) as router,
    ):
        until(lambda: len(fingerprints(router)) == 3)
        plain, adapted, stranger = (each.name for each in fleet)
        assert {each["id"] for each in router.client.get("/v1/models").json()["data"]} == {"m", "ad", "n"}

        def served(model: str) -> set[str]:
            return {router.complete(str(i), model=model).headers["x-kvtier-replica"] for i in range(6)}

        assert served("ad") == {adapted}
        assert served("n") == {stranger}
        assert served("m") == {plain, adapted}
        unread = {router.client.post("/v1/responses", json={"model": "n"}).headers["x-kvtier-replica"] for _ in "abc"}
        assert unread == {stranger}
        fleet[1].kill()
        until(lambda: adapted not in fingerprints(router))
        assert router.complete(model="ad").status_code in (502, 503)
        assert served("m") == {plain}
        unknown = router.complete(model="nobody's")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_as_many_conversations_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.router.fleet._REMEMBERED", 3)
    replica = Replica(ReplicaSpec("h", 1), ProbeSettings(1.0, 1.0), lambda _, __: None)
    replica.state = ReplicaState.UP
    versions = LivingVersions()
    assert versions.choose(versions.able([replica]), b"session", "") is None  # it has not said what it serves
    assert versions.joined(replica, ReplicaProfile((OLD,), 4, "ab" * 32, Publishers()), 4, [replica])
    for number in range(5):
        assert versions.choose(versions.able([replica]), b"%d" % number, "") is replica.version
    assert list(versions._of_session) == [b"2", b"3", b"4"]
