"""Rolling updates of deploy/kubernetes as Kubernetes makes them, while clients ask: another model, another release."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from node_rig import ROOT
from pod_rig import Clients, Pods, Version, ask
from release_rig import last_release
from server_rig import SIZES, save_checkpoint, wait_for
from transformers import LlamaConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="pods have a name service of their own: root mounts it"),
]

CLIENTS: Final = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that answer differently, under one name."""
    sizes: dict[str, Any] = {**SIZES, "rope_theta": 500.0}
    return [
        save_checkpoint(tmp_path_factory.mktemp("first")),
        save_checkpoint(tmp_path_factory.mktemp("second"), config=LlamaConfig(**sizes)),
    ]


@pytest.fixture
def pods(home: Path) -> Iterator[Pods]:
    with Pods(home) as made:
        yield made


def test_a_rolling_update_to_another_model_fails_and_mixes_nothing(pods: Pods, models: list[Path]) -> None:
    first, second = (Version(ROOT, model) for model in models)
    for name in ("node", "engine", "router"):
        pods.start(name, first)
    texts = [ask(pods.urls("engine", 8000)[0], number)[0] for number in range(CLIENTS)]
    clients = Clients(pods, CLIENTS)
    with clients.asking():
        wait_for(lambda: all(map(len, clients.answers)), 60)
        pods.roll("engine", second)
        new = [ask(pods.urls("engine", 8000)[0], number)[0] for number in range(CLIENTS)]
        wait_for(lambda: all(said[-1] == text for said, text in zip(clients.answers, new, strict=True)), 60)
        pods.roll("router", second)
        seen = [len(said) for said in clients.answers]
        wait_for(lambda: all(len(said) > before for said, before in zip(clients.answers, seen, strict=True)), 60)
    assert clients.failures == []
    assert all(old != text for old, text in zip(texts, new, strict=True))
    for said, old, text in zip(clients.answers, texts, new, strict=True):
        changes = said.index(text)
        assert said == [old] * changes + [text] * (len(said) - changes)


def test_a_rolling_update_from_the_last_release_fails_no_request(
    pods: Pods, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Engines first, as docs/operate.md has it, then the node's daemon: a while each side is the newer one."""
    last = Version(last_release(tmp_path_factory.mktemp("release")), models[0])
    now = Version(ROOT, models[0])
    pods.start("node", last)
    pods.start("engine", now)
    pods.start("router", now)
    texts = [ask(pods.urls("engine", 8000)[0], number)[0] for number in range(CLIENTS)]
    clients = Clients(pods, CLIENTS)
    with clients.asking():
        wait_for(lambda: all(map(len, clients.answers)), 60)
        pods.roll("node", now)
        wait_for(lambda: "upgrade" in pods.logs("engine"), 60)
        seen = [len(said) for said in clients.answers]
        wait_for(lambda: all(len(said) > before + 3 for said, before in zip(clients.answers, seen, strict=True)), 60)
    assert clients.failures == []
    assert [set(said) for said in clients.answers] == [{text} for text in texts]
