"""Whom a request goes to on Ray Serve, from real KV events: without Ray, which `make test-ray` has."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from doubles import chain_over, records_of
from event_rig import until
from node_rig import event_ports

from kvtier.service.events.publisher import Publisher
from kvtier.service.ray.ranking import EngineRequest, Queue, ReplicaRanking
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.hierarchy import Stored

MODEL, OTHER = b"a model".ljust(32, b"."), b"another".ljust(32, b".")
SIZE, BLOCKS = 16, 12
A, B = "replica-a", "replica-b"


def tokens_of(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + SIZE * BLOCKS))


def request(tokens: Sequence[int], key: str = "k", *tried: str) -> EngineRequest:
    body = json.dumps({"model": "m", "prompt": tokens}).encode()
    return EngineRequest("POST", "/v1/completions", [], body, key, frozenset(tried))


class ToldReplica:
    """What a replica tells of itself, and its events."""

    def __init__(self, fingerprint: bytes = MODEL) -> None:
        self._publisher = Publisher(EventsConfig.model_validate(event_ports()))
        self._fingerprint = fingerprint

    def close(self) -> None:
        self._publisher.close()

    def told(self) -> dict[str, Any]:
        events = {"publish": self._publisher.endpoint, "replay": self._publisher.replay_endpoint}
        ours = {"block_size": SIZE, "fingerprint": self._fingerprint.hex(), "events": events}
        return {"models": {"object": "list", "data": [{"id": "m", "kvtier": ours}]}, "node": "127.0.0.1"}

    def store(self, tokens: Sequence[int]) -> None:
        chain = chain_over(tokens, None, self._fingerprint, SIZE)
        self._publisher.announce(self._fingerprint, [Stored("l1", records_of(chain, last=BLOCKS))])
        assert self._publisher.flush(60)


@pytest.fixture
def two() -> Iterator[dict[str, ToldReplica]]:
    with ExitStack() as opened:
        made = {name: ToldReplica() for name in (A, B)}
        for each in made.values():
            opened.callback(each.close)
        yield made


@pytest.fixture
def ranking() -> Iterator[ReplicaRanking]:
    made = ReplicaRanking()
    yield made
    made.close()


async def changed(ranking: ReplicaRanking, **told: dict[str, Any]) -> None:
    ranking.change({name.replace("_", "-"): each for name, each in told.items()})


def follow(ranking: ReplicaRanking, replicas: dict[str, ToldReplica]) -> None:
    async def change() -> None:
        ranking.change({name: each.told() for name, each in replicas.items()})

    asyncio.run(change())
    until(lambda: all(each["events"]["state"] == "live" for each in ranking.figures()["replicas"].values()))


def ranked(ranking: ReplicaRanking, asked: EngineRequest | None, *queues: int, key: str = "1") -> list[str] | None:
    """Of both replicas, of which each may have four requests."""
    lengths = queues or (0, 0)
    return asyncio.run(ranking.rank(key, asked, [Queue(name, n, 4) for name, n in zip((A, B), lengths, strict=True)]))


def knows(ranking: ReplicaRanking, name: str, blocks: int = BLOCKS) -> None:
    until(lambda: ranking.figures()["replicas"][name]["blocks"].get("GPU", 0) == blocks)


def test_who_holds_the_prompt_is_ranked_first(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    follow(ranking, two)
    two[B].store(tokens_of(1))
    knows(ranking, B)
    assert ranked(ranking, request(tokens_of(1))) == [B, A]
    ranking.routed("1", B)
    assert ranking.figures()["tokens"] == {"prompt": SIZE * BLOCKS, "promised": SIZE * BLOCKS}
    assert ranking.figures()["requests"] == {"prefix": 1}
    # What it failed is not given to it again; if all failed it, it may be asked once more.
    assert ranked(ranking, request(tokens_of(1), "k", B), key="2") == [A]
    assert ranked(ranking, request(tokens_of(1), "k", A, B), key="3") == [B, A]


def test_a_full_replica_is_last_and_full_ones_have_no_order(
    ranking: ReplicaRanking, two: dict[str, ToldReplica]
) -> None:
    follow(ranking, two)
    two[B].store(tokens_of(1))
    knows(ranking, B)
    assert ranked(ranking, request(tokens_of(1)), 0, 4) == [A, B]
    assert ranked(ranking, request(tokens_of(1)), 4, 4) is None


def test_work_counts_until_the_answer_has_begun(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    follow(ranking, two)
    assert ranked(ranking, request(tokens_of(1), "first"), key="1") is not None
    ranking.routed("1", A)
    for turn in range(4):  # equally good ones take turns: while A computes there is no equality
        assert ranked(ranking, request(tokens_of(5 + turn)), key=f"busy {turn}") == [B, A]
        ranking.completed(f"busy {turn}", B)
    ranking.begun("first")
    assert ranked(ranking, request(tokens_of(9)), key="still") == [B, A]
    ranking.completed("1", A)
    assert ranking.figures()["requests"] == {"equal": 1}
    firsts = {(ranked(ranking, request(tokens_of(20 + n)), key=f"n{n}") or [""])[0] for n in range(4)}
    assert firsts == {A, B}


def test_an_answer_that_ends_unannounced_is_work_no_more(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    # Ray Serve tells the end from another thread: a short answer's may come before `routed`.
    follow(ranking, two)
    for number in range(8):
        assert ranked(ranking, request(tokens_of(number)), key=f"short {number}") is not None
        ranking.completed(f"short {number}", A)
        ranking.routed(f"short {number}", A)
    assert ranking.figures()["under_way"] == 0
    firsts = {(ranked(ranking, request(tokens_of(20 + n)), key=f"n{n}") or [""])[0] for n in range(4)}
    assert firsts == {A, B}, "one of them has work that ended long ago"
    # A refusal is no end: whoever takes it then has it, even if the refusal is told late.
    for is_late in (False, True):
        key = f"refused {is_late}"
        assert ranked(ranking, request(tokens_of(9)), key=key) is not None
        if not is_late:
            ranking.completed(key, A)
        assert ranked(ranking, request(tokens_of(9)), key=key) is not None
        ranking.routed(key, B)
        if is_late:
            ranking.completed(key, A)
        assert ranking.figures()["under_way"] == 1
        ranking.completed(key, B)
        assert ranking.figures()["under_way"] == 0


def test_an_unreadable_conversation_stays_at_one_replica(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    silent = {name: {"models": None} for name in (A, B)}
    asyncio.run(changed(ranking, replica_a=silent[A], replica_b=silent[B]))
    orders = set()
    for turn in range(4):
        messages = [{"role": "user", "content": "hello"}, *[{"role": "assistant", "content": "x"}] * turn]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        asked = EngineRequest("POST", "/v1/chat/completions", [], body, "k")
        orders.add(tuple(ranked(ranking, asked, key=str(turn)) or ()))
    assert len(orders) == 1
    assert ranking.figures()["unknown_prompts"] == {"no_tokenizer": 4}


def test_bodies_of_all_kinds_are_ranked(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    follow(ranking, two)
    bodies = (b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "' + b"," * (1 << 18) + b'"}', b"null")
    for number, body in enumerate(bodies):
        asked = EngineRequest("POST", "/v1/completions", [], body, "k")
        assert sorted(ranked(ranking, asked, key=str(number)) or ()) == [A, B]
    assert sorted(ranked(ranking, None, key="none") or ()) == [A, B]
    assert sorted(ranked(ranking, EngineRequest("GET", "/v1/models", [], b"", "k"), key="get") or ()) == [A, B]
    assert sum(ranking.figures()["unknown_prompts"].values()) == len(bodies) + 2


def test_a_replica_that_left_is_forgotten_by_its_model(ranking: ReplicaRanking, two: dict[str, ToldReplica]) -> None:
    follow(ranking, two)
    two[B].store(tokens_of(1))
    knows(ranking, B)
    other = ToldReplica(OTHER)  # a new version of the deployment, beside the old one
    try:
        follow(ranking, {A: two[A], B: two[B], "replica-c": other})
        other.store(tokens_of(2))
        knows(ranking, "replica-c")
        queues = [Queue(name, 0, 4) for name in (A, B, "replica-c")]
        assert (asyncio.run(ranking.rank("1", request(tokens_of(1)), queues)) or [""])[0] == B
        assert (asyncio.run(ranking.rank("2", request(tokens_of(2)), queues)) or [""])[0] == "replica-c"
        follow(ranking, {"replica-c": other})
        assert list(ranking.figures()["replicas"]) == ["replica-c"]
    finally:
        other.close()


def test_requests_that_never_end_are_not_kept_for_ever(
    ranking: ReplicaRanking, two: dict[str, ToldReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.service.ray.ranking._KEPT", 64)
    follow(ranking, two)

    async def ask_many() -> None:
        for number in range(100):
            await ranking.rank(str(number), None, [Queue(A, 0, 4), Queue(B, 0, 4)])
            ranking.routed(str(number), A)

    asyncio.run(ask_many())
    assert ranking.figures()["under_way"] == 64
