"""Our application on a real Ray cluster of several nodes' processes: `make test-ray`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray Serve; run `make test-ray`")

import httpx2
import openai
from ray_rig import Crowd, RayApp, add_node, application, kill, parent, ray_cluster, until
from server_rig import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LONG = "Tell me what stands in the long document that I gave you. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(2) as started:
        yield started


@pytest.fixture(scope="module")
def app(cluster: Any, model: Path) -> Iterator[RayApp]:
    with application(cluster, model, replicas=2) as running:
        yield running


def test_a_turn_goes_to_who_has_the_conversation_and_is_read_from_there(app: RayApp) -> None:
    until(lambda: len(app.running()) == 2)
    talks: list[list[str]] = [[f"{number}: {LONG}"] for number in range(6)]
    first = [app.ask(talk) for talk in talks]
    assert all(answer.num_cached < 32 for answer in first)  # the template begins alike
    for talk, answer in zip(talks, first, strict=True):
        talk += [answer.text, f"and then? {LONG}"]

    num_blocks = sum(answer.num_prompt // 64 for answer in first)
    until(lambda: app.num_known("CPU") >= num_blocks)
    for talk, before in zip(talks, first, strict=True):
        answer = app.ask(talk, stream=True)
        assert answer.replica == before.replica
        assert answer.num_cached >= before.num_prompt // 64 * 64
    figures = app.status()
    assert len({answer.replica for answer in first}) == 2, "work was not shared"
    assert figures["requests"]["prefix"] >= 6
    assert figures["tokens"]["promised"] > 0
    assert figures["under_way"] == 0


def test_what_engines_refuse_and_what_they_do_not_serve_is_told_as_they_tell_it(app: RayApp) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        app.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        app.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="/metrics"):
        app.client.get("../metrics", cast_to=object)
    assert [each.id for each in app.client.models.list().data] == ["tiny"]
    redirect = httpx2.get(f"{app.url}/metrics/", follow_redirects=False, timeout=30)
    assert (redirect.status_code, redirect.headers["location"]) == (307, "/metrics")


def test_more_than_engines_compute_at_once_waits_and_is_answered(app: RayApp) -> None:
    # Each engine computes 16 at once; Ray Serve gives it up to 256.
    with ThreadPoolExecutor(200) as clients:
        answers = list(clients.map(lambda number: app.ask([f"question {number}"]), range(200)))
    assert len({answer.replica for answer in answers}) == 2
    assert app.status()["under_way"] == 0


def test_an_engine_a_replica_and_a_node_die_under_load_and_no_answer_is_wrong(app: RayApp, cluster: Any) -> None:
    with Crowd(app, 4) as crowd:
        until(lambda: len(crowd.answers) >= 12)
        kill(app.engines()[0])
        until(lambda: len(app.running()) == 2 and len(app.engines()) == 2)
        seen = len(crowd.answers)
        until(lambda: len(crowd.answers) >= seen + 8)

        kill(parent(app.engines()[0]))  # the worker of Ray's: its engine goes with it
        until(lambda: len(app.running()) == 2 and len(app.engines()) == 2)
        seen = len(crowd.answers)
        until(lambda: len(crowd.answers) >= seen + 8)

        spare = add_node(cluster)
        lost = next(node for node in cluster.worker_nodes if node is not spare)
        cluster.remove_node(lost, allow_graceful=False)
        until(lambda: len(app.running()) == 2 and len(app.engines()) == 2)
        seen = len(crowd.answers)
        until(lambda: len(crowd.answers) >= seen + 8)
    # What was under way at a dead engine is lost, and told: at most what four clients had, three times.
    assert sum(crowd.failures.values()) <= 12, crowd.failures
    broken = {"APIError", "APIConnectionError", "RemoteProtocolError", "ReadError"}
    # 500 is Ray's proxy's own: the ingress, too, may have been on the lost node
    assert crowd.failures.keys() <= {"502", "500", *broken}, crowd.failures
    app.require_right(crowd.answers)
