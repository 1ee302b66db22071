"""Stories of the router before replicas that do as they are told: whom it asks, and what becomes of whoever asked."""

import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest
from command_rig import kvtier
from extent import brief
from http_rig import pester
from node_rig import ROOT, free_port
from openai import OpenAI
from router_rig import MODEL, PATIENCE, RoutedReplicas, ToldReplica, replicas, routed, until
from service_rig import end_child, environment

from kvtier.service.router.replica_list import parse_replicas
from kvtier.tiers.errors import ConfigError

Pair = tuple[ToldReplica, ToldReplica]


@pytest.fixture
def router(pair: Pair) -> Iterator[RoutedReplicas]:
    with routed(*(replica.url for replica in pair)) as router:
        yield router
        until(lambda: all(each["in_flight"] == 0 and each["load"] == 0 for each in router.status()["replicas"]))


def by_name(pair: Pair, name: str) -> tuple[ToldReplica, ToldReplica]:
    """The replica of that name, and the other."""
    one, other = pair
    return (one, other) if one.name == name else (other, one)


def stream(router: RoutedReplicas, **fields: object) -> "contextlib.AbstractContextManager[httpx2.Response]":
    return router.client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, **fields})


def events(text: str) -> list[Any]:
    """The stream's events, the last one as it is where it is no JSON."""
    assert text.endswith("\n\n")
    found = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def test_requests_and_answers_pass_unchanged(pair: Pair, router: RoutedReplicas) -> None:
    # the fields of any engine reach the replica, whatever the router makes of them
    answer = router.complete("hello", top_k=7, best_of_all={"engines": ["m"]})
    assert answer.status_code == 200
    chosen, _ = by_name(pair, answer.headers["x-kvtier-replica"])
    assert answer.json()["choices"][0]["text"] == "abc"
    assert answer.headers["x-kvtier-cached"] == "{}"  # the replica's own headers, too
    seen = chosen.seen[-1]
    assert seen["body"] == {"model": "m", "prompt": "hello", "top_k": 7, "best_of_all": {"engines": ["m"]}}
    assert seen["headers"]["host"] == chosen.name
    # one id names the request on both sides, the client's or the router's
    assert seen["headers"]["x-request-id"] == answer.headers["x-request-id"]
    body = {"model": "m", "prompt": "hello"}
    answer = router.client.post("/v1/completions", json=body, headers={"x-request-id": "trace-7"})
    chosen, _ = by_name(pair, answer.headers["x-kvtier-replica"])
    assert chosen.seen[-1]["headers"]["x-request-id"] == answer.headers["x-request-id"] == "trace-7"

    # a stream is the same bytes as without a router
    with stream(router) as answer:
        through = answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
    direct = chosen.client.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True})
    assert through == direct.content
    assert events(through.decode())[-1] == "[DONE]"

    # the merged list of models is theirs, and the pages say what was done
    assert router.client.get("/v1/models").json() == {"object": "list", "data": [MODEL]}
    assert router.client.get("/v1/models/m").json() == MODEL
    assert router.client.get("/v1/models/n").json()["error"]["code"] == "model_not_found"
    assert router.client.get("/readyz").json() == {"ready": True, "replicas_up": 2}
    metrics = router.metrics()
    assert sum(value for name, value in metrics.items() if name.startswith("kvtier_route_requests_total")) == 3
    assert metrics["kvtier_route_told_prompt_tokens_total"] == 120  # as the usage of all said
    assert metrics["kvtier_route_told_cached_tokens_total"] == 96
    assert router.status()["tokens"]["told_tiers"] == {"L1": 72, "L2": 0, "file": 0, "redis": 24}
    last = router.status()["decisions"][0]
    assert {score["name"] for score in last["scores"]} == {replica.name for replica in pair}
    assert last["reason"] == "unsure"


def test_without_events_they_take_turns(pair: Pair, router: RoutedReplicas) -> None:
    names = [router.complete().headers["x-kvtier-replica"] for _ in range(6)]
    assert sorted(names) == sorted([pair[0].name, pair[1].name] * 3)


def test_an_error_of_the_clients_is_the_replicas_answer(pair: Pair, router: RoutedReplicas) -> None:
    for replica in pair:
        replica.behave(status=400)
    answer = router.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "as told")
    assert router.status()["retries"] == {}  # nobody else was asked


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_replica_that_refuses_is_followed_by_the_next(pair: Pair, router: RoutedReplicas, status: int) -> None:
    pair[0].behave(status=status)
    for _ in range(4):  # whoever comes first
        answer = router.complete()
        assert (answer.status_code, answer.headers["x-kvtier-replica"]) == (200, pair[1].name)
    assert router.status()["retries"] == {str(status): 2}
    assert router.metrics()[f'kvtier_route_retries_total{{reason="{status}"}}'] == 2

    # all refuse: their own words, and that of the busy one rather than that of the broken
    pair[1].behave(status=429)
    answer = router.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "told")
    assert router.status()["errors"] == {"429": 1}


def test_one_that_is_killed_before_the_first_byte_costs_its_client_nothing(pair: Pair, router: RoutedReplicas) -> None:
    pair[0].behave(die=True)
    for _ in range(2):  # by turns: one of the two meets it
        answer = router.complete()
        assert (answer.status_code, answer.headers["x-kvtier-replica"]) == (200, pair[1].name)
    until(lambda: router.state(pair[0]) == "down")
    assert router.status()["retries"] == {"broken": 1}

    # nobody is sent there any more; it comes back by itself
    assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {pair[1].name}
    assert router.status()["retries"] == {"broken": 1}
    pair[0].start()
    until(lambda: router.state(pair[0]) == "up")
    assert {router.complete().headers["x-kvtier-replica"] for _ in range(4)} == {pair[0].name, pair[1].name}


@pytest.mark.parametrize("half", ["", 'data: {"choices": [{"te'])
def test_one_killed_in_the_middle_ends_its_stream_with_an_error(pair: Pair, router: RoutedReplicas, half: str) -> None:
    for replica in pair:
        replica.behave(events=1000, pause=0.01, die_after=4, half=half)
    with stream(router) as answer:
        text = answer.read().decode()
        chosen, other = by_name(pair, answer.headers["x-kvtier-replica"])
    found = events(text)  # whole events all of them, also where it died in the middle of one
    assert [event["choices"][0]["text"] for event in found[:-1]] == ["0 ", "1 ", "2 ", "3 ", "4 "]
    error = found[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "mid_stream_broken")
    assert chosen.name in error["message"]
    until(lambda: chosen.is_dead)
    assert not other.is_dead  # the request was not given to another, to kill that, too
    assert router.status()["errors"] == {"mid_stream_broken": 1}


def test_a_request_that_kills_every_replica_meets_two_of_them(pair: Pair) -> None:
    with replicas(1) as (third,), routed(*(replica.url for replica in (*pair, third))) as router:
        for replica in (*pair, third):
            replica.behave(die=True)
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broken")
        until(lambda: sum(replica.is_dead for replica in (*pair, third)) == 2)


def test_a_client_that_leaves_ends_its_request_at_the_replica(pair: Pair, router: RoutedReplicas) -> None:
    for replica in pair:
        replica.behave(events=100_000, pause=0.02)
    with stream(router) as answer:
        chosen, _ = by_name(pair, answer.headers["x-kvtier-replica"])
        pieces = answer.iter_raw()
        next(pieces)
        assert not chosen.seen[-1]["gone"]
    until(lambda: chosen.seen[-1]["gone"])
    until(lambda: router.status()["errors"] == {"client_gone": 1})


def test_a_client_that_closes_behind_the_last_event_is_booked_as_answered(pair: Pair, router: RoutedReplicas) -> None:
    for replica in pair:
        replica.behave(linger=PATIENCE)  # the stream's end does not come before the client leaves
    with OpenAI(base_url=f"http://{router.server.address}/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert len(list(client.completions.create(model="m", prompt=[1, 2, 3, 4, 5], stream=True))) == 4
    until(lambda: all(each["in_flight"] == 0 for each in router.status()["replicas"]))
    assert router.status()["errors"] == {}
    assert router.status()["tokens"]["prompt"] == 5


def test_a_client_that_does_not_read_makes_the_replica_wait(pair: Pair, router: RoutedReplicas) -> None:
    for replica in pair:
        replica.behave(events=1000, size=10_000)
    with stream(router) as answer:  # more than all buffers on its way
        chosen, _ = by_name(pair, answer.headers["x-kvtier-replica"])
        (before,) = (each for each in router.status()["replicas"] if each["name"] == chosen.name)
        assert before["in_flight"] == 1
        assert router.complete().status_code == 200  # nobody else waits for it
        num_bytes = sum(map(len, answer.iter_bytes()))
    assert num_bytes > 9_000_000


def test_patience_has_an_end_at_every_step(pair: Pair) -> None:
    spec = [replica.url for replica in pair]
    # no first byte in time, however many could be asked: the time is the client's
    with routed(*spec, first_byte_timeout="300ms") as router:
        for replica in pair:
            replica.behave(wait=30)
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "slow_first_byte")
        assert router.status()["errors"] == {"slow_first_byte": 1}
        assert router.status()["retries"] == {}
    # a stream that stops
    with routed(*spec, stall_timeout="300ms") as router:
        for replica in pair:
            replica.behave(events=2, pause=30)
        with stream(router) as answer:
            assert events(answer.read().decode())[-1]["error"]["code"] == "mid_stream_stalled"
    # a request that goes on for ever
    with routed(*spec, request_timeout="1s") as router:
        for replica in pair:
            replica.behave(events=100_000, pause=0.05)
        with stream(router) as answer:
            assert events(answer.read().decode())[-1]["error"]["code"] == "deadline"
        for replica in pair:
            replica.behave(wait=30)
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        until(lambda: all(each["in_flight"] == 0 for each in router.status()["replicas"]))


def test_more_than_replicas_may_have_is_told_so(pair: Pair) -> None:
    with routed(*(replica.url for replica in pair), max_requests=1) as router, ThreadPoolExecutor(2) as clients:
        for replica in pair:
            replica.behave(wait=PATIENCE)
        held = [clients.submit(router.complete) for _ in pair]
        until(lambda: sum(each["in_flight"] for each in router.status()["replicas"]) == 2)
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "full")
        assert answer.headers["retry-after"] == "1"
        for replica in pair:
            replica.behave()
        assert [each.result().status_code for each in held] == [200, 200]


def test_a_dead_one_is_dropped_before_anybody_asks_it(pair: Pair, router: RoutedReplicas) -> None:
    pair[0].kill()
    until(lambda: router.state(pair[0]) == "down")
    pair[1].kill()
    until(lambda: router.state(pair[1]) == "down")
    assert router.client.get("/readyz").status_code == 503
    answer = router.complete()
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "server_error")  # it was tried all the same


def test_one_that_hangs_is_dropped(pair: Pair) -> None:
    with routed(*(replica.url for replica in pair), probe_timeout="500ms") as router:
        pair[0].signal(signal.SIGSTOP)
        until(lambda: router.state(pair[0]) == "down")
        pair[0].signal(signal.SIGCONT)
        until(lambda: router.state(pair[0]) == "up")


def test_what_one_that_hangs_has_not_begun_another_answers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.router.fleet._HOPELESS", 1.0)
    with routed(*(replica.url for replica in pair), probe_timeout="1s") as router, ThreadPoolExecutor(4) as clients:
        before = [len(replica.seen) for replica in pair]
        for replica in pair:
            replica.behave(wait=PATIENCE)
        held = [clients.submit(router.complete) for _ in range(4)]
        until(lambda: [len(replica.seen) - was for replica, was in zip(pair, before, strict=True)] == [2, 2])
        pair[0].signal(signal.SIGSTOP)
        pair[1].behave()
        try:
            assert {each.result().headers["x-kvtier-replica"] for each in held} == {pair[1].name}
            assert router.status()["retries"] == {"slow_first_byte": 2}
        finally:
            pair[0].signal(signal.SIGCONT)


def test_one_that_is_not_ready_gets_nothing_new(pair: Pair, router: RoutedReplicas) -> None:
    until(lambda: router.state(pair[0]) == "up")  # one that was never up would be joining, not draining
    pair[0].behave(ready=503)
    until(lambda: router.state(pair[0]) == "draining")
    assert {router.complete().headers["x-kvtier-replica"] for _ in range(3)} == {pair[1].name}
    pair[0].behave()
    until(lambda: router.state(pair[0]) == "up")


def test_one_that_contradicts_its_spec_is_refused(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with replicas(1) as (stranger,), routed(pair[0].url, f"{stranger.url},block_size=16") as router:
        until(lambda: router.state(stranger) == "refused")
        told = next(each["why"] for each in router.status()["replicas"] if each["name"] == stranger.name)
        assert told == "block_size 4, but its --replica says 16; give the value the replica has"
        assert any(stranger.name in line and told in line for line in caplog.messages)
        assert {router.complete().headers["x-kvtier-replica"] for _ in range(3)} == {pair[0].name}


def test_one_that_cannot_join_is_logged_once_with_why(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nobody = f"127.0.0.1:{free_port()}"
    with (
        routed(pair[0].url, token="a key nobody has given") as locked,
        routed(f"http://{nobody}", f"http://{locked.server.address}") as router,
    ):
        until(lambda: [each["state"] for each in router.status()["replicas"]] == ["down", "refused"])
        # a key of the replica's is nothing that a client could fix: it is not told of it
        answer = router.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "unreachable")
    for name, why in (
        (nobody, "down: unreachable: "),
        (locked.server.address, "refused: /v1/models answers 401; set [router] replica_token to its key"),
    ):
        (line,) = (line for line in caplog.messages if line.startswith(f"replica {name} is "))
        assert why in line


def test_an_engine_that_only_has_vllms_page_for_health() -> None:
    with replicas(1, {"id": "v", "object": "model", "probe": "/health"}) as (replica,), routed(replica.url) as router:
        assert router.complete(model="v").status_code == 200


@pytest.mark.parametrize(
    ("specs", "mistake"),
    [
        ([], "no replica is given; give --replica"),
        (["127.0.0.1:8000"], "not http://HOST:PORT"),
        (["http://user:secret@127.0.0.1:8000"], "not http://HOST:PORT"),
        (["http://a:1,evnts=tcp://a:2"], 'unknown part "evnts"; known are events'),
        (["http://a:1,events=http://a:2"], "events is not an endpoint"),
        (["http://a:1,events=tcp://a:70000"], "events is not an endpoint"),
        (["http://a:1,events=tcp://a:2,replay=tcp://a:0"], "replay is not an endpoint"),
        (["http://a b:1"], "not http://HOST:PORT"),
        (["http://a:1,replay=tcp://a:2"], "replay without events"),
        (["http://a:1,block_size=0"], 'block_size "0" is not a number of tokens'),
        (["http://a:1", "http://a:1"], "named twice"),
    ],
)
def test_specs_that_cannot_be_are_one_line(specs: list[str], mistake: str) -> None:
    with pytest.raises(ConfigError, match=r"^\[router\] replicas [^\n]*$") as told:
        parse_replicas(specs)
    assert mistake in str(told.value)
    assert "secret" not in str(told.value)


def test_a_spec_that_cannot_be_ends_the_command_with_status_2() -> None:
    run = kvtier("route", "--http", "127.0.0.1:0", "--replica", "http://a:1,block_size=16", "--replica", "http://a:1")
    assert (run.returncode, run.stderr) == (2, 'kvtier: [router] replicas "http://a:1": named twice; remove one\n')


def test_one_that_stops_ends_its_answers_and_begins_none() -> None:
    with replicas(1) as (one,), routed(one.url) as router:
        one.behave(events=10**6, pause=0.02)
        with stream(router) as answer:
            lines = answer.iter_text()
            next(lines)
            stopping = threading.Thread(target=router.server.stop)
            stopping.start()
            until(lambda: router.client.get("/readyz").status_code == 503)
            assert router.client.get("/readyz").json() == {"ready": False, "replicas_up": 1, "stopping": True}
            assert router.client.get("/healthz").status_code == 200
            refused = router.complete()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            one.behave()
            assert "".join(lines).endswith("data: [DONE]\n\n")
        stopping.join(PATIENCE)
        with pytest.raises(httpx2.TransportError):
            router.client.get("/healthz")


def test_one_that_stops_waits_no_longer_than_it_may() -> None:
    with replicas(1) as (one,), routed(one.url, drain="100ms") as router:
        one.behave(events=10**6, pause=0.02)
        with stream(router) as answer:
            lines = answer.iter_text()
            next(lines)
            router.server.stop()
            with pytest.raises(httpx2.RemoteProtocolError):
                for _ in lines:
                    pass
        one.behave()


def test_the_command_serves_until_it_is_told_to_stop(pair: Pair) -> None:
    specs = [argument for replica in pair for argument in ("--replica", replica.url)]
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "route", "--http", "127.0.0.1:0", *specs]
    run = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        ready = next(line for line in run.stderr if " is up" not in line)  # which may come first on a busy machine
        assert " INFO kvtier: ready on 2 replicas, http on 127.0.0.1:" in ready
        url = f"http://{ready.rpartition(' ')[2].strip()}"
        with httpx2.Client(base_url=url, timeout=60, trust_env=False) as client:
            body = {"model": "m", "prompt": "x", "stream": True}
            for replica in pair:
                replica.behave(events=20, pause=0.1)
            with client.stream("POST", "/v1/completions", json=body) as answer:
                run.send_signal(signal.SIGTERM)  # what is under way may end
                assert events(answer.read().decode())[-1] == "[DONE]"
        assert run.wait(60) == 0
    finally:
        end_child(run)


def test_who_has_no_token_gets_no_hint(pair: Pair) -> None:
    spec = [replica.url for replica in pair]
    with routed(*spec, token="a client's", replica_token="of a replica") as router:
        chosen, _ = by_name(pair, router.complete().headers["x-kvtier-replica"])
        assert chosen.seen[-1]["headers"]["authorization"] == "Bearer of a replica"
        for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}):
            for answer in (
                router.client.post("/v1/completions", json={}, headers=headers),
                router.client.get("/v1/models", headers=headers),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["message"] == "not allowed"
        assert router.status()["errors"] == {"401": 4}
        for page in (
            "/healthz",
            "/readyz",
            "/status",
            "/summary",
            "/metrics",
        ):  # for everybody, and they name no secret
            answer = httpx2.get(f"http://{router.server.address}{page}")
            assert answer.status_code == 200
            assert "a client's" not in answer.text
            assert "of a replica" not in answer.text
    # the client's own is for the router alone
    with routed(*spec) as router:
        answer = router.client.post("/v1/completions", json={}, headers={"authorization": "Bearer mine"})
        chosen, _ = by_name(pair, answer.headers["x-kvtier-replica"])
        assert "authorization" not in chosen.seen[-1]["headers"]


def test_a_page_of_text_says_where_requests_went_and_why(pair: Pair, router: RoutedReplicas) -> None:
    router.complete()
    pair[0].kill()
    until(lambda: router.state(pair[0]) == "down")
    text = router.client.get("/summary").text
    assert "1 of 2 replicas up" in text.splitlines()[0]
    assert f"replica {pair[0].name}: down (" in text
    chosen, reason = (router.status()["decisions"][0][key] for key in ("chosen", "reason"))
    assert re.search(rf"^\d\d:\d\d:\d\d +\d+  {chosen} +{reason} ", text, re.MULTILINE)
    # the command prints it, too, and its status says that a replica is missing
    told = kvtier("status", "--http", router.server.address)
    assert (told.returncode, told.stdout.splitlines()[2:5]) == (3, text.splitlines()[2:5])
    assert json.loads(kvtier("status", "--http", router.server.address, "--json").stdout)["replicas"]
    # so does `top`, at an address or a URL: rows of figures, or of text
    url = f"http://{router.server.address}"
    row = json.loads(kvtier("top", "--url", url, "--interval", "20ms", "--count", "1", "--json").stdout)
    assert (row["replicas"], row["up"], row["in_flight"], row["state"]) == (2, 1, 0, "degraded")
    assert (row["requests"], row["tokens"], row["cached"]) == (0.0, 0.0, None)
    shown = kvtier("top", "--http", router.server.address, "--interval", "20ms", "--count", "1").stdout.splitlines()
    assert (shown[0].split(), shown[1].split()[-1]) == (list(row), "degraded")


def test_its_metrics_are_those_of_its_page_in_the_docs(router: RoutedReplicas) -> None:
    told = re.findall(r"^# TYPE (\w+)", router.client.get("/metrics").text, re.MULTILINE)
    assert set(told) == set(
        re.findall(r"`(kvtier_[a-z]+_\w+|kvtier_wanting)", (ROOT / "docs" / "routing.md").read_text())
    )


def test_a_daemons_verbs_are_one_line_where_a_router_or_an_engine_answers(pair: Pair, router: RoutedReplicas) -> None:
    for verb, address in (
        (["purge", "--all"], router.server.address),
        (["status"], pair[0].name),
        (["top", "--count", "1"], pair[0].name),
    ):
        told = kvtier(*verb, "--http", address)
        assert (told.returncode, told.stderr) == (
            1,
            f'kvtier: [service] http "{address}": no kvtier daemon answers there; '
            "give the daemon's --http HOST:PORT\n",
        )


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        (b"{", 400, None, "body: not JSON ("),
        (b"[1]", 400, None, "body [1]: not a JSON object; send one"),
        (b"[" * 100_000, 400, None, "body: not JSON ("),
        (b'"\xff"', 400, None, "body: not JSON ("),
        (b'{"model": "gpt"}', 404, "model", "model 'gpt': not served here; use 'm'"),
    ],
)
def test_bad_requests_are_told_in_openais_shape(
    router: RoutedReplicas, body: bytes, status: int, param: str | None, message: str
) -> None:
    answer = router.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, "invalid_request_error", param)
    assert message in error["message"]


def test_a_thousand_malformed_requests_leave_it_healthy(pair: Pair, router: RoutedReplicas) -> None:
    pester(router.server.address, "/v1/completions")
    assert router.complete().status_code == 200
    assert sum(len(replica.seen) for replica in pair) >= 1
    assert {router.state(replica) for replica in pair} == {"up"}


PATHS = ["embeddings", "rerank", "responses", "messages", "messages/count_tokens", "audio/speech", "tokenize.v2"]


@pytest.mark.parametrize("path", brief(["embeddings", "messages/count_tokens"], PATHS))
def test_other_requests_pass_unchanged(pair: Pair, router: RoutedReplicas, path: str) -> None:
    body = json.dumps({"model": "m", "input": ["a", "b"], "of": path}).encode()
    keys = {"authorization": "Bearer mine", "x-api-key": "mine"}
    sent = {"content-type": "application/json", "x-mine": "1", **keys}
    answer = router.client.post(f"/v1/{path}?a=b%20c&d", content=body, headers=sent)
    assert (answer.status_code, answer.content) == (200, body)
    chosen = next(replica for replica in pair if replica.name == answer.headers["x-kvtier-replica"])
    seen = chosen.seen[-1]
    assert (seen["path"], seen["query"], seen["headers"]["x-mine"]) == (f"/v1/{path}", "a=b%20c&d", "1")
    assert not keys.keys() & seen["headers"]
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
