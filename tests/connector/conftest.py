"""What the connectors' stories share: a daemon's socket, and both sides over a hierarchy."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from connector_rig import Bench


@pytest.fixture
def path(home: Path) -> Path:
    """A socket's: short."""
    return home / "s"


@pytest.fixture
def bench() -> "Iterator[Bench]":
    from connector_rig import Bench

    bench = Bench()
    yield bench
    bench.close()
