"""What the router does not read passes through it as it came, by load: other APIs, other types of body, speech."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection

import httpx2
import pytest
from extent import brief
from router_rig import PATIENCE, RoutedReplicas, ToldReplica, replicas, routed, until

PATHS = ["embeddings", "rerank", "responses", "messages", "messages/count_tokens", "audio/speech", "tokenize.v2"]
Pair = tuple[ToldReplica, ToldReplica]


@pytest.fixture
def router(pair: Pair) -> Iterator[RoutedReplicas]:
    with routed(*(replica.url for replica in pair)) as router:
        yield router
        until(lambda: all(each["in_flight"] == 0 and each["load"] == 0 for each in router.status()["replicas"]))


@pytest.mark.parametrize("path", brief(["embeddings", "messages/count_tokens"], PATHS))
def test_other_requests_pass_unchanged(pair: Pair, router: RoutedReplicas, path: str) -> None:
    body = json.dumps({"model": "m", "input": ["a", "b"], "of": path}).encode()
    sent = {"content-type": "application/json", "x-mine": "1", "authorization": "Bearer mine"}
    answer = router.client.post(f"/v1/{path}?a=b%20c&d", content=body, headers=sent)
    assert (answer.status_code, answer.content) == (200, body)
    chosen = next(replica for replica in pair if replica.name == answer.headers["x-kvtier-replica"])
    seen = chosen.seen[-1]
    assert (seen["path"], seen["query"], seen["headers"]["x-mine"]) == (f"/v1/{path}", "a=b%20c&d", "1")
    assert "authorization" not in seen["headers"]
    assert router.status()["unknown_prompts"] == {"passed_on": 1}


def test_bodies_that_are_no_json_pass_too(pair: Pair, router: RoutedReplicas) -> None:
    # a form with a file, as the official client sends it
    audio = bytes(range(256)) * 40_000  # ten megabytes
    answer = router.client.post("/v1/audio/transcriptions", files={"file": ("a.wav", audio)}, data={"model": "m"})
    assert answer.status_code == 200
    assert audio in answer.content
    # bytes
    answer = router.client.post("/v1/anything", content=b"\0\xff" * 9, headers={"content-type": "x/y"})
    assert (answer.content, answer.headers["content-type"]) == (b"\0\xff" * 9, "x/y")
    # JSON that is none is the replica's business
    answer = router.client.post("/v1/embeddings", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.content) == (200, b"{")


def test_they_go_by_load(pair: Pair, router: RoutedReplicas) -> None:
    found = Counter(
        router.client.post("/v1/embeddings", json={"input": f"{number}"}).headers["x-kvtier-replica"]
        for number in range(20)
    )
    assert found == {replica.name: 10 for replica in pair}
    # one has much to do of others: what comes goes to the other
    pair[0].behave(live=50)
    until(lambda: router.status()["replicas"][0]["load"] > 100)
    found = Counter(
        router.client.post("/v1/embeddings", json={"input": f"{number}"}).headers["x-kvtier-replica"]
        for number in range(20)
    )
    assert found == {pair[1].name: 20}
    pair[0].behave()
    until(lambda: router.status()["replicas"][0]["load"] == 0)


def test_an_answer_without_a_length_is_heard_as_it_comes(pair: Pair, router: RoutedReplicas) -> None:
    for replica in pair:
        replica.behave(gate=-1)
    with router.client.stream(
        "POST", "/v1/audio/speech?chunks=3", content=b"la", headers={"content-type": "x/y"}
    ) as told:
        pieces = told.iter_raw()
        assert next(pieces) == b"la"  # the replica says no more until this has been heard
        for replica in pair:
            replica.behave(gate=9)
        assert b"".join(pieces) == b"lala"
        assert told.headers["content-type"] == "audio/mpeg"


def test_one_that_refuses_is_followed_by_the_next() -> None:
    with replicas(1) as (one,), routed("http://127.0.0.1:1", one.url) as router:
        assert router.client.post("/v1/embeddings", json={"input": "a"}).headers["x-kvtier-replica"] == one.name


def test_paths_that_are_no_apis_stay_here(pair: Pair, router: RoutedReplicas) -> None:
    before, errors = [len(replica.seen) for replica in pair], router.status()["errors"]
    oblique = ("/v1/../status", "/v1/./embeddings", "/v1/a/%2e%2e/b", "/v1/a//b", "/v1/a%00b", "/v1/a/..")
    for path in (*oblique, "/v2/embeddings", "/admin/reset", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        connection = HTTPConnection(router.server.address, timeout=PATIENCE)  # sends a path as it is
        with contextlib.closing(connection):
            connection.request("POST", path, b"{}", {"content-type": "application/json"})
            assert connection.getresponse().status in (404, 405), path
    assert [len(replica.seen) for replica in pair] == before
    assert router.status()["errors"] == errors  # strangers are no errors of the router's


def test_a_page_in_a_browser_cannot_send_what_it_need_not_ask_for(pair: Pair, router: RoutedReplicas) -> None:
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        answer = router.client.post("/v1/audio/transcriptions", files={"file": b"a"}, headers=headers)
        assert answer.status_code == 415
    # with a token, no page has it
    with routed(pair[0].url, token="secret") as locked:
        answer = locked.client.post("/v1/audio/transcriptions", files={"file": b"a"}, headers={"origin": "http://a.b"})
        assert answer.status_code == 200
        bare = httpx2.post(f"http://{locked.server.address}/v1/audio/transcriptions", files={"file": b"a"})
        assert bare.status_code == 401


def test_a_body_has_a_bound(router: RoutedReplicas) -> None:
    assert router.client.post("/v1/x", content=b"x" * (33 << 20)).status_code == 413
