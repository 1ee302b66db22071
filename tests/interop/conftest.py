"""What the stories of real engines share: a small Llama of vLLM's, what it answers alone, a daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from node_rig import Node
    from vllm_rig import FailingLoads


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that vLLM can load."""
    from vllm_rig import make_checkpoint  # takes vLLM along

    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, model: Path) -> list[list[int]]:
    """What a vLLM without connectors answers to the module's PROMPTS."""
    from vllm_rig import engine  # takes vLLM along

    with engine(model) as plain:
        return plain.text(request.module.PROMPTS)


@pytest.fixture
def daemon() -> "Iterator[Node]":
    from node_rig import node

    with node() as running:
        yield running


@pytest.fixture
def failing_loads(monkeypatch: pytest.MonkeyPatch) -> "FailingLoads":
    """Loads fail while it is `on`."""
    from vllm_rig import FailingLoads  # takes vLLM along

    return FailingLoads(monkeypatch)
